"""One synchronous round at one member: its members, their streams and vectors, and whether it is aborted."""

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
from protocols.base import Deadline, Head, Header, PeerId, ProtocolError, Stream, Vector
from protocols.streams.chunks import receive_chunk
from protocols.streams.endpoint import ProtocolEndpoint
from protocols.vectors.codec import Codec, state_codec
from protocols.vectors.views import LARGEST_FLOAT32, VectorView
from protocols.wire import digest, real, register, text, uint

REFUSED_LIMIT = 256


@dataclass(frozen=True, slots=True)
class JoinRound(Header):
    """Opens a data stream between two members of a round."""

    run: bytes = digest()
    scope: str = text(64)
    round: int = uint(1 << 40)
    members: bytes = digest()  # of the round's members, as the sender sees them
    codec: str = text(16)
    elements: int = uint(1 << 48)
    weight: float = real(1.0, float(wire.MAX_TOKENS))  # of the sender's vectors
    part: int = uint(1 << 16)  # the part of the vectors that the stream is for


@dataclass(frozen=True, slots=True)
class RoundMismatch(Header):
    """Refuses `JoinRound`: the sender is not in that round, or sees other members in it. The stream then ends."""

    round: int = uint(1 << 40)  # the sender's own
    why: str = text(128)


@dataclass(frozen=True, slots=True)
class Hop(Header):
    """Announces a part that is passed on round the ring; its chunks follow."""

    step: int = uint(1 << 16)
    part: int = uint(1 << 16)
    weight: float = real(1.0, 1e30)  # of all contributions in it


register(112, (JoinRound, RoundMismatch, Hop))


class RoundAborted(ProtocolError):
    """The round is aborted, so this member has no result. The text says why."""


class AllReduceAlgorithm(Protocol):
    """How the vectors of a round travel between its members. An error of either method aborts the round."""

    async def run(self) -> None:
        """Write the mean of all members' vectors to `current_round.into`."""

    async def serve(self, peer: PeerId, stream: Stream, hello: JoinRound) -> None:
        """Serve a stream that another member has opened to this one."""


class SynchronousRound:
    """A round of all peers that are live when this one comes to average, in the order of their ids."""

    def __init__(
        self,
        endpoint: ProtocolEndpoint,
        method: str,
        *,
        head: Head,
        mine: Sequence[Vector],
        into: Sequence[Vector],
        tokens: int,
        deadline: Deadline,
    ) -> None:
        self.host, self.accounting = endpoint.host, endpoint.accounting
        self._endpoint, self._method = endpoint, method
        self.key, self.deadline = head.key, deadline
        self.members = self.host.members.live()
        self.peers = tuple(member.peer for member in self.members)
        self.place = self.peers.index(endpoint.me.peer)
        self.mine, self.into = VectorView(mine), VectorView(into)
        self.weight = float(max(1, tokens))
        self.codec = state_codec(endpoint.settings.codec)
        self.arrived: set[PeerId] = set()  # the members that have opened a stream to this peer
        self.sources: frozenset[PeerId] = frozenset()  # the members that open one; the algorithm sets them
        self.over = False  # this peer has the mean: it may still serve other members, and cannot abort the round
        self.why = ""  # why the round is aborted
        self.ahead = head.key.round  # the latest round that another peer has claimed
        named = "".join(f"{member.peer}/{member.incarnation}\n" for member in self.members)
        self.digest = hashlib.sha256(named.encode()).digest()
        self._notifier, self._turn = Notifier(), asyncio.Lock()

    def hello(self, part: int) -> JoinRound:
        key = self.key
        return JoinRound(key.run, key.scope, key.round, self.digest, self.codec.name, self.mine.size, self.weight, part)

    @asynccontextmanager
    async def open(self, peer: PeerId, part: int) -> AsyncIterator[Stream]:
        async with self._endpoint.open(peer, self._method, self.deadline) as stream:
            await stream.send(self.hello(part))
            yield stream

    def why_refused(self, hello: JoinRound) -> str:
        if hello.members != self.digest:
            return "sees other members in this round"
        if (hello.codec, hello.elements) != (self.codec.name, self.mine.size):
            return f"brings {hello.elements} elements in {hello.codec}"
        return ""

    def part(self, index: int, parts: int, codec: Codec | None = None) -> ReducedPart:
        """One of `parts` parts of nearly equal size, encoded. It takes memory only for chunks that are used."""
        low, high = (self.mine.size * edge // parts for edge in (index, index + 1))
        return ReducedPart(codec or self.codec, low, high, self._endpoint.settings.chunk_elements)

    # -- the mean, which grows in `into` ------------------------------------------------------------------------------

    def start_mean(self, part: ReducedPart) -> None:
        for _, low, high, (scratch,) in part.pieces(1):
            self.into.write(low, self.mine.read(low, high, scratch))

    async def receive(self, stream: Stream, part: ReducedPart, weights: list[float], weight: float) -> None:
        """Average a member's elements of a part into `into`, whose chunks' `weights` grow by `weight`."""
        buffer = part.chunk_buffer()
        for index in range(part.chunks):
            data = buffer(index)
            await receive_chunk(stream, index, data)
            async with self._turn:  # the members' chunks arrive at the same time, and `compute` has threads
                await self.host.compute.run(partial(self._add, part, index, data, weights, weight), len(data))

    def _add(self, part: ReducedPart, index: int, data: memoryview, weights: list[float], weight: float) -> None:
        low, high = part.elements(index)
        theirs, scratch = torch.empty(high - low), torch.empty(high - low)
        part.codec.decode(data, theirs)
        held, total = weights[index], weights[index] + weight
        torch.mul(self.into.read(low, high, scratch), held / total, out=scratch)
        self.into.write(low, scratch.add_(theirs.mul_(weight / total)))
        weights[index] = total

    async def encode_mean(self, part: ReducedPart) -> ReducedPart:
        """Encode the complete mean of a part, and decode it to `into`, so that all members hold the same bits."""

        def encode() -> None:
            for index, low, high, (scratch,) in part.pieces(1):
                mean = self.into.read(low, high, scratch)
                mean.clamp_(-LARGEST_FLOAT32, LARGEST_FLOAT32)  # rounding may have carried it beyond
                part.codec.encode(mean, part.chunk(index))
            part.decode(self.into)

        await self.host.compute.run(encode, 2 * part.size_bytes)
        return part

    # -- its end ------------------------------------------------------------------------------------------------------

    def missing(self) -> tuple[PeerId, ...]:
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
        self.wake()

    def hear(self, peer: PeerId, header: Header) -> None:
        """Check a member's answer on a stream that this peer opened: a refusal aborts the round."""
        if isinstance(header, RoundMismatch):
            self.ahead = max(self.ahead, header.round)
            self.abort(f"refused: {header.why}", peer)
            raise RoundAborted(self.why)

    def wake(self) -> None:
        self._notifier.notify()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds, or raise `RoundAborted`, or `TimeoutError` at the deadline."""
        await self._notifier.until(lambda: bool(self.why) or condition(), self.deadline)
        if self.why:
            raise RoundAborted(self.why)

    async def aborted(self) -> None:
        await self.until(lambda: False)
