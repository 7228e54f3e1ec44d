"""The outer loop of a peer with independent state: train, step and average with the partners, report.

A mixing strategy (`node.outer.mixing`) decides which vectors are exchanged, and applies the mean. The peer shares no
chain with the others: `parent` and `lineage` of a report are the roots of its state before and after the round.

Each peer counts its own rounds, so peers reach the end of the run one after the other. A peer that has reached it waits
for the others, and meanwhile shares its state with them; then come the closing exchanges. It stops waiting if no peer
has arrived for as long as its last round of training took.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_low

from node.outer.activity import Activity
from node.outer.mixing import MixingStrategy, PullMixing, StateMixing
from node.outer.noloco import NoLoCo
from node.outer.outer_loop import CATCH_UP_SECONDS, FIRST_ROUND_LIMIT_SECONDS, PAUSE_SECONDS, OuterLoop, RoundResult
from node.outer.round_history import LocalHistory
from node.outer.sketch import Sketch, distance, furthest, sketch, spread
from node.outer.sketch import mean as middle
from node.outer.state import OuterState
from node.reporting.report import LapTimer, RoundReport
from node.storage.checkpoint_manager import CheckpointManager
from node.tasks.extra import trained_elements
from protocols.base import (
    AveragingResult,
    ClosingAverager,
    Contribution,
    Deadline,
    Head,
    IndependentAverager,
    IndependentSession,
    LocalProgress,
    Outcome,
    PeerId,
    RoundKey,
    Trainer,
)
from protocols.sync.independent_sync import IndependentStateSync
from protocols.sync.snapshot import Snapshot, Snapshots
from protocols.sync.snapshot_download import StateUnavailable
from protocols.vectors.views import norm

log = logging.getLogger(__name__)

DRIFT_FACTOR = 10.0
"""Multiple of the spread limit. A peer that is further from the mean of all peers fetches another peer's state."""
PARTING_SECONDS = 1.0
"""A peer that pauses stays for so long after its round: with a barrier, others abort a round in which one is lost."""
LATE_SHARE = 0.5
"""Share of a round's time limit. A peer that trained for longer had little or no time left to average."""


WAIT_FLOOR_SECONDS, WAIT_LIMIT_SECONDS = 20.0, 600.0
"""Bounds of the wait for other peers to reach the end. Within them, the wait is this peer's last training time."""
LOOK_SECONDS = 0.25
SKETCH_SECONDS = 3.0  # Longest wait for the other peers' new sketches, which are sent with heartbeats


@dataclass(slots=True)
class ClosingResult:
    # includes the exchanges that others began with this peer while it waited
    mean: AveragingResult = field(default_factory=lambda: AveragingResult(Outcome.SKIPPED))
    exchanges: int = 0  # this peer's own that took effect
    half_exchanges: int = 0
    mass_drift: float = 0.0
    # the last sketch of each participant before the exchanges; None if it had sent none
    sketches: Mapping[PeerId, Sketch | None] = field(default_factory=dict)

    def follows(self, last: AveragingResult) -> AveragingResult:
        sent, received = last.bytes_sent + self.mean.bytes_sent, last.bytes_received + self.mean.bytes_received
        both = joined(replace(last, bytes_sent=sent, bytes_received=received), self.mean.contributions)
        return replace(both, blamed=(*last.blamed, *self.mean.blamed))


