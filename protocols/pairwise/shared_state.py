"""A round of a peer whose state others may average with.

The peer lends the state while it trains, opens it while it mixes, and keeps it to itself in between.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from protocols.aio import Notifier, loop_time
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
    Vector,
)
from protocols.control_channel import RoundAccounting
from protocols.independent_session import SessionBase
from protocols.pairwise.claimed_rounds import ClaimedRounds
from protocols.vectors import VectorView

SLOWEST_SHARE = 0.25
"""Largest share of a round's time that an exchange is estimated to take. Above it, the peer would never retry and
never notice an improvement.
"""


class Mixer(Protocol):
    """How states are averaged, as a session sees it."""

    me: Member
    host: Host
    accounting: RoundAccounting
    estimator: ClaimedRounds

    async def mix(self, session: SharedStateSession, state: VectorView) -> None:
        """Average the state in place. It is open to other peers meanwhile."""

    async def close(self, session: SharedStateSession, state: VectorView, here: Collection[PeerId]) -> None:
        """Average the state by the closing exchanges of a run, with the peers in `here`."""

    def partners(self) -> tuple[PeerId, ...]:
        """The peers that average with the state at this moment."""

    def opened(self) -> None:
        """Called when a session has a state."""

    async def at_rest(self) -> None:
        """Wait for any change of the state in progress. Nothing new begins while a session has no state."""


class SharedStateSession(SessionBase):
    """`protocols.base.ClosingSession` for gossip and push-sum.

    Attributes:
        key: of this peer's round.
        deadline: of the round.
        state: what other peers may average with; None while there is nothing to average.
        held: the peers whose values became part of the state since it was lent or given to `average`.
        weights: each peer's share of the state, after all averaging in this round.
        notifier: notifies when something is counted.
        closing: whether the session is in closing exchanges.
    """

    def __init__(self, mixer: Mixer, head: Head, deadline: Deadline) -> None:
        super().__init__(head, deadline, mixer.accounting)
        self.key: RoundKey = head.key
        self._longest_seconds = SLOWEST_SHARE * (deadline - loop_time())
        self.closing, self.closing_exchanges = False, 0
        self.state: VectorView | None = None
        self.held: dict[PeerId, Contribution] = {}
        self.notifier = Notifier()
        self.weights = {mixer.me.peer: 1.0}
        self._mixer = mixer

    # -- the contract -------------------------------------------------------------------------------------------------

    def waiting_for(self) -> tuple[PeerId, ...]:
        return self._mixer.partners()

    def share(self, state: Sequence[Vector]) -> None:
        self._open(VectorView(state))

    async def reclaim(self) -> Mapping[PeerId, Contribution]:
        self.state = None
        await self._mixer.at_rest()
        return self.held

    async def average(self, mine: Sequence[Vector], work: LocalProgress, into: Sequence[Vector]) -> AveragingResult:
        """Average as the contract says. `mine` is copied to `into` first, and other peers average with `into`
        meanwhile.

        Raises:
            ValueError: the sizes of `mine` and `into` differ.
        """
        early = await self.reclaim()
        self._keep_up()
        return await self._averaged(mine, into, early, lambda target: self._mixer.mix(self, target))

    async def close(self, mine: Sequence[Vector], into: Sequence[Vector], here: Collection[PeerId]) -> AveragingResult:
        """Close as the contract says.

        Raises:
            ValueError: as in `average`.
        """
        early, self.closing = await self.reclaim(), True
        return await self._averaged(mine, into, early, lambda target: self._mixer.close(self, target, here))

    async def _averaged(
        self,
        mine: Sequence[Vector],
        into: Sequence[Vector],
        early: Mapping[PeerId, Contribution],
        average: Callable[[VectorView], Awaitable[None]],
    ) -> AveragingResult:
        if [len(each) for each in mine] != [len(each) for each in into]:
            raise ValueError(f"{[len(each) for each in mine]} elements into {[len(each) for each in into]}")
        target = VectorView(into)
        await self._mixer.host.compute.run(partial(_copy, mine, into), 8 * target.size)
        self._open(target)
        try:
            await average(target)
        except BaseException:
            self.state = None  # a peer that leaves in a hurry does not wait for exchanges in progress
            raise
        held = await self.reclaim()
        committed = bool(held or early)
        return self._result(committed, held, self.weights if committed else {})

    def _keep_up(self) -> None:
        """Skip to the round of most other peers if this peer is behind."""
        others = [member.peer for member in self._mixer.host.members.live() if member.peer != self._mixer.me.peer]
        self.round = self._mixer.estimator.round(self.round, others)
        self.key = replace(self.key, round=self.round)

    def _open(self, state: VectorView) -> None:
        self.state, self.held = state, {}
        self._mixer.opened()

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


def _copy(source: Sequence[Vector], into: Sequence[Vector]) -> None:
    for each, target in zip(source, into, strict=True):
        target.copy_(each)
