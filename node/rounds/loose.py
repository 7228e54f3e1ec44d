"""One outer round of a peer that shares no anchor with the others: train, step by itself, and mix with whom it meets.

What travels is the state after the peer's own outer step. That step is linear, so that to average stepped states is to
step the averages; and others may average with a state whose owner still trains, because a pseudo-gradient is measured
from the parameters that the trainer was written with, wherever the state has moved meanwhile.

There is no chain but the peer's own: `parent` and `lineage` of a report are the roots of its state before and after.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from node.outer import OuterSGD, pseudo_gradient
from node.report import RoundReport, Watch
from node.rounds.course import OwnCourse
from node.rounds.labour import FIRST_ROUND_LIMIT_SECONDS, Labour, diverged
from node.rounds.sketch import Sketch, distance, furthest, sketch, spread
from node.rounds.sketch import mean as middle
from node.storage.keeper import Keeper
from protocols.base import (
    Blame,
    Compute,
    Contribution,
    Deadline,
    LooseAverager,
    LooseSession,
    Mean,
    Outcome,
    PeerId,
    RoundKey,
    Trainer,
    Vector,
    Work,
)
from protocols.catchup.download import Unavailable
from protocols.catchup.snapshot import Snapshot, Snapshots
from protocols.catchup.standing import Standings
from protocols.vectors import norm

log = logging.getLogger(__name__)

ASTRAY_FACTOR = 10.0
"""Times the spread that is borne: a peer that is as far from the mean of all fetches another's state."""
LATE_SHARE = 0.5
"""Of a round's limit: who trained for longer had little time left to mix, or none."""


