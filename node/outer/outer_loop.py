"""The base of both outer loops: the outer state, a round's training, offers of work, and the report.

`node.outer.replicated_loop.ReplicatedOuterLoop` and `node.outer.independent_loop.IndependentOuterLoop` run the rounds:
train, average, step, report.
"""

from __future__ import annotations

import asyncio
import logging
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from node.outer.activity import Activity, ActivitySwitch
from node.outer.error_feedback import ErrorFeedback
from node.outer.round_history import RoundHistory
from node.outer.state import OuterState
from node.reporting.report import LapTimer, RoundReport, TrainingDelta
from node.storage.checkpoint_manager import CheckpointManager
from protocols.base import (
    AveragingResult,
    AveragingSession,
    Head,
    LocalProgress,
    Member,
    Outcome,
    PeerId,
    RoundKey,
    Trainer,
    Vector,
)
from protocols.sync.service import SyncServiceBase
from protocols.sync.snapshot import Snapshot, Snapshots
from protocols.wire import MAX_NORM

log = logging.getLogger(__name__)

FIRST_ROUND_LIMIT_SECONDS = 3600.0
ROUND_LIMIT_MULTIPLE = 10.0
ROUND_LIMIT_FLOOR_SECONDS = 60.0
ROUNDS_LEARNED = 4  # The limit is a multiple of the longest of these: a round may be short because a peer left in it
FIRST_STEP_SECONDS = 2.0
"""Time that a leaving peer without any work waits for its first step, which it then contributes."""
CATCH_UP_SECONDS = 120.0
"""Time to find out what was decided and to receive the first bytes. A transfer that makes progress may take longer."""
PAUSE_SECONDS = 1.0  # Pause before the peer retries what came to nothing: peers that are ahead need time, too


@dataclass(frozen=True, slots=True)
class RoundResult:
    head: Head  # before the round
    mean: AveragingResult  # COMMITTED only if it was applied
    work: LocalProgress
    seconds: Mapping[str, float]  # of the laps `train` and `average`, and of the training in the latter, `overlap`
    finite: bool = True  # every parameter after the outer step
    outcome: str = ""  # for the report, if it is not that of the mean


