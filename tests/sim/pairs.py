"""A simple protocol without a shared anchor, with which the simulator and its checks are tested.

Pairs of peers meet at random and exchange whole states. A busy peer refuses; the responder changes its state before it
answers, the initiator when it has the answer. Tests plant bugs by overriding methods of `PairSession`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import torch

from protocols import wire
from protocols.base import (
    AveragingResult,
    BadPayload,
    Contribution,
    Deadline,
    Head,
    Host,
    IndependentAverager,
    LocalProgress,
    Member,
    Outcome,
    PeerError,
    PeerId,
    Settings,
    Stream,
    Vector,
)
from tests.sim.independent_world import IndependentWorld

PAIRS = "pairs/1"
EXCHANGE_SECONDS = 5.0
WAYS = 3
"""Partners that a peer asks, one after the other, before it goes on alone."""


class Pairs:
    """An `IndependentAverager` of `protocols.base`."""

    def __init__(self, host: Host, settings: Settings, session_type: type[PairSession]) -> None:
        self.host, self.me = host, Member(host.me, settings.incarnation)
        self.rng, self.session_type = host.rng("pairs"), session_type
        self.session: PairSession | None = None
        self.asked = 0
        host.transport.serve(PAIRS, self._serve)

    @asynccontextmanager
    async def enter(self, head: Head, deadline: Deadline) -> AsyncIterator[PairSession]:
        self.session = self.session_type(self, head.key.round)
        timer = asyncio.get_running_loop().call_at(deadline, self.session.cut.set)
        try:
            yield self.session
        finally:
            timer.cancel()
            self.session = None

    async def _serve(self, peer: PeerId, stream: Stream) -> None:
        session = self.session
        async with asyncio.timeout(EXCHANGE_SECONDS):
            theirs = wire.expect(await stream.receive(256), wire.Chunk)
            free = session is not None and bool(session.lent) and not session.turn.locked()
            await stream.send(wire.Availability(free))
            if session and free:
                async with session.turn:
                    await session.answer(stream, theirs)


class PairSession:
    """An `IndependentSession` of `protocols.base`."""

    def __init__(self, averager: Pairs, number: int) -> None:
        self.cut, self.turn = asyncio.Event(), asyncio.Lock()
        self.round, self.group, self.half_exchanges, self.mass_drift = number, "", 0, 0.0
        self.lent: Sequence[Vector] = ()
        self._averager = averager
        self._held: dict[PeerId, Contribution] = {}

    def offer(self, work: LocalProgress) -> None:
        if work.complete:
            self.cut.set()

    def waiting_for(self) -> tuple[PeerId, ...]:
        return ()

    def share(self, state: Sequence[Vector]) -> None:
        self.lent = state

    async def reclaim(self) -> Mapping[PeerId, Contribution]:
        async with self.turn:
            self.lent = ()
        return dict(self._held)

    async def average(self, mine: Sequence[Vector], work: LocalProgress, into: Sequence[Vector]) -> AveragingResult:
        averager = self._averager
        others = [member.peer for member in averager.host.members.live() if member != averager.me]
        for partner in averager.rng.sample(others, min(WAYS, len(others))):
            try:
                if name := await self._ask(partner, mine, into):
                    return AveragingResult(Outcome.COMMITTED, contributions={partner: Contribution(1, 1, (name,))})
            except (PeerError, BadPayload):
                continue
        return AveragingResult(Outcome.SKIPPED)

    async def _ask(self, partner: PeerId, mine: Sequence[Vector], into: Sequence[Vector]) -> str:
        """Exchange states with a partner; empty: it is busy."""
        averager, data = self._averager, packed(mine)
        averager.asked += 1
        number, deadline = averager.asked, asyncio.get_running_loop().time() + EXCHANGE_SECONDS
        async with averager.host.transport.open(partner, PAIRS, deadline) as stream:
            await stream.send(wire.Chunk(averager.me.incarnation << 16 | number, len(data)))
            if not wire.expect(await stream.receive(256), wire.Availability).here:
                return ""
            await stream.send(wire.Availability(True), data)
            self.half_exchanges += 1
            theirs = bytearray(len(data))
            await stream.receive_into(memoryview(theirs))
            self.half_exchanges -= 1
        for target, source in zip(into, mine, strict=True):
            target.copy_(source)
        self.mix(into, theirs)
        return f"{partner} to {averager.me.incarnation << 16 | number}"

    async def answer(self, stream: Stream, theirs: wire.Chunk) -> None:
        wire.expect(await stream.receive(256), wire.Availability)
        data, mine = bytearray(theirs.size), packed(self.lent)
        if len(data) != len(mine):
            raise BadPayload("a state of another size")
        await stream.receive_into(memoryview(data))
        self.mix(self.lent, data)
        self.count(stream.peer, f"{stream.peer} {theirs.index}")
        self.half_exchanges += 1
        await stream._pipe.write(mine)  # type: ignore[attr-defined]
        self.half_exchanges -= 1

    def mix(self, state: Sequence[Vector], data: bytearray) -> None:
        """Move the state halfway to the partner's."""
        theirs = torch.frombuffer(data, dtype=torch.float32).split([len(each) for each in state])
        for vector, other in zip(state, theirs, strict=True):
            vector.add_(other).mul_(0.5)

    def count(self, peer: PeerId, name: str) -> None:
        before = self._held.get(peer, Contribution(1, 1))
        self._held[peer] = Contribution(1, 1, (*before.messages, name))


def packed(state: Sequence[Vector]) -> bytes:
    return b"".join(each.numpy().tobytes() for each in state)


class PairWorld(IndependentWorld):
    """A world whose peers average by `Pairs`."""

    session: type[PairSession] = PairSession

    def averager(self, host: Host, settings: Settings) -> IndependentAverager:
        return Pairs(host, settings, self.session)


def pair_world(session: type[PairSession]) -> type[PairWorld]:
    """A world of pairs whose sessions are of this class, with its bugs."""
    return type("Planted", (PairWorld,), {"session": session})
