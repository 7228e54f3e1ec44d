"""A peer inside a run: its rounds, the reports of them, and leaving in good order."""

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

from node.membership.addresses import sound
from node.membership.membership import Membership
from node.outer.independent_loop import IndependentOuterLoop
from node.outer.replicated_loop import ReplicatedOuterLoop
from node.reporting.report import RoundReport
from node.reporting.status import EventSink
from node.runtime.metrics import LoopLag, vitals
from node.storage.journal import Journal
from node.storage.statedir import StateDir
from node.training.process import WorkerError
from node.ui.status_tracker import StatusTracker
from protocols.aio import task_group
from protocols.base import Clock, Compute, Deadline, Directory, PeerId
from protocols.sync.service import SyncServiceBase

log = logging.getLogger(__name__)

FINISH_SECONDS = 7.0
"""A peer that is asked to leave ends its round within so long, or leaves without ending it."""
OBSERVER_SECONDS = 1.0
"""The same for a peer that is not in the roster: only its goodbye takes time."""
FAREWELLS = 2
"""Rounds that a peer takes part in after it was asked to leave, if it was too late to leave in the rounds before."""
KEEP_BYTES = 1 << 30
"""A peer that leaves writes a checkpoint if its parameters are no larger: there is no time for more."""
LINGER_SECONDS = 20.0
"""After the last round, the peer stays so long at most for others that missed it and may ask for it."""
ANNOUNCED_SECONDS = 180.0
FIND_SECONDS = 20.0
FIRST_SECONDS = 5.0
MEET_SECONDS = 3.0
SETTLE_SECONDS = 2.0
"""After a sleep, until the clock's offset is known again, and p2pd knows its addresses."""
WAIT_SECONDS = 1.0
SCOPE = "run"
MAX_FOUND = 64
SAMPLE_PROMPT, SAMPLE_TOKENS, SAMPLE_TEMPERATURE = b"def ", 400, 0.7


class BootstrapDirectory(Directory, Protocol):
    """A directory that learns of peers from this one."""

    async def meet(self, peer: PeerId, deadline: Deadline) -> bool: ...


class Evaluator(Protocol):
    """Evaluates the outer parameters, and says how many threads it computes with."""

    @property
    def threads(self) -> int: ...

    async def evaluate(self) -> float: ...

    async def generate(self, prompt: bytes, tokens: int, temperature: float = 0.0, seed: int = 0) -> bytes: ...


Rounds: TypeAlias = Callable[
    [Callable[[], float], Callable[[], bool], Callable[[str, str], None]], AsyncIterator[RoundReport]
]
"""(wall clock, whether to begin another round, what to call with state and reason) -> reports."""


class OuterLoopStack(NamedTuple):
    """An outer loop, and what brings it from round to round; see `PeerSessionDeps`."""

    outer_loop: ReplicatedOuterLoop | IndependentOuterLoop
    sync: SyncServiceBase[Any]
    rounds: Rounds


