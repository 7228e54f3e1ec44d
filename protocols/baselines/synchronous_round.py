"""One synchronous round at one member: its members, their streams and vectors, and whether it is aborted.

One lost member aborts the round for all (`protocols.baselines.registry`).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from protocols import wire
from protocols.aio import Notifier
from protocols.allreduce.parts import ReducedPart
from protocols.base import Deadline, Head, Header, LocalProgress, PeerId, ProtocolError, Stream, Vector
from protocols.streams.chunks import receive_chunk
from protocols.streams.endpoint import ProtocolEndpoint
from protocols.vectors.codec import state_codec
from protocols.vectors.layout import PartLayout
from protocols.vectors.views import LARGEST_FLOAT32, VectorView
from protocols.wire import digest, real, register, text, uint

REFUSED_LIMIT = 256


@dataclass(frozen=True, slots=True)
class JoinRound(Header):
    """Opens a data stream between two members of a round.

    Attributes:
        members: a digest of the round's members, as the sender sees them.
        weight: the weight of the sender's vectors.
        part: the part of the vectors that the stream is for.
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
    """Refuses `JoinRound`: the sender is not in that round, or sees other members in it. The stream then ends.

    Attributes:
        round: the sender's own round.
    """

    round: int = uint(1 << 40)
    why: str = text(128)


@dataclass(frozen=True, slots=True)
class Hop(Header):
    """Announces a part that is passed on round the ring; its chunks follow.

    Attributes:
        weight: the total weight of the contributions in it.
    """

    step: int = uint(1 << 16)
    part: int = uint(1 << 16)
    weight: float = real(1.0, 1e30)


register(112, (JoinRound, RoundMismatch, Hop))


class RoundAborted(ProtocolError):
    """The round is aborted, so this member has no result. The text says why."""


class AllReduceAlgorithm(Protocol):
    """How the vectors of a round travel between its members."""

    async def run(self) -> None:
        """Write the mean of all members' vectors to `current_round.into`.

        Raises:
            BadPayload, PeerError, RoundAborted: there is no mean.
        """

    async def serve(self, peer: PeerId, stream: Stream, hello: JoinRound) -> None:
        """Serve a stream that another member has opened to this one.

        Raises:
            BadPayload, PeerError, RoundAborted: the round is aborted.
        """


@dataclass(frozen=True, slots=True)
class RoundTask:
    """This peer's contribution to a round, and the vectors that take the mean.

    Attributes:
        mine, into: float32 vectors of the same sizes; `into` is overwritten.
    """

    mine: Sequence[Vector]
    into: Sequence[Vector]
    work: LocalProgress


