"""What gossip and push-sum share: the averager, and a round of a peer whose state other peers may average with. The
peer lends the state while it trains, opens it while it mixes, and keeps it to itself in between.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from protocols.aio import Notifier, loop_time, set_at
from protocols.allreduce.parts import ChunkPool, ReducedPart
from protocols.base import (
    AveragingResult,
    Contribution,
    Deadline,
    Head,
    Host,
    LocalProgress,
    Member,
    PeerId,
    RoundKey,
    Settings,
    Vector,
)
from protocols.pairwise import matching
from protocols.pairwise.state_swap import HEADER_LIMIT
from protocols.peers.estimates import ClaimedRounds
from protocols.peers.timeouts import PeerTimeouts
from protocols.registry import SCHEDULES, require_known
from protocols.streams.endpoint import ProtocolEndpoint, SessionBase
from protocols.vectors.codec import codec
from protocols.vectors.views import VectorView

SLOWEST_SHARE = 0.25
"""An exchange is estimated to take at most this share of a round's time; above it, the peer would never retry."""


class PairwiseAverager(ABC):
    """The state that a peer averages with others one by one (`protocols.base.ClosingAverager`)."""

    closes = True

    def __init__(self, host: Host, settings: Settings, purpose: str) -> None:
        """`purpose` names the random draws, which differ between the protocols."""
        self.host, self.endpoint = host, ProtocolEndpoint(host, settings, HEADER_LIMIT)
        self.me, self.accounting = self.endpoint.me, self.endpoint.accounting
        self.codec, self.timeouts = codec(settings.codec), PeerTimeouts(settings.upload_bandwidth())
        self.schedule, self.rng = require_known("schedule", settings.schedule, SCHEDULES), host.rng(purpose)
        self.estimator = ClaimedRounds()
        self.notifier = Notifier()  # notifies when there is a state, or when an exchange has ended
        self.session: SharedStateSession | None = None  # of the present round; None between two rounds
        self.half_exchanges = 0  # exchanges or shares, since this peer started, that may have moved one end only
        self.partners: tuple[PeerId, ...] = ()  # that average with the state at this moment
        self._pool = ChunkPool()
        self._unreported_drifts: list[float] = []  # drifts of half exchanges that ended between two rounds

    @property
    def state(self) -> VectorView | None:
        return self.session.state if self.session else None

    def part(self, elements: int) -> ReducedPart:
        return ReducedPart(self.codec, 0, elements, self.endpoint.settings.chunk_elements, pool=self._pool)

    @asynccontextmanager
    async def enter(self, head: Head, deadline: Deadline) -> AsyncIterator[SharedStateSession]:
        session = SharedStateSession(self, head, deadline)
        self.endpoint.bind(head.key)
        self.open_round(session)
        try:
            async with set_at(session.cut, deadline):
                yield session
        finally:
            await self.close_round()

    def open_round(self, session: SharedStateSession) -> None:
        self._pool.next_round()
        self.session = session
        for drift in self._unreported_drifts:
            session.count_half(drift)
        self._unreported_drifts.clear()

    async def close_round(self) -> None:
        """Subclasses wait until the state is at rest."""
        if self.session:
            self.session.state = None
        self.session = None

    def count_half(self, drift: float) -> None:
        self.half_exchanges += 1
        if self.session:
            self.session.count_half(drift)
        else:
            self._unreported_drifts.append(drift)

    @abstractmethod
    async def at_rest(self) -> None:
        """Wait for any change of the state in progress. Nothing new begins while a session has no state."""

    @abstractmethod
    async def mix(self, session: SharedStateSession, state: VectorView) -> None:
        """Average the state in place. It is open to other peers meanwhile."""

    @abstractmethod
    async def close(self, session: SharedStateSession, state: VectorView, here: Collection[PeerId]) -> None:
        """Average the state by the closing exchanges of a run, with the peers in `here`."""

    def others(self) -> dict[PeerId, Member]:
        return {member.peer: member for member in self.host.members.live() if member.peer != self.me.peer}

    def named(self, session: SharedStateSession, others: Collection[PeerId]) -> tuple[PeerId, ...]:
        seed = f"{session.key.run.hex()}/{session.key.scope}"
        return matching.select_partners(self.schedule, tuple(others), self.me.peer, session.round, seed)


