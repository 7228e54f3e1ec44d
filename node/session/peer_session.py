"""A peer's session in a run: its rounds, their reports, and an orderly exit."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from node.membership.membership import Membership
from node.membership.peer_record import PeerRecord
from node.outer.outer_loop import FIRST_STEP_SECONDS, OuterLoop
from node.reporting.event_feed import EventFeed
from node.reporting.report import RoundEvaluation, RoundReport
from node.session.status_tracker import StatusTracker
from node.storage.statedir import StateDir
from node.training.remote import RemoteTrainer, WorkerError
from protocols.aio import task_group
from protocols.base import Compute, Outcome
from protocols.sync.service import SyncServiceBase

if TYPE_CHECKING:  # only runs with stages load its code
    from node.session.pipeline_session import PipelineSession
    from protocols.pipeline.held_out import HeldOutLoss

log = logging.getLogger(__name__)

MOVE_SECONDS = 60.0  # The same as `FINISH_SECONDS` for a peer that moves to another stage: its process stays
MOVE_FIRST_STEP_SECONDS = 30.0  # A mover is in no hurry: its first step counts, and the round is not skipped for it
FINISH_SECONDS = 7.0
"""Time that a peer has to finish its round after it was asked to leave. It then leaves without the round."""
OBSERVER_SECONDS = 1.0  # The same for a peer outside the roster, which only has to say goodbye
MAX_LAST_ROUNDS = 2
"""Further rounds that a leaving peer takes part in if it could not announce its leaving in time for an earlier one.

