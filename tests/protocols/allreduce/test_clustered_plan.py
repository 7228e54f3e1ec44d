"""Plans of clusters: what follows from their offers, who may use an offer, and what a receiver refuses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.allreduce import clustered_plan as clustered
from protocols.allreduce import plan as planning
from protocols.allreduce.aggregator import norm_limit
from protocols.allreduce.clustered_messages import (
    ClusteredPlan,
    ClusterOffer,
    ClusterPlan,
    ClusterReady,
    ContributePartial,
    OfferToLead,
    member_offers,
    offers_digest,
    packed,
    unpacked,
)
from protocols.allreduce.clustered_plan import CLUSTER_PACE, MEMBER_PACE, ResolvedClusters
from protocols.allreduce.plan import PlanInputs
from protocols.base import BadPayload, Member, PeerId, RoundKey
from protocols.streams.chunks import HEADER_LIMIT
from protocols.wire import MAX_HEADER_BYTES, MAX_ROSTER, Offer, Reduced, encode
from tests.sim.host import SimSigner
from tests.support.variants import variants

KEY = RoundKey(bytes(32), "run", b"l" * 32, 7)
INPUTS = PlanInputs(KEY, elements=10_000, bytes_per_element=1.0, max_weight=3.0)
ROOT = b"r" * 32


def sign(peer: PeerId, message: bytes) -> bytes:
    return SimSigner(peer, 1).sign(message)


def verify(peer: PeerId, message: bytes, signature: bytes) -> bool:
    return SimSigner("", 1).verify(peer, message, signature)


def offer(peer: PeerId, lead: PeerId, tokens: int = 100, bandwidth: float = 1e6, step: float = 1.0) -> Offer:
    made = Offer(Member(peer), tokens, 1.0, step, True, False, bandwidth, ROOT, b"")
    return replace(made, signature=sign(peer, OfferToLead(KEY, lead, made).signed()))


def members_of(lead: PeerId, size: int, **claims: Any) -> tuple[Offer, ...]:
    return tuple(offer(f"{lead}-{each:02}" if each else lead, lead, **claims) for each in range(size))


def cluster(offers: Sequence[Offer], inputs: PlanInputs = INPUTS) -> ClusterOffer:
    made = clustered.make_cluster_offer(inputs, offers[0].member, offers, True)
    return replace(made, signature=sign(made.lead.peer, ClusterReady(KEY, made).signed()))


def resolved(*sizes: int, **claims: Any) -> tuple[ResolvedClusters, list[tuple[Offer, ...]]]:
    offers = [members_of(f"v{index:02}", size, **claims) for index, size in enumerate(sizes)]
    plan = clustered.make_clustered_plan(INPUTS, [cluster(each) for each in offers], 5.0)
    return clustered.resolve_clusters(plan, INPUTS, [each.lead for each in plan.clusters]), offers


# -- offers -----------------------------------------------------------------------------------------------------------


def test_offer_is_valid_in_the_cluster_of_its_lead_only() -> None:
    """Else another lead could use it, and its work would count twice."""
    mine, theirs = members_of("v0", 3), members_of("v1", 1)
    clustered.check_offers(INPUTS, cluster(mine), mine, verify)
    stolen = (*theirs, *(each for each in mine if each.member.peer != "v0"))
    stolen = tuple(sorted(stolen, key=lambda each: each.member))
    lead = next(each for each in stolen if each.member.peer == "v1")
    made = clustered.make_cluster_offer(INPUTS, lead.member, stolen, True)
    with pytest.raises(BadPayload, match="forged offer of v0-01"):
        clustered.check_offers(INPUTS, made, stolen, verify)


def test_cluster_that_does_not_follow_from_its_offers_is_refused() -> None:
    offers = members_of("v0", 4)
    good = cluster(offers)
    changes: dict[str, Any] = {
        "tokens": (100, 100, 100, 101),
        "norms": good.norms[1:],
        "step_seconds": 0.5,
        "pace": 2e6,
        "bandwidth": 2e6,
    }
    changes |= {"leaving": True, "offers": bytes(32)}
    for name, value in changes.items():
        with pytest.raises(BadPayload, match="not the one that its offers lead to"):
            clustered.check_offers(INPUTS, replace(good, **{name: value}), offers, verify)
    for bad in (offers[1:], offers[::-1], (*offers, offers[-1])):
        with pytest.raises(BadPayload):
            clustered.check_offers(INPUTS, good, bad, verify)
    other = replace(offers[2], state_root=b"x" * 32)
    with pytest.raises(BadPayload, match="different states"):
        clustered.check_offers(INPUTS, good, (*offers[:2], other, offers[3]), verify)


def test_digest_of_offers_covers_each_of_them_and_the_lead() -> None:
    offers = members_of("v0", 3)
    found = {offers_digest(KEY, "v0", each) for each in (offers, *variants(offers))}
    found.add(offers_digest(KEY, "v1", offers))
    assert len(found) == len(list(variants(offers))) + 2


# -- the plan ---------------------------------------------------------------------------------------------------------


def test_plan_that_does_not_follow_from_its_clusters_is_refused() -> None:
    plan = resolved(4, 1, 7)[0].plan
    assert isinstance(plan, ClusteredPlan)
    roster = [each.lead for each in plan.clusters]
    clustered.check_clustered_plan(plan, INPUTS, roster, verify)
    moved = replace(plan, version=1, reducers=(0, 0, 2))  # a repair
    clustered.check_clustered_plan(moved, INPUTS, roster, verify)
    changes: list[dict[str, Any]] = [
        {"bounds": (0, 1, 2, 10_000)},
        {"reducers": (1, 0, 2)},
        {"cut_seconds": 2.0},
        {"budget_seconds": plan.budget_seconds + 1},
        {"clusters": plan.clusters[::-1]},
        {"clusters": plan.clusters[:2]},
        {"clusters": (replace(plan.clusters[0], tokens=(9,) * 4), *plan.clusters[1:])},
        {"clusters": (replace(plan.clusters[0], tokens=(), norms=()), *plan.clusters[1:])},
        {"clusters": (replace(plan.clusters[0], norms=(9,) * 3), *plan.clusters[1:])},
        {"key": replace(KEY, round=8)},
        {"version": 1, "reducers": (0, 3, 2)},
    ]
    for change in changes:
        with pytest.raises(BadPayload):
            clustered.check_clustered_plan(replace(plan, **change), INPUTS, roster, verify)
    with pytest.raises(BadPayload, match="of the roster"):
        clustered.check_clustered_plan(plan, INPUTS, roster[1:], verify)


def test_outline_has_the_hash_of_its_plan_and_parts_that_the_codec_can_cut() -> None:
    whole, _ = resolved(4, 1)
    roster = [each.lead for each in whole.offered]
    known = clustered.resolve_outline(whole.outline, INPUTS, roster)
    assert (known.digest, known.peers, known.lone) == (whole.digest, whole.peers, whole.lone)
    with pytest.raises(BadPayload, match="parts are not those"):
        clustered.resolve_outline(whole.outline, replace(INPUTS, grain=7), roster)


def test_slowest_tenth_does_not_set_the_times() -> None:
    """A thousand peers would always wait for one that claims a sixteenth of the median."""
    calm = resolved(*[31] * 8)[0].plan
    offers = [list(members_of(f"v{index:02}", 31)) for index in range(8)]
    for each in offers:
        each[30] = offer(each[30].member.peer, each[0].member.peer, bandwidth=1e6 / 16, step=4.0)
    slow = clustered.make_clustered_plan(INPUTS, [cluster(each) for each in offers], 5.0)
    assert (slow.cut_seconds, slow.budget_seconds) == (calm.cut_seconds, calm.budget_seconds)


def test_largest_messages_fit_their_headers() -> None:
    peer = "12D3KooW" + "x" * 44
    many = Offer(Member(peer, 1 << 40), 1 << 53, 1e30, 1.0, True, False, 1e13, ROOT, bytes(64))
    lead = ClusterOffer(
        many.member, (1 << 53,) * 32, ((1 << 16) - 1,) * 32, 1.0, 1e13, 1e13, True, False, ROOT, ROOT, bytes(64)
    )
    key = replace(KEY, lineage=b"l" * 32, round=1 << 40, scope="s" * 64)
    plan = ClusteredPlan(key, 0, 0, (lead,) * 32, (1 << 48,) * 33, tuple(range(32)), 1.0, 1.0)
    roster = tuple(Member(f"{peer[:-2]}{number:02}", 1 << 40) for number in range(32))
    plan = replace(plan, clusters=tuple(replace(lead, lead=each) for each in roster))
    outline, message = clustered.outline_of(plan, roster), packed(plan, roster)
    assert unpacked(message, roster) == plan
    offers = member_offers((many,) * 32)
    assert len(encode(message)) < 17_000 < MAX_HEADER_BYTES
    assert len(encode(ClusterPlan(key, outline, lead, offers))) < 8_000, "a lead sends it to 31 associates in turn"
    assert len(encode(ContributePartial(key, ROOT, 1, "int8", 1, offers, False))) < 6_000
    assert len(encode(Reduced(1 << 32, (1 << 32) - 1, 1 << 32, b"\xff" * 4 * MAX_ROSTER))) <= HEADER_LIMIT


# -- weights ----------------------------------------------------------------------------------------------------------

TOKENS = st.lists(st.lists(st.integers(0, 10_000), min_size=1, max_size=6), min_size=1, max_size=6)


def claiming(tokens: Sequence[Sequence[int]], inputs: PlanInputs = INPUTS) -> tuple[ResolvedClusters, list[Any]]:
    """Clusters whose members claim these tokens, and the plans inside them."""
    offers = [
        tuple(offer(f"v{g:02}-{i:02}" if i else f"v{g:02}", f"v{g:02}", tokens=n) for i, n in enumerate(each))
        for g, each in enumerate(tokens)
    ]
    plan = clustered.make_clustered_plan(inputs, [cluster(each, inputs) for each in offers], 5.0)
    whole = clustered.resolve_clusters(plan, inputs, [each.lead for each in plan.clusters])
    return whole, [clustered.resolve_cluster(whole, g, each) for g, each in enumerate(offers)]


@given(tokens=TOKENS, draw=st.randoms(use_true_random=False))
def test_mean_of_clusters_is_the_mean_of_their_members(tokens: list[list[int]], draw: Any) -> None:
    """Whatever members a chunk holds: with W_gc as weights, each counts as its own weight."""
    whole, _ = claiming(tokens, replace(INPUTS, max_weight=1e9))  # no claim is capped
    values, masks = [[draw.random() for _ in each] for each in tokens], [draw.getrandbits(len(each)) for each in tokens]
    top, weight, exact, total = 0.0, 0.0, Fraction(0), 0
    for g, (each, mask) in enumerate(zip(tokens, masks, strict=True)):
        held = [i for i in range(len(each)) if mask >> i & 1 and each[i]]
        mine = whole.weight(g, mask)
        assert mine == sum(each[i] for i in held)
        if held:
            mean = math.fsum(each[i] * values[g][i] for i in held) / sum(each[i] for i in held)
            top, weight = top + mine * mean, weight + mine
            exact += sum((Fraction(values[g][i]) * each[i] for i in held), Fraction(0))
            total += sum(each[i] for i in held)
    assert total == 0 or top / weight == pytest.approx(float(exact / total))


@given(tokens=TOKENS, robust=st.sampled_from(["mean", "median"]))
def test_member_weighs_as_in_a_flat_round_or_less(tokens: list[list[int]], robust: str) -> None:
    """As much if its clusters have equally many members with work, or the medians of members and clusters agree."""
    whole, inner = claiming(tokens, replace(INPUTS, robust=robust))
    flat = planning.weights([count for each in tokens for count in each], 3.0 if robust == "mean" else 1.0)
    mine = [weight for each in inner for weight in each.weights]
    assert all(weight <= most for weight, most in zip(mine, flat, strict=True))
    assert [each.weights for each in inner] == [*whole.member_weights]
    if len({working for each in tokens if (working := sum(map(bool, each)))}) <= 1:
        assert mine == [*flat]
    if all(len(each) == 1 for each in tokens):
        assert whole.allowances == pytest.approx(planning.allowances(flat))


@given(
    honest=st.lists(st.lists(st.integers(1, 10_000), max_size=6), min_size=1, max_size=8),
    lies=st.lists(st.lists(st.integers(0, 1 << 53), max_size=31), min_size=8, max_size=8),
)
def test_half_of_all_must_lie_before_one_weighs_more_than_honest_ones(
    honest: list[list[int]], lies: list[list[int]]
) -> None:
    """Half of the members with work, and half of the clusters, each cluster by the share of its members that lie."""
    tokens = [(each, lying) for each, lying in zip(honest, lies, strict=False) if each or any(lying)]
    median = clustered.median_tokens([[*each, *lying] for each, lying in tokens])
    liars = [sum(map(bool, lying)) for _, lying in tokens]
    members = Fraction(sum(liars), sum(liars) + sum(len(each) for each, _ in tokens) or 1)
    shares = [Fraction(count, count + len(each)) for (each, _), count in zip(tokens, liars, strict=True)]
    largest = max((count for each, _ in tokens for count in each), default=0)
    if min(members, sum(shares, Fraction(0)) / max(1, len(shares))) <= Fraction(1, 2):
        assert median <= largest


def test_one_lead_with_made_up_associates_sets_no_median() -> None:
    """Among 31 voters without associates it is the only one, although it brings half of the members."""
    assert clustered.median_tokens([[100]] * 31 + [[1 << 53] * 32]) == 100


def test_slow_associate_costs_its_fast_lead_nothing() -> None:
    """The median of two is that of the slower one. The run's counts: for its weight, and for what is plausible."""
    tokens = [[1000, 10], *[[1000]] * 3, [10**9, 10]]
    whole, inner = claiming(tokens)
    assert inner[0].weights == (1000.0, 10.0) and whole.weights == (1010.0, 1000.0, 1000.0, 1000.0, 3010.0)
    assert not inner[0].clamped and not inner[0].capped and inner[0].factors == (1.0, 1.0)
    assert [(each.peer, each.why) for each in inner[4].clamped] == [
        ("v04", "weight clamped from 1000000000 to 3000 tokens")
    ]
    assert inner[4].capped == {"v04": 10**9} and whole.allowances[:4] == (1.0,) * 4 and 2 < whole.allowances[4] < 3