class SynchronousRound:
    """A round of all live peers, as this peer sees it.

    Attributes:
        members: the peers that are live when this one comes to average, in the order of their ids.
        place: this peer's index among the members.
        weight: the weight of this peer's vectors: its tokens, but at least 1.
        arrived: the members that have opened a stream to this peer.
        sources: the members that open one, by the algorithm; it sets them.
        over: whether this peer has the mean. It may still serve other members.
        why: why the round is aborted; empty if it is not.
        ahead: the latest round that another peer has claimed.
    """

    def __init__(
        self, endpoint: ProtocolEndpoint, method: str, head: Head, task: RoundTask, deadline: Deadline
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
        self.sources: frozenset[PeerId] = frozenset()
        self.over = False
        self.why = ""
        self.ahead = head.key.round
        named = "".join(f"{member.peer}/{member.incarnation}\n" for member in self.members)
        self.digest = hashlib.sha256(named.encode()).digest()
        self._notifier, self._turn = Notifier(), asyncio.Lock()

    def hello(self, part: int) -> JoinRound:
        """The first frame of a stream that this peer opens."""
        key = self.key
        return JoinRound(key.run, key.scope, key.round, self.digest, self.codec.name, self.mine.size, self.weight, part)

    @asynccontextmanager
    async def open(self, peer: PeerId, part: int) -> AsyncIterator[Stream]:
        """Open a stream to a member for one part, and count its bytes.

        Raises:
            PeerError: as `Transport.open`.
        """
        async with self._endpoint.open(peer, self._method, self.deadline) as stream:
            await stream.send(self.hello(part))
            yield stream

    def why_refused(self, hello: JoinRound) -> str:
        """Why this round cannot serve a stream; empty if it can."""
        if hello.members != self.digest:
            return "sees other members in this round"
        if (hello.codec, hello.elements) != (self.codec.name, self.mine.size):
            return f"brings {hello.elements} elements in {hello.codec}"
        return ""

    def layout(self, index: int, parts: int) -> PartLayout:
        """The layout of one of `parts` parts of nearly equal size."""
        low, high = (self.mine.size * edge // parts for edge in (index, index + 1))
        return PartLayout(self.codec, low, high, self.chunk_elements)

    def part(self, index: int, parts: int) -> ReducedPart:
        """Allocate that part, encoded."""
        layout = self.layout(index, parts)
        return ReducedPart(layout.codec, layout.low, layout.high, layout.chunk_elements)

    # -- the mean, which grows in `into` ------------------------------------------------------------------------------

    def start_mean(self, layout: PartLayout) -> None:
        """Copy this member's elements of a part to `into`: the mean so far."""
        for _, low, high, (scratch,) in layout.pieces(1):
            self.into.write(low, self.mine.read(low, high, scratch))

    async def receive(self, stream: Stream, layout: PartLayout, weights: list[float], weight: float) -> None:
        """Receive a member's elements of a part, and average them into `into`, chunk by chunk.

        Args:
            weights: the weight of each chunk in `into`; grows by `weight`, that of what is received.

        Raises:
            BadPayload: another message or chunk came, or a chunk does not decode to finite numbers.
            PeerSilent: the stream broke off.
        """
        buffer = layout.chunk_buffer()
        for index in range(layout.chunks):
            data = buffer(index)
            await receive_chunk(stream, index, data)
            async with self._turn:  # the members' chunks arrive at the same time, and `compute` has threads
                await self.host.compute.run(partial(self._add, layout, index, data, weights, weight), len(data))

    def _add(self, layout: PartLayout, index: int, data: memoryview, weights: list[float], weight: float) -> None:
        low, high = layout.elements(index)
        theirs, scratch = torch.empty(high - low), torch.empty(high - low)
        layout.codec.decode(data, theirs)
        held, total = weights[index], weights[index] + weight
        torch.mul(self.into.read(low, high, scratch), held / total, out=scratch)
        self.into.write(low, scratch.add_(theirs.mul_(weight / total)))
        weights[index] = total

    async def encode_mean(self, index: int, parts: int) -> ReducedPart:
        """Encode the complete mean of a part, and decode it to `into`, so that all members hold the same bits."""
        part = self.part(index, parts)
        await self.host.compute.run(partial(self._encode_mean, part), 2 * part.size_bytes)
        return part

    def _encode_mean(self, part: ReducedPart) -> None:
        for index, low, high, (scratch,) in part.pieces(1):
            mean = self.into.read(low, high, scratch)
            mean.clamp_(-LARGEST_FLOAT32, LARGEST_FLOAT32)  # rounding may have carried it beyond
            part.codec.encode(mean, part.chunk(index))
        part.decode(self.into)

    # -- its end ------------------------------------------------------------------------------------------------------

    def missing(self) -> tuple[PeerId, ...]:
        """The members that have opened no stream to this peer yet."""
        return tuple(peer for peer in self.peers if peer not in self.arrived and peer != self.host.me)

    @property
    def expected(self) -> frozenset[PeerId]:
        """The members without which this one cannot end the round, and that have not come yet."""
        return self.sources - self.arrived

    def abort(self, why: str, *peers: PeerId) -> None:
        """Abort the round and name the peers at fault. Only the first call has an effect."""
        if self.over or self.why:
            return
        self.why = why
        for peer in peers:
            self.accounting.name(peer, why)
        self._notifier.notify()

    def hear(self, peer: PeerId, header: Header) -> None:
        """Check a member's answer on a stream that this peer opened.

        Raises:
            RoundAborted: the member refuses the stream.
        """
        if isinstance(header, RoundMismatch):
            self.ahead = max(self.ahead, header.round)
            self.abort(f"refused: {header.why}", peer)
            raise RoundAborted(self.why)

    def end(self) -> None:
        """Record that this peer has the mean: it cannot abort the round any more."""
        self.over = True
        self._notifier.notify()

    def wake(self) -> None:
        """Wake the tasks that wait in `until`."""
        self._notifier.notify()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds.

        Raises:
            RoundAborted: the round was aborted first.
            TimeoutError: the deadline passed first.
        """
        await self._notifier.until(lambda: bool(self.why) or condition(), self.deadline)
        if self.why:
            raise RoundAborted(self.why)

    async def aborted(self) -> None:
        """Wait until the round is aborted, then raise.

        Raises:
            RoundAborted: the round was aborted.
            TimeoutError: the deadline passed first.
        """
        await self.until(lambda: False)
