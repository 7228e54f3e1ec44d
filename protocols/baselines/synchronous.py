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
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

from protocols.aio import run_with_helper, set_at, task_group
from protocols.base import (
    AveragingResult,
    BadPayload,
    Contribution,
    Deadline,
    Head,
    Host,
    LocalProgress,
    PeerError,
    PeerFault,
    PeerId,
    PeerSilent,
    Settings,
    Stream,
    Vector,
)
from protocols.baselines.algorithms import Ring, ScatterReduce
from protocols.baselines.round import AllReduceAlgorithm, JoinRound, RoundAborted, RoundMismatch, SynchronousRound
from protocols.streams.endpoint import ProtocolEndpoint, SessionBase, SessionTable


class SynchronousAverager:
    """`protocols.base.IndependentAverager` with a barrier. `method` is that of the streams between members."""

    def __init__(
        self, host: Host, settings: Settings, method: str, algorithm: Callable[[SynchronousRound], AllReduceAlgorithm]
    ) -> None:
        self.endpoint, self.method, self.algorithm = ProtocolEndpoint(host, settings), method, algorithm
        self.me, self.accounting = self.endpoint.me, self.endpoint.accounting
        self._session: SynchronousSession | None = None
        self._sessions = SessionTable[int, SynchronousSession]()
        self._latest_round = 0  # the latest round that any peer has claimed
        self.endpoint.serve(method, JoinRound, self._on_stream)

    @asynccontextmanager
    async def enter(self, head: Head, deadline: Deadline) -> AsyncIterator[SynchronousSession]:
        session = self._session = SynchronousSession(self, head, deadline)
        self.endpoint.bind(head.key)
        self._sessions.close(self._sessions.keys())
        self._sessions.wake()
        session.hear(self._latest_round)
        try:
            async with set_at(session.cut, deadline):
                yield session
        finally:
            session.end()

    def serve_session(self, session: SynchronousSession) -> None:
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


class SynchronousSession(SessionBase):
    """`protocols.base.IndependentSession`. The state is not shared, and there are no half exchanges."""

    def __init__(self, averager: SynchronousAverager, head: Head, deadline: Deadline) -> None:
        super().__init__(head, deadline, averager.accounting)
        self.current_round: SynchronousRound | None = None  # both None before `average`
        self.exchange: AllReduceAlgorithm | None = None
        self.ended = False  # this peer has left the round
        self._averager, self._latest = averager, head.key.round

    # -- the contract -------------------------------------------------------------------------------------------------

    def waiting_for(self) -> tuple[PeerId, ...]:
        return self.current_round.missing() if self.current_round else ()

    async def average(self, mine: Sequence[Vector], work: LocalProgress, into: Sequence[Vector]) -> AveragingResult:
        averager, head = self._averager, self.head
        current_round = SynchronousRound(
            averager.endpoint,
            averager.method,
            head=head,
            mine=mine,
            into=into,
            tokens=work.tokens,
            deadline=self.deadline,
        )
        if self._latest > head.key.round:
            current_round.abort(f"other peers are in round {self._latest} already")
        elif len(current_round.members) == 1:
            current_round.abort("")  # there is no other peer: nothing is averaged, and that is not an error
        else:
            self.current_round, self.exchange = current_round, averager.algorithm(current_round)
            averager.serve_session(self)
            await self._run_round(current_round, self.exchange)
        if current_round.over:
            names = {each.peer: f"{each.peer}/{each.incarnation}/{head.key.round}" for each in current_round.members}
            return self._result(True, {peer: Contribution(1, 1, (name,)) for peer, name in names.items()}, {})
        self.round = max(self.round, current_round.ahead - 1)
        result = self._result(False, {}, {})
        if current_round.why and not result.blamed:
            return replace(result, blamed=(PeerFault(averager.me.peer, current_round.why),))
        return result

    # -- the round ----------------------------------------------------------------------------------------------------

    def why_refused(self, peer: PeerId, hello: JoinRound) -> str:
        if self.current_round is None or hello.round != self.head.key.round:
            return "has left that round"
        if hello.members == self.current_round.digest and peer not in self.current_round.peers:
            return "sees no member in the caller"  # a stranger's claim: it does not abort the members' round
        if why := self.current_round.why_refused(hello):
            self.current_round.abort(why, peer)
            return why
        return self.current_round.why

    async def serve(self, peer: PeerId, stream: Stream, hello: JoinRound) -> None:
        current_round, exchange = self.current_round, self.exchange
        assert current_round is not None and exchange is not None
        current_round.arrived.add(peer)
        current_round.wake()
        try:
            await run_with_helper(exchange.serve(peer, stream, hello), current_round.aborted())
        except (BadPayload, PeerError) as error:
            current_round.abort(str(error), peer)
            raise
        except RoundAborted as error:
            raise PeerSilent(peer, f"the round was aborted: {error}") from None
        except TimeoutError:
            raise PeerSilent(peer, "the round's deadline passed") from None

    async def _run_round(self, current_round: SynchronousRound, exchange: AllReduceAlgorithm) -> None:
        try:
            async with task_group() as group:
                watch = group.create_task(self._watch(current_round))
                await run_with_helper(exchange.run(), current_round.aborted())
                watch.cancel()
            current_round.over = True
            current_round.wake()
            self.group = f"{self.head.key.round}/{current_round.digest.hex()[:16]}"
        except PeerError as error:
            current_round.abort(error.why, error.peer)
        except (BadPayload, RoundAborted) as error:
            current_round.abort(str(error))
        except TimeoutError:
            current_round.abort("the round did not end before its deadline", *current_round.missing())

    async def _watch(self, current_round: SynchronousRound) -> None:
        """Abort the round when a member is lost, or another peer comes, to which an expected member may have gone."""
        members, loop = self._averager.endpoint.host.members, asyncio.get_running_loop()
        while loop.time() < current_round.deadline:
            version, live = members.version, members.live()
            if gone := [member.peer for member in current_round.members if member not in live]:
                return current_round.abort("lost during a round", *gone)
            if len(live) > len(current_round.members) and current_round.expected:
                return current_round.abort("another peer has come during the round")
            await members.changed(version, current_round.deadline)

    def hear(self, number: int, peer: PeerId | None = None) -> None:
        """Note that another peer is in that round. Go there if it is later and this peer cannot complete its own."""
        if number <= self.head.key.round:
            return
        if self.current_round:
            self.current_round.ahead = max(self.current_round.ahead, number)
            if peer in self.current_round.expected:
                self.current_round.abort("is in a later round", peer)
        else:
            self._latest, self.round = max(self._latest, number), max(self.round, number - 1)
            self.cut.set()

    def end(self) -> None:
        self.ended = True
        if self.current_round:
            self.current_round.abort("this peer has left the round")
        self._averager.serve_session(self)


# -- the protocols by name --------------------------------------------------------------------------------------------


def data_parallel(host: Host, settings: Settings) -> SynchronousAverager:
    return SynchronousAverager(host, settings, "starling/data-parallel/1", ScatterReduce)


def ring(host: Host, settings: Settings) -> SynchronousAverager:
    return SynchronousAverager(host, settings, "starling/ring/1", Ring)


def parameter_server(host: Host, settings: Settings) -> SynchronousAverager:
    """A parameter server with a barrier: one member averages for all (Li et al. 2014). Its link carries 2 (N − 1) S."""
    return SynchronousAverager(host, settings, "starling/parameter-server/1", partial(ScatterReduce, server=True))
