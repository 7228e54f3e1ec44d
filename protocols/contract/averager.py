"""The two plug-in interfaces of a run: an averager decides how peers agree, a trainer computes the inner steps."""

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
    """Set when the coordinator calls the round or its deadline has come. Then finish the step and call `average`."""

    def offer(self, work: LocalProgress) -> None:
        """Announce this peer's progress to the others. Call it again as the work grows."""

    def waiting_for(self) -> tuple[PeerId, ...]:
        """Peers that the round is waiting for, as far as this peer knows. Shown in the status."""

    async def average(self, mine: Sequence[Vector], work: LocalProgress, into: Sequence[Vector]) -> AveragingResult:
        """Average `mine` with the others' vectors into `into`, which has the same shapes.

        With replicated state these are the fragments of the pseudo-gradient. With independent state they are parameters
        and momentum, or, in a run with `outer_pull`, the pseudo-gradient alone. All are flat and float32.

        Neither this nor the caller changes `mine` before this returns. A failure of another peer never raises: the
        result's outcome says how the round ended.
        """


class Averager(Protocol):
    """How peers with replicated state agree on the next outer parameters."""

    me: Member

    def enter(self, head: Head, deadline: Deadline) -> AbstractAsyncContextManager[AveragingSession]:
        """Take part in the round that extends `head`. Other peers may call the round as soon as this is entered.

        A peer outside the roster asks for admission and learns what the roster decides, but does not vote.
        """


class IndependentSession(AveragingSession, Protocol):
    """One round of a protocol in which each peer owns its state.

    The peer calls `average` at the end of its round with its state, or with its contribution to its own outer step. If
    the outcome is COMMITTED, `into` holds the mean, and the result names at least one contribution. If it is SKIPPED,
    no peer averaged with this one and `into` is undefined. Other outcomes do not occur. Other peers may average with a
    shared state while its owner still trains.

    Attributes:
        round: number of the round in which the session ended; higher than at entry if other peers were ahead. A
            protocol in which peers do not follow each other's rounds leaves it as it is.
        group: name of the last group that this peer completed. All peers that report the same name hold the same bits.
            Empty if there was none, or if the protocol has no groups.
        half_exchanges: exchanges of this peer that may have been committed at one end only.
        mass_drift: upper bound of how far the half exchanges moved the mean of all peers: the sum over them of
            ‖the change, made or not, of this peer's state‖ / ‖this peer's state‖.
    """

    round: int
    group: str
    half_exchanges: int
    mass_drift: float

    def share(self, state: Sequence[Vector]) -> None:
        """Let other peers average with this state, in place, until `reclaim`. An exchange changes all of it or nothing.

        A peer that shares no state answers "busy" to exchange requests.
        """

    async def reclaim(self) -> Mapping[PeerId, Contribution]:
        """Stop sharing the state. Waits for an exchange that is under way, which has a deadline of its own.

        Returns:
            Contribution of each peer that the state has been averaged with; empty if the state did not change.
        """


class ClosingSession(IndependentSession, Protocol):
    """A session of a protocol that ends a run with closing exchanges: a few exchanges in sequence, without training.

    Attributes:
        closing_exchanges: number of closing exchanges that succeeded.
    """

    closing_exchanges: int

    async def close(self, mine: Sequence[Vector], into: Sequence[Vector], here: Collection[PeerId]) -> AveragingResult:
        """Average `mine` into `into`, as `average` does, with the peers that have reached the end of the run.

        Takes at most ⌈log₂ n⌉ + 1 exchanges among n peers, this one included. Ends early when `cut` is set.

        Args:
            here: the other peers that take part. The result is the mean of all only if all of them pass the same set.
        """


class IndependentAverager(Protocol):
    """How peers with independent state bring their states near each other.

    The head passed to `enter` has this peer's own round number, and as lineage the root of its own last state.
    """

    me: Member

    def enter(self, head: Head, deadline: Deadline) -> AbstractAsyncContextManager[IndependentSession]:
        """Take part in a round. From then on other peers may open the round, or an exchange with a shared state."""


@runtime_checkable
class ClosingAverager(IndependentAverager, Protocol):
    """An averager that ends a run with closing exchanges. Classes set `closes = True`."""

    closes: bool

    def enter(self, head: Head, deadline: Deadline) -> AbstractAsyncContextManager[ClosingSession]: ...


class Trainer(Protocol):
    """Computes the inner steps between two rounds. In a node it is a worker process."""

    layout: Layout

    async def train(
        self, key: RoundKey, cut: asyncio.Event, progress: Callable[[LocalProgress], None], surplus: bool = True
    ) -> LocalProgress:
        """Train from the present parameters until `cut` is set, which is checked after every inner step.

        `progress` is called at once (with work left over from earlier rounds), after the first inner step, when the
        round's inner steps are complete, and whenever the work has grown by a tenth since the last call.

        Args:
            surplus: keep training after the round's inner steps are complete; otherwise wait for the cut.
        """

    def rest(self, resting: bool) -> None:
        """Take no step after the present one until called again with False; `train` still ends at its cut.

        When it has stopped, it calls `progress` with the work so far, marked `resting`.
        """

    async def release(self) -> None:
        """Free what computing needs, between two rounds. The next command gets it back."""

    async def read(self, into: Vector, fragment: int = 0) -> None:
        """Copy the local parameters into `into`, between two inner steps."""

    async def write(self, source: Vector, fragment: int = 0, anchor: Vector | None = None, tokens: int = 0) -> None:
        """Replace the local parameters and reset the progress. The inner optimiser keeps its state.

        Args:
            anchor: what the pseudo-gradient is measured from, if not `source`. A peer that keeps work which no round
                has counted passes the new anchor minus that work as `source`.
            tokens: number of tokens in that work.
        """