Those before its first offer that says so do not count: it would stay in the roster, and the others might not decide."""
KEEP_BYTES = 1 << 30
"""A leaving peer writes a checkpoint only if its parameters are no larger: there is no time for more."""
LINGER_SECONDS = 20.0  # Longest time that a peer stays after the last round, to serve it to peers that missed it
LAST_TEXT_SECONDS = 130.0
"""The same in a stage other than 0: peers of stage 0 evaluate the last round, and write a text, through all stages."""
GOODBYE_SECONDS = 0.3  # Time for a goodbye to reach the others after the last round
WAIT_SECONDS = 1.0
LAST_EVALUATION_SECONDS = 60.0
"""Longest time for which a peer of a run with stages waits for the evaluation of its last round."""
SAMPLE_BYTES, SAMPLE_TEMPERATURE = 400, 0.7
SHOWN_BYTES = 200
_BYTES_PER_TOKEN = 4  # Of a task that chooses its prompt: its tokens are not bytes, and take longer
MIN_ROUNDS, MIN_ROUNDS_OUTSIDE = 2, 10
"""A peer may join or leave in the middle of a single round, which then need not count. One that has just joined trains
without being counted until it is admitted to the roster, which may take several short rounds."""


class PeerSession:
    """Runs rounds until the run is over, this peer has done its number of them, or its user asks it to leave.

    Beside the rounds it runs the membership and the sync service, and saves the live peers' addresses.
    """

    def __init__(
        self,
        outer_loop: OuterLoop,
        sync: SyncServiceBase[Any],
        *,
        trainer: RemoteTrainer | PipelineSession,
        membership: Membership,
        state: StateDir,
        disk: Compute,
        status_tracker: StatusTracker,
        view: EventFeed,
        on_report: Callable[[RoundReport], None],
        on_evaluated: Callable[[RoundEvaluation], None] = lambda evaluation: None,
        run_rounds: int,
        rounds: int | None = None,
        wait_for_peers: int = 1,
        pipeline: PipelineSession | None = None,
    ) -> None:
        """`run_rounds` is the length of the run, `rounds` this peer's number of them; None: all.

        Before its first round begins, `wait_for_peers` peers must be live, this one included.
        """
        self._outer_loop, self._sync, self._trainer, self._pipeline = outer_loop, sync, trainer, pipeline
        self._membership, self._state, self._disk = membership, state, disk
        self._status_tracker, self._view, self._on_report = status_tracker, view, on_report
        self._run_rounds, self._limit, self._wait_for_peers = run_rounds, rounds, wait_for_peers
        self.done = self._last_rounds = 0  # rounds of this session that count for `rounds`
        self._is_member = False  # before its first round, a joiner is not
        self.outcome = SessionOutcome()
        self._evaluated = ""  # hash of the parameters that were evaluated last, or that the session starts from
        self._leave, self._reported, self._hurry = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.moves_to: int | None = None  # the stage to which this peer moves when the session is over
        self.moves_by_hand = False
        self._wants_text = asyncio.Event()
        self._on_evaluated = on_evaluated
        if pipeline:
            pipeline.evaluator.on_end = self._evaluated_beside

    def leave(self, to_stage: int | None = None, *, by_hand: bool = False) -> None:
        """Finish the round under way with the work done so far, then end the session: to move, or to leave the run."""
        self._leave.set()
        if to_stage is None:
            self._hurry.set()
        self.moves_to, self.moves_by_hand = to_stage, by_hand
        if to_stage is None:
            self._status_tracker.set_state("leaving", "finishing the round")
        else:
            self._status_tracker.set_state("moving", f"to stage {to_stage}: finishing the round of stage {self._stage}")
        self._membership.goodbye()
        self._outer_loop.leave(FIRST_STEP_SECONDS if to_stage is None else MOVE_FIRST_STEP_SECONDS)

    async def run(self) -> None:
        self._sync.complain_to(self._view.say)
        async with task_group() as group:
            helpers = [
                group.create_task(self._membership.run()),
                group.create_task(self._sync.run()),
                group.create_task(self._remember()),
                group.create_task(self._show_texts()),
            ]
            if self._pipeline:
                helpers.append(group.create_task(self._pipeline.evaluator.run()))
            main = group.create_task(self._rounds())
            watch = group.create_task(self._limit_leaving(main))
            await asyncio.wait([main])
            if not self._leave.is_set():
                if main.cancelled():
                    raise RuntimeError("the rounds were cancelled, and this peer was not asked to leave")
                await self._linger()
                self._membership.goodbye()
                if any(each.live for each in self._membership.contacts()):
                    await asyncio.sleep(GOODBYE_SECONDS)
            for each in (*helpers, watch):
                each.cancel()

    async def _limit_leaving(self, main: asyncio.Task[None]) -> None:
        """Cancel the rounds if the peer was asked to leave and does not finish its round in time."""
        await self._leave.wait()
        roster = {member.peer for member in self._outer_loop.chain.head.roster}
        with suppress(TimeoutError):
            async with asyncio.timeout(MOVE_SECONDS):
                await self._hurry.wait()
        if self._hurry.is_set():
            await asyncio.sleep(FINISH_SECONDS if self._status_tracker.peer in roster else OBSERVER_SECONDS)
        if not main.done():
            self._view.say("the round did not end in time: leaving without it")
            main.cancel()

    def _should_continue(self) -> bool:
        if self._over():
            return False
        enough = self._limit is not None and self.done >= self._limit
        if not enough and not self._leave.is_set():
            return True
        self._last_rounds += self._outer_loop.has_announced_leaving or not self._leave.is_set()
        return self._last_rounds <= MAX_LAST_ROUNDS and self._is_expected()

    def _is_expected(self) -> bool:
        """Whether other members count on this peer: one that leaves unannounced costs them the time of a round."""
        roster = self._outer_loop.chain.head.roster
        return len(roster) > 1 and self._outer_loop.me in roster

    def _over(self) -> bool:
        trained = self._outer_loop.chain.trained >= self._run_rounds
        return trained and (self._pipeline is None or self._pipeline.is_run_over())

    async def _rounds(self) -> None:
        loop = self._outer_loop
        await loop.settle()
        self._evaluated = loop.state.index.parameters_root.hex()
        await self._wait_for_others()
        self._is_member = loop.me in loop.chain.head.roster
        loop.last_round = self._limit == 1
        async for report in loop.rounds(self._sync, self._should_continue, self._status_tracker.set_state):
            await self._report(report)
            if self._limit is not None:
                loop.last_round = self.done >= self._limit - 1
                if self.done >= self._limit:
                    loop.leave()
        if self._over() or 4 * len(loop.anchor) <= KEEP_BYTES:
            await loop.keep()
        if self._pipeline:
            await self._pipeline.evaluator.finish(0.0 if self._leave.is_set() else LAST_EVALUATION_SECONDS)
        wants_text = self._over() and not self._leave.is_set() and self._stage == 0
        if wants_text and (text := await self._generate(SAMPLE_BYTES)):
            await self._disk.run(partial(self._state.keep_text, text), 0)
        if self._over():
            await self._disk.run(self._state.forget, 0)
        if self._over():
            self.moves_to = None
        if self.moves_to is None:
            self._status_tracker.set_state("finished", "the run is over" if self._over() else "")

    async def _generate(self, size: int) -> bytes | None:
        """A text of about this many bytes, and the prompt before it; None if the model cannot write one now."""
        prompt = self._trainer.sample_prompt
        tokens = size if prompt else size // _BYTES_PER_TOKEN
        try:
            return prompt + await self._trainer.generate(prompt, tokens, SAMPLE_TEMPERATURE)
        except (WorkerError, TimeoutError) as error:
            log.info("no text: %s", str(error) or type(error).__name__)
            return None

    async def _wait_for_others(self) -> None:
        members, wanted = self._membership, self._wait_for_peers
        while not self._leave.is_set():
            here = len(members.live())
            lacking = self._pipeline.waiting_reason() if self._pipeline and wanted > 1 else ""
            if here >= wanted and not lacking:
                return
            why = f"for {wanted} peers to be here: {here} so far" if here < wanted else lacking
            self._status_tracker.set_state("waiting", why)
            await members.changed(members.version, asyncio.get_running_loop().time() + WAIT_SECONDS)

    async def _report(self, report: RoundReport) -> None:
        self.done += self._outer_loop.took_part(report)
        self._judge(report)
        if self._pipeline:
            self._pipeline.announce_decided()
        # A pausing peer computes nothing.
        rests = self._outer_loop.activity.pauses
        due = self._outer_loop.chain.head.key.fragment == 0 or self._over()  # all fragments have been averaged
        evaluates = due and report.params_hash != self._evaluated and self._trainer.evaluates and not rests
        if evaluates:
            self._evaluated = report.params_hash
            if self._pipeline:
                self._pipeline.begin_evaluation(report)
            else:
                report = replace(report, held_out_loss=await self._held_out_loss())
        if evaluates and self._view.text_is_due():
            if self._pipeline:
                self._wants_text.set()
            else:
                await self._show_text()
        report = replace(report, threads=self._trainer.threads, **asdict(self._status_tracker.vitals()))
        self._on_report(self._pipeline.annotate(report) if self._pipeline else report)
        if not self._over():
            self._reported.set()
        gc.collect()  # a round's objects form cycles that hold its reduced parts: 100 MB for a 100 MB model

    def _judge(self, report: RoundReport) -> None:
        loop, was_member = self._outer_loop, self._is_member
        self._is_member = not loop.SHARES_ANCHOR or loop.me in loop.chain.head.roster
        if loop.activity.pauses or not (report.tokens or report.outcome != Outcome.SUPERSEDED):
            return
        own = report.weight != 0 if loop.SHARES_ANCHOR else report.tokens > 0
        self.outcome.round(report.tokens, loop.took_part(report) and own, was_member)

    async def _remember(self) -> None:
        """Save the live peers' addresses after each round, in a task of its own: a checkpoint may block the disk."""
        while await self._reported.wait():
            self._reported.clear()
            live = {each.peer: each.addresses for each in self._membership.contacts() if each.live}
            await self._disk.run(partial(self._state.remember, live), 0)

    async def _show_texts(self) -> None:
        """With stages, a text is written beside the rounds."""
        while await self._wants_text.wait():
            self._wants_text.clear()
            await self._show_text()

    async def _show_text(self) -> None:
        if text := await self._generate(SHOWN_BYTES):
            self._view.show_text(text)

    async def _held_out_loss(self) -> float:
        """Evaluate the outer parameters; nan if the worker fails. The next round tries again."""
        try:
            loss = await cast(RemoteTrainer, self._trainer).evaluate()
        except (WorkerError, TimeoutError) as error:
            self._not_evaluated(str(error) or type(error).__name__)
            return math.nan
        self.outcome.evaluation()
        return loss

    def _not_evaluated(self, why: str) -> None:
        log.warning("the state of this round is not evaluated: %s", why)
        if not self._leave.is_set():
            self.outcome.evaluation(why)

    def _evaluated_beside(self, report: RoundReport, found: HeldOutLoss, why: str) -> None:
        """Report the loss of a round of a run with stages. `why` the evaluation failed; empty if it did not."""
        if found.is_enough:
            self.outcome.evaluation()
            now = self._status_tracker.clock.wall()
            self._on_evaluated(RoundEvaluation(report.round, report.lineage, found.mean, found.samples, now))
        elif why:
            self._not_evaluated(why)

    async def _linger(self) -> None:
        """Stay until no live peer needs this one any more.

        Those of the own stage may have missed the last round, and fetch it. Those of stage 0 evaluate the last round
        and write a text through all stages, and leave then.
        """
        loop, members = asyncio.get_running_loop(), self._membership
        until = loop.time() + (LAST_TEXT_SECONDS if self._stage else LINGER_SECONDS)
        while not self._leave.is_set():
            live = [each for each in members.contacts() if each.here and not each.said.leaving]
            if not any(self._needs_this(each) for each in live) or loop.time() >= until:
                return
            await asyncio.sleep(0.1)

    def _needs_this(self, peer: PeerRecord) -> bool:
        if peer.stage != self._stage:
            return peer.stage == 0 and self._over()
        return peer.said.round < self._outer_loop.chain.head.key.round

    @property
    def is_leaving(self) -> bool:
        return self._leave.is_set()

    @property
    def _stage(self) -> int:
        """This peer's stage; 0 in a run without stages."""
        return self._membership.stage_of(self._outer_loop.me.peer) or 0


