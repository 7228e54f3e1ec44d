"""Butterfly all-reduce: the right mean, the same bits for everyone, the promised bytes; and liars left out."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from protocols import REPLICATED_PROTOCOLS
from protocols.allreduce.clipping import weights as plan_weights
from protocols.base import (
    AveragingResult,
    AveragingSession,
    Head,
    Host,
    LocalProgress,
    Member,
    Outcome,
    Settings,
    Vector,
)
from protocols.codec import codec
from protocols.consensus.record import coordinators, genesis
from protocols.history.chain import genesis as genesis_head
from protocols.vectors import norm
from tests.sim import loop as simloop
from tests.sim.butterfly_harness import RUN, Averaged, ButterflyHarness
from tests.sim.byzantine.contributors import LIES
from tests.sim.host import sim_host
from tests.sim.network import SimNetwork, Trace

MIB = 1 << 20


def vectors(count: int, elements: int, seed: int) -> list[Vector]:
    """Vectors of one norm, of which nothing is clipped."""
    generator = torch.Generator().manual_seed(seed)
    given = [torch.randn(elements, generator=generator) for _ in range(count)]
    return [v / v.norm() * elements**0.5 for v in given]


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


@pytest.mark.parametrize("count", range(1, 17))
@pytest.mark.parametrize("elements", (1, 7, 1001, 65_537))
def test_exact_mean_for_every_group_size(count: int, elements: int) -> None:
    """Unequal weights, unequal shares, odd sizes, vectors smaller than the group."""
    rng = random.Random(count * 31 + elements)
    given = vectors(count, elements, seed=count)
    tokens = [rng.randrange(1000, 5000) for _ in range(count)]
    bandwidths = [rng.choice((1e6, 5e6, 20e6)) for _ in range(count)]
    averaged = ButterflyHarness(given, tokens, bandwidths, chunk_elements=4096).average()
    assert [mean.outcome for mean in averaged.means] == [Outcome.COMMITTED] * count
    assert same_bits(averaged)
    expected = reference(given, list(plan_weights(tokens)))
    assert float((averaged.results[0].double() - expected).norm() / given[0].double().norm()) <= 1e-6
    assert len({mean.record for mean in averaged.means}) == 1
    assert averaged.means[0].peers == averaged.peers


@pytest.mark.parametrize("name", ("fp32", "fp16", "bf16", "int8"))
@pytest.mark.parametrize("count", (2, 3, 5, 8))
def test_codec_errors_stay_within_bound(name: str, count: int) -> None:
    """Each contribution is encoded once and the mean once: the errors of both, element by element."""
    given = vectors(count, 30_011, seed=count)
    tokens = [1000 + 500 * index for index in range(count)]
    averaged = ButterflyHarness(given, tokens, [1e7] * count, codec=name, chunk_elements=4096).average()
    assert same_bits(averaged)
    weights = torch.tensor(tokens, dtype=torch.float64) / sum(tokens)
    used = codec(name)
    bound = sum(w * used.error_bound(v).double() for v, w in zip(given, weights, strict=True))
    expected = reference(given, [float(t) for t in tokens])
    scattered = expected.abs().float() + bound.float()  # type: ignore[union-attr]
    rounding = 1e-6 * sum(w * v.double().abs() for v, w in zip(given, weights, strict=True))
    bound = bound + _block_bound(used.name, scattered).double() + rounding
    assert bool(((averaged.results[0].double() - expected).abs() <= bound).all())


def _block_bound(name: str, magnitude: Vector) -> Vector:
    """The bound of encoding any vector of at most these magnitudes, wherever its blocks begin."""
    if name != "int8":
        return codec(name).error_bound(magnitude) * 2
    return torch.full_like(magnitude, float(magnitude.max()) / 127)


def test_equal_shares_send_the_optimal_bytes() -> None:
    """2(N-1)/N·S per peer, headers included, within 1 %; int8 at most 0.27 of it."""
    count, elements = 4, 10 * MIB // 4
    size = 4 * elements
    given = vectors(count, elements, seed=0)
    sent = {}
    for name in ("fp32", "int8"):
        averaged = ButterflyHarness(given, [1000] * count, [1e8] * count, codec=name).average()
        sent[name] = averaged.sent_bytes
    optimum = 2 * (count - 1) / count * size
    assert all(abs(bytes_ / optimum - 1) < 0.01 for bytes_ in sent["fp32"])
    assert all(small / large <= 0.27 for small, large in zip(sent["int8"], sent["fp32"], strict=True))


def test_unequal_links_send_their_share() -> None:
    """S[1 + (N-2)·f_i], within 1 %, with the shares that let all uplinks end at the same time, T* = 2(N-1)S/Σb."""
    bandwidths = [40e6, 20e6, 20e6, 18e6]
    elements = 10 * MIB // 4
    averaged = ButterflyHarness(vectors(4, elements, seed=0), [1000] * 4, bandwidths).average()
    seconds = 2 * 3 * 4 * elements / sum(bandwidths)
    for sent, bandwidth in zip(averaged.sent_bytes, bandwidths, strict=True):
        assert abs(sent / (seconds * bandwidth) - 1) < 0.01


def test_slow_link_sends_only_its_own_contribution() -> None:
    """f_i = 0: it sends S, once."""
    elements = 10 * MIB // 4
    averaged = ButterflyHarness(vectors(4, elements, seed=0), [1000] * 4, [40e6, 20e6, 20e6, 1e6]).average()
    assert abs(averaged.sent_bytes[3] / (4 * elements) - 1) < 0.01
    assert same_bits(averaged)


def test_reducer_memory_is_bounded_by_window() -> None:
    """A reducer holds a window of chunks for each contributor, whatever the length of the vector."""
    from protocols.allreduce import reducer as reduce

    most = 0
    taken = reduce.Reducer._take_chunk

    async def counting(self: reduce.Reducer, peer: str, stream: object, index: int) -> None:
        nonlocal most
        await taken(self, peer, stream, index)  # type: ignore[arg-type]
        waiting = [len(inbox) for inbox in self._inbox.values()]
        assert sum(1 for inbox in self._inbox.values() if peer in inbox) <= reduce.WINDOW_CHUNKS
        most = max(most, sum(waiting))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reduce.Reducer, "_take_chunk", counting)
        ButterflyHarness(vectors(4, 100_000, seed=0), [1] * 4, [1e9, 1e6, 5e6, 1e8], chunk_elements=512).average()
    assert 3 <= most <= 3 * reduce.WINDOW_CHUNKS


def test_single_peer_averages_with_itself_at_once() -> None:
    (given,) = vectors(1, 5000, seed=3)
    averaged = ButterflyHarness([given], [10], [1e6]).average()
    assert torch.equal(averaged.results[0], given)
    assert averaged.sent_bytes == [0]
    assert averaged.seconds < 0.1


def test_member_without_work_receives_with_zero_weight() -> None:
    given = vectors(4, 20_000, seed=4)
    averaged = ButterflyHarness(given, [1000, 0, 1000, 1000], [1e7] * 4, chunk_elements=1024).average()
    assert same_bits(averaged)
    assert averaged.means[0].peers == ("p00", "p02", "p03")
    assert relative_error(averaged.results[1], reference(given, [1000.0, 0.0, 1000.0, 1000.0])) <= 1e-6
    assert averaged.means[1].weights["p01"] == 0


REFUSED = tuple(lie for lie in LIES if lie != "weight-huge")


@pytest.mark.parametrize("lie", REFUSED)
@pytest.mark.parametrize(("name", "chunk_elements"), [("fp32", 2048), ("int8", 2048), ("fp32", 1 << 18)])
def test_lying_contributor_is_blamed_and_left_out(lie: str, name: str, chunk_elements: int) -> None:
    """Whatever it sends: the others commit the same bits, without it where it lied, and say who it was.

    A part of one chunk is no exception, but that a chunk sent twice is then one chunk and something nobody reads.
    """
    count, liar, elements = 4, 2, 40_000
    given = vectors(count, elements, seed=5)
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
    assert named, f"nobody named the liar {lie}"
    for index in honest:
        blamed = {blame.peer for blame in averaged.means[index].blamed}
        assert blamed <= {"p02"}, "an honest peer was blamed"
    contribution = averaged.means[0].contributions.get("p02")
    assert contribution is None or contribution.chunks_counted < contribution.chunks
    _holds_only_whole_chunks(averaged, given, liar, codec(name).error_bound(given[3]).max().item())


def _holds_only_whole_chunks(averaged: Averaged, given: list[Vector], liar: int, slack: float) -> None:
    """Every element is the mean with the liar's true value or without it: nothing of what it made up."""
    with_liar = reference(given, [1.0] * len(given)).float()
    without = reference(given, [0.0 if index == liar else 1.0 for index in range(len(given))]).float()
    result = averaged.results[0]
    nearest = torch.minimum((result - with_liar).abs(), (result - without).abs())
    assert float(nearest.max()) <= 3 * slack + 1e-5


