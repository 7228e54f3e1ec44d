"""The outer loop of a peer with replicated state: train, average, step, report, and catch up with missed rounds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

from node.outer.activity import Activity
from node.outer.catch_up import CatchUp, CatchUpResult
from node.outer.error_feedback import ErrorFeedback
from node.outer.fragments import Fragments
from node.outer.outer_loop import CATCH_UP_SECONDS, PAUSE_SECONDS, OuterLoop, RoundResult, diverged
from node.outer.overlap import Meanwhile, Overlap
from node.outer.state import OuterState, pseudo_gradient
from node.reporting.report import LapTimer, RoundReport
from node.storage.checkpoint_manager import CheckpointManager
from protocols.base import (
    RUN_SCOPE,
    Averager,
    AveragingResult,
    Deadline,
    LocalProgress,
    Outcome,
    PeerFault,
    PeerId,
    Trainer,
)
from protocols.consensus.messages import Certificate
from protocols.consensus.record import Kind, Record
from protocols.history.chain import Chain
from protocols.history.fork_choice import Branch
from protocols.sync.chain_sync import ChainSync
from protocols.sync.snapshot import Snapshots

KEEP_COUNTED = 4096
"""Rounds for which a peer remembers how much of its work counted, to report the cost of a switch of branch."""
PROOF_SHARE = 1 / 3
"""Share of the catch-up time for proofs: peers that prove nothing must leave time to fetch the state."""
AGAIN_SECONDS, NEAR_ROUNDS = 1.0, 2
"""If catching up took longer and covered more rounds, the peer catches up again. The next pass is shorter, because
fewer rounds were decided during this one."""
STATELESS_SECONDS = 10.0  # until a peer that may not decide, since it lacks the head's state, looks for it again
MAX_PASSES = 16
"""Times in a row that a peer catches up. It then enters a round, in which it learns what is being decided."""


class ReplicatedOuterLoop(OuterLoop):
    chain: Chain

    def __init__(
        self,
        chain: Chain,
        averager: Averager,
        *,
        state: OuterState,
        trainer: Trainer,
        wall: Callable[[], float],
        feedback: ErrorFeedback | None = None,
        snapshots: Snapshots | None = None,
        checkpoints: CheckpointManager | None = None,
        overlaps: bool = False,
        alone: Meanwhile | None = None,
        least_members: Callable[[], int] = lambda: 1,
        lead: Callable[[], PeerId] = str,
    ) -> None:
        """With `overlaps`, training continues while a round averages (`node.outer.overlap`). Without, `alone` trains
        meanwhile if the decision may take long, because the roster's majority is gone.

        As the only member, this peer trains once others would make the roster as large as `least_members` says. `lead`
        returns the member through which its work counts while it is none itself; empty: there is none.
        """
        me = averager.me
        super().__init__(me, state=state, trainer=trainer, wall=wall, snapshots=snapshots, checkpoints=checkpoints)
        self.chain, self.averager, self.feedback = chain, averager, feedback
        self.fragments = Fragments(trainer, len(state.anchor), chain.head.fragments)
        size = self.fragments.largest
        self._delta, self._mean = state.anchor.new_empty(size), state.anchor.new_empty(size)
        self._counted: dict[bytes, int] = {}  # lineage -> tokens of this peer that the round counted
        self._overlaps, self._average_seconds = overlaps, 0.0  # of the last decided round
        self._alone, self._least_members, self._lead = alone, least_members, lead
        self._since: float | None = None  # when the overlapped work began that the next round starts from

    def recall(self, counted: Mapping[bytes, int]) -> None:
        """Restore from earlier incarnations, by lineage, the tokens of this peer's work that each round counted."""
        self._counted.update(list(counted.items())[-KEEP_COUNTED:])

    async def _settled(self) -> None:
        key = self.chain.head.key
        self.chain.settle(self.state.root(key.round))
        fragments = self.chain.head.fragments
        if key.fragment == 0 and key.round // fragments % self._snapshots.every_rounds == 0:
            await self._keep()

    @property
    def may_be_away(self) -> bool:
        """Whether it is to be away, and has left the roster, or was never in it."""
        here = self.leaving or self.me in self.chain.head.roster
        return self.activity.wanted is Activity.AWAY and not here

    @property
    def holds_up_run(self) -> bool:
        """Whether this peer is the only one of the roster: without it, no round can be decided."""
        return self.chain.head.roster == (self.me,)

    @property
    def awaits_members(self) -> bool:
        roster = self.chain.head.roster
        if self.chain.trained or self.chain.head.key.scope != RUN_SCOPE:
            return False
        if self.me not in roster:  # it would be admitted with complete work, and its round called before others train
            return True
        return len(roster) == 1 and self._least_members() > 1

    async def rounds(
        self,
        sync: ChainSync,
        should_continue: Callable[[], bool],
        set_state: Callable[[str, str], None] = lambda state, reason: None,
    ) -> AsyncIterator[RoundReport]:
        loop = asyncio.get_running_loop()
        sync.keep_state = self.keep
        behind, passes = self.me not in self.chain.head.roster or self.chain.lacks_state, 0
        while should_continue():
            if self.may_be_away:
                await self.stay_away(lambda: self.activity.wanted is not Activity.AWAY)
                behind = True
                continue
            tried = None
            if behind:
                set_state("syncing", "catching up with the other peers")
                began = loop.time()
                tried = await self.catch_up(sync, began + CATCH_UP_SECONDS)
                if tried.outcome == Outcome.SUPERSEDED:
                    passes += 1
                    was_far = tried.replayed_rounds > NEAR_ROUNDS or tried.bytes_downloaded > 0
                    behind = passes < MAX_PASSES and was_far and loop.time() - began >= AGAIN_SECONDS
                    yield tried
                    continue  # the peer may have caught up with the end of the run
                if self.may_be_away:
                    yield tried
                    continue
                if not passes:
                    await asyncio.sleep(PAUSE_SECONDS)
                if self.may_not_decide:
                    set_state("syncing", "the state that it is to begin with is not on its disk: it waits for a peer's")
                    await asyncio.sleep(STATELESS_SECONDS)
                    continue
            passes = 0
            report = await self.run_round()
            yield report.after(tried) if tried else report
            behind = report.outcome in (Outcome.UNDECIDED, Outcome.SUPERSEDED)
            sync.stranded = report.outcome == Outcome.UNDECIDED

    @property
    def may_not_decide(self) -> bool:
        """Whether this peer has a vote on the next round, or may fork, and the head is known to have another state.

        What it decided would begin from its own state, so no other peer would accept it.
        """
        head = self.chain.head
        deciding = {member.peer for roster in (head.roster, *head.former) for member in roster}
        return self.chain.lacks_state and self.me.peer in deciding

    def _show_progress(self, phase: str, work: LocalProgress) -> None:
        self.fragments.hear(work)
        super()._show_progress(phase, work)

    def _offered(self, work: LocalProgress, state_root: bytes, rests: bool = False) -> LocalProgress:
        index = self.chain.head.key.fragment
        work = super()._offered(self.fragments.work(index, work), state_root, rests)
        return self.feedback.offered(work, self.fragments.part(index)) if self.feedback else work

    # -- a round ------------------------------------------------------------------------------------------------------

    async def run_round(self) -> RoundReport:
        """A peer outside the head's roster observes, and asks to be admitted."""
        head, watch = self.chain.head, LapTimer()
        self._begin_round(head.key.lineage)
        self.trainer.rest(self.activity.pauses or self.awaits_members)
        since, self._since = self._since, None
        async with self.averager.enter(head, watch.began + self._limit_seconds, since) as session:
            # alone, there is no other peer to wait for but a joiner: train the same number of steps each round
            surplus = len(head.roster) > 1 or bool({*session.waiting_for()} - {self.me.peer})
            due = replace(head.key, round=self.chain.trained)
            part = self.fragments.part(head.key.fragment)
            work, offers = await self._train(session, due, head.state_root, surplus)
            watch.lap("train")
            self._show_progress("averaging", work)
            if diverged(work):  # start again from the anchor, and contribute nothing
                await self.trainer.write(self.anchor)
                self.fragments.forget()
                work = replace(work, tokens=0, norm=0.0)
            anchor = self.anchor[part]
            delta = self._delta[: len(anchor)]
            await self.trainer.read(delta, part)
            async with self._overlap(work, watch) as overlap:
                await self._compute.run(lambda: pseudo_gradient(anchor, delta, delta), 4 * len(delta))
                sent = await self.feedback.outgoing(delta, part) if self.feedback else delta
                work = self._offered(work, head.state_root)
                mean = await session.average([sent], work, [self._mean[: len(delta)]])
                self._offer_again = lambda: None
                if mean.outcome in (Outcome.COMMITTED, Outcome.SKIPPED):
                    self._average_seconds = watch.since_lap()
                watch.lap("average")
                one_step = offers[:2] == [0, work.tokens]
                done = await self._step(RoundResult(head, mean, work, watch.seconds), one_step, overlap)
        # a round that ran into its limit must not raise it, nor one in which all members rested
        if mean.outcome is Outcome.COMMITTED and not self._rested:
            self._learn_limit(watch)
        return self._report(done)

    @asynccontextmanager
    async def _overlap(self, work: LocalProgress, watch: LapTimer) -> AsyncIterator[Overlap]:
        """Train for the next round meanwhile, if there is to be one, and averaging lasts for a step or more.

        With longer steps, this peer would enter the next round late by more than averaging takes.
        """
        head, trained = self.chain.head, self._trained
        overlap = Overlap(self.trainer, self.fragments, head, work)
        following = replace(head.key, round=self.chain.trained + 1, fragment=head.next_fragment)
        progress = partial(self._show_progress, "averaging")
        overlaps = self._overlaps and self._average_seconds >= work.step_seconds
        train = partial(self.trainer.train, following, progress=progress) if overlaps else self._alone
        counts = self.me in head.roster or bool(self._lead())
        ends = self.leaving or self.last_round or not counts
        if not train or ends or len(head.roster) == 1:
            yield overlap
            return
        cut, tokens, seconds = asyncio.get_running_loop().time(), trained.tokens, trained.seconds
        self.is_overlapped = overlaps
        try:
            async with overlap.run(train, progress):
                yield overlap
        finally:
            self.is_overlapped = False
        if overlaps:
            self._since = cut
        watch.seconds["overlap"] = trained.seconds - seconds
        self._overlap_tokens = trained.tokens - tokens

    async def _step(self, done: RoundResult, one_step: bool, overlap: Overlap) -> RoundResult:
        """Apply the decision of a round: extend the chain, and take the outer step if the round has a mean.

        `one_step`: the worker took only one step, so that the first offer was empty and the second covered all work.
        """
        head, mean, me = done.head, done.mean, self.me
        certificate, record = mean.certificate, mean.record
        if mean.outcome is Outcome.COMMITTED and head.roster == (me,):
            done = replace(done, outcome="alone")
        if mean.outcome not in (Outcome.COMMITTED, Outcome.SKIPPED):
            return done
        if not isinstance(certificate, Certificate) or not isinstance(record, Record):
            return done
        if record.state_root != head.state_root:  # the record follows a state that this peer does not hold
            blame = PeerFault(me.peer, "its state is not the one that the others hold")
            sent, received = mean.bytes_sent, mean.bytes_received
            blamed = (*mean.blamed, blame)
            lost = AveragingResult(Outcome.SUPERSEDED, blamed=blamed, bytes_sent=sent, bytes_received=received)
            return replace(done, mean=lost, outcome="")
        async with self._changes():
            self.chain.extend(certificate, record)
            if mean.outcome is Outcome.COMMITTED:
                part = self.fragments.part(head.key.fragment)
                size = len(self.anchor[part])
                delta, found = self._delta[:size], self._mean[:size]
                if self.feedback:
                    await self.feedback.conclude(me.peer, mean, delta, part)
                trained = self.chain.trained_at(head.key.lineage)
                finite = await overlap.step(self.state, trained, found, delta, self._keeps(mean, done.work, one_step))
                done = replace(done, finite=finite)
                self._remember(mean, done.work.tokens // self.fragments.count)
            await self._settled()
        return replace(done, outcome="fork") if record.kind == Kind.FORK else done

    def _keeps(self, mean: AveragingResult, work: LocalProgress, one_step: bool) -> bool:
        """Whether this peer keeps the work that it has handed in, because the mean does not include it.

        Other such work is dropped: it goes in the direction that the others' mean went already, and a peer that kept it
        would go there twice. A peer that was in its first inner step when the round was called had nothing to offer:
        the plan lists it without weight, or not at all. It keeps that step.
        """
        me = self.me.peer
        weight = mean.weights.get(me)
        late = weight == 0 or (weight is None and one_step and me not in mean.peers)
        return late and work.tokens > 0

    def _remember(self, mean: AveragingResult, tokens: int) -> None:
        """How much of this peer's work the round has counted, for the report of a switch of branch."""
        if self.me.peer in mean.peers:
            self._counted[self.chain.head.key.lineage] = tokens
            if len(self._counted) > KEEP_COUNTED:
                del self._counted[next(iter(self._counted))]

    # -- catching up --------------------------------------------------------------------------------------------------

    async def catch_up(self, sync: ChainSync, deadline: Deadline) -> RoundReport:
        """Switch to the best branch that others can prove, and fetch its state; a joiner fetches that of its head.

        What was trained since the anchor is dropped. Never raises for what other peers do: the outcome `undecided` says
        that nothing has changed, and that another try may succeed. The branch may have grown meanwhile: the next round
        finds out.
        """
        head, watch = self.chain.head, LapTimer()
        self._since = None  # what follows may be another round, or much later
        seconds = deadline - watch.began
        branch = await sync.better(watch.began + PROOF_SHARE * seconds)
        deadline = max(deadline, watch.began + watch.total() + (1 - PROOF_SHARE) * seconds)  # a long way takes longer
        chain = self.chain.copy()
        if branch:
            chain.switch(branch.ancestor.key.lineage, branch.links)
        reached = None
        if branch or self.chain.lacks_state:
            held = self._snapshots.held()
            attempt = CatchUp(
                sync.fetcher, chain, self.state, head.key.lineage, held, self._mean, self.fragments.part, deadline
            )
            reached = await self.activity.unless(lambda: self.may_be_away, attempt.run())
        lost_rounds, lost_tokens = 0, 0
        if reached:
            async with self._changes():
                lost_rounds, lost_tokens = await self._adopt(branch, reached)
        finite = reached.finite if reached else True
        report = self._report_catch_up(head, sync, watch, caught_up=reached is not None, finite=finite)
        replayed = reached.replayed_rounds if reached else 0
        return replace(report, lost_rounds=lost_rounds, lost_tokens=lost_tokens, replayed_rounds=replayed)

    async def _adopt(self, branch: Branch | None, reached: CatchUpResult) -> tuple[int, int]:
        """Returns the rounds, and the tokens of this peer, that the switch costs. Fragments that stay keep work."""
        changed = await self.fragments.changed(self.state, reached.state)
        await self.state.take(reached.state)
        if self.feedback:
            for part in changed:
                self.feedback.forget(part)
        lost = self.chain.switch(branch.ancestor.key.lineage, branch.links) if branch else ()
        self._snapshots.prune(self.chain)
        if reached.snapshot:
            self._keep_fetched(reached.snapshot)
        await self._settled()
        await self.fragments.restart(changed, self.anchor, self.chain.head.key.fragment)
        return len(lost), sum(self._counted.pop(link.lineage, 0) for link in lost)
