"""The two axes of a run: how replicas agree, an averager and its sessions; and who computes, a trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol, runtime_checkable

from protocols.contract.values import (
    AveragingResult,
    Contribution,
    Deadline,
    Head,
    Layout,
    LocalProgress,
    Member,
    PeerId,
    RoundKey,
    Vector,
)


class AveragingSession(Protocol):
    """One peer's side of one round of averaging."""

    cut: asyncio.Event
    """Set when the round is called, or has reached its deadline: start no further step, hand in."""

    def offer(self, work: LocalProgress) -> None:
        """Tell the others what there is to hand in; again as the work grows."""

    def waiting_for(self) -> tuple[PeerId, ...]:
        """Whom the round waits for, as far as this peer can tell: what a person who wonders is shown."""

    async def average(self, mine: Sequence[Vector], work: LocalProgress, into: Sequence[Vector]) -> AveragingResult:
        """Average `mine` with the others into `into` (same shapes). `mine` is lent, and unchanged until return.

        Never raises for a peer's failure: the outcome says what became of the round.
        """


class Averager(Protocol):
    """How replicas agree."""

    me: Member

    def enter(self, head: Head, deadline: Deadline) -> AbstractAsyncContextManager[AveragingSession]:
        """Take part in the round that extends `head`, from its first moment: peers may call from then on.

        Who is not in the roster looks on, asks to be admitted, and learns what was decided.
        """


class IndependentSession(AveragingSession, Protocol):
    """A session of a protocol without a shared anchor: what travels is a peer's state, or what it brings to its step.

    `average` is given that at the end of this peer's round. Committed, `into` holds the mean; skipped, nobody averaged
    with us, and `into` is undefined. Others may average with a peer that still trains, too.

    Attributes:
        round: that this session ended in: a later one than it was entered for if others were ahead.
        group: names the last group that this peer completed in it: all who name it hold the same bits. Empty: none,
            or there are no groups.
        half_exchanges: that this peer began or answered and does not know to be over at both ends: one end may have
            moved alone.
        mass_drift: by how much these may have moved the mean of all, at most: the sum over them of
            ‖what this end moved, or would have moved‖ / ‖its state‖.
    """

    round: int
    group: str
    half_exchanges: int
    mass_drift: float

    def share(self, state: Sequence[Vector]) -> None:
        """Let others average with this, in place, until it is taken back: all of it at once, or nothing. Who lends
        nothing is busy to those who ask."""

    async def reclaim(self) -> Mapping[PeerId, Contribution]:
        """From now on the state is the caller's alone; waits for an exchange under way, which has its own deadline.

        Returns:
            Of whom the state holds something, since it was lent; empty: it is as it was.
        """


class ClosingSession(IndependentSession, Protocol):
    """A session of a protocol that ends a run with closing exchanges: a few, without training, one after the other.

    Attributes:
        closing_exchanges: that held.
    """

    closing_exchanges: int

    async def close(self, mine: Sequence[Vector], into: Sequence[Vector], here: Collection[PeerId]) -> AveragingResult:
        """Average `mine` with the states of those who have come to the run's end, into `into`, as `average` does.

        At most ⌈log₂ n⌉ + 1 exchanges, n with this peer. It ends early when `cut` is set.

        Args:
            here: the others that are there for it; the same at all of them, if it is to come to the mean of all.
        """


class IndependentAverager(Protocol):
    """How replicas that share no anchor come near each other.

    `enter` is given the number of this peer's own round, and as lineage the root of its own last state. The class says
    `shares_anchor = False`.
    """

    me: Member
    shares_anchor: bool

    def enter(self, head: Head, deadline: Deadline) -> AbstractAsyncContextManager[IndependentSession]:
        """Take part in a round: peers may call from then on, for this one or for an exchange with what was lent."""


@runtime_checkable
class ClosingAverager(IndependentAverager, Protocol):
    """One that ends a run with closing exchanges: its class says `closes = True`."""

    closes: bool

    def enter(self, head: Head, deadline: Deadline) -> AbstractAsyncContextManager[ClosingSession]: ...


class Trainer(Protocol):
    """Who computes: the inner steps between two rounds, behind a process boundary in a node."""

    layout: Layout

    async def train(
        self, key: RoundKey, cut: asyncio.Event, progress: Callable[[LocalProgress], None], surplus: bool = True
    ) -> LocalProgress:
        """Train from where the parameters stand until `cut` is set; the cut is seen at every inner step.

        `progress` is called at once, with what earlier rounds left over, after the first inner step, when the round's
        inner steps are complete, and whenever the work has grown by a tenth since the last call.

        Args:
            surplus: go on when the round's inner steps are complete; else wait for the cut.
        """

    async def read(self, into: Vector, fragment: int = 0) -> None:
        """Copy the local parameters out, at a step boundary."""

    async def write(self, source: Vector, fragment: int = 0, anchor: Vector | None = None, tokens: int = 0) -> None:
        """Replace the local parameters; the inner optimiser's state stays, the account of work starts again.

        Args:
            anchor: what the pseudo-gradient is measured from, if not `source`: where work is kept that no round has
                counted, `source` is the new anchor less that work.
            tokens: how many tokens that work is worth.
        """
