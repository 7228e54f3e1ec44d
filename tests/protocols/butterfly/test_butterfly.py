"""Butterfly all-reduce: the right mean, the same bits for all peers, the promised bytes, and liars left out."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch

from protocols.allreduce.plan import weights as plan_weights
from protocols.base import (
    MAX_WEIGHT,
    Member,
    Outcome,
    Stream,
    Vector,
)
from protocols.consensus.record import coordinators, genesis
from protocols.vectors.codec import codec
from tests.sim.averaging import RUN, Averaged, ButterflyHarness
from tests.sim.byzantine.contributors import LIES
from tests.sim.network import SimNetwork
from tests.support.codecs import error_bound
from tests.support.example_vectors import equal_norm_vectors
from tests.support.long import diagonal

SIZE = 10 << 20


def reference(given: list[Vector], weights: list[float]) -> torch.Tensor:
    """The weighted mean in float64."""
    total = sum(w * v.double() for v, w in zip(given, weights, strict=True))
    assert isinstance(total, torch.Tensor)
    return total / sum(weights)


def relative_error(result: Vector, expected: torch.Tensor) -> float:
    return float((result.double() - expected).norm() / expected.norm())


def same_bits(averaged: Averaged) -> bool:
    first = averaged.results[0].numpy().tobytes()
    return all(result.numpy().tobytes() == first for result in averaged.results)


@diagonal("count, elements", (1, 2, 3, 5, 16), (65_537, 1, 7, 1001, 7))
def test_exact_mean_for_every_group_size(count: int, elements: int) -> None:
    """Unequal weights, unequal shares, odd sizes, vectors smaller than the group. The vectors stay as they are."""
    rng = random.Random(count * 31 + elements)
    given = equal_norm_vectors(count, elements, seed=count)
    before = [vector.clone() for vector in given]
    tokens = [rng.randrange(1000, 5000) for _ in range(count)]
    bandwidths = [rng.choice((1e6, 5e6, 20e6)) for _ in range(count)]
    averaged = ButterflyHarness(given, tokens, bandwidths, chunk_elements=4096).average()
    assert [mean.outcome for mean in averaged.means] == [Outcome.COMMITTED] * count
    assert same_bits(averaged)
    expected = reference(given, list(plan_weights(tokens, MAX_WEIGHT)))
    assert float((averaged.results[0].double() - expected).norm() / given[0].double().norm()) <= 1e-6
    assert len({mean.record for mean in averaged.means}) == 1
    assert averaged.means[0].peers == averaged.peers
    assert all(map(torch.equal, given, before))


@pytest.mark.parametrize(
    "bandwidths, expected_bytes",
    [
        # All uplinks end at the same time, T* = 2(N-1)S/Σb.
        pytest.param((40e6, 20e6, 20e6, 18e6), [6 * SIZE / 98 * share for share in (40, 20, 20, 18)], id="unequal"),
        pytest.param((40e6, 20e6, 20e6, 1e6), [None, None, None, SIZE], id="slow link reduces nothing"),
    ],
)
def test_unequal_links_send_their_share(bandwidths: tuple[float, ...], expected_bytes: list[float | None]) -> None:
    """S[1 + (N-2)·f_i], within 1 %."""
    averaged = ButterflyHarness(equal_norm_vectors(4, SIZE // 4, seed=0), [1000] * 4, list(bandwidths)).average()
    for sent, expected in zip(averaged.sent_bytes, expected_bytes, strict=True):
        assert expected is None or abs(sent / expected - 1) < 0.01
    assert same_bits(averaged)


def test_reducer_memory_is_bounded_by_window() -> None:
    """A reducer holds a window of chunks for each contributor, whatever the length of the vector."""
    from protocols.allreduce import all_reduce as reduce

    most = 0
    taken = reduce.Reducer._take_chunk

    async def counting(self: reduce.Reducer, peer: str, stream: Stream, index: int) -> None:
        nonlocal most
        await taken(self, peer, stream, index)
        waiting = [len(inbox) for inbox in self._inbox.values()]
        assert sum(1 for inbox in self._inbox.values() if peer in inbox) <= reduce.WINDOW_CHUNKS
        most = max(most, sum(waiting))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reduce.Reducer, "_take_chunk", counting)
        ButterflyHarness(
            equal_norm_vectors(4, 100_000, seed=0), [1] * 4, [1e9, 1e6, 5e6, 1e8], chunk_elements=512
        ).average()
    assert 3 <= most <= 3 * reduce.WINDOW_CHUNKS


def test_member_without_work_receives_with_zero_weight() -> None:
    given = equal_norm_vectors(4, 20_000, seed=4)
    averaged = ButterflyHarness(given, [1000, 0, 1000, 1000], [1e7] * 4, chunk_elements=1024).average()
    assert same_bits(averaged)
    assert averaged.means[0].peers == ("p00", "p02", "p03")
    assert relative_error(averaged.results[1], reference(given, [1000.0, 0.0, 1000.0, 1000.0])) <= 1e-6
    assert averaged.means[1].weights["p01"] == 0


REFUSED = LIES[:-1]


@diagonal("lie, encoding", REFUSED, (("fp32", 2048), ("int8", 2048), ("fp32", 1 << 18)))
def test_lying_contributor_is_blamed_and_left_out(lie: str, encoding: tuple[str, int]) -> None:
    """Whatever it sends, the others commit the same bits, without it where it lied, and blame it.

    In a part of one chunk, the second copy of a chunk that was sent twice is never read.
    """
    name, chunk_elements = encoding
    count, liar, elements = 4, 2, 40_000
    given = equal_norm_vectors(count, elements, seed=5)
    group = ButterflyHarness(
        given, [1000] * count, [1e7] * count, codec=name, chunk_elements=chunk_elements, lies={liar: lie}
    )
    averaged = group.average()
    if lie == "twice" and chunk_elements > elements:
        assert same_bits(averaged)
        return
    honest = [index for index in range(count) if index != liar]
    assert {averaged.means[index].outcome for index in honest} == {Outcome.COMMITTED}
    assert len({averaged.means[index].record for index in honest}) == 1
    assert len({averaged.results[index].numpy().tobytes() for index in honest}) == 1
    named = [blame.why for index in honest for blame in averaged.means[index].blamed if blame.peer == "p02"]
    assert named, f"no peer blamed the liar {lie}"
    for index in honest:
        blamed = {blame.peer for blame in averaged.means[index].blamed}
        assert blamed <= {"p02"}, "an honest peer was blamed"
    contribution = averaged.means[0].contributions.get("p02")
    assert contribution is None or contribution.chunks_counted < contribution.chunks
    _holds_only_whole_chunks(averaged, given, liar, error_bound(codec(name), given[3]).max().item())


def _holds_only_whole_chunks(averaged: Averaged, given: list[Vector], liar: int, slack: float) -> None:
    """Every element is the mean with the liar's true value or without it: nothing of what it made up."""
    with_liar = reference(given, [1.0] * len(given)).float()
    without = reference(given, [0.0 if index == liar else 1.0 for index in range(len(given))]).float()
    result = averaged.results[0]
    nearest = torch.minimum((result - with_liar).abs(), (result - without).abs())
    assert float(nearest.max()) <= 3 * slack + 1e-5


