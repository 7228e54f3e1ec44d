"""The outer loop of a peer with independent state: train, step and average with the partners, report.

A mixing strategy (`node.outer.mixing`) decides which vectors are exchanged, and applies the mean. By default, peers
average their states after the outer step.

The peer shares no chain with the others: `parent` and `lineage` of a report are the roots of its state before and
after the round.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median_low

from node.outer.activity import Activity
from node.outer.closing import LOOK_SECONDS, SKETCH_SECONDS, ClosingPhase, ClosingResult, joined
from node.outer.mixing import MixingStrategy, PullMixing, StateMixing
from node.outer.noloco import NoLoCo
from node.outer.outer_loop import FIRST_ROUND_LIMIT_SECONDS, OuterLoop, OuterLoopDeps, RoundResult
from node.outer.round_history import LocalHistory
from node.outer.sgd import OuterSGD
from node.outer.sketch import Sketch, distance, furthest, sketch, spread
from node.outer.sketch import mean as middle
from node.reporting.report import LapTimer, RoundReport
from node.tasks.extra import trained_elements
from protocols.base import (
    AveragingResult,
    ClosingSession,
    Deadline,
    IndependentAverager,
    IndependentSession,
    LocalProgress,
    Outcome,
    PeerId,
    RoundKey,
)
from protocols.sync.independent_sync import IndependentStateSync
from protocols.sync.snapshot import Snapshot
from protocols.sync.snapshot_download import StateUnavailable
from protocols.vectors.views import norm

log = logging.getLogger(__name__)

DRIFT_FACTOR = 10.0
"""Multiple of the spread limit. A peer that is further from the mean of all peers fetches another peer's state."""
PARTING_SECONDS = 1.0
"""A peer that pauses stays for so long after its round: with a barrier, others abort a round in which one is lost."""
LATE_SHARE = 0.5
"""Share of a round's time limit. A peer that trained for longer had little or no time left to average."""


@dataclass(frozen=True, slots=True)
class IndependentOptions:
    """How the outer loop of a peer with independent state deals with the other peers."""

    # sends our sketch to the others, and returns the latest sketch of each live peer
    compare: Callable[[Sketch], Mapping[PeerId, Sketch]] = lambda sketch: {}
    spread_limit: float = math.inf  # largest accepted spread of the peers' parameters, as in reports
    closing: ClosingPhase | None = None
    newcomer: bool = False  # it must fetch its first state, and must serve none before
    rounds: Callable[[], Mapping[PeerId, int]] = dict  # the round of each other live peer