def test_huge_weight_claim_is_clamped_and_blamed() -> None:
    given = vectors(4, 10_000, seed=6)
    names = [f"p{index:02}" for index in range(4)]
    calls = coordinators(genesis(RUN), [Member(name) for name in names])[0]
    liar = next(index for index, name in enumerate(names) if name != calls)
    averaged = ButterflyHarness(given, [1000] * 4, [1e7] * 4, chunk_elements=2048, lies={liar: "weight-huge"}).average()
    honest = [mean for index, mean in enumerate(averaged.means) if index != liar]
    assert {mean.outcome for mean in honest} == {Outcome.COMMITTED}
    assert {mean.weights[names[liar]] for mean in honest} == {16_000.0}
    assert all(any(b.peer == names[liar] and "clamped" in b.why for b in mean.blamed) for mean in honest)
    expected = reference(given, [16.0 if index == liar else 1.0 for index in range(4)])
    assert all(relative_error(averaged.results[index], expected) <= 1e-6 for index in range(4) if index != liar)


def test_stalled_peer_costs_others_no_chunk() -> None:
    """Whom the window held up behind it gets time afresh, and who was late still receives the mean."""
    given = vectors(4, 1_500_000, seed=0)

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


# -- whom a round waits for -------------------------------------------------------------------------------------------