def test_huge_weight_claim_is_clamped_and_blamed() -> None:
    given = equal_norm_vectors(4, 10_000, seed=6)
    names = [f"p{index:02}" for index in range(4)]
    calls = coordinators(genesis(RUN), [Member(name) for name in names])[0]
    liar = next(index for index, name in enumerate(names) if name != calls)
    averaged = ButterflyHarness(given, [1000] * 4, [1e7] * 4, chunk_elements=2048, lies={liar: "weight-huge"}).average()
    honest = [mean for index, mean in enumerate(averaged.means) if index != liar]
    assert {mean.outcome for mean in honest} == {Outcome.COMMITTED}
    assert {mean.weights[names[liar]] for mean in honest} == {3_000.0}
    assert all(any(b.peer == names[liar] and "clamped" in b.why for b in mean.blamed) for mean in honest)
    expected = reference(given, [3.0 if index == liar else 1.0 for index in range(4)])
    assert all(relative_error(averaged.results[index], expected) <= 1e-6 for index in range(4) if index != liar)


def test_stalled_peer_costs_others_no_chunk() -> None:
    """Peers that waited behind it in the window get their time again, and the late peer still receives the mean."""
    given = equal_norm_vectors(4, 1_500_000, seed=0)

    def stall(network: SimNetwork) -> None:
        for peer in ("p00", "p01", "p02"):
            asyncio.get_running_loop().call_later(3.0, network.block, "p03", peer)

    averaged = ButterflyHarness(
        given, [1000] * 4, [24e6, 12e6, 12e6, 75e4], chunk_elements=1 << 14, before=stall
    ).average()
    assert [mean.outcome for mean in averaged.means] == [Outcome.COMMITTED] * 4
    assert same_bits(averaged)
    parts = averaged.means[0].contributions
    assert all(parts[peer].chunks_counted == parts[peer].chunks for peer in ("p00", "p01", "p02"))
    assert 0 < parts["p03"].chunks_counted < parts["p03"].chunks
    assert {blame.peer for mean in averaged.means for blame in mean.blamed} == {"p03"}