class IndependentOuterLoop(OuterLoop):
    SHARES_ANCHOR = False
    chain: LocalHistory

    def __init__(
        self,
        chain: LocalHistory,
        averager: IndependentAverager,
        *,
        state: OuterState,
        trainer: Trainer,
        wall: Callable[[], float],
        snapshots: Snapshots | None = None,
        checkpoints: CheckpointManager | None = None,
        compare: Callable[[Sketch], Mapping[PeerId, Sketch]] = lambda sketch: {},
        spread_limit: float = math.inf,
        run_rounds: int | None = None,
        rounds_of_others: Callable[[], Mapping[PeerId, int]] = dict,
    ) -> None:
        """The trainer must hold the state's anchor. NoLoCo's step includes the averaging; with SGD, states are averaged
        after it.

        `compare` sends our sketch to the others, and returns the latest sketch of each live peer; `spread_limit` is the
        largest accepted spread of the peers' parameters, as in reports. `rounds_of_others` returns the round of each
        other peer that is live and does not leave. After `run_rounds` come the closing exchanges, if the averager has
        any.
        """
        me = averager.me
        super().__init__(me, state=state, trainer=trainer, wall=wall, snapshots=snapshots, checkpoints=checkpoints)
        self.chain, self.averager, self.has_drifted = chain, averager, False
        self._compare_sketches, self._spread_limit = compare, spread_limit
        self._closer = averager if isinstance(averager, ClosingAverager) else None
        self._run_rounds, self._rounds_of_others = run_rounds, rounds_of_others
        self._sketches: dict[PeerId, Sketch] = {}  # the others' sketches, as of the last round
        self._sketch: Sketch | None = None  # our own, as sent to the others
        self._kept_round = -1
        rule, exchanged = state.outer, (state, trainer, me.peer)
        self._mixing: MixingStrategy = (
            PullMixing(*exchanged, rule) if isinstance(rule, NoLoCo) else StateMixing(*exchanged)
        )

    @property
    def key(self) -> RoundKey:
        return self.chain.key

    @property
    def seeks_state(self) -> bool:
        """Whether this peer must fetch another peer's state. Until then it serves none."""
        return self.chain.lacks_state or self.has_drifted

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
        if here := self._rounds_of_others().values():
            self.chain.key = replace(self.key, round=max(self.key.round, median_low(here)))

    async def _settled(self) -> None:
        self.chain.key = replace(self.key, lineage=self.state.root(self.key.round))
        # A peer that moves on to the others' round may skip the one in which a checkpoint is due.
        every_rounds = self._snapshots.every_rounds
        if not self.chain.lacks_state and self.key.round // every_rounds > self._kept_round // every_rounds:
            self._kept_round = self.key.round
            await self._keep()

    async def start_from(self, snapshot: Snapshot) -> None:
        """Take over the state and the round of a snapshot, this peer's or another's; call `settle` afterwards.

        Raises OSError, with nothing changed, if the snapshot cannot be read.
        """
        await self._mixing.take(snapshot)
        self.chain.key = replace(self.key, round=max(self.key.round, snapshot.round))
        self._kept_round = self.key.round - 1

    async def rounds(
        self,
        sync: IndependentStateSync,
        should_continue: Callable[[], bool],
        set_state: Callable[[str, str], None] = lambda state, reason: None,
    ) -> AsyncIterator[RoundReport]:
        """As `OuterLoop.rounds`. A joiner, or a peer that has drifted too far, fetches another peer's state.

        A drifted peer tries once a round and keeps averaging in between, which may also bring it back.
        """
        tried: RoundReport | None = None
        while should_continue():
            if self.activity.pauses and not self.leaving:
                await self.stay_away(lambda: not self.activity.pauses)
                continue
            if self.seeks_state:
                set_state("syncing", "fetching a state from a peer that has one")
                report = await self.catch_up(sync, asyncio.get_running_loop().time() + CATCH_UP_SECONDS)
                report = report.after(tried) if tried else report
                tried = None if report.outcome == Outcome.SUPERSEDED else report
                if tried is None:
                    yield report
                    continue
            if self.chain.lacks_state:
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            report = await self.run_round()
            yield report.after(tried) if tried else report
            tried = None

    # -- a round ------------------------------------------------------------------------------------------------------

    async def run_round(self) -> RoundReport:
        head, watch, mixing = self.chain.head, LapTimer(), self._mixing
        key = head.key
        self._begin_round(key.lineage)
        async with self._changes():  # for the whole round: others may average with the state while this peer trains
            async with self.averager.enter(head, watch.began + self._limit_seconds) as session:
                mixing.share(session)
                work, _ = await self._train(session, key, key.lineage, surplus=True)
                await mixing.reclaim(session)
                watch.lap("train")
                mean, work = await self._step_and_average(session, work, key)
                watch.lap("average")
            self._set_limit(mean, work, watch)
            self.chain.key = replace(key, round=session.round + 1)
            mean, undone = joined(mean, mixing.held), mixing.undone
            closed = await self._close(replace(key, round=session.round), watch)
            await mixing.begin()
            await self._settle()
        done = RoundResult(head, closed.follows(mean), work, watch.seconds)
        report = replace(
            self._report(done),
            round=session.round,
            group=session.group,
            messages=tuple(name for each in done.mean.contributions.values() for name in each.messages),
            half_exchanges=session.half_exchanges + closed.half_exchanges + undone,
            mass_drift=session.mass_drift + closed.mass_drift,
            closing_exchanges=closed.exchanges,
        )
        return await self._compare(report, key, closed.sketches)

    async def _step_and_average(
        self, session: IndependentSession, work: LocalProgress, key: RoundKey
    ) -> tuple[AveragingResult, LocalProgress]:
        self._show_progress("averaging", work)
        mean, work = await self._mixing.mix(session, work, lambda work: self._offered(work, key.lineage), key.round)
        self._offer_again = lambda: None
        return mean, work

    async def _close(self, key: RoundKey, watch: LapTimer) -> ClosingResult:
        """At the end of the run, wait for the other peers, then average with those that have reached the end."""
        closer, last, rounds, mixing = self._closer, self._run_rounds, self._rounds_of_others, self._mixing
        if closer is None or last is None or self.leaving or self.key.round < last or not rounds():
            return ClosingResult()
        wait_seconds = min(max(WAIT_FLOOR_SECONDS, watch.seconds["train"]), WAIT_LIMIT_SECONDS)
        head = Head(key, (self.me,), key.lineage, key.lineage)
        deadline = asyncio.get_running_loop().time() + 2 * wait_seconds + self._limit_seconds
        async with closer.enter(head, deadline) as session:
            self._offer_again, self.waiting_for = session.cut.set, self._behind
            mixing.share(session)
            await self._gather(wait_seconds, session.cut)
            await mixing.reclaim(session)
            early, undone = mixing.held, mixing.undone
            here = [peer for peer, number in rounds().items() if number >= last]
            before = self._compare_sketches(self._sketch) if self._sketch else {}
            mean = await mixing.close(session, here)
        self._offer_again, self.waiting_for = (lambda: None), tuple
        watch.lap("close")
        watch.seconds["average"] += watch.seconds["close"]
        return ClosingResult(
            joined(mean, early),
            session.closing_exchanges,
            session.half_exchanges + undone + mixing.undone,
            session.mass_drift,
            {peer: before.get(peer) for peer in here},
        )

    def _behind(self) -> tuple[PeerId, ...]:
        last = self._run_rounds or 0
        return tuple(peer for peer, number in self._rounds_of_others().items() if number < last)

    async def _gather(self, wait_seconds: float, cut: asyncio.Event) -> None:
        """Wait until no peer is behind, or none has arrived for `wait_seconds`; at most twice that time in all."""
        loop = asyncio.get_running_loop()
        limit = loop.time() + 2 * wait_seconds
        until, behind = loop.time() + wait_seconds, set(self._behind())
        while behind and loop.time() < min(until, limit) and not cut.is_set():
            await asyncio.sleep(LOOK_SECONDS)
            now = set(self._behind())
            if behind - now:
                until = loop.time() + wait_seconds
            behind = now

    def _set_limit(self, mean: AveragingResult, work: LocalProgress, watch: LapTimer) -> None:
        """Only complete rounds count: a peer that joins at the end of one would have too little time to average in all
        later ones.
        """
        if mean.outcome is Outcome.COMMITTED and work.complete and not self._rested:
            self._learn_limit(watch)
        elif watch.seconds["train"] > LATE_SHARE * self._limit_seconds:
            self._limit_seconds = min(FIRST_ROUND_LIMIT_SECONDS, 2 * self._limit_seconds)

    async def _compare(self, report: RoundReport, key: RoundKey, before: Mapping[PeerId, Sketch | None]) -> RoundReport:
        """Add to the report how far this peer is from the others, estimated from their sketches.

        `before` are the last sketches of peers that are about to send new ones, which this method waits for.
        """
        compare, spread_limit = self._compare_sketches, self._spread_limit
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

    async def catch_up(self, sync: IndependentStateSync, deadline: Deadline) -> RoundReport:
        """Fetch the state of the peer whose parameters are nearest to the mean of all live peers, and continue from it.

        Failures of other peers do not raise: with the outcome `undecided`, nothing has changed.
        """
        head, watch, caught_up = self.chain.head, LapTimer(), False
        try:
            fetching = sync.fetch(self._nearest, deadline)
            snapshot = await self.activity.unless(lambda: self.activity.wanted is Activity.AWAY, fetching)
            if snapshot is None:
                raise StateUnavailable("this peer is to be away")
            async with self._changes():
                await self.start_from(snapshot)
                caught_up, self.has_drifted, self.chain.lacks_state = True, False, False
                for each in self._snapshots.held():  # of the previous state
                    self._snapshots.drop(each)
                self._keep_fetched(snapshot)
                await self._settle()
        except StateUnavailable as error:
            log.debug("no state to continue from: %s", error)
        except OSError as error:
            log.warning("the state that was fetched cannot be read: %s", error.strerror or error)
        return self._report_catch_up(head, sync, watch, caught_up=caught_up)

    def _nearest(self, donors: Sequence[PeerId]) -> Sequence[PeerId]:
        centre = middle([self._sketches[peer] for peer in sorted(self._sketches)])
        known = {peer: distance(numbers, centre) for peer, numbers in self._sketches.items()}
        return sorted(
            donors, key=lambda donor: known.get(donor, math.inf)
        )  # donors without a sketch last, the newest state first


def joined(mean: AveragingResult, held: Mapping[PeerId, Contribution]) -> AveragingResult:
    """Merge a mean with `held`, exchanges that other peers began. Neither may include reverted exchanges.

    If `held` is empty, a committed mean without contributions becomes SKIPPED.
    """
    if not held:
        nothing = mean.outcome is Outcome.COMMITTED and not mean.contributions
        return replace(mean, outcome=Outcome.SKIPPED, weights={}) if nothing else mean
    whole = dict(mean.contributions)
    for peer, early in held.items():
        late = whole.get(peer, early)
        messages = early.messages if late is early else early.messages + late.messages
        whole[peer] = Contribution(late.chunks_counted, late.chunks, messages)
    return replace(mean, outcome=Outcome.COMMITTED, contributions=whole)