class SessionOutcome:
    """Whether a session's rounds and evaluations came to anything."""

    def __init__(self) -> None:
        self._rounds = self._as_member = self._counted = self._tokens = self._evaluations = self._evaluated = 0
        self._error = ""

    def round(self, tokens: int, counted: bool, is_member: bool) -> None:
        """Count a round in which this peer was to train. `counted`: whether its tokens counted; only a member's can."""
        self._rounds += 1
        self._as_member += is_member
        self._tokens += tokens
        self._counted += counted

    def evaluation(self, error: str = "") -> None:
        """Count an evaluation; `error` is empty if it worked."""
        self._evaluations += 1
        self._evaluated += not error
        self._error = error

    def failure(self, worker_failure: str) -> str:
        """What came to nothing, in one user-facing line; empty if all is well."""
        found = []
        enough = self._as_member >= MIN_ROUNDS or self._rounds >= MIN_ROUNDS_OUTSIDE
        if enough and not self._counted:
            why = "see the outcomes in rounds.jsonl" if self._tokens else "no inner step had a finite loss and gradient"
            why = worker_failure or why
            found.append(f"none of {self._rounds} rounds counted what this peer trained ({why})")
        if self._evaluations and not self._evaluated:
            found.append(f"none of {self._evaluations} evaluations worked ({self._error})")
        return "; ".join(found)
