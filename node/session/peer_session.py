"""A peer inside a run: rounds, what is told of them, and leaving in good order."""

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
"""A peer that is asked to leave ends its round within so long, or leaves without."""
LOOK_ON_SECONDS = 1.0
"""The same for a peer that is not in the roster: for its goodbye."""
FAREWELLS = 2
"""Rounds that a peer takes part in after it was asked to leave, if those before were too far gone to let it go."""
KEEP_BYTES = 1 << 30
"""Who leaves makes a checkpoint of where it stands, if the parameters are no more: there is not time for any size."""
LINGER_SECONDS = 20.0
"""After the last round, others who missed it may still ask for it; this long at most, and until all have it."""
ANNOUNCED_SECONDS = 180.0
FIND_SECONDS = 20.0
FIRST_SECONDS = 5.0
MEET_SECONDS = 3.0
SETTLE_SECONDS = 2.0
"""After a sleep, until it is known again what the clock is off by, and p2pd has seen where it is."""
WAIT_SECONDS = 1.0
SCOPE = "run"
MAX_FOUND = 64
SAMPLE_PROMPT, SAMPLE_TOKENS, SAMPLE_TEMPERATURE = b"def ", 400, 0.7


class BootstrapDirectory(Directory, Protocol):
    """A directory that grows by peers whom we know."""

    async def meet(self, peer: PeerId, deadline: Deadline) -> bool: ...


class Evaluator(Protocol):
    """What can tell how good the outer parameters are, and how many threads it computes with."""

    @property
    def threads(self) -> int: ...

    async def evaluate(self) -> float: ...

    async def generate(self, prompt: bytes, tokens: int, temperature: float = 0.0, seed: int = 0) -> bytes: ...


Rounds: TypeAlias = Callable[
    [Callable[[], float], Callable[[], bool], Callable[[str, str], None]], AsyncIterator[RoundReport]
]
"""(wall time, whether to go on, who is told what the peer does) -> reports."""


class OuterLoopStack(NamedTuple):
    """How a peer comes from round to round; see `PeerSessionDeps`."""

    outer_loop: ReplicatedOuterLoop | IndependentOuterLoop
    sync: SyncServiceBase[Any]
    rounds: Rounds


@dataclass(frozen=True, slots=True)
class PeerSessionDeps:
    """What a stay is made of.

    Attributes:
        sync: asks and answers others beside the rounds.
        rounds: those of the replica, `node.outer.round_loops`.
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
    """How long a stay lasts.

    Attributes:
        run_rounds: rounds of the whole run.
        rounds: that this peer takes part in; None: all.
        wait_for_peers: so many must be here before the first, this one included.
    """

    run_rounds: int
    rounds: int | None
    wait_for_peers: int


class PeerSession:
    """Runs rounds until the run is over, this peer has done its share of them, or its user wants to leave."""

    def __init__(
        self, deps: PeerSessionDeps, limits: SessionLimits, status_tracker: StatusTracker, view: EventSink
    ) -> None:
        self._deps, self._limits, self._status_tracker, self._view = deps, limits, status_tracker, view
        self._done = self._farewells = 0
        self._evaluated = ""  # hash of the parameters whose loss was told, or that the run starts from
        self._leave, self._reported = asyncio.Event(), asyncio.Event()

    def leave(self) -> None:
        """End the round under way, and go."""
        self._leave.set()
        self._status_tracker.set_state("leaving", "the round ends, its work is handed in")
        self._deps.membership.goodbye()
        self._deps.outer_loop.leave()

    async def run(self) -> None:
        """The whole stay; returns when it is over."""
        deps = self._deps
        self._status_tracker.progress = deps.sync.sync_progress.progress
        deps.sync.complain_to(self._view.say)
        async with task_group() as group:
            helpers = [
                group.create_task(deps.membership.run()),
                group.create_task(deps.sync.run()),
                group.create_task(self._discover()),
                group.create_task(self._remember()),
            ]
            main = group.create_task(self._rounds())
            watch = group.create_task(self._hurry(main))
            await asyncio.wait([main])
            if not self._leave.is_set():
                if main.cancelled():
                    raise RuntimeError("the rounds were cancelled, and nobody asked for that")
                await self._linger()
            for each in (*helpers, watch):
                each.cancel()

    async def _hurry(self, main: asyncio.Task[None]) -> None:
        """Who is asked to leave does not wait for others for long; who looks on has nothing to hand in."""
        await self._leave.wait()
        roster = {member.peer for member in self._deps.outer_loop.chain.head.roster}
        await asyncio.sleep(FINISH_SECONDS if self._status_tracker.peer in roster else LOOK_ON_SECONDS)
        if not main.done():
            self._view.say("the round did not end in time: leaving without it")
            main.cancel()

    def _goes_on(self) -> bool:
        if self._over():
            return False
        enough = self._limits.rounds is not None and self._done >= self._limits.rounds
        if not enough and not self._leave.is_set():
            return True
        self._farewells += 1
        return self._farewells <= FAREWELLS and self._is_awaited()

    def _is_awaited(self) -> bool:
        """Whether the others count on us: who is in their roster and just goes costs them a round's time."""
        roster = self._deps.outer_loop.chain.head.roster
        return len(roster) > 1 and self._deps.outer_loop.averager.me in roster

    def _over(self) -> bool:
        return self._deps.outer_loop.chain.trained >= self._limits.run_rounds

    async def _rounds(self) -> None:
        deps = self._deps
        await deps.outer_loop.settle()
        self._evaluated = deps.outer_loop.state.index.parameters_root.hex()
        await self._wait_for_others()
        deps.outer_loop.last = self._limits.rounds == 1
        async for report in deps.rounds(deps.clock.wall, self._goes_on, self._status_tracker.set_state):
            await self._report(report)
            if self._limits.rounds is not None:
                deps.outer_loop.last = self._done >= self._limits.rounds - 1
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
        """Keep something that the model writes at the end of the run, if it writes: for people."""
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
        """Note after each round who is here, behind its back: the disk may be busy with a checkpoint for seconds."""
        deps = self._deps
        while await self._reported.wait():
            self._reported.clear()
            live = {each.peer: each.addresses for each in deps.membership.contacts() if each.live}
            await deps.disk.run(partial(deps.state.remember, live), 0)

    async def _held_out_loss(self) -> float:
        """Unknown where the worker fails: what the round came to is told all the same, and the next asks for it."""
        try:
            return await self._deps.trainer.evaluate()
        except (WorkerError, TimeoutError) as error:
            log.warning("the state of this round is not evaluated: %s", error or type(error).__name__)
            return math.nan

    async def _linger(self) -> None:
        """Stay until all who are here are as far as we: who missed the last round, or looked on, can ask us."""
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
        """Tell the directory where we are, and ask it for others, again and again."""
        loop, deps = asyncio.get_running_loop(), self._deps
        met: set[PeerId] = set()
        while True:
            until = loop.time() + FIND_SECONDS
            await deps.membership.changed(0, loop.time() + FIRST_SECONDS)  # a directory begins with whom we know
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
            await self._quiet(until)

    async def _quiet(self, until: Deadline) -> None:
        """Wait, less long if this machine slept or moved: others look for it at its old addresses."""
        upset = self._deps.membership.host_monitor.upset
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await upset.wait()
                upset.clear()
                await asyncio.sleep(SETTLE_SECONDS)


def _addresses(value: bytes) -> tuple[str, ...]:
    """What a directory says: a hint, perhaps nonsense."""
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return ()
    return sound(found) if isinstance(found, list) else ()