class SharedStateSession(SessionBase):
    def __init__(self, averager: PairwiseAverager, head: Head, deadline: Deadline) -> None:
        super().__init__(head, deadline, averager.accounting)
        self.key: RoundKey = head.key
        self._longest_seconds = SLOWEST_SHARE * (deadline - loop_time())
        self.closing, self.closing_exchanges = False, 0
        self.state: VectorView | None = None  # what other peers may average with
        self.held: dict[PeerId, Contribution] = {}  # in the state since it was lent or given to `average`
        self.weights = {averager.me.peer: 1.0}  # peer -> its share of the state, after all averaging in this round
        self.notifier = Notifier()  # notifies when something is counted
        self._averager = averager

    # -- the contract -------------------------------------------------------------------------------------------------

    def waiting_for(self) -> tuple[PeerId, ...]:
        return self._averager.partners

    def share(self, state: Sequence[Vector]) -> None:
        self._open(VectorView(state))

    async def reclaim(self) -> Mapping[PeerId, Contribution]:
        self.state = None
        await self._averager.at_rest()
        return self.held

    async def average(self, mine: Sequence[Vector], work: LocalProgress, into: Sequence[Vector]) -> AveragingResult:
        """Average as the contract says. `mine` is copied to `into`, with which other peers average meanwhile."""
        early = await self.reclaim()
        # A peer that is behind skips to the round of most other peers.
        self.round = self._averager.estimator.round(self.round, self._averager.others())
        self.key = replace(self.key, round=self.round)
        return await self._averaged(mine, into, early, lambda target: self._averager.mix(self, target))

    async def close(self, mine: Sequence[Vector], into: Sequence[Vector], here: Collection[PeerId]) -> AveragingResult:
        early, self.closing = await self.reclaim(), True
        return await self._averaged(mine, into, early, lambda target: self._averager.close(self, target, here))

    async def _averaged(
        self,
        mine: Sequence[Vector],
        into: Sequence[Vector],
        early: Mapping[PeerId, Contribution],
        average: Callable[[VectorView], Awaitable[None]],
    ) -> AveragingResult:
        def copy() -> None:
            for source, copied in zip(mine, into, strict=True):
                copied.copy_(source)

        if [len(each) for each in mine] != [len(each) for each in into]:
            raise ValueError(f"{[len(each) for each in mine]} elements into {[len(each) for each in into]}")
        target = VectorView(into)
        await self._averager.host.compute.run(copy, 8 * target.size)
        self._open(target)
        try:
            await average(target)
        except BaseException:
            self.state = None  # a peer that leaves in a hurry does not wait for exchanges in progress
            raise
        held = await self.reclaim()
        committed = bool(held or early)
        return self._result(committed, held, self.weights if committed else {})

    def _open(self, state: VectorView) -> None:
        self.state, self.held = state, {}
        self._averager.notifier.notify()

    def has_time(self, seconds: float, until: Deadline) -> bool:
        """Whether an operation of this expected length may begin now, if it must end by `until`."""
        return loop_time() + min(seconds, self._longest_seconds) < until

    # -- what came of it ----------------------------------------------------------------------------------------------

    def count(self, peer: PeerId, chunks: int, name: str, share: float) -> None:
        """Count that this share of our state is now this peer's; the rest is unchanged."""
        before = self.held.get(peer)
        self.held[peer] = Contribution(chunks, chunks, (*(before.messages if before else ()), name))
        self.weights = {each: (1 - share) * weight for each, weight in self.weights.items()}
        self.weights[peer] = self.weights.get(peer, 0.0) + share
        self.notifier.notify()

    def counted(self, peer: PeerId) -> int:
        """How often this peer's values were counted since the state was lent or given to `average`."""
        return len(self.held[peer].messages) if peer in self.held else 0
