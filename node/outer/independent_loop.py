"""One outer round of a peer that shares no anchor with the others: train, step by itself, and mix with whom it meets.

What travels, and what comes of it, is `node.outer.mixing`'s: the state after the peer's own outer step, unless the run
says otherwise.

There is no chain but the peer's own: `parent` and `lineage` of a report are the roots of its state before and after.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from node.outer.closing import LOOK_SECONDS, TOLD_SECONDS, ClosingPhase, ClosingResult, joined
from node.outer.mixing import MixingStrategy, PullMixing, StateMixing
from node.outer.noloco import NoLoCo
from node.outer.outer_loop import FIRST_ROUND_LIMIT_SECONDS, OuterLoop
from node.outer.round_history import LocalHistory
from node.outer.sgd import OuterSGD
from node.outer.sketch import Sketch, distance, furthest, sketch, spread
from node.outer.sketch import mean as middle
from node.reporting.report import LapTimer, RoundReport
from node.storage.checkpoint_manager import CheckpointManager
from protocols.base import (
    AveragingResult,
    ClosingSession,
    Compute,
    Deadline,
    IndependentAverager,
    LocalProgress,
    Outcome,
    PeerId,
    RoundKey,
    Trainer,
    Vector,
)
from protocols.sync.independent_sync import IndependentStateSync
from protocols.sync.snapshot import Snapshot, Snapshots
from protocols.sync.snapshot_download import StateUnavailable
from protocols.vectors import norm

log = logging.getLogger(__name__)

ASTRAY_FACTOR = 10.0
"""Times the spread that is borne: a peer that is as far from the mean of all fetches another's state."""
LATE_SHARE = 0.5
"""Of a round's limit: who trained for longer had little time left to mix, or none."""