class OuterLoop(ABC):
    SHARES_ANCHOR: ClassVar[bool] = True  # Whether all peers measure their work from one state
    chain: RoundHistory
    feedback: ErrorFeedback | None = None

    def __init__(
        self,
        me: Member,
        *,
        state: OuterState,
        trainer: Trainer,
        wall: Callable[[], float],
        snapshots: Snapshots | None = None,
        checkpoints: CheckpointManager | None = None,
    ) -> None:
        """`snapshots` are copies of the outer state, for this peer and for others; else those of `checkpoints`."""
        self.me, self.trainer, self.leaving = me, trainer, False
        self.state, self._compute, self._wall = state, state.compute, wall
        self._snapshots = checkpoints.snapshots if checkpoints else snapshots or Snapshots()
        self._checkpoints = checkpoints
        self.on_progress: Callable[[str, LocalProgress], None] = lambda phase, work: None  # `training` or `averaging`
        self.is_overlapped = False  # it trains while the round averages
        self._overlap_tokens = 0  # of that training, in this round
        self._changing, self._changes_done = asyncio.Lock(), 0
        self.change: int | None = None  # number of the last change of the state; None while it changes
        self.activity = ActivitySwitch()
        self._departs = False  # an offer of this round says that it leaves the roster, to be away
        self._parent = b""  # the lineage that the round under way extends
        self._rested = False  # it has rested in this round
        self.waiting_for: Callable[[], Sequence[PeerId]] = tuple  # peers that the round waits for
        self.last_round = False  # it ends as any other, and its offer says so
        self._may_leave_without_work = False
        self.has_announced_leaving = False  # to the other members, in an offer
        self._offer_again: Callable[[], None] = lambda: None
        self._limit_seconds = FIRST_ROUND_LIMIT_SECONDS
        self._round_seconds: deque[float] = deque(maxlen=ROUNDS_LEARNED)
        self._trained = TrainingDelta()
        self._said_capped = False

    @property
    def anchor(self) -> Vector:
        return self.state.anchor

    async def start_from(self, snapshot: Snapshot) -> None:
        """Restore the outer state of an earlier incarnation; call `settle` afterwards. May raise OSError."""
        await self.state.take(snapshot)
        await self.trainer.write(self.anchor)

    @abstractmethod
    def rounds(
        self,
        sync: Any,
        should_continue: Callable[[], bool],
        set_state: Callable[[str, str], None] = lambda state, reason: None,
    ) -> AsyncIterator[RoundReport]:
        """Run rounds while `should_continue` says so; yields a report for each, and for each time that the peer caught
        up.

        The cost of an attempt to catch up that failed is in the report of the round that follows. `set_state` is called
        with what this peer does and why, if that is not a round.
        """

    def took_part(self, report: RoundReport) -> bool:
        """Whether this peer took part in the round: it did not only observe it, skip it or fetch another's state."""
        return report.peer in report.peers if self.SHARES_ANCHOR else report.outcome != Outcome.SUPERSEDED

    # -- the state ----------------------------------------------------------------------------------------------------

    async def settle(self) -> None:
        async with self._changes():
            await self._settle()

    async def _settle(self) -> None:
        """The state has changed: set the head's state root, and keep a snapshot if one is due."""
        await self.state.hash()
        await self._settled()

    @abstractmethod
    async def _settled(self) -> None:
        """As `_settle`, for a state that is hashed already."""

    async def keep(self) -> None:
        """Keep the state that the present round begins from, on the disk if there is one. Waits while it changes."""
        async with self._changing:
            if self.change is not None:
                await self._keep()

    async def _keep(self) -> None:
        """Keep the state before the present round, if this peer has it and does not keep it yet."""
        key = self.chain.head.key
        if self.chain.lacks_state or self._snapshots.get(key.lineage):
            return
        if self._checkpoints:
            await self._checkpoints.keep(self.state, key)
        else:
            await self.state.keep(self._snapshots, key)

    def _keep_fetched(self, snapshot: Snapshot) -> None:
        """Keep another peer's snapshot, which others may fetch, too."""
        if self._checkpoints:
            self._checkpoints.take(snapshot)
        else:
            self._snapshots.put(snapshot)

    @asynccontextmanager
    async def _changes(self) -> AsyncIterator[None]:
        """While the state changes, and until its root is known, nothing is kept. Nor if that is cut short."""
        async with self._changing:
            self.change = None
            yield
            self._changes_done += 1
            self.change = self._changes_done

    # -- leaving and pausing ------------------------------------------------------------------------------------------

    def leave(self, first_step_seconds: float = FIRST_STEP_SECONDS) -> None:
        """Offer the work so far as final: this peer leaves when the round is over.

        Without any work, it first waits so long for its first step. A round in which nobody has any is skipped.
        """
        self.leaving = True
        self._may_leave_without_work |= self.activity.pauses  # there will be no first step
        self._offer_again()
        self.activity.wake()
        asyncio.get_running_loop().call_later(first_step_seconds, self._leave_with_nothing)

    def _leave_with_nothing(self) -> None:
        self._may_leave_without_work = True
        self._offer_again()

    def pause(self, wanted: Activity) -> None:
        """Work, rest or be away from now on. Other peers do not wait for one that pauses, nor hurry for it.

        A round under way continues: the work so far counts in it, and a peer that is to be away leaves at its end.
        """
        self.activity.set(wanted)
        self._rested |= self.activity.pauses
        self.trainer.rest(self.activity.pauses or self.awaits_members)
        self._offer_again()
        self.activity.wake()

    async def stay_away(self, until: Callable[[], bool]) -> None:
        """Be away until a condition holds or this peer leaves. If asked for, the worker ends, after a checkpoint."""
        activity = self.activity
        activity.released = False
        activity.tell(Activity.AWAY)
        while not (until() or self.leaving):
            if activity.wanted is Activity.AWAY and not activity.released:
                await self.keep()
                await self.trainer.release()
                activity.released = True
            wanted = activity.wanted
            await activity.until(lambda: activity.wanted is not wanted or until() or self.leaving)  # noqa: B023 - awaited
        activity.tell(min(activity.wanted, Activity.REST))

    @property
    def holds_up_run(self) -> bool:
        """Whether the run waits for this peer while it pauses."""
        return False

    @property
    def awaits_members(self) -> bool:
        """Whether this peer does not train yet, because the run is to begin with more members."""
        return False

    # -- a round ------------------------------------------------------------------------------------------------------

    def _begin_round(self, parent: bytes) -> None:
        """What was said in the last round holds no longer, unless it is the same round again."""
        self._departs &= parent == self._parent
        self._parent, self._rested = parent, self.activity.pauses

    async def _train(
        self, session: AveragingSession, key: RoundKey, state_root: bytes, surplus: bool
    ) -> tuple[LocalProgress, list[int]]:
        """Returns the work, and the tokens of each offer that was made of it."""
        offers: list[int] = []
        self.waiting_for = session.waiting_for

        def offer(work: LocalProgress) -> None:
            by_itself = work.resting and not self.activity.pauses  # as a script that is away, or silent
            self._rested |= by_itself
            self._offer_again = lambda: session.offer(self._offered(work, state_root, by_itself))
            session.offer(offered := self._offered(work, state_root, by_itself))
            offers.append(offered.tokens)
            self._show_progress("training", work)

        return await self.trainer.train(key, session.cut, offer, surplus), offers

    def _show_progress(self, phase: str, work: LocalProgress) -> None:
        self._trained.hear(work)
        self.on_progress(phase, replace(work, tokens=self._trained.tokens, seconds=self._trained.seconds))

    def _offered(self, work: LocalProgress, state_root: bytes, rests: bool = False) -> LocalProgress:
        """The work as offered to other members: with this peer's state root, and without tokens if it diverged."""
        if diverged(work):
            work = replace(work, tokens=0, norm=0.0)
        away = self.activity.wanted is Activity.AWAY and not self.holds_up_run  # the last of a roster cannot leave
        self._departs |= self.SHARES_ANCHOR and away
        rests |= self.activity.pauses
        if work.resting and rests:
            work = replace(work, step_seconds=0.0)  # it has stopped, so it notices the cut at once
        # one that works again is called as any other, and still leaves: it has said so
        work = replace(work, leaving=self._departs, resting=rests)
        if (self.leaving and (work.tokens or self._may_leave_without_work)) or (self.last_round and work.complete):
            work = replace(work, complete=True, leaving=True, resting=False)
            self.has_announced_leaving = True
        return replace(work, state_root=state_root)

    def _learn_limit(self, watch: LapTimer) -> None:
        self._round_seconds.append(watch.total())
        self._limit_seconds = max(ROUND_LIMIT_FLOOR_SECONDS, ROUND_LIMIT_MULTIPLE * max(self._round_seconds))

    def _report_catch_up(
        self, head: Head, sync: SyncServiceBase[Any], watch: LapTimer, *, caught_up: bool, finite: bool = True
    ) -> RoundReport:
        blamed, sent, received = sync.accounting.take()
        outcome = Outcome.SUPERSEDED if caught_up else Outcome.UNDECIDED
        mean = AveragingResult(outcome, blamed=blamed, bytes_sent=sent, bytes_received=received)
        idle, laps = LocalProgress(0, math.nan, 0.0, 0.0), {"train": 0.0, "average": watch.total()}
        return replace(self._report(RoundResult(head, mean, idle, laps, finite)), bytes_downloaded=sync.take_bytes())

    def _report(self, done: RoundResult) -> RoundReport:
        me, key, mean, anchor = self.me, done.head.key, done.mean, done.head.anchor.hex()
        trained_tokens, trained_seconds = self._trained.take()
        overlap_seconds = done.seconds.get("overlap", 0.0)
        overlap_tokens, self._overlap_tokens = self._overlap_tokens, 0
        self._say_if_capped(key.round, mean)
        known = mean.contributions if self.SHARES_ANCHOR else {me.peer}  # else a state comes without its lineage
        counted = {p: (anchor if p in known else "", c.chunks_counted, c.chunks) for p, c in mean.contributions.items()}
        return RoundReport(
            run=key.run.hex(),
            peer=me.peer,
            incarnation=me.incarnation,
            round=key.round,
            fragment=key.fragment,
            parent=key.lineage.hex(),
            lineage=self.chain.head.key.lineage.hex(),
            anchor_lineage=anchor,
            outcome=done.outcome or str(mean.outcome),
            peers=mean.peers,
            contributors=mean.contributors,
            contributions=counted,
            clusters={lead: (total.chunks_counted, total.chunks) for lead, total in mean.clusters.items()},
            blamed={blame.peer: blame.why for blame in mean.blamed},
            finite=done.finite,
            weight=mean.weights.get(me.peer, math.nan if me.peer in mean.peers else 0.0),
            tokens=trained_tokens,
            loss=done.work.loss,
            params_hash=self.state.index.parameters_root.hex(),
            seconds_train=trained_seconds,
            seconds_wait=max(0.0, done.seconds["train"] - (trained_seconds - overlap_seconds)),
            seconds_average=max(0.0, done.seconds["average"] - overlap_seconds),
            seconds_overlap=overlap_seconds,
            tokens_overlap=overlap_tokens,
            seconds_moving=mean.seconds_moving,
            bytes_sent=mean.bytes_sent,
            bytes_received=mean.bytes_received,
            time=self._wall(),
        )

    def _say_if_capped(self, round: int, mean: AveragingResult) -> None:
        """Log once that this peer's work counts less than its tokens."""
        tokens = mean.capped.get(self.me.peer)
        if tokens and not self._said_capped:
            self._said_capped = True
            counts = f"{mean.weights[self.me.peer]:,.0f}"
            why = "the most that this run lets one member count beside the others (max_weight)"
            log.info("the %s tokens of this peer count as %s in round %d, %s", f"{tokens:,}", counts, round, why)


def diverged(work: LocalProgress) -> bool:
    """Whether the work's norm is not finite or exceeds `MAX_NORM`: all peers would refuse a plan with such an offer."""
    return not work.norm <= MAX_NORM
