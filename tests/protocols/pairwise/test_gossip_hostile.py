"""Gossip with a lying, silent or greedy partner: it is refused, blamed and avoided, and the others go on."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch

from protocols import wire
from protocols.base import DISTRUST_SECONDS, Buffer, Header, Member, PeerError, RoundKey, Stream
from protocols.pairwise.gossip import MAX_EXCHANGES_PER_PEER
from protocols.pairwise.state_swap import (
    EXCHANGE,
    HEADER_LIMIT,
    ExchangeMessage,
    ExchangeReply,
    ExchangeRequest,
    OutcomeQuery,
    StateReceived,
    StateSwap,
)
from protocols.streams.framing import FramedStream
from protocols.vectors.views import VectorView
from tests.sim.averaging import RUN
from tests.support.disguises import lying, sending
from tests.support.pairwise import PairwiseSwarm

KEY = RoundKey(RUN, "run", bytes(32), 5)
ELEMENTS, CHUNK = 48, 16
REQUEST = ExchangeRequest(KEY, Member("p1"), 100, ELEMENTS, "fp32")

# -- single messages by hand ------------------------------------------------------------------------------------------


async def answers_to(swarm: PairwiseSwarm, *messages: ExchangeMessage) -> list[str]:
    """Send each of these from p1 to p0 on a stream of its own; returns whether p0 accepted, has moved, or refused."""
    answers = []
    for message in messages:
        try:
            async with swarm.opened(EXCHANGE, 3.0) as stream:
                await stream.send(message)
                answer = await stream.receive(HEADER_LIMIT)
            answers.append(str(getattr(answer, "accepted", getattr(answer, "moved", None))))
        except PeerError:
            answers.append("refused")
    return answers


@pytest.mark.parametrize(
    "messages, expected, blame",
    [
        ([REQUEST, REQUEST], ["True", "refused"], "p1 refused: question 100 is asked again"),
        ([replace(REQUEST, sender=Member("p1", 3))], ["refused"], None),  # it may be late, and honest
        ([OutcomeQuery(KEY, Member("p1"), 100), REQUEST], ["False", "True"], ""),
    ],
    ids=(
        "a request counts once",
        "a request of another incarnation",
        "an outcome query before its request settles nothing",
    ),
)
def test_message_by_hand_is_answered_as_expected(
    messages: list[ExchangeMessage], expected: list[str], blame: str | None
) -> None:
    swarm, answers = PairwiseSwarm(2), list[str]()

    async def main() -> None:
        async with swarm.beside_lenders(0):
            await asyncio.sleep(0.1)
            answers.extend(await swarm.start(1, answers_to(swarm, *messages)))

    swarm.run(main)
    blamed = " ".join(f"{each.peer} {each.why}" for each in swarm.gossips[0].accounting.take()[0])
    assert answers == expected
    assert blamed == "" if blame is None else blame in blamed


async def transfer(swarm: PairwiseSwarm, stream: Stream, state: list[torch.Tensor]) -> None:
    """Exchange states on p1's stream to p0."""
    exchanges = swarm.gossips[1]
    await StateSwap(VectorView(state), exchanges.part(sum(map(len, state))), exchanges.host.compute).transfer(stream)


def test_outcome_not_moved_is_binding() -> None:
    """The initiator's query for the outcome overtakes its last message, which then comes too late."""
    swarm, answers = PairwiseSwarm(2), list[str]()

    async def initiator() -> None:
        async with swarm.opened(EXCHANGE, 3.0) as stream:
            await stream.send(REQUEST)
            await stream.receive(HEADER_LIMIT)
            await transfer(swarm, stream, swarm.states[1])
            answers.extend(await answers_to(swarm, OutcomeQuery(KEY, Member("p1"), REQUEST.sequence)))
            with pytest.raises(PeerError):
                await stream.send(StateReceived(KEY, Member("p1"), REQUEST.sequence))
                await stream.receive(HEADER_LIMIT)

    async def main() -> None:
        async with swarm.beside_lenders(0, seconds=20.0):
            await asyncio.sleep(0.1)
            await swarm.start(1, initiator())

    swarm.run(main)
    assert answers == ["False"] and not swarm.moved(0) and swarm.results[0][0].early == {}


