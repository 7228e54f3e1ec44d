"""All live members meet in every round, or none of them gets anything: the barrier of the baselines.

A round is a number, which all must have in common: who hears of a later one goes there. It takes those who are live
when this peer is done with its own work; members that see others, that are gone, refuse or break off spoil it, and
everybody who waits hears of that by the end of its streams. Then each goes on from its own state, and the next round
averages whole states again: a spoilt round is drift, not damage.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

from protocols.aio import run_with_helper, set_at, task_group, until_gone
from protocols.base import (
    AveragingResult,
    BadPayload,
    Contribution,
    Deadline,
    Head,
    Host,
    LocalProgress,
    Member,
    Outcome,
    PeerError,
    PeerFault,
    PeerId,
    PeerSilent,
    Settings,
    Stream,
    Vector,
)
from protocols.baselines.synchronous_round import (
    AllReduceAlgorithm,
    JoinRound,
    RoundAborted,
    RoundMismatch,
    RoundTask,
    SynchronousRound,
)
from protocols.endpoint import ProtocolEndpoint, SessionTable

AlgorithmFactory = Callable[[SynchronousRound], AllReduceAlgorithm]


class SynchronousAverager:
    """`protocols.base.LooseAverager` with a barrier.

    Attributes:
        method: under which members open streams to each other.
    """

    shares_anchor = False

    def __init__(self, host: Host, settings: Settings, method: str, way: AlgorithmFactory) -> None:
        self.endpoint, self.method, self.way = ProtocolEndpoint(host, settings), method, way
        self.me, self.accounting = self.endpoint.me, self.endpoint.accounting
        self._session: SynchronousSession | None = None
        self._sessions = SessionTable[int, SynchronousSession]()
        self._latest_round = 0  # that a peer was in
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

    def met(self, session: SynchronousSession) -> None:
        """The session's meeting has begun, or will not."""
        self._sessions.open(session.head.key.round, session)

    async def _on_stream(self, stream: Stream, hello: JoinRound) -> None:
        """Serve a stream when its round has begun here, or refuse it when that is over."""
        self._latest_round = max(self._latest_round, hello.round)
        if self._session:
            self._session.hear(hello.round)
        session = await self._sessions.wait_for(hello.round, stream, lambda: self._is_past(hello)) or self._session
        assert session is not None
        if why := session.misfit(stream.peer, hello):
            return await stream.send(RoundMismatch(session.head.key.round + session.ended, why[:128]))
        await session.serve(stream.peer, stream, hello)

    def _is_past(self, hello: JoinRound) -> bool:
        return self._session is not None and hello.round < self._session.head.key.round


