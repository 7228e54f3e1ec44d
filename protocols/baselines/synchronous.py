"""The synchronous baselines: well-known ways to train together, with which the other protocols are compared.

    data_parallel             each member reduces one part: reduce-scatter and all-gather in one hop each
    ring                      the same in a ring: less memory and fewer streams, but 2 (N - 1) steps
    parameter_server          the member with the first peer id reduces everything

They promise only to fail cleanly. A round's members are the peers that are live when this peer has finished its own
work: all of them average, or none. A member aborts the round if it sees other members, is lost, refuses a stream or
breaks one off. Each then continues from its own state. A peer that hears of a later round goes there. Members believe
each other's tokens, vectors and round numbers.

The peers average states (parameters and momentum after each peer's own outer step), weighted by tokens, in fp32 or
fp16. An outer step of SGD is linear: with one inner step of SGD at rate 1 in each round, `data_parallel` equals an
all-reduce of gradients and one step of SGD. For AdamW see `benchmarks.laboratory.data_parallel`.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch

from protocols import wire
from protocols.aio import Notifier, loop_time, run_with_helper, set_at, task_group
from protocols.allreduce.parts import ReducedPart
from protocols.base import (
    AveragingResult,
    BadPayload,
    Contribution,
    Deadline,
    Head,
    Header,
    Host,
    LocalProgress,
    Member,
    PeerError,
    PeerFault,
    PeerId,
    PeerSilent,
    ProtocolError,
    Settings,
    Stream,
    Vector,
)
from protocols.streams.chunks import receive_chunk
from protocols.streams.endpoint import ProtocolEndpoint, SessionBase, SessionTable
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


class SynchronousAverager:
    """`protocols.base.IndependentAverager` with a barrier. `method` is that of the streams between members."""

    def __init__(
        self, host: Host, settings: Settings, method: str, algorithm: Callable[[SynchronousRound], AllReduceAlgorithm]
    ) -> None:
        self.endpoint, self.method, self.algorithm = ProtocolEndpoint(host, settings), method, algorithm
        self.me, self.accounting = self.endpoint.me, self.endpoint.accounting
        self._session: SynchronousRound | None = None
        self._sessions = SessionTable[int, SynchronousRound]()
        self._latest_round = 0  # the latest round that any peer has claimed
        self.endpoint.serve(method, JoinRound, self._on_stream)

    @asynccontextmanager
    async def enter(self, head: Head, deadline: Deadline) -> AsyncIterator[SynchronousRound]:
        session = self._session = SynchronousRound(self, head, deadline)
        self.endpoint.bind(head.key)
        self._sessions.close(self._sessions.keys())
        self._sessions.wake()
        session.hear(self._latest_round)
        try:
            async with set_at(session.cut, deadline):
                yield session
        finally:
            session.end()

    def serve_session(self, session: SynchronousRound) -> None:
        """Serve streams of the session's round from now on: its averaging has begun, or never will."""
        self._sessions.open(session.head.key.round, session)

    async def _on_stream(self, stream: Stream, hello: JoinRound) -> None:
        """Serve a stream as soon as its round has begun at this peer, or refuse it if that round is over."""
        self._latest_round = max(self._latest_round, hello.round)
        if self._session:
            self._session.hear(hello.round, stream.peer)
        session = await self._sessions.wait_for(hello.round, stream, lambda: self._is_past(hello)) or self._session
        assert session is not None
        if why := session.why_refused(stream.peer, hello):
            return await stream.send(RoundMismatch(session.head.key.round + session.ended, why[:128]))
        await session.serve(stream.peer, stream, hello)

    def _is_past(self, hello: JoinRound) -> bool:
        return self._session is not None and hello.round < self._session.head.key.round


