"""Push-sum with peers that lie, keep shares or stay silent: the mass and the progress of the others are safe."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import torch

from protocols import wire
from protocols.base import Buffer, Header, Member, PeerSilent, RoundKey
from protocols.pairwise.push_sum import MAX_KEPT, MAX_TAKING, MOST_SHARE, PUSH, PushShare
from protocols.pairwise.state_swap import HEADER_LIMIT
from protocols.streams.framing import FramedStream
from tests.sim.averaging import RUN
from tests.support.disguises import lying, sending
from tests.support.pairwise import ROUND_SECONDS, PairwiseSwarm, push_sum_swarm

KEY = RoundKey(RUN, "run", bytes(32), 0)
ELEMENTS, CHUNK = 48, 16


async def stay_silent(stream: FramedStream, header: Header, payload: Buffer) -> None:
    raise PeerSilent("p1", "it sends nothing")


def share(number: int, weight: float = 0.5, sender: str = "p1") -> PushShare:
    """The header of a share for p0."""
    return PushShare(KEY, Member(sender), number, Member("p0"), weight, ELEMENTS, "fp32")


async def give(swarm: PairwiseSwarm, header: PushShare) -> bool:
    """Give p0 a share of zeros, as p1 without honest code; returns whether p0 counts it."""
    async with swarm.opened(PUSH) as stream:
        await stream.send(header)
        for index in range(ELEMENTS // CHUNK):
            await stream.send(wire.Chunk(index, 4 * CHUNK), bytes(4 * CHUNK))
        answer: Any = await stream.receive(HEADER_LIMIT)
    return bool(answer.counted)


# -- wrong shares -----------------------------------------------------------------------------------------------------


def test_sender_of_invalid_share_gets_no_more() -> None:
    """A share for it would take half of the sender's mass along."""
    swarm = push_sum_swarm(2, disguises={1: lying("norm")})
    swarm.rounds(4)
    refused = [number for number, result in enumerate(swarm.results[0]) if result.mean.blamed]
    assert refused == [0] and swarm.weights()[0] >= 0.25


def test_accepted_shares_keep_weight_within_the_limit() -> None:
    swarm, answers = push_sum_swarm(2), list[bool]()

    async def main() -> None:
        async with swarm.beside_lenders(0, seconds=30.0):
            for number in range(4):
                answers.append(await swarm.start(1, give(swarm, share(number, MOST_SHARE))))

    swarm.run(main)
    assert answers == [True, False, False, False]
    assert swarm.gossips[0].masses.weight == 1 + MOST_SHARE


def test_repeated_share_counts_once() -> None:
    """Counted again, it would move the state and add no weight."""
    swarm, states = push_sum_swarm(2), list[torch.Tensor]()

    async def main() -> None:
        async with swarm.beside_lenders(0, seconds=30.0):
            for _ in range(3):
                await swarm.start(1, give(swarm, share(0)))
                states.append(torch.cat(swarm.states[0]))

    swarm.run(main)
    assert swarm.moved(0) and torch.equal(states[0], states[2]) and len(swarm.messages(0)) == 1


# -- peers that take and do not give ----------------------------------------------------------------------------------


async def promise_shares(swarm: PairwiseSwarm, count: int, peer: str = "p1") -> None:
    """The peer announces this many shares to p0, and sends none of them."""
    deadline = asyncio.get_running_loop().time() + 1e5
    async with AsyncExitStack() as stack:
        for number in range(count):
            stream = await stack.enter_async_context(swarm.network.transports[peer].open("p0", PUSH, deadline))
            await stream.send(share(number, sender=peer))
        await asyncio.sleep(ROUND_SECONDS)


def test_stalled_sender_takes_one_slot_then_is_refused() -> None:
    swarm = push_sum_swarm(3)
    node = swarm.network.nodes["p0"]

    async def main() -> None:
        async with swarm.beside_lenders(0, seconds=90.0):
            stalling = swarm.start(1, promise_shares(swarm, 2 * MAX_TAKING))
            await asyncio.sleep(1.0)
            assert len(node.ends) == 1
            await swarm.start(2, swarm.round(2))
            assert swarm.weights() == [1.5, 1.0, 0.5]
            await asyncio.sleep(1.0)
            assert not node.ends
            again = swarm.start(1, promise_shares(swarm, 1))
            await asyncio.sleep(1.0)
            assert not node.ends
            again.cancel()
        await asyncio.wait([stalling, again])

    swarm.run(main)


def test_concurrent_incoming_shares_are_bounded() -> None:
    """Each takes the memory of a state, and identities cost nothing."""
    swarm = push_sum_swarm(MAX_TAKING + 3)

    async def main() -> None:
        async with swarm.beside_lenders(0, seconds=20.0):
            others = range(1, swarm.count)
            stalling = [swarm.start(index, promise_shares(swarm, 1, f"p{index}")) for index in others]
            await asyncio.sleep(1.0)
            assert len(swarm.network.nodes["p0"].ends) == MAX_TAKING
        await asyncio.wait(stalling)

    swarm.run(main)


def test_kept_shares_are_bounded() -> None:
    """Each is a state in memory, and no receiver answers for its share."""
    swarm, most = push_sum_swarm(6, disguises=dict.fromkeys(range(1, 6), sending(stay_silent))), 0

    async def main() -> None:
        nonlocal most
        async with swarm.beside_lenders(*range(1, 6)):
            for number in range(12):
                await swarm.start(0, swarm.round(0, number))
                most = max(most, len(swarm.gossips[0].share_sender.kept))

    swarm.run(main)
    assert most == MAX_KEPT


def play_beside(swarm: PairwiseSwarm, lender: int, rounds: int, train_seconds: float) -> None:
    """Rounds of the others while one peer only lends its state; each other peer still mixes in most late rounds."""
    others = [index for index in range(swarm.count) if index != lender]

    async def main() -> None:
        task = swarm.start(lender, swarm.lending(lender, 1e4))
        await asyncio.wait([swarm.start(index, swarm.play_rounds(index, rounds, train_seconds)) for index in others])
        task.cancel()
        await asyncio.wait([task])

    swarm.run(main)
    for index in others:
        assert sum(bool(result.early or result.mean.contributions) for result in swarm.results[index][-30:]) > 10


def test_peer_that_only_takes_does_not_stop_others() -> None:
    """Each share takes half of its sender's weight along, and none comes back."""
    swarm = push_sum_swarm(4)
    play_beside(swarm, 3, 120, 1.0)
    assert max(swarm.weights()[:3]) < 2.0**-20


def test_peer_silent_about_shares_does_not_stop_others() -> None:
    """Its shares are kept for two minutes, and then return, which is reported."""
    swarm = push_sum_swarm(4, disguises={1: sending(stay_silent)})
    play_beside(swarm, 1, 90, 3.0)
    assert all(swarm.gossips[index].half_exchanges > 0 for index in (0, 2, 3))
