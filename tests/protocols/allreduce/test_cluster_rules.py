"""Robust rules within clusters and again between them: what they withstand, and whom they name."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.allreduce.clustered_plan import ResolvedClusters
from protocols.base import Buffer, Header, Vector
from protocols.streams.framing import FramedStream
from protocols.vectors.robust import RULES, RobustAggregator
from protocols.wire import Partial
from tests.support.clustered_swarm import ClusteredSwarm
from tests.support.disguises import sending
from tests.support.example_vectors import noisy_contributions
from tests.support.simulated import simulated

TOLERANT = tuple(name for name in RULES if name != "mean")
SIZE = 200
SIGNAL = torch.ones(SIZE) / SIZE**0.5


def offered(name: str, sizes: Sequence[int], *tokens: int, seed: int = 1) -> ClusteredSwarm:
    """The offers of clusters of these sizes, whose members have trained one of these numbers of `tokens`."""
    swarm = ClusteredSwarm(*sizes, robust=name, seed=seed)
    swarm.tokens = tokens
    swarm.offer()
    return swarm


def aggregated(name: str, swarm: ClusteredSwarm, rows: Sequence[torch.Tensor]) -> Vector:
    """What the rule makes of the contributions (members, d) of each cluster, weighed as in a round."""
    whole, partials = swarm.versions[0], torch.empty(len(rows), rows[0].shape[1])
    for partial, members, inner in zip(partials, rows, swarm.inner, strict=True):
        RULES[name](members.clone(), inner.weights, partial)
    into = torch.empty(rows[0].shape[1])
    RULES[name](partials, [full_weight(whole, cluster) for cluster in range(len(rows))], into)
    return into


def full_weight(whole: ResolvedClusters, cluster: int) -> float:
    return whole.weight(cluster, (1 << whole.clusters[cluster].size) - 1)


# -- what they withstand ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["median", "trimmed_mean"])
@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=7), seed=st.integers(0, 10**6))
@settings(max_examples=60)
def test_lies_that_the_rule_tolerates_stay_within_honest_values(name: str, sizes: list[int], seed: int) -> None:
    """A cluster is wrong if liars have more of its weight than the rule tolerates; the mean, if wrong clusters have."""
    draw, swarm = random.Random(seed), offered(name, sizes, 64, 128, 256, seed=seed)
    reached = {"median": lambda lying, of: 2 * lying < of, "trimmed_mean": lambda lying, of: 4 * lying <= of}[name]
    honest, rows, wrong = [0.0], list[torch.Tensor](), list[int]()
    for cluster, inner in enumerate(swarm.inner):
        lies = [draw.random() < 0.25 for _ in inner.peers]
        values = [draw.choice([-1, 1]) * 2.0 ** draw.randint(5, 90) if lie else draw.uniform(-10, 10) for lie in lies]
        lying = sum(weight for weight, lie in zip(inner.weights, lies, strict=True) if lie)
        wrong += [] if reached(lying, sum(inner.weights)) else [cluster]
        honest += [value for value, lie in zip(values, lies, strict=True) if not lie]
        rows.append(torch.tensor(values)[:, None])
    weights = [full_weight(swarm.versions[0], cluster) for cluster in range(len(sizes))]
    result = float(aggregated(name, swarm, rows))
    if reached(sum(weights[cluster] for cluster in wrong), sum(weights)):
        assert min(honest) - 1e-4 <= result <= max(honest) + 1e-4


@pytest.mark.parametrize(
    ("name", "size", "lost", "tolerated", "breaking"),
    [
        ("median", 8, 3, 3, 4),  # so 16 of 64 liars may break it, a quarter
        ("centered_clip", 8, 3, 3, 4),
        ("trimmed_mean", 8, 2, 2, 3),
        ("krum", 8, 2, 2, 4),
        ("multi_krum", 8, 2, 2, 4),
        *((name, 4, 1, 1, 2) for name in TOLERANT),  # Krum takes the median of so few
    ],
)
def test_tolerance_holds_within_and_between_but_not_beyond(
    name: str, size: int, lost: int, tolerated: int, breaking: int
) -> None:
    """As many clusters of liars alone as it tolerates, and as many liars in each of the others; or too many of both."""
    swarm, rows = offered(name, [size] * size, 64), [noisy_contributions(size, SIZE, seed) for seed in range(size)]
    for cluster, members in enumerate(rows):
        members[: size if cluster < lost else tolerated] = -1000 * SIGNAL
    assert float((aggregated(name, swarm, rows) - SIGNAL).norm()) <= 1.5
    for cluster, members in enumerate(rows):
        members.copy_(noisy_contributions(size, SIZE, cluster))
        members[: breaking if cluster < breaking else 0] = -1000 * SIGNAL
    assert float((aggregated(name, swarm, rows) - SIGNAL).norm()) > 10


@pytest.mark.parametrize("name", TOLERANT)
def test_lead_with_made_up_associates_does_not_own_the_mean(name: str) -> None:
    """It brings half of the members, 32 of 63, and counts once among the other voters."""
    swarm = offered(name, [32, *[1] * 31], 64)
    rows = [-1000 * SIGNAL.repeat(32, 1), *noisy_contributions(31, SIZE, 1)[:, None]]
    assert float((aggregated(name, swarm, rows) - SIGNAL).norm()) <= 1.5


@pytest.mark.parametrize("name", TOLERANT)
@pytest.mark.parametrize("sizes", [(1, 4, 2), (2, 2), (1, 1, 1, 1, 5)])
@simulated(lambda name, sizes: ClusteredSwarm(*sizes, robust=name))
async def test_round_holds_the_rule_within_and_between(swarm: ClusteredSwarm) -> None:
    swarm.begin()
    assert not await swarm.whole()
    counted = swarm.check(swarm.names)
    assert set(counted.values()) == {swarm.chunks}
    for part in swarm.parts("v0"):
        for low, high in map(part.elements, range(part.chunks)):
            rows = [torch.stack([swarm.vectors[peer][low:high] for peer in inner.peers]) for inner in swarm.inner]
            due = aggregated(swarm.settings.robust, swarm, rows)
            assert torch.allclose(swarm.peers["v0"].into[low:high], due, atol=1e-5)


@simulated(ClusteredSwarm, 3, 3, 3, 3, robust="median")
async def test_liars_in_all_roles_stay_within_honest_values(swarm: ClusteredSwarm) -> None:
    """An aggregator that sends wrong results, and in each other cluster an associate with a wrong contribution."""

    async def send(stream: FramedStream, header: Header, payload: Buffer) -> None:
        await stream.send(header, bytes(len(payload)) if isinstance(header, Partial) else payload)

    swarm.tokens = (64,)
    liars, honest = ["v1.1", "v2.1", "v3.1"], [name for name in swarm.names if not name.endswith(".1")]
    for name in swarm.names:
        swarm.vectors[name].abs_().add_(1.0)  # zeros are no honest value
    for name in liars:
        swarm.vectors[name].mul_(-10.0)
    swarm.disguises["v0.1"] = sending(send)
    swarm.begin()
    assert not await swarm.whole()
    swarm.check(swarm.names)
    values, result = torch.stack([swarm.vectors[name] for name in honest]), swarm.peers["v0"].into
    assert bool((values.min(0).values <= result).all() and (result <= values.max(0).values).all())


# -- whom they name ---------------------------------------------------------------------------------------------------


def judged(name: str, rows: Sequence[Vector], counts: Sequence[int]) -> dict[int, str]:
    judge, into = RobustAggregator(name, [1.0] * len(rows)), torch.empty(SIZE)
    given = [row.clone() for row in rows]
    judge.average(range(len(rows)), [float(row.norm()) for row in rows], given, [1.0] * len(rows), into, counts)
    return judge.named()


@pytest.mark.parametrize("name", TOLERANT)
@pytest.mark.parametrize("spread", [0.5, 2.0])
def test_voter_alone_among_large_clusters_is_not_named(name: str, spread: float) -> None:
    """The mean of 16 is four times as near to the median as one contribution is."""
    rows = [noisy_contributions(16, SIZE, seed, spread).mean(0) for seed in range(7)]
    alone = noisy_contributions(1, SIZE, 9, spread)[0]
    assert judged(name, [alone, *rows], [1, *[16] * 7]) == {}
    assert list(judged(name, [-6 * alone, *rows], [1, *[16] * 7])) == [0]


@pytest.mark.parametrize("name", TOLERANT)
def test_aggregator_is_not_named_for_its_members(name: str) -> None:
    """The partial of a pair stands apart if either of them lies, and the reducer cannot tell which."""
    rows = [*noisy_contributions(8, SIZE, 3, 0.3)]
    rows[2] = -0.5 * rows[2]
    assert judged(name, rows, [2] * 8) == {}
    assert list(judged(name, rows, [1] * 8)) == [2]
