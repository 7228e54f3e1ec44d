"""Push-sum between peers: faults of streams do not change the mass, and slow peers do not delay the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import torch

from protocols.allreduce.parts import ReducedPart
from protocols.base import Buffer, Header, Outcome
from protocols.pairwise import push_sum
from protocols.pairwise.push_sum import split_share
from protocols.streams.framing import FramedStream
from protocols.vectors.codec import CODECS
from protocols.vectors.views import VectorView
from tests.sim.averaging import flat, head
from tests.sim.faults import Faults
from tests.sim.faults import Message as At
from tests.sim.injection import Injector
from tests.support.disguises import sending
from tests.support.pairwise import DONE, PairwiseSwarm, push_sum_swarm
from tests.support.simulated import simulated

REST_SECONDS = 60.0
"""After this time, a peer that cost a timeout is contacted again."""


def healed_rounds(swarm: PairwiseSwarm, count: int) -> Callable[[Injector], Awaitable[None]]:
    """After a first round with faults: these rounds without, and one of each peer that settles all its shares."""

    async def play(injector: Injector) -> None:
        injector.heal()
        await asyncio.sleep(REST_SECONDS)
        everyone = range(swarm.count)
        await asyncio.wait([swarm.start(index, swarm.play_rounds(index, count, first=1)) for index in everyone])
        await asyncio.sleep(REST_SECONDS)
        for index in everyone:
            async with swarm.beside_lenders(*(other for other in everyone if other != index), seconds=30.0):
                await swarm.start(index, swarm.round(index, 1 + count))

    return play


def messages_without_faults(peer: str, step: int = 1) -> range:
    """The numbers of the messages that a peer of two sends and receives in a round without faults."""
    swarm = push_sum_swarm(2, jitter=3)
    swarm.run_with_faults(Faults())
    return range(1, swarm.network.nodes[peer].messages + 1, step)


def test_share_moves_only_the_receiver() -> None:
    swarm = push_sum_swarm(2)
    swarm.run_round(1, 0, seconds=30.0)
    assert swarm.weights() == [1.5, 0.5] and not swarm.moved(1)
    expected = (swarm.first[0] + swarm.first[1] / 2) / 1.5
    assert float((flat(swarm.states[0]) - expected).abs().max()) < 1e-6
    assert swarm.is_conserved()
    (result,) = swarm.results[1]
    assert result.mean.outcome is Outcome.SKIPPED and result.ended - result.asked < 1.0, "it was given nothing"
    assert swarm.messages(0) == ["p1.0/0 to p0.0"]


@pytest.mark.parametrize("name", sorted(CODECS))
def test_sender_keeps_the_codec_loss(name: str) -> None:
    """The half that is sent and the half that stays add up to the state, to the rounding of float32."""
    grain = CODECS[name].grain
    elements, chunk = 5 * grain + 30, grain * max(1, 64 // grain)
    before = torch.randn(elements, generator=torch.Generator().manual_seed(1)) + 1.0
    state, part = before.clone(), ReducedPart(CODECS[name], 0, elements, chunk)
    split_share(VectorView([state]), part)
    sent = torch.empty(elements)
    part.decode(VectorView([sent]))
    assert name == "fp32" or not torch.equal(sent, before)
    assert float(((state.double() + sent) / 2 - before).abs().max()) < 1e-6


@pytest.mark.parametrize("victim", ("p0", "p1"))
def test_stream_reset_at_any_message_conserves_mass(victim: str) -> None:
    for number in messages_without_faults(victim):
        swarm = push_sum_swarm(2, jitter=3)
        swarm.run_with_faults(Faults().reset(victim, at_message=number), 1, healed_rounds(swarm, 2))
        assert swarm.is_conserved(), f"at message {number}"


@pytest.mark.parametrize("both", (True, False))
def test_silence_at_any_message_conserves_mass(both: bool) -> None:
    for number in messages_without_faults("p0", 1 + both):
        at = At("p0", number)
        faults = Faults().silence({"p0"}, {"p1"}, at) if both else Faults().silence_one_way("p0", "p1", at)
        swarm = push_sum_swarm(2, jitter=3)
        swarm.run_with_faults(faults, 1, healed_rounds(swarm, 3))
        assert swarm.is_conserved(), f"at message {number}"
        assert all(result.ended - result.asked < 5.0 for results in swarm.results for result in results)


# -- shares without an answer -----------------------------------------------------------------------------------------


@asynccontextmanager
async def counted_share(swarm: PairwiseSwarm) -> AsyncIterator[None]:
    """p0 gives p1, which lends its state, a share. Inside, p1 has counted it, and p0 does not know yet."""
    giving = swarm.start(0, swarm.round(0))
    while swarm.gossips[1].masses.weight == 1.0:  # noqa: ASYNC110 - there is no event to wait for
        await asyncio.sleep(0.001)
    yield
    await asyncio.wait([giving])


@simulated(push_sum_swarm, 2)
async def test_share_for_former_incarnation_returns_to_sender(swarm: PairwiseSwarm) -> None:
    lender = swarm.start(1, swarm.lending(1, 50.0))
    async with counted_share(swarm):
        swarm.network.block("p1", "p0")
    assert swarm.gossips[0].masses.weight == 0.5
    swarm.network.kill("p1")
    await asyncio.wait([lender])
    swarm.network.heal("p1", "p0")
    swarm.network.restart("p1")
    await asyncio.sleep(5.0)
    await swarm.start(0, swarm.round(0, 1))
    await swarm.settle()
    assert swarm.gossips[0].masses.weight == 1.0 and not swarm.gossips[0].share_sender.kept
    second = swarm.results[0][1]
    assert second.mean.outcome is Outcome.COMMITTED and list(second.mean.contributions) == ["p0"], "its own earlier one"
    assert float((flat(swarm.states[0]) - swarm.first[0]).abs().max()) < 1e-6


@simulated(push_sum_swarm, 2)
async def test_share_for_departed_peer_returns_and_is_reported(
    swarm: PairwiseSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(push_sum, "RETURN_SECONDS", 20.0)
    async with swarm.beside_lenders(1, seconds=50.0), counted_share(swarm):
        swarm.network.block("p1", "p0")
    await swarm.start(0, swarm.play_rounds(0, 5, train_seconds=10.0, first=1))
    await swarm.settle()
    assert swarm.gossips[0].masses.weight == 1.0 and swarm.gossips[0].half_exchanges == 1
    assert sum(result.half_exchanges for result in swarm.results[0]) == 1
    assert sum(result.mass_drift for result in swarm.results[0]) == 0.5


def test_unsent_share_returns_and_unreachable_peer_rests() -> None:
    """No stream can be opened to p1: not a byte of the share has reached it."""
    swarm = push_sum_swarm(2)
    swarm.network.link("p1", "p0").blocked = True
    swarm.run(lambda: swarm.play_rounds(0, 2, train_seconds=0.1))
    assert swarm.weights() == [1.0, 1.0] and swarm.is_conserved()
    first, second = swarm.results[0]
    assert first.mean.blamed[0].peer == "p1" and first.ended - first.asked < 3.0
    assert second.ended - second.asked < 0.01


@simulated(push_sum_swarm, 2)
async def test_finished_round_asks_nothing_about_shares(swarm: PairwiseSwarm) -> None:

    async def late() -> None:
        loop = asyncio.get_running_loop()
        async with swarm.gossips[0].enter(head(1), loop.time() + 20.0) as session:
            session.share(swarm.states[0])
            await asyncio.sleep(20.0)  # p1, which cost a timeout, may be contacted again
            sent = swarm.network.nodes["p0"].messages
            await session.average(swarm.states[0], DONE, [torch.empty_like(each) for each in swarm.states[0]])
            assert loop.time() - session.deadline < 0.01 and swarm.network.nodes["p0"].messages == sent

    async with swarm.beside_lenders(1):
        async with counted_share(swarm):
            swarm.network.link("p1", "p0").blocked = True
        await swarm.start(0, late())
    await swarm.settle()


@simulated(push_sum_swarm, 2)
async def test_broken_stream_does_not_change_the_link_estimate(swarm: PairwiseSwarm) -> None:
    before = swarm.gossips[0].timeouts.timeout_seconds("p1", 10**6)
    async with swarm.beside_lenders(1), counted_share(swarm):
        swarm.network.reset_streams("p0")
    await swarm.settle()
    (result,) = swarm.results[0]
    assert result.mean.blamed[0].why == "no share: it did not say whether it has counted the share"
    assert swarm.gossips[0].timeouts.timeout_seconds("p1", 10**6) < before + 1.0


# -- busy, slow and stalled receivers ---------------------------------------------------------------------------------


def test_receiver_without_state_declines_the_share() -> None:
    """p1 is between two rounds, and p2 trains: p2 gets the share."""
    swarm = push_sum_swarm(3)
    swarm.run_round(0, 2, seconds=30.0)
    assert swarm.weights() == [0.5, 1.0, 1.5] and swarm.is_conserved()


def test_busy_receiver_answers_before_whole_state_is_sent() -> None:
    """p1 is between two rounds. The state is 4.8 MB, of which 1 MiB is in flight at most."""
    swarm = push_sum_swarm(2, elements=600_000, chunk_elements=100_000)
    swarm.run_round(0)
    (result,) = swarm.results[0]
    assert swarm.weights() == [1.0, 1.0] and swarm.is_conserved() and not result.mean.blamed
    assert result.ended - result.asked < 1.0 and result.mean.bytes_sent < 2e6


def test_stalled_peer_costs_only_its_own_timeout() -> None:
    """The link to p1 counts as very slow, and p1 is avoided. p2 takes a share and never answers."""

    async def stall(stream: FramedStream, header: Header, payload: Buffer) -> None:
        await asyncio.sleep(60.0)

    swarm = push_sum_swarm(3, disguises={2: sending(stall)})
    timeouts = swarm.gossips[0].timeouts
    for _ in range(12):
        timeouts.late("p1", 0.0, 1000.0)
        timeouts.took("p2", 384, 0.0, 1e-4)
    swarm.run_round(0, 2)
    (result,) = swarm.results[0]
    assert 2.0 < result.ended - result.asked < 3.0
