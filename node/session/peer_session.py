"""A peer's session in a run: its rounds, their reports, and an orderly exit."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import math
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias

from node.membership.hello import sound
from node.membership.membership import Membership
from node.membership.peer_record import PeerRecord
from node.outer.independent_loop import IndependentOuterLoop
from node.outer.replicated_loop import ReplicatedOuterLoop
from node.reporting.report import RoundReport
from node.reporting.status import EventSink
from node.runtime.metrics import LoopLag, vitals
from node.session.fatal import SessionOutcome
from node.storage.journal import Journal
from node.storage.statedir import StateDir
from node.training.process import WorkerError
from node.ui.status_tracker import StatusTracker
from protocols.aio import task_group
from protocols.base import Clock, Compute, Deadline, Directory, Outcome, PeerId
from protocols.sync.service import SyncServiceBase

log = logging.getLogger(__name__)

FINISH_SECONDS = 7.0
"""Time that a peer has to finish its round after it was asked to leave. It then leaves without the round."""
OBSERVER_SECONDS = 1.0
"""The same for a peer outside the roster, which only has to say goodbye."""
MAX_LAST_ROUNDS = 2
"""Further rounds that a leaving peer takes part in if it could not announce its leaving in time for an earlier one."""
KEEP_BYTES = 1 << 30
"""A leaving peer writes a checkpoint only if its parameters are no larger: there is no time for more."""
LINGER_SECONDS = 20.0
"""Longest time that a peer stays after the last round, to serve it to peers that missed it."""
LAST_TEXT_SECONDS = 130.0
"""The same in a stage other than 0: peers of stage 0 evaluate the last round, and write a text, through all stages."""
GOODBYE_SECONDS = 0.3
"""Time for a goodbye to reach the others after the last round."""
ANNOUNCED_SECONDS = 180.0
FIND_SECONDS = 20.0
FIRST_SECONDS = 5.0
MEET_SECONDS = 3.0
SETTLE_SECONDS = 2.0
"""Time after a suspend until the clock's offset and p2pd's addresses are known again."""
WAIT_SECONDS = 1.0
SCOPE = "run"
MAX_FOUND = 64
SAMPLE_PROMPT, SAMPLE_BYTES, SAMPLE_TEMPERATURE = b"def ", 400, 0.7
SHOWN_BYTES = 200
_BYTES_PER_TOKEN = 4
"""Of a task that chooses its prompt: its tokens are not bytes, and take longer."""


class BootstrapDirectory(Directory, Protocol):
    """A directory that this peer can introduce to other peers."""

    async def meet(self, peer: PeerId, deadline: Deadline) -> bool: ...


class Evaluator(Protocol):
    """Evaluates the outer parameters and generates text; `threads` is the number of threads that it computes with."""

    @property
    def threads(self) -> int: ...

    async def evaluate(self) -> float: ...

    async def generate(self, prompt: bytes, tokens: int, temperature: float = 0.0, seed: int = 0) -> bytes: ...


class TextReader(Protocol):
    """Reads texts that the model generates, now and then."""

    def text_is_due(self) -> bool: ...

    def show_text(self, text: bytes) -> None: ...


Rounds: TypeAlias = Callable[
    [Callable[[], float], Callable[[], bool], Callable[[str, str], None]], AsyncIterator[RoundReport]
]
"""(wall clock, whether to begin another round, callback for state and reason) -> reports."""


class OuterLoopStack(NamedTuple):
    """An outer loop with its state sync and the function that runs its rounds; see `PeerSessionDeps`."""

    outer_loop: ReplicatedOuterLoop | IndependentOuterLoop
    sync: SyncServiceBase[Any]
    rounds: Rounds


@dataclass(frozen=True, slots=True)
class PeerSessionDeps:
    """Dependencies of a session.

    Attributes:
        sync: fetches what this peer missed, and serves other peers, beside the rounds.
        rounds: runs the outer loop's rounds: a function of `node.outer.round_loops`.
        disk: runs blocking disk operations.
        annotate: adds to a report what only the trainer knows.
        is_run_over: whether no other stage needs this peer any more, once its own rounds are over.
        prompt: what texts that the model generates begin with; empty: the task takes one from its held-out texts.
        lacking: names the stages without a live peer, as shown to the user; empty if there are none.
        texts: takes texts that the model generates while the run goes on; None: none are generated.
        on_decided: called when a round has ended, before its evaluation.
        on_round_end: called after each report.
    """

    outer_loop: ReplicatedOuterLoop | IndependentOuterLoop
    sync: SyncServiceBase[Any]
    rounds: Rounds
    trainer: Evaluator
    membership: Membership
    directory: BootstrapDirectory
    state: StateDir
    journal: Journal
    lag: LoopLag
    clock: Clock
    disk: Compute
    annotate: Callable[[RoundReport], RoundReport] = lambda report: report
    is_run_over: Callable[[], bool] = lambda: True
    prompt: bytes = SAMPLE_PROMPT
    lacking: Callable[[], str] = lambda: ""
    texts: TextReader | None = None
    on_decided: Callable[[], None] = lambda: None
    on_round_end: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """How long a session lasts.

    Attributes:
        run_rounds: length of the run, in rounds.
        rounds: number of rounds that this peer takes part in; None: all.
        wait_for_peers: peers that must be live before the first round, this one included.
    """

    run_rounds: int
    rounds: int | None
    wait_for_peers: int


class PeerSession:
    """Runs rounds until the run is over, this peer has done its number of them, or its user asks it to leave.

    Beside the rounds it runs the membership, the sync service and the directory, and saves the live peers' addresses.

    Attributes:
        outcome: whether the rounds came to anything so far.
    """

    def __init__(
        self, deps: PeerSessionDeps, limits: SessionLimits, status_tracker: StatusTracker, view: EventSink
    ) -> None:
        self._deps, self._limits, self._status_tracker, self._view = deps, limits, status_tracker, view
        self._done = self._last_rounds = 0
        self._is_member = False  # before its first round, a joiner is not
        self.outcome = SessionOutcome()
        self._evaluated = ""  # hash of the parameters that were evaluated last, or that the session starts from
        self._leave, self._reported = asyncio.Event(), asyncio.Event()

    def leave(self) -> None:
        """Finish the round under way with the work done so far, then end the session."""
        self._leave.set()
        self._status_tracker.set_state("leaving", "the round ends, its work is handed in")
        self._deps.membership.goodbye()
        self._deps.outer_loop.leave()

    async def run(self) -> None:
        """Run the whole session; returns when it is over."""
        deps = self._deps
        deps.sync.complain_to(self._view.say)
        async with task_group() as group:
            helpers = [
                group.create_task(deps.membership.run()),
                group.create_task(deps.sync.run()),
                group.create_task(self._discover()),
                group.create_task(self._remember()),
            ]
            main = group.create_task(self._rounds())
            watch = group.create_task(self._limit_leaving(main))
            await asyncio.wait([main])
            if not self._leave.is_set():
                if main.cancelled():
                    raise RuntimeError("the rounds were cancelled, and this peer was not asked to leave")
                await self._linger()
                await self._say_goodbye()
            for each in (*helpers, watch):
                each.cancel()

    async def _limit_leaving(self, main: asyncio.Task[None]) -> None:
        """Cancel the rounds if the peer was asked to leave and does not finish its round in time."""
        await self._leave.wait()
        roster = {member.peer for member in self._deps.outer_loop.chain.head.roster}
        await asyncio.sleep(FINISH_SECONDS if self._status_tracker.peer in roster else OBSERVER_SECONDS)
        if not main.done():
            self._view.say("the round did not end in time: leaving without it")
            main.cancel()

    def _should_continue(self) -> bool:
        if self._over():
            return False
        enough = self._limits.rounds is not None and self._done >= self._limits.rounds
        if not enough and not self._leave.is_set():
            return True
        self._last_rounds += 1
        return self._last_rounds <= MAX_LAST_ROUNDS and self._is_expected()

    def _is_expected(self) -> bool:
        """Whether other members count on this peer: one that leaves unannounced costs them the time of a round."""
        roster = self._deps.outer_loop.chain.head.roster
        return len(roster) > 1 and self._deps.outer_loop.averager.me in roster

    def _over(self) -> bool:
        return self._deps.outer_loop.chain.trained >= self._limits.run_rounds and self._deps.is_run_over()

    async def _rounds(self) -> None:
        deps = self._deps
        await deps.outer_loop.settle()
        self._evaluated = deps.outer_loop.state.index.parameters_root.hex()
        await self._wait_for_others()
        self._is_member = deps.outer_loop.averager.me in deps.outer_loop.chain.head.roster
        deps.outer_loop.set_last_round(self._limits.rounds == 1)
        async for report in deps.rounds(deps.clock.wall, self._should_continue, self._status_tracker.set_state):
            await self._report(report)
            if self._limits.rounds is not None:
                deps.outer_loop.set_last_round(self._done >= self._limits.rounds - 1)
                if self._done >= self._limits.rounds:
                    deps.outer_loop.leave()
        if self._over() or 4 * len(deps.outer_loop.anchor) <= KEEP_BYTES:
            await deps.outer_loop.keep()
        if self._over() and not self._leave.is_set() and self._stage == 0:
            await self._sample()
        if self._over():
            await deps.disk.run(deps.state.forget, 0)
        self._status_tracker.set_state("finished", "the run is over" if self._over() else "")

    async def _sample(self) -> None:
        """Save a text that the model generates at the end of the run, if it can generate text."""
        try:
            text = await self._generate(SAMPLE_BYTES)
        except (WorkerError, TimeoutError) as error:
            log.info("no sample: %s", str(error) or type(error).__name__)
        else:
            await self._deps.disk.run(partial(self._deps.state.keep_text, text), 0)

    async def _show_text(self) -> None:
        """Let the model write a short text, if the page is open and the latest text is old."""
        texts = self._deps.texts
        if texts is None or self._stage or not texts.text_is_due():
            return
        try:
            text = await self._generate(SHOWN_BYTES)
        except (WorkerError, TimeoutError) as error:
            log.info("no text for the page: %s", str(error) or type(error).__name__)
        else:
            texts.show_text(text)

    async def _generate(self, size: int) -> bytes:
        """A text of about this many bytes, and the prompt before it."""
        prompt = self._deps.prompt
        tokens = size if prompt else size // _BYTES_PER_TOKEN
        return prompt + await self._deps.trainer.generate(prompt, tokens, SAMPLE_TEMPERATURE)

    async def _wait_for_others(self) -> None:
        members, wanted = self._deps.membership, self._limits.wait_for_peers
        while not self._leave.is_set():
            here, lacking = len(members.live()), self._deps.lacking() if wanted > 1 else ""
            if here >= wanted and not lacking:
                return
            why = f"for {wanted} peers to be here: {here} so far" if here < wanted else lacking
            self._status_tracker.set_state("waiting", why)
            await members.changed(members.version, asyncio.get_running_loop().time() + WAIT_SECONDS)

    async def _report(self, report: RoundReport) -> None:
        deps = self._deps
        self._done += deps.outer_loop.took_part(report)
        self._judge(report)
        deps.on_decided()
        # A pausing peer computes nothing.
        if report.params_hash != self._evaluated and not deps.outer_loop.activity.pauses:
            self._evaluated = report.params_hash
            report = replace(report, held_out_loss=await self._held_out_loss())
            await self._show_text()
        pids = self._status_tracker.pids()
        report = deps.annotate(replace(report, threads=deps.trainer.threads, **asdict(vitals(deps.lag, pids))))
        deps.journal.write(report)
        self._status_tracker.reported(report)
        self._view.report(report)
        deps.on_round_end()
        if not self._over():
            self._reported.set()
        gc.collect()  # a round's objects form cycles that hold its reduced parts: 100 MB for a 100 MB model

    def _judge(self, report: RoundReport) -> None:
        loop, was_member = self._deps.outer_loop, self._is_member
        self._is_member = not loop.SHARES_ANCHOR or loop.averager.me in loop.chain.head.roster
        if loop.activity.pauses or not (report.tokens or report.outcome != Outcome.SUPERSEDED):
            return
        own = report.weight != 0 if loop.SHARES_ANCHOR else report.tokens > 0
        self.outcome.round(report.tokens, loop.took_part(report) and own, was_member)

    async def _remember(self) -> None:
        """Save the live peers' addresses after each round, in a task of its own: a checkpoint may block the disk."""
        deps = self._deps
        while await self._reported.wait():
            self._reported.clear()
            live = {each.peer: each.addresses for each in deps.membership.contacts() if each.live}
            await deps.disk.run(partial(deps.state.remember, live), 0)

    async def _held_out_loss(self) -> float:
        """Evaluate the outer parameters; nan if the worker fails. The next round tries again."""
        try:
            loss = await self._deps.trainer.evaluate()
        except (WorkerError, TimeoutError) as error:
            why = str(error) or type(error).__name__
            log.warning("the state of this round is not evaluated: %s", why)
            if not self._leave.is_set():
                self.outcome.evaluation(why)
            return math.nan
        self.outcome.evaluation()
        return loss

    async def _linger(self) -> None:
        """Stay until no live peer needs this one any more.

        Those of the own stage may have missed the last round, and fetch it. Those of stage 0 evaluate the last round
        and write a text through all stages, and leave then.
        """
        loop, members = asyncio.get_running_loop(), self._deps.membership
        until = loop.time() + (LAST_TEXT_SECONDS if self._stage else LINGER_SECONDS)
        while not self._leave.is_set():
            live = [each for each in members.contacts() if each.here and not each.said.leaving]
            if not any(self._needs_this(each) for each in live) or loop.time() >= until:
                return
            await asyncio.sleep(0.1)

    async def _say_goodbye(self) -> None:
        """Tell the others that this peer leaves in good order, and wait until they have probably heard it."""
        members = self._deps.membership
        members.goodbye()
        if any(each.live for each in members.contacts()):
            await asyncio.sleep(GOODBYE_SECONDS)

    def _needs_this(self, peer: PeerRecord) -> bool:
        if peer.stage != self._stage:
            return peer.stage == 0 and self._over()
        return peer.said.round < self._deps.outer_loop.chain.head.key.round

    @property
    def _stage(self) -> int:
        """This peer's stage; 0 in a run without stages."""
        return self._deps.membership.stage_of(self._deps.outer_loop.averager.me.peer) or 0

    async def _discover(self) -> None:
        """Announce this peer's addresses in the directory, and look for other peers there, until cancelled."""
        loop, deps = asyncio.get_running_loop(), self._deps
        met: set[PeerId] = set()
        while True:
            until = loop.time() + FIND_SECONDS
            # the directory learns of peers from the membership
            await deps.membership.changed(0, loop.time() + FIRST_SECONDS)
            here = {member.peer for member in deps.membership.live()} - {deps.outer_loop.averager.me.peer}
            for peer in sorted(here - met):
                if await deps.directory.meet(peer, loop.time() + MEET_SECONDS):
                    met.add(peer)
            met &= here
            addresses = [address.rpartition("/p2p/")[0] for address in self._status_tracker.addresses()]
            value = json.dumps(addresses[:8]).encode()
            await deps.directory.announce(SCOPE, value, ANNOUNCED_SECONDS, until)
            for peer, found in await deps.directory.find(SCOPE, MAX_FOUND, until):
                deps.membership.add_candidate(peer, _addresses(found))
            await self._pause(until)

    async def _pause(self, until: Deadline) -> None:
        """Wait until the given time, or less if this machine slept or moved: others may have its old addresses."""
        announce_again = self._deps.membership.host_monitor.announce_again
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await announce_again.wait()
                announce_again.clear()
                await asyncio.sleep(SETTLE_SECONDS)


def _addresses(value: bytes) -> tuple[str, ...]:
    """The addresses in a directory entry, which any peer may have written; none if the entry is malformed."""
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return ()
    return sound(found) if isinstance(found, list) else ()