def test_silent_initiator_costs_only_its_own_exchange() -> None:
    """p1 asks and is silent: p0 is free again after one timeout, and then avoids p1."""
    swarm, answers = PairwiseSwarm(2), list[str]()

    async def silent() -> None:
        async with swarm.opened(EXCHANGE, 50.0) as stream:
            await stream.send(REQUEST)
            await stream.receive(HEADER_LIMIT)
            assert swarm.gossips[0].exchange
            await asyncio.sleep(4.0)
            assert swarm.gossips[0].exchange is None
            answers.extend(await answers_to(swarm, replace(REQUEST, sequence=101)))

    async def main() -> None:
        async with swarm.beside_lenders(0, seconds=20.0):
            await asyncio.sleep(0.1)
            await asyncio.wait([swarm.start(1, silent())])

    swarm.run(main)
    assert answers == ["False"] and not swarm.moved(0)


# -- peers that take time or influence --------------------------------------------------------------------------------


async def is_accepted(stream: Stream, number: int) -> bool:
    """Ask for an exchange on p1's stream to p0; returns whether p0 accepts."""
    await stream.send(ExchangeRequest(replace(KEY, round=0), Member("p1"), number, ELEMENTS, "fp32"))
    accepted = wire.expect(await stream.receive(HEADER_LIMIT), ExchangeReply).accepted
    if not accepted:
        await asyncio.sleep(0.002)
    return accepted


def test_initiator_that_aborts_early_is_blamed_and_avoided() -> None:
    """It asks again and again, and aborts just before the limit. Unavoided, it would hold up a peer nearly always."""
    swarm, number = PairwiseSwarm(3), 0

    async def abort_again_and_again() -> None:
        nonlocal number
        while True:
            try:
                async with swarm.opened(EXCHANGE) as stream:
                    number += 1
                    if await is_accepted(stream, number):
                        timeouts = swarm.gossips[0].timeouts
                        await asyncio.sleep(0.9 * timeouts.timeout_seconds("p1", 4 * ELEMENTS))
            except PeerError:
                await asyncio.sleep(0.002)

    async def main() -> None:
        aborting = swarm.start(1, abort_again_and_again())
        await asyncio.wait([swarm.start(index, swarm.play_rounds(index, 12, train_seconds=3.0)) for index in (0, 2)])
        aborting.cancel()
        await asyncio.wait([aborting])

    swarm.run(main)
    for index, other in ((0, "p2"), (2, "p0")):
        assert sum(other in {*result.early, *result.mean.contributions} for result in swarm.results[index]) >= 10
    assert any(blame.peer == "p1" for result in swarm.results[0] for blame in result.mean.blamed)


def test_exchanges_per_peer_and_lent_state_are_bounded() -> None:
    swarm, began = PairwiseSwarm(2), list[int]()

    async def exchange(number: int) -> None:
        async with swarm.opened(EXCHANGE) as stream:
            if not await is_accepted(stream, number):
                return
            began.append(number)
            await transfer(swarm, stream, [torch.ones(ELEMENTS)])
            for _ in range(2):
                await stream.send(StateReceived(replace(KEY, round=0), Member("p1"), number))
                await asyncio.sleep(0.1)

    async def main() -> None:
        async with swarm.beside_lenders(0, seconds=30.0):
            for number in range(3 * MAX_EXCHANGES_PER_PEER):
                await swarm.start(1, exchange(number))

    swarm.run(main)
    assert began == list(range(MAX_EXCHANGES_PER_PEER))


@pytest.mark.parametrize("initiator", (0, 1))
def test_sender_of_invalid_state_is_avoided(initiator: int) -> None:
    """Whether it asked or was asked, it is neither asked nor answered from then on."""
    seen: list[tuple[float, Header]] = []

    async def send(stream: FramedStream, header: Header, payload: Buffer) -> None:
        seen.append((asyncio.get_running_loop().time(), header))
        await lying("nan")("", stream, None).send(header, payload)  # type: ignore[arg-type]

    swarm = PairwiseSwarm(2, disguises={1: sending(send)})

    async def main() -> None:
        for _ in range(3):
            async with swarm.beside_lenders(1 - initiator, seconds=10.0):
                await asyncio.wait([swarm.start(initiator, swarm.round(initiator))])

    swarm.run(main)
    states = [at for at, header in seen if isinstance(header, wire.Chunk)]
    assert states and states[-1] - states[0] < 1.0, "it exchanged once"
    assert seen[-1][0] < DISTRUST_SECONDS and not swarm.moved(0)
