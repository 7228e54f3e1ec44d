"""Peers that take time, weight or influence by what no single rule forbids: what it costs them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch

from protocols import wire
from protocols.base import Member, PeerError, PeerSilent, RoundKey
from protocols.limits import DISTRUST_SECONDS
from protocols.pairwise.push_sum import MAX_KEPT, PushSum
from protocols.pairwise.responder import MOST_MEETINGS
from protocols.pairwise.share_receiver import MOST_SHARE
from protocols.pairwise.shares import PUSH, PushShare
from protocols.pairwise.state_swap import EXCHANGE, HEADER_LIMIT, ExchangeRequest, StateReceived, StateSwap
from protocols.vectors import VectorView
from tests.sim.byzantine.contributors import ByzantineContributorStream
from tests.sim.gossip_harness import RUN, GossipHarness

KEY = RoundKey(RUN, "run", bytes(32), 0)
ELEMENTS, CHUNK = 48, 16


def beside(swarm: GossipHarness, liar: Callable[[], Awaitable[None]], honest: tuple[int, ...], rounds: int) -> None:
    """Rounds of the honest ones while p1 does that, again and again."""

    async def lies() -> None:
        while True:
            try:
                await liar()
            except PeerError:
                await asyncio.sleep(0.002)

    async def life(index: int) -> None:
        for number in range(rounds):
            await swarm.round(index, number, train_seconds=3.0)

    async def main() -> None:
        lying = swarm.start(1, lies())
        await asyncio.wait([swarm.start(index, life(index)) for index in honest])
        lying.cancel()
        await asyncio.wait([lying])

    swarm.run(main)


async def ask(swarm: GossipHarness, stream: Any, number: int) -> bool:
    """p1 asks p0 for an exchange; whether it says yes."""
    await stream.send(ExchangeRequest(KEY, Member("p1"), number, ELEMENTS, "fp32"))
    accepted = (await stream.receive(HEADER_LIMIT)).accepted
    if not accepted:
        await asyncio.sleep(0.002)
    return bool(accepted)


def met(swarm: GossipHarness, index: int, other: str) -> int:
    """Rounds in which the two have met."""
    return sum(other in told.early or other in told.mean.contributions for told in swarm.told[index])


def test_initiator_that_aborts_early_is_blamed_and_avoided() -> None:
    """As who is late: else it holds up another for nearly all of its time, by asking again and again."""
    swarm, numbers = GossipHarness(3), iter(range(10**6))

    async def liar() -> None:
        async with swarm.network.transports["p1"].open(
            "p0", EXCHANGE, asyncio.get_running_loop().time() + 500
        ) as stream:
            if await ask(swarm, stream, next(numbers)):
                await asyncio.sleep(0.9 * swarm.gossips[0].exchanges.patience.timeout_seconds("p1", 4 * ELEMENTS))

    beside(swarm, liar, (0, 2), 12)
    assert met(swarm, 0, "p2") >= 10 and met(swarm, 2, "p0") >= 10
    assert any(blame.peer == "p1" for told in swarm.told[0] for blame in told.mean.blamed)


def test_exchanges_per_peer_and_lent_state_are_bounded() -> None:
    swarm, began = GossipHarness(2), []

    async def exchange(number: int) -> None:
        async with swarm.network.transports["p1"].open(
            "p0", EXCHANGE, asyncio.get_running_loop().time() + 500
        ) as stream:
            if not await ask(swarm, stream, number):
                return
            began.append(number)
            exchanges, mine = swarm.gossips[1].exchanges, torch.ones(ELEMENTS)
            await StateSwap(VectorView([mine]), exchanges.codec, CHUNK, exchanges.host.compute).transfer(stream)
            for _ in range(2):
                await stream.send(StateReceived(KEY, Member("p1"), number))
                await asyncio.sleep(0.1)

    async def main() -> None:
        lending = swarm.start(0, swarm.lending(0, 30.0))
        for number in range(3 * MOST_MEETINGS):
            await swarm.start(1, exchange(number))
        await asyncio.wait([lending])

    swarm.run(main)
    assert began == list(range(MOST_MEETINGS))


@pytest.mark.parametrize("asks", (0, 1))
def test_sender_of_invalid_state_is_avoided(asks: int) -> None:
    """Whether it asked or was asked, it is neither asked nor answered from then on."""
    seen: list[tuple[float, Any]] = []

    class Watched(ByzantineContributorStream):
        async def send(self, header: Any, payload: Any = b"") -> None:
            seen.append((asyncio.get_running_loop().time(), header))
            await super().send(header, payload)

    swarm = GossipHarness(2, disguises={1: lambda method, stream, pipe: Watched(stream, pipe, "nan", None)})  # type: ignore[arg-type]

    async def main() -> None:
        for _ in range(3):
            lending = swarm.start(1 - asks, swarm.lending(1 - asks, 10.0))
            await asyncio.wait([swarm.start(asks, swarm.round(asks)), lending])

    swarm.run(main)
    states = [at for at, header in seen if isinstance(header, wire.Chunk)]
    assert states and states[-1] - states[0] < 1.0, "it was met once"
    assert seen[-1][0] < DISTRUST_SECONDS and not swarm.moved(0)


# -- push-sum ---------------------------------------------------------------------------------------------------------


def test_peer_that_only_takes_does_not_stop_others() -> None:
    """Each share to it takes half of its giver's weight along, and none comes back."""
    swarm = GossipHarness(4, protocol=PushSum)

    async def main() -> None:
        async def life(index: int) -> None:
            for number in range(120):
                await swarm.round(index, number, train_seconds=1.0)

        leech = swarm.start(3, swarm.lending(3, 1e4))
        await asyncio.wait([swarm.start(index, life(index)) for index in range(3)])
        leech.cancel()
        await asyncio.wait([leech])

    swarm.run(main)
    assert max(each.weighted.masses.weight for each in swarm.gossips[:3]) < 2.0**-20
    for told in swarm.told[:3]:
        assert sum(bool(each.early or each.mean.contributions) for each in told[-30:]) > 10