@dataclass(frozen=True, slots=True)
class PeerSessionDeps:
    """What a session works with.

    Attributes:
        sync: asks other peers for what this one missed, and answers them, beside the rounds.
        rounds: runs the outer loop's rounds: a function of `node.outer.round_loops`.
        disk: runs what waits for the disk.
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


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """How long a session lasts.

    Attributes:
        run_rounds: rounds of the whole run.
        rounds: that this peer takes part in; None: all.
        wait_for_peers: peers that must be live before the first round, this one included.
    """

    run_rounds: int
    rounds: int | None
    wait_for_peers: int


class PeerSession:
    """Runs rounds until the run is over, this peer has done its share of them, or its user wants to leave.

    Beside the rounds it keeps the membership, the sync service and the directory running, and remembers the live peers.
    """

    def __init__(
        self, deps: PeerSessionDeps, limits: SessionLimits, status_tracker: StatusTracker, view: EventSink
    ) -> None:
        self._deps, self._limits, self._status_tracker, self._view = deps, limits, status_tracker, view
        self._done = self._farewells = 0
        self._evaluated = ""  # hash of the parameters that were evaluated last, or that the run starts from
        self._leave, self._reported = asyncio.Event(), asyncio.Event()

    def leave(self) -> None:
        """End the round under way, hand in its work, and end the session."""
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
            for each in (*helpers, watch):
                each.cancel()

    async def _limit_leaving(self, main: asyncio.Task[None]) -> None:
        """Cancel the rounds of a peer that was asked to leave and does not end its round in time."""
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
        self._farewells += 1
        return self._farewells <= FAREWELLS and self._is_expected()

    def _is_expected(self) -> bool:
        """Whether the others count on this peer: a member of their roster that just goes costs them a round's time."""
        roster = self._deps.outer_loop.chain.head.roster
        return len(roster) > 1 and self._deps.outer_loop.averager.me in roster

    def _over(self) -> bool:
        return self._deps.outer_loop.chain.trained >= self._limits.run_rounds

    async def _rounds(self) -> None:
        deps = self._deps
        await deps.outer_loop.settle()
        self._evaluated = deps.outer_loop.state.index.parameters_root.hex()
        await self._wait_for_others()
        deps.outer_loop.set_last_round(self._limits.rounds == 1)
        async for report in deps.rounds(deps.clock.wall, self._should_continue, self._status_tracker.set_state):
            await self._report(report)
            if self._limits.rounds is not None:
                deps.outer_loop.set_last_round(self._done >= self._limits.rounds - 1)
                if self._done >= self._limits.rounds:
                    deps.outer_loop.leave()
        if self._over() or 4 * len(deps.outer_loop.anchor) <= KEEP_BYTES:
            await deps.outer_loop.keep()
        if self._over() and not self._leave.is_set():
            await self._sample()
        if self._over():
            await deps.disk.run(deps.state.forget, 0)
        self._status_tracker.set_state("finished", "the run is over" if self._over() else "")

    async def _sample(self) -> None:
        """Keep a text that the model writes at the end of the run, if it writes text."""
        try:
            text = await self._deps.trainer.generate(SAMPLE_PROMPT, SAMPLE_TOKENS, SAMPLE_TEMPERATURE)
        except (WorkerError, TimeoutError) as error:
            log.info("no sample: %s", error or type(error).__name__)
        else:
            await self._deps.disk.run(partial(self._deps.state.keep_text, SAMPLE_PROMPT + text), 0)

    async def _wait_for_others(self) -> None:
        members, wanted = self._deps.membership, self._limits.wait_for_peers
        while not self._leave.is_set() and (here := len(members.live())) < wanted:
            self._status_tracker.set_state("waiting", f"for {wanted} peers to be here: {here} so far")
            await members.changed(members.version, asyncio.get_running_loop().time() + WAIT_SECONDS)

    async def _report(self, report: RoundReport) -> None:
        deps = self._deps
        self._done += deps.outer_loop.took_part(report)
        if report.params_hash != self._evaluated:
            self._evaluated = report.params_hash
            report = replace(report, held_out_loss=await self._held_out_loss())
        pids = self._status_tracker.pids()
        report = replace(report, threads=deps.trainer.threads, **asdict(vitals(deps.lag, pids)))
        deps.journal.write(report)
        self._status_tracker.reported(report)
        self._view.report(report)
        if not self._over():
            self._reported.set()
        gc.collect()  # a round's objects refer to each other, and hold its reduced parts: at 100 MB, 100 MB

    async def _remember(self) -> None:
        """Note the live peers after each round, beside the rounds: a checkpoint may keep the disk busy for seconds."""
        deps = self._deps
        while await self._reported.wait():
            self._reported.clear()
            live = {each.peer: each.addresses for each in deps.membership.contacts() if each.live}
            await deps.disk.run(partial(deps.state.remember, live), 0)

    async def _held_out_loss(self) -> float:
        """Evaluate the outer parameters; nan where the worker fails: the next round tries again."""
        try:
            return await self._deps.trainer.evaluate()
        except (WorkerError, TimeoutError) as error:
            log.warning("the state of this round is not evaluated: %s", error or type(error).__name__)
            return math.nan

    async def _linger(self) -> None:
        """Stay until all live peers are as far as this one: those that missed the last round can ask for it."""
        members, chain = self._deps.membership, self._deps.outer_loop.chain
        loop = asyncio.get_running_loop()
        until = loop.time() + LINGER_SECONDS
        while loop.time() < until and not self._leave.is_set():
            behind = [
                each
                for each in members.contacts()
                if each.live and not each.leaving and each.round < chain.head.key.round
            ]
            if not behind:
                return
            await asyncio.sleep(0.1)

    async def _discover(self) -> None:
        """Announce this peer's addresses in the directory, and look for other peers there, again and again."""
        loop, deps = asyncio.get_running_loop(), self._deps
        met: set[PeerId] = set()
        while True:
            until = loop.time() + FIND_SECONDS
            await deps.membership.changed(0, loop.time() + FIRST_SECONDS)  # it learns of peers from this one
            here = {member.peer for member in deps.membership.live()} - {deps.outer_loop.averager.me.peer}
            for peer in sorted(here - met):
                if await deps.directory.meet(peer, loop.time() + MEET_SECONDS):
                    met.add(peer)
            met &= here
            addresses = [address.rpartition("/p2p/")[0] for address in self._status_tracker.addresses()]
            value = json.dumps(addresses[:8]).encode()
            await deps.directory.announce(SCOPE, value, ANNOUNCED_SECONDS, until)
            for peer, found in await deps.directory.find(SCOPE, MAX_FOUND, until):
                deps.membership.hint(peer, _addresses(found))
            await self._pause(until)

    async def _pause(self, until: Deadline) -> None:
        """Wait; less long if this machine slept or moved: other peers look for it at its old addresses."""
        upset = self._deps.membership.host_monitor.upset
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await upset.wait()
                upset.clear()
                await asyncio.sleep(SETTLE_SECONDS)


def _addresses(value: bytes) -> tuple[str, ...]:
    """The addresses in a directory entry, which anyone may have written; none where it cannot be read."""
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return ()
    return sound(found) if isinstance(found, list) else ()