class IndependentOuterLoop(OuterLoop):
    """The outer state of one peer, which is its own, and its rounds.

    Attributes:
        chain: its own; there is no other.
        compare: tells the others our sketch, and returns those of the others that are here, as each told it last.
        closing: how the run ends here; None: with its last round.
        spread_limit: how far apart, as reports have it, peers may be.
        lacks_state: whether it has yet to fetch its first state, and what it holds is nobody's.
        astray: whether this peer is further than mixing should have to cure: it is to fetch another's state.
    """

    SHARES_ANCHOR = False

    def __init__(
        self,
        chain: LocalHistory,
        trainer: Trainer,
        averager: IndependentAverager,
        outer: OuterSGD | NoLoCo,
        compute: Compute,
        anchor: Vector,
        snapshots: Snapshots | None = None,
        checkpoints: CheckpointManager | None = None,
    ) -> None:
        """
        Args:
            anchor, snapshots, checkpoints: as of `node.outer.replicated_loop.Replica`. The trainer stands at the
            anchor.
            outer: its own step, after which it averages states; or NoLoCo's, which is both at once.
        """
        super().__init__(trainer, outer, compute, anchor, snapshots, checkpoints)
        self.chain, self.averager = chain, averager
        self.compare: Callable[[Sketch], Mapping[PeerId, Sketch]] = lambda mine: {}
        self.spread_limit, self.astray, self.lacks_state = math.inf, False, False
        self.closing: ClosingPhase | None = None
        self._sketches: dict[PeerId, Sketch] = {}  # of the others, as of the last round
        self._sketch: Sketch | None = None  # our own, as the others have been told
        self._kept_round = -1
        me = averager.me.peer
        self._mixing: MixingStrategy = StateMixing(self.state, trainer, compute, me)
        if isinstance(outer, NoLoCo):
            self._mixing = PullMixing(self.state, trainer, compute, me, outer)

    @property
    def key(self) -> RoundKey:
        """Of the next round: the number is this peer's own, the lineage the root of its state."""
        return self.chain.key

    @property
    def seeks_state(self) -> bool:
        """Whether this peer is to fetch another's state: its own is for nobody to start from."""
        return self.lacks_state or self.astray

    def took_part(self, report: RoundReport) -> bool:
        """Whether that was a round of this peer's: all are, but fetching another's state."""
        return report.outcome != Outcome.SUPERSEDED

    async def settle(self) -> None:
        """Compute the root of the state as it stands: where the next round starts from."""
        await self.state.hash()
        self.chain.key = replace(self.key, lineage=self.state.root(self.key.round))
        snapshots = None if self.lacks_state else self._snapshots
        # A peer that goes by others' rounds may jump over the one in which a checkpoint is due.
        if snapshots and self.key.round // snapshots.every_rounds > self._kept_round // snapshots.every_rounds:
            self._kept_round = self.key.round
            await self._keep(snapshots, self.key)

    async def keep(self) -> None:
        """Make a checkpoint of where this peer stands, between two rounds, if it makes any."""
        if self._checkpoints and not self.lacks_state:
            await self._keep(self._checkpoints.snapshots, self.key)

    async def start_from(self, snapshot: Snapshot) -> None:
        """Take up a state, one's own of a former life or another peer's, and its round; `settle` follows.

        Raises:
            OSError: it cannot be read; nothing has changed.
        """
        await self._mixing.take(snapshot)
        self.chain.key = replace(self.key, round=max(self.key.round, snapshot.round))
        self._kept_round = self.key.round - 1

    # -- a round ------------------------------------------------------------------------------------------------------

    async def run_round(self, wall: Callable[[], float]) -> RoundReport:
        """Train, step, mix with whom one meets. There is always a next state: without the others, the peer's own."""
        key, watch, mixing = self.key, LapTimer(), self._mixing
        async with self.averager.enter(self.chain.head, watch.began + self._limit_seconds) as session:
            mixing.share(session)
            work, _ = await self._train(session, key, key.lineage, surplus=True)
            await mixing.reclaim(session)
            watch.lap("train")
            self._show("averaging", work)
            mean, work = await mixing.mix(session, work, lambda work: self._offered(work, key.lineage))
            self._offer_again = lambda: None
            watch.lap("average")
        self._timed(mean, work, watch)
        self.chain.key = replace(key, round=session.round + 1)
        mean, undone = joined(mean, mixing.held), mixing.undone
        closed = await self._close(replace(key, round=session.round), watch)
        mean = closed.follows(mean)
        await mixing.begin()
        await self.settle()
        me, lineage = self.averager.me, self.key.lineage
        report = self._report(me, key, lineage, key.lineage, mean, work, watch.seconds, wall())
        report = replace(
            report,
            round=session.round,
            group=session.group,
            messages=tuple(name for each in mean.contributions.values() for name in each.messages),
            half_exchanges=session.half_exchanges + undone + closed.half_exchanges,
            mass_drift=session.mass_drift + closed.mass_drift,
            closing_exchanges=closed.exchanges,
        )
        return await self._compared(report, key, closed.told)

    async def _close(self, key: RoundKey, watch: LapTimer) -> ClosingResult:
        """Closing exchanges, if that was the run's last round and this peer is not asked to leave."""
        if self.closing is None or self.leaving or not self.closing.is_due(self.key.round):
            return ClosingResult()
        closing, mixing = self.closing, self._mixing

        def entered(session: ClosingSession) -> None:
            self._offer_again, self.waiting_for = session.cut.set, closing.behind

        def told() -> Mapping[PeerId, Sketch]:
            return self.compare(self._sketch) if self._sketch else {}

        closed = await closing.run(mixing, key, (watch.seconds["train"], self._limit_seconds), entered, told)
        self._offer_again, self.waiting_for = (lambda: None), tuple
        watch.lap("close")
        watch.seconds["average"] += watch.seconds["close"]
        return closed

    def _timed(self, mean: AveragingResult, work: LocalProgress, watch: LapTimer) -> None:
        """How long the next round may take. A whole one is the measure, and none that others have cut short: who comes
        in at the end of a round would be cut in all that follow, before it can mix."""
        if mean.outcome is Outcome.COMMITTED and work.complete:
            self._took(watch)
        elif watch.seconds["train"] > LATE_SHARE * self._limit_seconds:
            self._limit_seconds = min(FIRST_ROUND_LIMIT_SECONDS, 2 * self._limit_seconds)

    async def _compared(
        self, report: RoundReport, key: RoundKey, before: Mapping[PeerId, Sketch | None]
    ) -> RoundReport:
        """The report, and how far this peer is from the others, by the sketches that are here.

        Args:
            before: of those who are about to tell another sketch, what they told before.
        """
        anchor, loop = self.anchor, asyncio.get_running_loop()
        finite = await self._compute.run(lambda: math.isfinite(norm([anchor])), 4 * len(anchor))
        ours = self._sketch = await self._compute.run(lambda: sketch(anchor, key.run), 4 * len(anchor))
        until = loop.time() + TOLD_SECONDS
        self._sketches = dict(self.compare(ours))
        while any(self._sketches.get(peer) == told for peer, told in before.items()):
            if loop.time() >= until or self.leaving:
                break
            await asyncio.sleep(LOOK_SECONDS)
            self._sketches = dict(self.compare(ours))
        far = furthest({**self._sketches, self.averager.me.peer: ours})
        self.astray = far[0] == self.averager.me.peer and far[1] > ASTRAY_FACTOR * self.spread_limit
        return replace(
            report, finite=finite, spread_limit=self.spread_limit, spread=spread([ours, *self._sketches.values()])
        )

    # -- another's state ----------------------------------------------------------------------------------------------

    async def catch_up(
        self, state_sync: IndependentStateSync, wall: Callable[[], float], deadline: Deadline
    ) -> RoundReport:
        """Fetch another's state, and stand there. Never raises for what other peers do: `undecided`, nothing changed.

        The donor is the one whose parameters are nearest to the mean of all that are here.
        """
        key, watch = self.key, LapTimer()
        outcome = Outcome.UNDECIDED
        try:
            snapshot = await state_sync.fetch(self._nearest, deadline)
            await self.start_from(snapshot)
        except StateUnavailable as error:
            log.debug("no state to go on from: %s", error)
        except OSError as error:
            log.warning("the state that was fetched cannot be read: %s", error.strerror or error)
        else:
            outcome, self.astray, self.lacks_state = Outcome.SUPERSEDED, False, False
            self._take(snapshot)
            await self.settle()
        blamed, sent, received = state_sync.accounting.take()
        mean = AveragingResult(outcome, blamed=blamed, bytes_sent=sent, bytes_received=received)
        idle = LocalProgress(0, math.nan, 0.0, 0.0)
        seconds = {"train": 0.0, "average": watch.total()}
        me, lineage = self.averager.me, self.key.lineage
        report = self._report(me, key, lineage, key.lineage, mean, idle, seconds, wall())
        downloaded, _ = state_sync.take_bytes()
        return replace(report, bytes_downloaded=downloaded)

    def _nearest(self, donors: Sequence[PeerId]) -> Sequence[PeerId]:
        centre = middle([self._sketches[peer] for peer in sorted(self._sketches)])
        known = {peer: distance(numbers, centre) for peer, numbers in self._sketches.items()}
        return sorted(donors, key=lambda donor: known.get(donor, math.inf))  # of those unknown, the newest first

    def _take(self, snapshot: Snapshot) -> None:
        """Keep what was fetched, for others as well; what was kept before is of a state that was given up."""
        if self._snapshots:
            for each in self._snapshots.held():
                self._snapshots.drop(each)
        if self._checkpoints:
            self._checkpoints.take(snapshot)
        elif self._snapshots:
            self._snapshots.put(snapshot)