class IndependentOuterLoop(OuterLoop):
    """The outer loop of a peer with independent state. The chain is the peer's own rounds."""

    SHARES_ANCHOR = False

    def __init__(
        self,
        chain: LocalHistory,
        averager: IndependentAverager,
        optimizer: OuterSGD | NoLoCo,
        deps: OuterLoopDeps,
        options: IndependentOptions = IndependentOptions(),
    ) -> None:
        """NoLoCo's step includes the averaging; with SGD, states are averaged after it. The trainer must hold the
        anchor.
        """
        super().__init__(averager.me, optimizer, deps)
        self.chain, self.averager, self._options = chain, averager, options
        self.has_drifted, self.lacks_state = False, options.newcomer
        self._sketches: dict[PeerId, Sketch] = {}  # the others' sketches, as of the last round
        self._sketch: Sketch | None = None  # our own, as sent to the others
        self._kept_round = -1
        exchanged = self.state, deps.trainer, deps.compute, self.me.peer
        self._mixing: MixingStrategy = (
            PullMixing(*exchanged, optimizer) if isinstance(optimizer, NoLoCo) else StateMixing(*exchanged)
        )

    @property
    def key(self) -> RoundKey:
        return self.chain.key

    @property
    def seeks_state(self) -> bool:
        """Whether this peer must fetch another peer's state. Until then it serves none."""
        return self.lacks_state or self.has_drifted

    async def stay_away(self, until: Callable[[], bool]) -> None:
        """As `OuterLoop.stay_away`. This peer then continues in the round of those that have worked meanwhile.

        Otherwise they would have to wait for it, if they average in rounds. After an absence the state is old, too:
        this peer first fetches another's.
        """
        await asyncio.sleep(PARTING_SECONDS)
        if until() or self.leaving:
            return
        await super().stay_away(until)
        self.has_drifted |= self.activity.released and not self.leaving
        if here := self._options.rounds().values():
            self.chain.move_to(replace(self.key, round=max(self.key.round, median_low(here))))

    @property
    def holds_up_run(self) -> bool:
        """Peers with independent state never wait for this one."""
        return False

    def took_part(self, report: RoundReport) -> bool:
        """Whether the report is of a round, not of the fetching of another peer's state."""
        return report.outcome != Outcome.SUPERSEDED

    async def settle(self) -> None:
        async with self._changes():
            await self._settle()

    async def _settle(self) -> None:
        await self.state.hash()
        self.chain.move_to(replace(self.key, lineage=self.state.root(self.key.round)))
        snapshots = None if self.lacks_state else self._snapshots
        # A peer that moves on to the others' round may skip the one in which a checkpoint is due.
        if snapshots and self.key.round // snapshots.every_rounds > self._kept_round // snapshots.every_rounds:
            self._kept_round = self.key.round
            await self._keep(snapshots, self.key)

    async def keep(self) -> None:
        async with self._changing:  # for a whole round: others may average with the state while this peer trains
            if self._checkpoints and self._is_settled and not self.lacks_state:
                await self._keep(self._checkpoints.snapshots, self.key)

    async def start_from(self, snapshot: Snapshot) -> None:
        """Take over the state and the round of a snapshot: of an earlier incarnation, or of another peer.

        Call `settle` afterwards. Raises OSError, with nothing changed, if the snapshot cannot be read.
        """
        await self._mixing.take(snapshot)
        self.chain.move_to(replace(self.key, round=max(self.key.round, snapshot.round)))
        self._kept_round = self.key.round - 1

    # -- a round ------------------------------------------------------------------------------------------------------

    async def run_round(self, wall: Callable[[], float]) -> RoundReport:
        """Train, step, average with the partners of this round (or keep this peer's own step), and report."""
        key, watch, mixing = self.key, LapTimer(), self._mixing
        self._begin_round(key.lineage)
        async with self._changes():
            async with self.averager.enter(self.chain.head, watch.began + self._limit_seconds) as session:
                mixing.share(session)
                work, _ = await self._train(session, key, key.lineage, surplus=True)
                await mixing.reclaim(session)
                watch.lap("train")
                mean, work = await self._step_and_average(session, work, key)
                watch.lap("average")
            self._set_limit(mean, work, watch)
            self.chain.move_to(replace(key, round=session.round + 1))
            mean, undone = joined(mean, mixing.held), mixing.undone
            closed = await self._close(replace(key, round=session.round), watch)
            await mixing.begin()
            await self._settle()
        done = RoundResult(key, key.lineage, closed.follows(mean), work, watch.seconds)
        report = self._report_exchanges(done, session, closed, wall())
        report = replace(report, half_exchanges=report.half_exchanges + undone)
        return await self._compare(report, key, closed.sketches)

    async def _step_and_average(
        self, session: IndependentSession, work: LocalProgress, key: RoundKey
    ) -> tuple[AveragingResult, LocalProgress]:
        self._show_progress("averaging", work)
        mean, work = await self._mixing.mix(session, work, lambda work: self._offered(work, key.lineage), key.round)
        self._offer_again = lambda: None
        return mean, work

    def _report_exchanges(
        self, done: RoundResult, session: IndependentSession, closed: ClosingResult, time: float
    ) -> RoundReport:
        return replace(
            self._report(done, self.key.lineage, time),
            round=session.round,
            group=session.group,
            messages=tuple(name for each in done.mean.contributions.values() for name in each.messages),
            half_exchanges=session.half_exchanges + closed.half_exchanges,
            mass_drift=session.mass_drift + closed.mass_drift,
            closing_exchanges=closed.exchanges,
        )

    async def _close(self, key: RoundKey, watch: LapTimer) -> ClosingResult:
        """Run the closing exchanges, if that was the run's last round and this peer does not leave."""
        closing = self._options.closing
        if closing is None or self.leaving or not closing.is_due(self.key.round):
            return ClosingResult()

        def on_enter(session: ClosingSession) -> None:
            self._offer_again, self._waiting_for = session.cut.set, closing.behind

        def sketches() -> Mapping[PeerId, Sketch]:
            return self._options.compare(self._sketch) if self._sketch else {}

        seconds = (watch.seconds["train"], self._limit_seconds)
        closed = await closing.run(self._mixing, key, seconds, on_enter, sketches)
        self._offer_again, self._waiting_for = (lambda: None), tuple
        watch.lap("close")
        watch.seconds["average"] += watch.seconds["close"]
        return closed

    def _set_limit(self, mean: AveragingResult, work: LocalProgress, watch: LapTimer) -> None:
        """Set how long the next round may take.

        Only complete rounds count, not those that others cut short: a peer that joins at the end of a round would have
        too little time to average in all rounds after it.
        """
        if mean.outcome is Outcome.COMMITTED and work.complete and not self._rested:
            self._learn_limit(watch)
        elif watch.seconds["train"] > LATE_SHARE * self._limit_seconds:
            self._limit_seconds = min(FIRST_ROUND_LIMIT_SECONDS, 2 * self._limit_seconds)

    async def _compare(self, report: RoundReport, key: RoundKey, before: Mapping[PeerId, Sketch | None]) -> RoundReport:
        """Add to the report how far this peer is from the others, estimated from their sketches.

        `before` are the last sketches of peers that are about to send new ones, which this method waits for.
        """
        compare, spread_limit = self._options.compare, self._options.spread_limit
        anchor, loop = self.anchor, asyncio.get_running_loop()
        finite = await self._compute.run(lambda: math.isfinite(norm([anchor])), 4 * len(anchor))
        trained = anchor[: trained_elements(self.trainer.layout)]
        ours = self._sketch = await self._compute.run(lambda: sketch(trained, key.run), 4 * len(trained))
        until = loop.time() + SKETCH_SECONDS
        self._sketches = dict(compare(ours))
        while any(self._sketches.get(peer) == old for peer, old in before.items()):
            if loop.time() >= until or self.leaving:
                break
            await asyncio.sleep(LOOK_SECONDS)
            self._sketches = dict(compare(ours))
        far = furthest({**self._sketches, self.me.peer: ours})
        self.has_drifted = far[0] == self.me.peer and far[1] > DRIFT_FACTOR * spread_limit
        return replace(
            report, finite=finite, spread_limit=spread_limit, spread=spread([ours, *self._sketches.values()])
        )

    # -- another's state ----------------------------------------------------------------------------------------------

    async def catch_up(
        self, state_sync: IndependentStateSync, wall: Callable[[], float], deadline: Deadline
    ) -> RoundReport:
        """Fetch the state of the peer whose parameters are nearest to the mean of all live peers, and continue from it.

        Failures of other peers do not raise: with the outcome `undecided`, nothing has changed.
        """
        key, watch = self.key, LapTimer()
        outcome = Outcome.UNDECIDED
        try:
            fetching = state_sync.fetch(self._nearest, deadline)
            snapshot = await self.activity.unless(lambda: self.activity.wanted is Activity.AWAY, fetching)
            if snapshot is None:
                raise StateUnavailable("this peer is to be away")
            async with self._changes():
                await self.start_from(snapshot)
                outcome, self.has_drifted, self.lacks_state = Outcome.SUPERSEDED, False, False
                self._keep_fetched(snapshot)
                await self._settle()
        except StateUnavailable as error:
            log.debug("no state to continue from: %s", error)
        except OSError as error:
            log.warning("the state that was fetched cannot be read: %s", error.strerror or error)
        blamed, sent, received = state_sync.accounting.take()
        mean = AveragingResult(outcome, blamed=blamed, bytes_sent=sent, bytes_received=received)
        idle, seconds = LocalProgress(0, math.nan, 0.0, 0.0), {"train": 0.0, "average": watch.total()}
        done = RoundResult(key, key.lineage, mean, idle, seconds)
        downloaded = state_sync.take_bytes()
        return replace(self._report(done, self.key.lineage, wall()), bytes_downloaded=downloaded)

    def _nearest(self, donors: Sequence[PeerId]) -> Sequence[PeerId]:
        centre = middle([self._sketches[peer] for peer in sorted(self._sketches)])
        known = {peer: distance(numbers, centre) for peer, numbers in self._sketches.items()}
        return sorted(
            donors, key=lambda donor: known.get(donor, math.inf)
        )  # donors without a sketch last, the newest state first

    def _keep_fetched(self, snapshot: Snapshot) -> None:
        """Keep a fetched snapshot, which other peers may fetch too, and drop those of the previous state."""
        if self._snapshots:
            for each in self._snapshots.held():
                self._snapshots.drop(each)
        if self._checkpoints:
            self._checkpoints.take(snapshot)
        elif self._snapshots:
            self._snapshots.put(snapshot)
