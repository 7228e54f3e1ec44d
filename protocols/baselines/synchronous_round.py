"""What members of a round in lockstep share: who they are, what each brings, and whether it is spoilt.

One lost member spoils the round for everybody: that is what these protocols are for (`protocols.baselines.registry`).
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from protocols import wire
from protocols.aio import Notifier
from protocols.allreduce.parts import PartLayout, ReducedPart
from protocols.base import Deadline, Head, Header, LocalProgress, PeerId, ProtocolError, Stream, Vector
from protocols.codec import state_codec
from protocols.endpoint import ProtocolEndpoint
from protocols.vectors import VectorView
from protocols.wire import digest, real, register, text, uint

REFUSED_LIMIT = 256


@dataclass(frozen=True, slots=True)
class JoinRound(Header):
    """Opens a data stream between two members of a round.

    Attributes:
        members: digest over who is in it, as the opener sees it.
        weight: how much the opener's vectors count.
        part: which part of the vectors the stream is about.
    """

    run: bytes = digest()
    scope: str = text(64)
    round: int = uint(1 << 40)
    members: bytes = digest()
    codec: str = text(16)
    elements: int = uint(1 << 48)
    weight: float = real(1.0, float(wire.MAX_TOKENS))
    part: int = uint(1 << 16)


@dataclass(frozen=True, slots=True)
class RoundMismatch(Header):
    """The answer of one who is not in that round, or sees other members in it; the stream ends.

    Attributes:
        round: where the answerer is.
    """

    round: int = uint(1 << 40)
    why: str = text(128)


@dataclass(frozen=True, slots=True)
class Hop(Header):
    """A part on its way round the ring: its chunks follow. `weight`: of all that is in it."""

    step: int = uint(1 << 16)
    part: int = uint(1 << 16)
    weight: float = real(1.0, 1e30)


MESSAGES: tuple[type[Header], ...] = (JoinRound, RoundMismatch, Hop)
register(112, MESSAGES)


class RoundAborted(ProtocolError):
    """The round has no result here; says why."""


class AllReduceAlgorithm(Protocol):
    """How the vectors travel in a meeting."""

    async def run(self) -> None:
        """Bring the mean of everybody's vectors into `meeting.into`.

        Raises:
            BadPayload, PeerError, Spoilt: it is not to be had.
        """

    async def serve(self, peer: PeerId, stream: Stream, hello: JoinRound) -> None:
        """A member's stream to this one.

        Raises:
            BadPayload, PeerError, Spoilt: as above; the round is spoilt.
        """


@dataclass(frozen=True, slots=True)
class RoundTask:
    """What this peer brings to a round, and where the mean goes.

    Attributes:
        mine, into: float32, of the same shapes; `into` is overwritten.
    """

    mine: Sequence[Vector]
    into: Sequence[Vector]
    work: LocalProgress


class SynchronousRound:
    """A round that all live peers take part in, as this peer sees it.

    Attributes:
        members: the peers that are live when this one comes to average, in the order of their ids.
        place: this peer's index among the members.
        weight: how much this peer's vectors count: tokens, one at least.
        arrived: members that have opened a stream to this peer.
        over: everything has arrived; what still runs serves others.
        why: the reason why the round is spoilt; empty: it is not.
        ahead: the latest round that any other peer was in.
    """

    def __init__(
        self,
        endpoint: ProtocolEndpoint,
        method: str,
        head: Head,
        task: RoundTask,
        deadline: Deadline,
    ) -> None:
        self.host, self.accounting = endpoint.host, endpoint.accounting
        self._endpoint, self._method = endpoint, method
        self.key, self.deadline = head.key, deadline
        self.members = self.host.members.live()
        self.peers = tuple(member.peer for member in self.members)
        self.place = self.peers.index(endpoint.me.peer)
        self.mine, self.into = VectorView(task.mine), VectorView(task.into)
        self.weight = float(max(1, task.work.tokens))
        self.codec, self.chunk_elements = state_codec(endpoint.settings.codec), endpoint.settings.chunk_elements
        self.arrived: set[PeerId] = set()
        self.over = False
        self.why = ""
        self.ahead = head.key.round
        named = "".join(f"{member.peer}/{member.incarnation}\n" for member in self.members)
        self.digest = hashlib.sha256(named.encode()).digest()
        self._notifier = Notifier()

    def hello(self, part: int) -> JoinRound:
        """What opens a stream of ours."""
        key = self.key
        return JoinRound(key.run, key.scope, key.round, self.digest, self.codec.name, self.mine.size, self.weight, part)

    @asynccontextmanager
    async def open(self, peer: PeerId, part: int) -> AsyncIterator[Stream]:
        """A stream to a member, counted, about one part.

        Raises:
            PeerError: as `Transport.open`.
        """
        async with self._endpoint.open(peer, self._method, self.deadline) as stream:
            await stream.send(self.hello(part))
            yield stream

    def misfit(self, hello: JoinRound) -> str:
        """Why a stream to this round cannot be served; empty if it can."""
        if hello.members != self.digest:
            return "sees other members in this round"
        if (hello.codec, hello.elements) != (self.codec.name, self.mine.size):
            return f"brings {hello.elements} elements in {hello.codec}"
        return ""

    def shape(self, index: int, parts: int) -> PartLayout:
        """One part of so many, as equal as can be."""
        low, high = (self.mine.size * edge // parts for edge in (index, index + 1))
        return PartLayout(self.codec, low, high, self.chunk_elements)

    def part(self, index: int, parts: int) -> ReducedPart:
        """The same with room for it, encoded."""
        shape = self.shape(index, parts)
        return ReducedPart(shape.codec, shape.low, shape.high, shape.chunk_elements)

    def missing(self) -> tuple[PeerId, ...]:
        """Members that have not come yet."""
        return tuple(peer for peer in self.peers if peer not in self.arrived and peer != self.host.me)

    def spoil(self, why: str, *peers: PeerId) -> None:
        """Nobody gets anything from us in this round any more, nor we; the first reason stays, with whom it names."""
        if self.over or self.why:
            return
        self.why = why
        for peer in peers:
            self.accounting.name(peer, why)
        self._notifier.notify()

    def hear(self, peer: PeerId, header: Header) -> None:
        """What a member answers to a stream of ours.

        Raises:
            Spoilt: that it does not meet us.
        """
        if isinstance(header, RoundMismatch):
            self.ahead = max(self.ahead, header.round)
            self.spoil(f"refused: {header.why}", peer)
            raise RoundAborted(self.why)

    def end(self) -> None:
        """Everything is in here; it cannot be spoilt any more."""
        self.over = True
        self._notifier.notify()

    def ring(self) -> None:
        """Something has changed that somebody may wait for."""
        self._notifier.notify()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until it holds.

        Raises:
            Spoilt: the round was spoilt first.
            TimeoutError: the deadline came first.
        """
        await self._notifier.until(lambda: bool(self.why) or condition(), self.deadline)
        if self.why:
            raise RoundAborted(self.why)

    async def spoilt(self) -> None:
        """Wait until the round is spoilt, and say so.

        Raises:
            Spoilt: it is.
            TimeoutError: the deadline came first.
        """
        await self.until(lambda: False)