class SynchronousRound(SessionBase):
    """`protocols.base.IndependentSession`: a round of all peers that are live when this one comes to average, in the
    order of their ids. The state is not shared, and there are no half exchanges.
    """

    mine: VectorView  # these three exist once the round has begun
    into: VectorView
    weight: float  # of this peer's vectors

    def __init__(self, averager: SynchronousAverager, head: Head, deadline: Deadline) -> None:
        super().__init__(head, deadline, averager.accounting)
        self.host, self._endpoint, self._averager = averager.endpoint.host, averager.endpoint, averager
        self.members: tuple[Member, ...] = ()  # none before `average`
        self.peers: tuple[PeerId, ...] = ()
        self.place, self.digest = 0, b""  # this peer's among the members; of the members
        self.codec = state_codec(self._endpoint.settings.codec)
        self.arrived: set[PeerId] = set()  # the members that have opened a stream to this peer
        self.sources: frozenset[PeerId] = frozenset()  # the members that open one; the algorithm sets them
        self.over = False  # this peer has the mean: it may still serve other members, and cannot abort the round
        self.why = ""  # why the round is aborted
        self.ended = False  # this peer has left the round
        self._algorithm: AllReduceAlgorithm | None = None
        self._ahead = head.key.round  # the latest round that another peer has claimed
        self._notifier, self._turn = Notifier(), asyncio.Lock()

    # -- the contract -------------------------------------------------------------------------------------------------

    def waiting_for(self) -> tuple[PeerId, ...]:
        return tuple(peer for peer in self.peers if peer not in self.arrived and peer != self.host.me)

    async def average(self, mine: Sequence[Vector], work: LocalProgress, into: Sequence[Vector]) -> AveragingResult:
        number, members, me = self.head.key.round, self.host.members.live(), self._averager.me.peer
        if self._ahead > number:
            self.why = f"other peers are in round {self._ahead} already"
        elif len(members) > 1:  # else nothing is averaged, and that is not an error
            self.members, self.peers = members, tuple(member.peer for member in members)
            self.place = self.peers.index(me)
            named = "".join(f"{member.peer}/{member.incarnation}\n" for member in members)
            self.digest = hashlib.sha256(named.encode()).digest()
            self.mine, self.into, self.weight = VectorView(mine), VectorView(into), float(max(1, work.tokens))
            self._algorithm = self._averager.algorithm(self)
            self._averager.serve_session(self)
            await self._run(self._algorithm)
        if self.over:
            names = {each.peer: f"{each.peer}/{each.incarnation}/{number}" for each in members}
            return self._result(True, {peer: Contribution(1, 1, (name,)) for peer, name in names.items()}, {})
        self.round = max(self.round, self._ahead - 1)
        result = self._result(False, {}, {})
        return replace(result, blamed=result.blamed or (PeerFault(me, self.why),)) if self.why else result

    # -- its streams --------------------------------------------------------------------------------------------------

    def hello(self, part: int) -> JoinRound:
        key, size = self.head.key, self.mine.size
        return JoinRound(key.run, key.scope, key.round, self.digest, self.codec.name, size, self.weight, part)

    @asynccontextmanager
    async def open(self, peer: PeerId, part: int) -> AsyncIterator[Stream]:
        async with self._endpoint.open(peer, self._averager.method, self.deadline) as stream:
            await stream.send(self.hello(part))
            yield stream

    def why_refused(self, peer: PeerId, hello: JoinRound) -> str:
        if not self.members or hello.round != self.head.key.round:
            return "has left that round"
        if hello.members == self.digest and peer not in self.peers:
            return "sees no member in the caller"  # a stranger's claim: it does not abort the members' round
        why = ""
        if hello.members != self.digest:
            why = "sees other members in this round"
        elif (hello.codec, hello.elements) != (self.codec.name, self.mine.size):
            why = f"brings {hello.elements} elements in {hello.codec}"
        if why:
            self.abort(why, peer)
        return why or self.why

    async def serve(self, peer: PeerId, stream: Stream, hello: JoinRound) -> None:
        assert self._algorithm is not None
        self.arrived.add(peer)
        self.wake()
        try:
            await run_with_helper(self._algorithm.serve(peer, stream, hello), self._aborted())
        except (BadPayload, PeerError) as error:
            self.abort(str(error), peer)
            raise
        except RoundAborted as error:
            raise PeerSilent(peer, f"the round was aborted: {error}") from None
        except TimeoutError:
            raise PeerSilent(peer, "the round's deadline passed") from None

    def check(self, peer: PeerId, header: Header) -> None:
        """Check a member's answer on a stream that this peer opened: a refusal aborts the round."""
        if isinstance(header, RoundMismatch):
            self._ahead = max(self._ahead, header.round)
            self.abort(f"refused: {header.why}", peer)
            raise RoundAborted(self.why)

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

    async def _run(self, algorithm: AllReduceAlgorithm) -> None:
        try:
            async with task_group() as group:
                watch = group.create_task(self._watch())
                await run_with_helper(algorithm.run(), self._aborted())
                watch.cancel()
            self.over = True
            self.wake()
            self.group = f"{self.head.key.round}/{self.digest.hex()[:16]}"
        except PeerError as error:
            self.abort(error.why, error.peer)
        except (BadPayload, RoundAborted) as error:
            self.abort(str(error))
        except TimeoutError:
            self.abort("the round did not end before its deadline", *self.waiting_for())

    async def _watch(self) -> None:
        """Abort the round when a member is lost, or another peer comes, to which an expected member may have gone."""
        members = self.host.members
        while loop_time() < self.deadline:
            version, live = members.version, members.live()
            if gone := [member.peer for member in self.members if member not in live]:
                return self.abort("lost during a round", *gone)
            if len(live) > len(self.members) and self._expected:
                return self.abort("another peer has come during the round")
            await members.changed(version, self.deadline)

    @property
    def _expected(self) -> frozenset[PeerId]:
        """The members without which this one cannot end the round, and that have not come yet."""
        return self.sources - self.arrived

    def hear(self, number: int, peer: PeerId | None = None) -> None:
        """Note that another peer is in that round. Go there if it is later and this peer cannot complete its own."""
        if number <= self.head.key.round:
            return
        self._ahead = max(self._ahead, number)
        if not self.members:
            self.round = max(self.round, number - 1)
            self.cut.set()
        elif peer in self._expected:
            self.abort("is in a later round", peer)

    def abort(self, why: str, *peers: PeerId | None) -> None:
        """Abort the round and name the peers at fault. Only the first call has an effect."""
        if not self.over and not self.why:
            self.why = why
            for peer in filter(None, peers):
                self._accounting.name(peer, why)
            self.wake()

    def end(self) -> None:
        self.ended = True
        if self.members:
            self.abort("this peer has left the round")
        self._averager.serve_session(self)

    def wake(self) -> None:
        self._notifier.notify()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds, or raise `RoundAborted`, or `TimeoutError` at the deadline."""
        await self._notifier.until(lambda: bool(self.why) or condition(), self.deadline)
        if self.why:
            raise RoundAborted(self.why)

    async def _aborted(self) -> None:
        await self.until(lambda: False)