# -- inside a cluster -------------------------------------------------------------------------------------------------


@given(
    bandwidths=st.lists(st.floats(1e5, 1e7), min_size=2, max_size=32),
    sizes=st.lists(st.integers(0, 1000), min_size=1, max_size=32),
    idle=st.sets(st.integers(1, 31)),
)
def test_parts_go_to_members_that_work_and_not_to_the_lead(
    bandwidths: list[float], sizes: list[int], idle: set[int]
) -> None:
    offers = [
        offer(f"v-{i:02}" if i else "v", "v", tokens=0 if i in idle else 100, bandwidth=bandwidth)
        for i, bandwidth in enumerate(bandwidths)
    ]
    given = clustered.aggregators(offers, "v", sizes)
    able = [i for i in range(1, len(offers)) if i not in idle] or [0]
    assert len(given) == len(sizes) and set(given) <= set(able)
    uplinks = planning.bandwidths(bandwidths)
    times = {i: sum(size for size, to in zip(sizes, given, strict=True) if to == i) / uplinks[i] for i in able}
    fair = sum(sizes) / sum(uplinks[i] for i in able)
    assert max(times.values()) <= fair + max(sizes) / min(uplinks[i] for i in able) + 1e-9


def test_members_ask_one_peer_after_the_other_for_a_lost_part() -> None:
    whole, offers = resolved(9, 5)
    inner = clustered.resolve_cluster(whole, 0, offers[0])
    orders = [clustered.relays(inner, "v00", part) for part in range(2)]
    for part, order in enumerate(orders):
        assert order[0] == inner.reducer(part) and order[-1] == "v00" and sorted(order) == sorted(inner.peers)
    assert orders[0] != orders[1], "all would ask the same one"
    alone = clustered.resolve_cluster(whole, 1, offers[1][:1])
    assert clustered.relays(alone, "v01", 0) == ("v01",)


