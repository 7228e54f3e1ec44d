"""Norms in a round of clusters: declared and measured, they count as in a flat round, however small a cluster is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.allreduce import clustered_plan as clustered
from protocols.allreduce import plan as planning
from protocols.allreduce.aggregator import norm_limit
from protocols.allreduce.clustered_messages import (
    coded_norm,
    norm_code,
)
from protocols.allreduce.clustered_plan import ResolvedClusters
from protocols.allreduce.plan import PlanInputs, ResolvedPlan
from protocols.base import Member, RoundKey
from protocols.vectors.robust import MEASURED_SLACK, RobustAggregator
from protocols.wire import MAX_NORM, Offer
from tests.support.clustered_swarm import ClusteredSwarm

KEY = RoundKey(bytes(32), "run", b"l" * 32, 7)
INPUTS = PlanInputs(KEY, elements=10_000, bytes_per_element=1.0)
ROUNDED = 1 + 1 / 256
NORMS = st.floats(1e-30, MAX_NORM)


def declaring(norms: Sequence[Sequence[float]], tokens: int = 100) -> tuple[ResolvedClusters, list[ResolvedPlan]]:
    """Clusters whose members declare these norms, and the plans inside them."""
    offers = [
        tuple(
            Offer(Member(f"v{g:02}-{i:02}"), tokens, each, 1.0, True, False, 1e6, b"r" * 32, b"")
            for i, each in enumerate(group)
        )
        for g, group in enumerate(norms)
    ]
    made = [clustered.make_cluster_offer(INPUTS, each[0].member, each, True) for each in offers]
    plan = clustered.make_clustered_plan(INPUTS, made, 5.0)
    whole = clustered.resolve_clusters(plan, INPUTS, [each.lead for each in made])
    return whole, [clustered.resolve_cluster(whole, g, each) for g, each in enumerate(offers)]


# -- declared ---------------------------------------------------------------------------------------------------------


@given(norm=st.floats(0, MAX_NORM), other=st.floats(0, MAX_NORM))
def test_code_of_a_norm_is_rounded_up_a_little(norm: float, other: float) -> None:
    """Rounded down, the median member would be clipped."""
    decoded = coded_norm(norm_code(norm))
    assert norm <= decoded and (decoded <= norm * ROUNDED or decoded < 1e-38)
    if norm <= other:
        assert norm_code(norm) <= norm_code(other)


@given(norms=st.lists(st.lists(NORMS, min_size=3, max_size=3), min_size=1, max_size=6))
def test_equal_clusters_clip_as_a_flat_round(norms: list[list[float]]) -> None:
    flat = [norm for each in norms for norm in each]
    factors = [factor for inner in declaring(norms)[1] for factor in inner.factors]
    for factor, due in zip(factors, planning.clip_factors(flat, [1.0] * len(flat)), strict=True):
        assert due <= factor <= due * ROUNDED


@given(
    honest=st.lists(st.lists(NORMS, max_size=6), min_size=1, max_size=8),
    lies=st.lists(st.lists(NORMS, max_size=31), min_size=8, max_size=8),
)
def test_less_than_half_of_the_clusters_move_no_median(honest: list[list[float]], lies: list[list[float]]) -> None:
    """Each cluster by the share of its members that lie. Else one lead with made-up associates would clip all work."""
    groups = [(each, lying) for each, lying in zip(honest, lies, strict=False) if each or lying]
    liars = sum(Fraction(len(lying), len(each) + len(lying)) for each, lying in groups)
    if groups and 2 * liars < len(groups):
        all_honest = [norm for each in honest for norm in each]
        median = declaring([[*each, *lying] for each, lying in groups])[0].median_norm
        assert min(all_honest) <= median <= max(all_honest) * ROUNDED


def test_norms_of_members_without_work_or_norm_are_no_median() -> None:
    whole, _ = declaring([[2.0], [0.0, 2.0]])
    idle = replace(whole.offered[1], tokens=(0, 0), norms=(9, 9))
    assert clustered.median_norm([whole.offered[0], idle]) == whole.median_norm == 2.0
    assert declaring([[0.0], [0.0, 0.0]])[0].median_norm == 0.0 and clustered.median_norm([idle]) == 0.0
    assert declaring([[0.0], [0.0, 0.0]])[1][1].factors == (1.0, 1.0)


@pytest.mark.parametrize("tiny", [0.0, 5e-324, 1e-6, 0.7])
def test_associate_that_declares_little_clips_no_lead(tiny: float) -> None:
    """The lower median of two is the smaller one."""
    for inner in declaring([[1.0, tiny], *[[1.0]] * 7])[1]:
        assert set(inner.factors) == {1.0} and not inner.clamped
        assert norm_limit(inner) == pytest.approx(24.0)


# -- measured ---------------------------------------------------------------------------------------------------------


@given(
    declared=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6),
    chunk=st.floats(1e-3, 1),
)
def test_members_that_send_as_declared_are_not_clipped(declared: list[float], chunk: float) -> None:
    """Those that are alone with a slow member neither, whoever aggregates."""
    inner = declaring([declared, *[[1.0]] * 7])[1][0]
    for own in range(len(declared)):
        judge = RobustAggregator("mean", inner.allowances, inner.expected_norms, own)
        sent = [chunk * norm * factor for norm, factor in zip(declared, inner.factors, strict=True)]
        assert judge.is_clear(range(len(declared)), sent)


LIES = {
    "declares tiny, sends zeros": ("v0.1", 1e-6, 0.0),
    "declares tiny, sends tiny": ("v0.1", 1e-6, 1e-6),
    "declares nothing, sends tiny": ("v0.1", 0.0, 1e-6),
    "declares large, sends large": ("v0.1", 16.0, 16.0),
    "leads, declares tiny, sends tiny": ("v0", 1e-6, 1e-6),
    "leads, declares tiny, sends large": ("v0", 1e-6, 16.0),
    "leads, declares as others, sends large": ("v0", 1.0, 16.0),
    "leads, declares large, sends large": ("v0", 1e6, 1e6),
    "leads, declares large, sends tiny": ("v0", 1e6, 1e-6),
}


@pytest.mark.parametrize("lie", LIES)
def test_liar_wastes_its_own_half_of_a_pair_only(lie: str) -> None:
    """The other one's work keeps at least nine tenths of its share, and the mean of the pair an honest norm."""
    liar, declared, sent = LIES[lie]
    swarm = ClusteredSwarm(2, *[1] * 7, elements=8_000, chunk=800)
    unit = math.sqrt(8_000)
    honest = "v0" if liar == "v0.1" else "v0.1"
    swarm.norms = {name: float(vector.norm()) for name, vector in swarm.vectors.items()} | {liar: declared * unit}
    swarm.vectors[liar].mul_(sent)

    async def play() -> None:
        swarm.begin()
        assert not await swarm.whole()

    swarm.play(play)
    whole, mean, work = swarm.versions[0], swarm.peers[honest].into, swarm.vectors[honest]
    weights = dict(zip(swarm.clusters[0], whole.member_weights[0], strict=True))
    share = weights[honest] / math.fsum(whole.weights)
    assert 0.9 * share < float(mean @ work / work.norm() ** 2) < 1.1 * share
    calm = sum(float(each) for each in whole.weights[1:]) / math.fsum(whole.weights)
    rest = sum(swarm.vectors[f"v{g}"] * (whole.weights[g] / math.fsum(whole.weights)) for g in range(1, 8))
    pair = float((mean - rest).norm()) / unit / (1 - calm)
    assert pair < MEASURED_SLACK * whole.allowances[0] * 1.1, "times the median norm"