class LooseReplica(Labour):
    """The outer state of one peer, which is its own, and its rounds.

    Attributes:
        chain: its own; there is no other.
        compare: tells the others our sketch, and returns those of the others that are here, as each told it last.
        spread_limit: how far apart, as reports have it, peers may be.
        lacks_state: whether it has yet to fetch its first state, and what it holds is nobody's.
        astray: whether this peer is further than mixing should have to cure: it is to fetch another's state.
    """

    SHARES_ANCHOR = False

    def __init__(
        self,
        chain: OwnCourse,
        trainer: Trainer,
        averager: LooseAverager,
        outer: OuterSGD,
        compute: Compute,
        anchor: Vector,
        snapshots: Snapshots | None = None,
        keeper: Keeper | None = None,
    ) -> None:
        """
        Args:
            anchor, snapshots, keeper: as of `node.rounds.round.Replica`. The trainer stands at the anchor.
        """
        super().__init__(trainer, outer, compute, anchor, snapshots, keeper)
        self.chain, self.averager = chain, averager
        self.compare: Callable[[Sketch], Mapping[PeerId, Sketch]] = lambda mine: {}
        self.spread_limit, self.astray, self.lacks_state = math.inf, False, False
        self._sketches: dict[PeerId, Sketch] = {}  # of the others, as of the last round
        self._kept_round = -1
        self._undone = 0  # exchanges of this round that are in nothing of ours any more
        self._origin = anchor.clone()  # what the trainer was written with
        self._delta = torch.empty_like(anchor)

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
        if self._keeper and not self.lacks_state:
            await self._keep(self._keeper.snapshots, self.key)

    async def start_from(self, snapshot: Snapshot) -> None:
        """Take up a state, one's own of a former life or another peer's, and its round; `settle` follows.

        Raises:
            OSError: it cannot be read; nothing has changed.
        """
        await self._compute.run(lambda: self._delta.copy_(self.velocity), 8 * len(self._delta))
        try:
            await self.state.take(snapshot)
        except OSError:  # what was taken by then is no state
            self.anchor.copy_(self._origin)
            self.velocity.copy_(self._delta)
            raise
        self.chain.key = replace(self.key, round=max(self.key.round, snapshot.round))
        self._kept_round = self.key.round - 1
        await self._write()

    async def _write(self) -> None:
        await self.trainer.write(self.anchor)
        await self._compute.run(lambda: self._origin.copy_(self.anchor), 8 * len(self.anchor))

    # -- a round ------------------------------------------------------------------------------------------------------

    async def run_round(self, wall: Callable[[], float]) -> RoundReport:
        """Train, step, mix with whom one meets. There is always a next state: without the others, the peer's own."""
        key, watch = self.key, Watch()
        async with self.averager.enter(self.chain.head, watch.began + self._limit_seconds) as session:
            session.lend([self.state.anchor, self.state.velocity])
            work, _ = await self._train(session, key, key.lineage, surplus=True)
            held = await session.take_back()
            watch.lap("train")
            self._show("averaging", work)
            self._undone, stepped = 0, not diverged(work)
            if stepped and not await self._step(work):
                held, stepped = self._undo(held), False
            work = self._offered(work if stepped else replace(work, tokens=0, norm=0.0), key.lineage)
            mean = await self._mix(session, work)
            self._offer_again = lambda: None
            watch.lap("average")
        self._timed(mean, work, watch)
        await self._write()
        self.chain.key = replace(key, round=session.round + 1)
        await self.settle()
        if not stepped:
            mine = Blame(self.averager.me.peer, "its own step led to parameters that are not finite: it is left out")
            mean = replace(mean, blamed=(*mean.blamed, mine))
        return await self._told(key, session, _with(mean, held), work, watch.seconds, wall())

    def _timed(self, mean: Mean, work: Work, watch: Watch) -> None:
        """How long the next round may take. A whole one is the measure, and none that others have cut short: who comes
        in at the end of a round would be cut in all that follow, before it can mix."""
        if mean.outcome is Outcome.COMMITTED and work.complete:
            self._took(watch)
        elif watch.seconds["train"] > LATE_SHARE * self._limit_seconds:
            self._limit_seconds = min(FIRST_ROUND_LIMIT_SECONDS, 2 * self._limit_seconds)

    async def _step(self, work: Work) -> bool:
        """Our own outer step along what was trained, if it was anything; False if it led nowhere: then we stand where
        the training began, and nothing that came in meanwhile is in our state."""
        if not work.tokens:
            return True
        await self.trainer.read(self._delta)
        cost_bytes = 4 * len(self._delta)
        await self._compute.run(lambda: pseudo_gradient(self._origin, self._delta, self._delta), cost_bytes)
        if await self.state.advance(self._delta):
            return True
        self.state.anchor.copy_(self._origin)
        self.state.velocity.zero_()
        return False

    async def _mix(self, session: LooseSession, work: Work) -> Mean:
        """Average with others; what comes of it is our state, if anything good does."""
        state, into = self.state, [self._origin, self._delta]
        mean = await session.mean([state.anchor, state.velocity], work, into)
        if mean.outcome is not Outcome.COMMITTED:
            return replace(mean, outcome=Outcome.SKIPPED)
        if not await self._compute.run(lambda: math.isfinite(norm(into)), 8 * len(self._delta)):
            blame = Blame(self.averager.me.peer, "the mean is not finite: it keeps its own state")
            none = self._undo(mean.contributions)
            return replace(mean, outcome=Outcome.SKIPPED, contributions=none, blamed=(*mean.blamed, blame))
        state.anchor, self._origin = self._origin, state.anchor
        state.velocity, self._delta = self._delta, state.velocity
        return mean

    def _undo(self, held: Mapping[PeerId, Contribution]) -> Mapping[PeerId, Contribution]:
        """What was averaged with these is given up: they have moved, and we have not. Returns of whom we hold anything
        now: nobody."""
        self._undone += sum(len(each.messages) for each in held.values())
        return {}

    async def _told(
        self, key: RoundKey, session: LooseSession, mean: Mean, work: Work, seconds: Mapping[str, float], time: float
    ) -> RoundReport:
        ours = await self._compute.run(lambda: sketch(self.anchor, key.run), 4 * len(self.anchor))
        self._sketches = dict(self.compare(ours))
        far = furthest({**self._sketches, self.averager.me.peer: ours})
        self.astray = far[0] == self.averager.me.peer and far[1] > ASTRAY_FACTOR * self.spread_limit
        report = self._report(
            self.averager.me, key, self.key.lineage, key.lineage, mean, work, seconds, time,
        )  # fmt: skip
        return replace(
            report,
            round=session.round,
            group=session.group,
            messages=tuple(name for each in mean.contributions.values() for name in each.messages),
            half_exchanges=session.half_exchanges + self._undone,
            mass_drift=session.mass_drift,
            spread_limit=self.spread_limit,
            spread=spread([ours, *self._sketches.values()]),
        )

    # -- another's state ----------------------------------------------------------------------------------------------

    async def catch_up(self, standings: Standings, wall: Callable[[], float], deadline: Deadline) -> RoundReport:
        """Fetch another's state, and stand there. Never raises for what other peers do: `undecided`, nothing changed.

        The donor is the one whose parameters are nearest to the mean of all that are here.
        """
        key, watch = self.key, Watch()
        outcome = Outcome.UNDECIDED
        try:
            snapshot = await standings.fetch(self._nearest, deadline)
            await self.start_from(snapshot)
        except Unavailable as error:
            log.debug("no state to go on from: %s", error)
        except OSError as error:
            log.warning("the state that was fetched cannot be read: %s", error.strerror or error)
        else:
            outcome, self.astray, self.lacks_state = Outcome.SUPERSEDED, False, False
            self._take(snapshot)
            await self.settle()
        blamed, sent, received = standings.ledger.take()
        mean = Mean(outcome, blamed=blamed, bytes_sent=sent, bytes_received=received)
        idle = Work(0, math.nan, 0.0, 0.0)
        seconds = {"train": 0.0, "average": watch.total()}
        me, lineage = self.averager.me, self.key.lineage
        report = self._report(me, key, lineage, key.lineage, mean, idle, seconds, wall())
        return replace(report, bytes_downloaded=standings.take_bytes())

    def _nearest(self, donors: Sequence[PeerId]) -> Sequence[PeerId]:
        centre = middle([self._sketches[peer] for peer in sorted(self._sketches)])
        known = {peer: distance(numbers, centre) for peer, numbers in self._sketches.items()}
        return sorted(donors, key=lambda donor: known.get(donor, math.inf))  # of those unknown, the newest first

    def _take(self, snapshot: Snapshot) -> None:
        """Keep what was fetched, for others as well; what was kept before is of a state that was given up."""
        if self._snapshots:
            for each in self._snapshots.held():
                self._snapshots.drop(each)
        if self._keeper:
            self._keeper.take(snapshot)
        elif self._snapshots:
            self._snapshots.put(snapshot)


def _with(mean: Mean, held: Mapping[PeerId, Contribution]) -> Mean:
    """With what came in while the state was lent: that is an exchange, too."""
    if not held:
        return mean
    whole = dict(mean.contributions)
    for peer, early in held.items():
        late = whole.get(peer, early)
        messages = early.messages if late is early else early.messages + late.messages
        whole[peer] = Contribution(late.chunks_counted, late.chunks, messages)
    return replace(mean, outcome=Outcome.COMMITTED, contributions=whole)