@given(
    held=st.lists(st.integers(0, 31), min_size=2, max_size=2), then=st.lists(st.integers(0, 31), min_size=2, max_size=2)
)
def test_members_left_out_of_a_chunk_are_in_no_later_one(held: list[int], then: list[int]) -> None:
    whole = resolved(5, 3)[0]

    def passes(masks: list[int], before: bytes) -> bool:
        members = b"".join(mask.to_bytes(4, "little") for mask in masks)
        try:
            whole.check_chunk(sum(1 << bit for bit, mask in enumerate(masks) if mask), members, before)
        except BadPayload:
            return False
        return True

    before = b"".join(mask.to_bytes(4, "little") for mask in held)
    assert passes(held, b"") == (held[1] < 8)
    assert passes(then, before) == all(now & ~old == 0 for now, old in zip(then, held, strict=True))
    for mask, members in ((0b100, bytes(12)), (0, bytes(4)), (1, bytes(8)), (0, b"\1" + bytes(7)), (1, b"\1")):
        with pytest.raises(BadPayload):
            whole.check_chunk(mask, members, b"")


def test_declared_norm_of_a_member_without_work_allows_no_larger_partials() -> None:
    calm = members_of("v00", 4)
    idle = replace(offer("v00-03", "v00", tokens=0), norm=1e30)
    whole = resolved(4, 4)[0]
    limits = [norm_limit(clustered.resolve_cluster(whole, 0, each)) for each in (calm, (*calm[:3], idle))]
    assert limits[0] == limits[1] < 100 * calm[0].norm


@given(took=st.floats(0, 1e5))
def test_reducer_is_more_patient_than_any_aggregator(took: float) -> None:
    """One slow member must cost its cluster its own work only, if the other clusters have delivered at that time."""
    assert CLUSTER_PACE.until(took) > MEMBER_PACE.until(took)
    assert [MEMBER_PACE.enough(count) for count in (1, 2, 3, 4, 31)] == [1, 2, 3, 3, 24]