class Mute(ByzantineContributorStream):
    async def send(self, header: Any, payload: Any = b"") -> None:
        raise PeerSilent("p1", "it says nothing")


def mute(method: str, stream: Any, pipe: Any) -> Mute:
    return Mute(stream, pipe, "", None)  # type: ignore[arg-type]


def test_kept_shares_are_bounded() -> None:
    """Each is a state in memory, and nobody says what became of any."""
    swarm, most = GossipHarness(6, protocol=PushSum, disguises=dict.fromkeys(range(1, 6), mute)), [0]

    async def main() -> None:
        others = [swarm.start(index, swarm.lending(index, 60.0)) for index in range(1, 6)]

        async def life() -> None:
            for number in range(12):
                await swarm.round(0, number, train_seconds=1.0)
                most[0] = max(most[0], len(swarm.gossips[0].share_sender.kept))

        await asyncio.wait([swarm.start(0, life()), *others])

    swarm.run(main)
    assert most[0] == MAX_KEPT


def test_peer_silent_about_shares_does_not_stop_others() -> None:
    """They are kept for two minutes, and then come home: that is told."""
    swarm = GossipHarness(4, protocol=PushSum, disguises={1: mute})

    async def main() -> None:
        async def life(index: int) -> None:
            for number in range(90):
                await swarm.round(index, number, train_seconds=3.0)

        silent = swarm.start(1, swarm.lending(1, 1e4))
        await asyncio.wait([swarm.start(index, life(index)) for index in (0, 2, 3)])
        silent.cancel()
        await asyncio.wait([silent])

    swarm.run(main)
    for index in (0, 2, 3):
        assert sum(bool(each.early or each.mean.contributions) for each in swarm.told[index][-30:]) > 10
        assert swarm.gossips[index].half_exchanges > 0


def test_accepted_shares_keep_weight_within_the_limit() -> None:
    swarm, answers = GossipHarness(2, protocol=PushSum), []

    async def give(number: int, weight: float) -> None:
        async with swarm.network.transports["p1"].open("p0", PUSH, asyncio.get_running_loop().time() + 500) as stream:
            await stream.send(PushShare(KEY, Member("p1"), number, Member("p0"), weight, ELEMENTS, "fp32"))
            for index in range(ELEMENTS // CHUNK):
                await stream.send(wire.Chunk(index, 4 * CHUNK), bytes(4 * CHUNK))
            answers.append((await stream.receive(HEADER_LIMIT)).counted)

    async def main() -> None:
        lending = swarm.start(0, swarm.lending(0, 30.0))
        for number in range(4):
            await swarm.start(1, give(number, MOST_SHARE))
        await asyncio.wait([lending])

    swarm.run(main)
    assert answers == [True, False, False, False]
    assert swarm.gossips[0].weighted.masses.weight == 1 + MOST_SHARE


def test_repeated_share_counts_once() -> None:
    """It would draw the state over, and weigh nothing."""
    swarm, after = GossipHarness(2, protocol=PushSum), []

    async def give() -> None:
        async with swarm.network.transports["p1"].open("p0", PUSH, asyncio.get_running_loop().time() + 500) as stream:
            await stream.send(PushShare(KEY, Member("p1"), 0, Member("p0"), 0.5, ELEMENTS, "fp32"))
            for index in range(ELEMENTS // CHUNK):
                await stream.send(wire.Chunk(index, 4 * CHUNK), bytes(4 * CHUNK))
            await stream.receive(HEADER_LIMIT)

    async def main() -> None:
        lending = swarm.start(0, swarm.lending(0, 30.0))
        for _ in range(3):
            await swarm.start(1, give())
            after.append(torch.cat(swarm.state[0]))
        await asyncio.wait([lending])

    swarm.run(main)
    assert swarm.moved(0) and torch.equal(after[0], after[2]) and len(swarm.messages(0)) == 1