def watched(
    count: int, late_seconds: dict[int, float], before: Callable[[SimNetwork], None] = lambda network: None
) -> tuple[list[tuple[float, str, tuple[str, ...]]], list[AveragingResult]]:
    """Average; returns (seconds, peer, whom it waits for), each time that this changes, and the means."""
    seen: list[tuple[float, str, tuple[str, ...]]] = []

    async def look(peer: str, session: AveragingSession) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if not (mine := [each for each in seen if each[1] == peer]) or mine[-1][2] != session.waiting_for():
                seen.append((loop.time(), peer, session.waiting_for()))
            await asyncio.sleep(0.01)

    async def member(host: Host, head: Head, index: int) -> AveragingResult:
        given = vectors(count, 400_000, seed=1)[index]
        work = LocalProgress(1000, 0.0, 1.0, norm([given]), complete=True)
        averager = REPLICATED_PROTOCOLS["butterfly"](host, Settings("fp32", (len(given),), 4096, 1e6))
        async with averager.enter(head, asyncio.get_running_loop().time() + 600.0) as session:
            looking = asyncio.create_task(look(host.me, session))
            session.offer(replace(work, complete=False))
            await asyncio.sleep(late_seconds.get(index, 0.0))
            session.offer(work)
            await session.cut.wait()
            mean = await session.average([given], work, [torch.empty_like(given)])
            await asyncio.sleep(0.02)
            looking.cancel()
            return mean

    async def main() -> list[AveragingResult]:
        network = SimNetwork(Trace())
        peers = [f"p{index:02}" for index in range(count)]
        hosts = [sim_host(network, network.join(peer, 1e6), 1, {}) for peer in peers]
        before(network)
        head = genesis_head(RUN, "run", tuple(Member(peer) for peer in peers), bytes(32))
        return list(await asyncio.gather(*(member(host, head, index) for index, host in enumerate(hosts))))

    means = simloop.run(main())
    return seen, means


def awaited_at(seen: list[tuple[float, str, tuple[str, ...]]], peer: str, seconds: float) -> tuple[str, ...]:
    return [whom for at, who, whom in seen if who == peer and at <= seconds][-1]


def test_awaited_peers_follow_the_phases_of_a_round() -> None:
    seen, means = watched(4, {2: 0.5})
    assert {mean.outcome for mean in means} == {Outcome.COMMITTED}
    for peer in ("p00", "p01", "p03"):
        assert awaited_at(seen, peer, 0.2) == ("p02",), "its own inner steps are done"
    assert awaited_at(seen, "p02", 0.2) == ("p02",), "it waits for nobody but itself"
    everybody = {"p00", "p01", "p02", "p03"}
    for peer in everybody:
        told = [whom for _, who, whom in seen if who == peer]
        assert told[-1] == () and all(set(whom) <= everybody for whom in told)
        assert len(told[-2]) == 1, "whoever coordinates the decision"
        assert max(len(whom) for whom in told[1:-1]) > 1, "the reducers, while data travels"


def test_peer_holding_up_data_is_reported() -> None:
    """Its link fails once the round is called: the others wait for the part that it reduces."""

    def strike(network: SimNetwork) -> None:
        for peer in ("p00", "p01", "p03"):
            asyncio.get_running_loop().call_later(1.5, network.block, "p02", peer)

    seen, means = watched(4, {}, strike)
    assert {means[index].outcome for index in (0, 1, 3)} == {Outcome.COMMITTED}
    for peer in ("p00", "p01", "p03"):
        assert any(whom == ("p02",) for at, who, whom in seen if who == peer and at > 1.5)
        assert awaited_at(seen, peer, 1e9) == ()


def test_single_peer_waits_only_for_itself() -> None:
    seen, _ = watched(1, {})
    assert {whom for _, _, whom in seen} <= {(), ("p00",)} and seen[-1][2] == ()