class SynchronousSession:
    """`protocols.base.LooseSession`: nothing is lent, and nothing is half done.

    Attributes:
        meeting, exchange: once this peer has come to average.
        ended: this round is over here.
    """

    half_exchanges = 0
    mass_drift = 0.0

    def __init__(self, averager: SynchronousAverager, head: Head, deadline: Deadline) -> None:
        self.head, self.deadline = head, deadline
        self.cut = asyncio.Event()
        self.round, self.group = head.key.round, ""
        self.meeting: SynchronousRound | None = None
        self.exchange: AllReduceAlgorithm | None = None
        self.ended = False
        self._averager = averager

    # -- the contract -------------------------------------------------------------------------------------------------

    def offer(self, work: LocalProgress) -> None:
        if work.complete or work.leaving:
            self.cut.set()

    def waiting_for(self) -> tuple[PeerId, ...]:
        return self.meeting.missing() if self.meeting else ()

    def share(self, state: Sequence[Vector]) -> None:
        """Nobody averages with a peer that trains."""

    async def reclaim(self) -> Mapping[PeerId, Contribution]:
        return {}

    async def average(self, mine: Sequence[Vector], work: LocalProgress, into: Sequence[Vector]) -> AveragingResult:
        averager, task = self._averager, RoundTask(mine, into, work)
        meeting = SynchronousRound(averager.endpoint, averager.method, self.head, task, self.deadline)
        if self.round > self.head.key.round:
            meeting.spoil(f"others are in round {self.round + 1} already")
        elif len(meeting.members) == 1:
            meeting.spoil("")  # there is nobody: nothing is wrong, and nothing is averaged
        else:
            self.meeting, self.exchange = meeting, averager.way(meeting)
            averager.met(self)
            await self._meet(meeting, self.exchange)
        blamed, sent, received = averager.accounting.take()
        if not meeting.over:
            self.round = max(self.round, meeting.ahead - 1)
            if meeting.why and not blamed:
                blamed = (PeerFault(averager.me.peer, meeting.why),)
            return AveragingResult(Outcome.SKIPPED, blamed=blamed, bytes_sent=sent, bytes_received=received)
        return AveragingResult(
            Outcome.COMMITTED,
            contributions={member.peer: Contribution(1, 1, (self._name(member),)) for member in meeting.members},
            blamed=blamed,
            bytes_sent=sent,
            bytes_received=received,
        )

    def _name(self, member: Member) -> str:
        return f"{member.peer}/{member.incarnation}/{self.head.key.round}"

    # -- the meeting --------------------------------------------------------------------------------------------------

    def misfit(self, peer: PeerId, hello: JoinRound) -> str:
        """Why a stream cannot be served, now that this peer has come to average; empty if it can."""
        if self.meeting is None or hello.round != self.head.key.round:
            return "has left that round"
        if hello.members == self.meeting.digest and peer not in self.meeting.peers:
            return "sees no member in the caller"  # one that says so is not the members' affair: nothing is spoilt
        if why := self.meeting.misfit(hello):
            self.meeting.spoil(why, peer)
            return why
        return self.meeting.why

    async def serve(self, peer: PeerId, stream: Stream, hello: JoinRound) -> None:
        """A member's stream to this meeting.

        Raises:
            BadPayload, PeerError: the round is spoilt.
        """
        meeting, exchange = self.meeting, self.exchange
        assert meeting is not None and exchange is not None
        meeting.arrived.add(peer)
        meeting.ring()
        try:
            await run_with_helper(exchange.serve(peer, stream, hello), meeting.spoilt())
        except (BadPayload, PeerError) as error:
            meeting.spoil(str(error), peer)
            raise
        except RoundAborted as error:
            raise PeerSilent(peer, f"the round is spoilt: {error}") from None
        except TimeoutError:
            raise PeerSilent(peer, "the round's deadline passed") from None

    async def _meet(self, meeting: SynchronousRound, exchange: AllReduceAlgorithm) -> None:
        """Meet, to the end or until it is spoilt."""
        try:
            async with task_group() as group:
                watch = group.create_task(self._watch(meeting))
                await run_with_helper(exchange.run(), meeting.spoilt())
                watch.cancel()
            meeting.end()
            self.group = f"{self.head.key.round}/{meeting.digest.hex()[:16]}"
        except PeerError as error:
            meeting.spoil(error.why, error.peer)
        except (BadPayload, RoundAborted) as error:
            meeting.spoil(str(error))
        except TimeoutError:
            meeting.spoil("the round did not end by its deadline", *meeting.missing())

    async def _watch(self, meeting: SynchronousRound) -> None:
        """A member that is gone spoils the round at once."""
        if gone := await until_gone(self._averager.endpoint.host.members, meeting.members, meeting.deadline):
            meeting.spoil("gone in the middle of a round", *gone)

    def hear(self, number: int) -> None:
        """Others are in that round: go there if it is later. One that has met may still come to its end."""
        if number <= self.head.key.round:
            return
        if self.meeting:
            self.meeting.ahead = max(self.meeting.ahead, number)
        else:
            self.round = max(self.round, number - 1)
            self.cut.set()

    def end(self) -> None:
        self.ended = True
        if self.meeting:
            self.meeting.spoil("this peer has left the round")
        self._averager.met(self)
