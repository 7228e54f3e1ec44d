"""One peer, from the start of its processes to their end: it joins or starts a run, trains, and leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from node.config.derived import lent_devices, stage_values, stream_seed, unused_gpus, worker_spec
from node.config.manifest import Manifest, ManifestError, unseal
from node.config.peer_config import PeerConfig
from node.config.run_config import RunConfig
from node.config.toml import ConfigError
from node.joining import resume
from node.joining.bootstrap import RunInfo
from node.joining.overlap_plan import choose_overlap
from node.joining.run_selector import RunSelector, asks, found_run, run_id
from node.membership.invitations import Ticket
from node.network.daemon import DaemonError, PortTaken
from node.reporting.status import EventSink, Status, join_command, narrow
from node.runtime.clock import monotonic_seconds
from node.runtime.identity import IdentityError, verify
from node.runtime.program import typed
from node.session.build import open_session
from node.session.fatal import AGAIN, NO_RESULT, NO_WORKER, REPLACED, FatalPeerError
from node.session.peer_session import PeerSession
from node.session.private_run import read_manifest
from node.session.processes import PeerProcesses
from node.session.stage_entrance import StageEntrance, require_stage
from node.storage.statedir import StateDir, StateError, read_stage
from node.training.remote import RemoteTrainer, WorkerError, WorkerSpec
from protocols.base import PeerId
from protocols.registry import INDEPENDENT_PROTOCOLS, REPLICATED_PROTOCOLS

if TYPE_CHECKING:  # only a peer with --own-loop loads it
    from node.training.script import ScriptEntrance

Entered: TypeAlias = tuple[Manifest, RunInfo, resume.RestartPoint, RemoteTrainer, StageEntrance | None]
"""The run, what joiners get of it, from where this peer starts, its worker, and its stage if there are stages."""


class Peer:
    """A volunteer's peer. `run` starts its processes, joins or starts a run, trains in a `PeerSession` and leaves."""

    def __init__(
        self,
        config: PeerConfig,
        run: RunConfig | None,
        state: StateDir,
        view: EventSink,
        on_asked: Callable[..., None] | None = None,
        ticket: Ticket | None = None,
    ) -> None:
        """`run` starts if no address leads to one; a run in the state directory must agree with it.

        `on_asked` is called without arguments when the control channel asks the peer to finish, and with a reason when
        the peer has to leave because it has no worker. By default: `finish`.
        """
        self._config, self._wanted, self._state, self._ticket = config, run, state, ticket
        self._on_asked = on_asked or self.finish
        self._processes = PeerProcesses(config, state, view)
        self._tracker, self._say = self._processes.tracker, self._processes.view.say
        self._selector = RunSelector(config, state, (*REPLICATED_PROTOCOLS, *INDEPENDENT_PROTOCOLS), self._say)
        self._session: PeerSession | None = None
        self._main: asyncio.Task[None] | None = None
        self._scripts: ScriptEntrance | None = None
        self._finishing, self._failure, self._no_worker, self._no_result = False, "", "", ""
        self._asks_again = False

    def finish(self, why: str = "") -> None:
        """Finish the round under way, then leave. Before the session begins, leave at once."""
        if self._session:
            self._finishing = True
            self._session.leave()
        elif self._main and not self._finishing:
            self._main.cancel()
        self._finishing = True

    def status(self) -> Status:
        return self._tracker.status()

    async def run(self) -> int:
        """Join or start a run, train and leave; returns the process's exit code, or raises `FatalPeerError`.

        `AGAIN`: this peer has lost its stage before the run has begun, and has to be started again.
        """
        me = asyncio.current_task()
        try:
            self._main = asyncio.create_task(self._take_part())
            await self._main
        except asyncio.CancelledError:
            if me is None or me.cancelling() or not (self._finishing or self._failure or self._asks_again):
                raise
        except (StateError, IdentityError, DaemonError, WorkerError, ManifestError, ConfigError) as error:
            # A port may be free soon: a service tries again, as it does not after a request that cannot be carried out.
            raise FatalPeerError(str(error), 1 if isinstance(error, PortTaken) else 2) from None
        if self._failure:
            raise FatalPeerError(self._failure)
        if self._asks_again and not self._finishing:
            return AGAIN
        if self._no_worker:
            raise FatalPeerError(self._no_worker, NO_WORKER)
        if self._no_result:
            raise FatalPeerError(self._no_result, NO_RESULT)
        self._tracker.set_state("finished", self._tracker.reason)
        return 0

    def _end(self, line: str) -> None:
        """Finish without an error because the run is over."""
        self._say(line)
        self._tracker.set_state("finished", "the run is over")

    def _fail(self, why: str) -> None:
        self._failure = why
        if self._main:
            self._main.cancel()

    def _ask_again(self, why: str) -> None:
        self._say(f"{why}: asking for a stage again")
        self._asks_again = True
        if self._main:
            self._main.cancel()

    def _give_up_training(self, why: str) -> None:
        """Leave in good order because the worker cannot be restarted; `run` raises the reason at the end.

        Before there is a session, the trainer's own error ends the peer.
        """
        if self._session:
            self._no_worker = why
            self._on_asked("there is no worker any more")

    async def _take_part(self) -> None:
        """Find the run and train in it, until it is over or this peer leaves."""
        processes, selector = self._processes, self._selector
        if line := selector.over(self._wanted):
            return self._end(line)
        self._prepare_private()
        async with processes.running(selector.judge, self._on_asked), AsyncExitStack() as stack:
            if self._config.own_loop:
                from node.training.script import ScriptEntrance

                self._scripts = await stack.enter_async_context(ScriptEntrance(self._state.path, self._on_asked))
            if self._ticket:
                self._tracker.set_state("joining", "asking for a pass")
                await processes.private.redeem(self._ticket, processes.transport, processes.transport.connect)
            run = await self._find_run()
            if run and (line := selector.is_over(run)):
                return self._end(line)
            enter: Callable[[AsyncExitStack], Awaitable[Entered]]
            enter = partial(self._join_run, run) if run else self._start_run
            while moved := await self._train(enter):
                enter = partial(self._arrive, *moved)

    def _prepare_private(self) -> None:
        """Keep strangers out before anything is served, if the run may be private."""
        private, wanted = self._processes.private, self._wanted
        private.exchange.on_barred = lambda revocation: self._fail(private.removed_line(revocation))
        held = None if self._config.new else read_manifest(self._state.path)
        private.prepare(self._ticket, held, wanted is not None and wanted.admission is not None)

    async def _train(self, enter: Callable[[AsyncExitStack], Awaitable[Entered]]) -> tuple[RunInfo, str, bool] | None:
        """Enter the run and train in it, as one incarnation.

        If this peer moves to another stage, returns the run, the directory of the stage that it has left, and whether
        it was pinned there.
        """
        processes, selector = self._processes, self._selector
        async with processes.transport.scope(), AsyncExitStack() as stack:
            manifest, info, start, worker, entrance = await enter(stack)
            async with open_session(
                processes,
                manifest=manifest,
                info=info,
                start=start,
                worker=worker,
                entrance=entrance,
                unanswered=selector.given(processes.bootstrap) if selector.alone else (),
                on_fatal=self._fail,
                on_lost=self._ask_again,
                is_leaving=lambda: self._finishing or (self._session is not None and self._session.is_leaving),
            ) as session:
                self._session = session
                await session.run()
            if worker.restarts:
                times = "once" if worker.restarts == 1 else f"{worker.restarts} times"
                self._say(f"{REPLACED} {times}, at last because of this: {worker.last_failure}")
            self._no_result = session.outcome.failure(worker.last_failure)
        if session.moves_to is None or entrance is None:
            return None
        processes.rounds_done += session.done
        self._session = None  # from here on, who asks this peer to finish ends it at once
        former, was_pinned = self._state.home.name, self._state.is_pinned
        name = entrance.prepared[session.moves_to]
        await processes.disk.run(partial(self._state.switch_stage, name, pinned=session.moves_by_hand), 0)
        await processes.begin_again()
        return info, former, was_pinned

    # -- into a run ---------------------------------------------------------------------------------------------------

    async def _find_run(self) -> RunInfo | None:
        """The run that an address leads to, else the one in the state directory; None if this peer is to start one."""
        state, selector = self._state, self._selector
        held = selector.held(self._wanted)
        if addresses := selector.addresses():
            self._tracker.set_state("joining", asks(addresses))
            return await selector.ask(self._processes.bootstrap, addresses, held)
        if held and held.has_state:
            return selector.resume_held(held)
        if not self._config.new:
            resume.require_none(state)
        return None

    async def _join_run(self, run: RunInfo, stack: AsyncExitStack) -> Entered:
        """Take part in a run that another peer or an earlier incarnation of this one started."""
        manifest, state, processes = unseal(run.sealed, verify), self._state, self._processes
        require_stage(manifest, self._config.stage)
        await self._claim_state_dir(manifest, run)
        entrance = await self._enter_stage(manifest)
        stage = entrance.seat.stage if entrance else 0
        processes.limits.enter_run(manifest, stage)
        try:
            start = await self._load_restart_point(manifest, entrance)
            sample = state.sample if run.sample and not stage else None
            values = None
            if manifest.stages:
                elements = manifest.elements[stage]
                values = stage_values(manifest.config, manifest.bounds, elements, stage, processes.me)
            spec = worker_spec(manifest.config, self._config, start.data.seed, sample, values, manifest.model)
            worker = await stack.enter_async_context(self._worker(spec))
            manifest.require_layout(worker.layout, stage)
        except (WorkerError, ManifestError, ConfigError):  # this machine cannot train it
            await processes.disk.run(state.withdraw, 0)
            raise
        return manifest, run, start, worker, entrance

    async def _arrive(self, run: RunInfo, former: str, was_pinned: bool, stack: AsyncExitStack) -> Entered:
        """Enter another stage of the same run, or the former one again if this machine cannot train the other."""
        target = read_stage(self._state.path)
        try:
            entered = await self._join_run(run, stack)
        except (WorkerError, ManifestError, ConfigError, StateError, FatalPeerError) as error:
            self._tracker.moved = f"not moved to stage {target}: {error}"
            await self._processes.disk.run(partial(self._state.switch_stage, former, pinned=was_pinned), 0)
            await self._processes.begin_again()
            entered = await self._join_run(run, stack)
        else:
            self._processes.has_moved = True
            self._tracker.moved = f"moved from stage {former.partition('-')[0]} to stage {target}"
        self._say(self._tracker.moved)
        return entered

    async def _start_run(self, stack: AsyncExitStack) -> Entered:
        """Start a run. This peer draws the initial state, which all others download or, with stages, draw as well."""
        config, processes = self._wanted, self._processes
        if config is None:
            raise FatalPeerError("no address leads to a run: give one by --bootstrap, or start a run by --new")
        self._tracker.set_state("starting", "the model is built")
        if self._config.stage:
            raise FatalPeerError("the peer that starts a run is in stage 0: leave --stage out")
        plan = None
        if config.stages > 1:
            from node.joining.stage_plan import plan_stages

            planned = partial(plan_stages, config, self._config.claim_bytes_per_second, monotonic_seconds)
            plan = await processes.compute.run(planned, 1 << 30)
            for line in plan.lines:
                self._say(line)
        config = await self._with_overlap(config)
        me, identity = processes.me, self._state.identity
        values = stage_values(config, plan.bounds, plan.elements[0], 0, me) if plan else None
        spec = worker_spec(config, self._config, stream_seed(me), stage=values)
        worker = await stack.enter_async_context(self._worker(spec))
        now, compute = processes.clock.wall(), processes.compute
        manifest, run = await found_run(
            config, worker, me=me, identity=identity, created=now, compute=compute, plan=plan
        )
        await self._claim_state_dir(manifest, run)
        entrance = await self._enter_stage(manifest, founding=True)
        processes.limits.enter_run(manifest, 0, founding=True)
        self._announce_run(manifest)
        start = await self._load_restart_point(manifest, entrance)
        return manifest, run, start, worker, entrance

    async def _with_overlap(self, config: RunConfig) -> RunConfig:
        """The configuration of a new run, with a choice of `recipe.overlap` if this machine's line is declared."""
        mine = self._config
        if not mine.declares_line or set(lent_devices(mine)) != {"cpu"}:
            return config
        choice = partial(choose_overlap, config, mine.claim_bytes_per_second, monotonic_seconds)
        config, why = await self._processes.compute.run(choice, 1 << 30)
        if why:
            self._say(why)
        return config

    async def _enter_stage(self, manifest: Manifest, founding: bool = False) -> StageEntrance | None:
        """Find this peer's stage, in its directory or by asking another peer; None in a run without stages."""
        if not manifest.stages:
            return None
        processes, wanted = self._processes, self._config.stage
        entrance = StageEntrance(manifest, self._state, processes.disk, self._state.identity)
        kept = not founding and entrance.kept(wanted)
        if founding:
            await entrance.found(processes.me)
        elif not kept:
            self._tracker.set_state("joining", "asking which stage this peer works in")
            await entrance.enter(processes.me, wanted, processes.transport, self._askable, self._say)
        stage = entrance.seat.stage
        if wanted not in (None, stage):
            self._say(f"--stage {wanted} is not followed: this peer was moved to stage {stage}, and stays there")
        if not founding:
            why = "" if kept else ", where it is needed most" if wanted is None else ", as --stage says"
            self._say(f"this peer is in stage {stage} (of 0 to {len(manifest.stages) - 1}){why}")
        self._tracker.stage = stage
        return entrance

    def _askable(self) -> Collection[PeerId]:
        """Peers that answered, and those of the given addresses: the run was found before these served anything."""
        bootstrap = self._processes.bootstrap
        given = (address.rpartition("/p2p/")[2] for address in self._selector.given(bootstrap))
        return {**dict.fromkeys(bootstrap.met), **dict.fromkeys(given)}.keys()

    def _announce_run(self, manifest: Manifest) -> None:
        """Tell the user how others join the new run."""
        if manifest.config.admission:
            run = f"private run {manifest.config.name} ({manifest.run_id[:6]}…)"
            return self._say(f"{run}: others need a ticket. In another terminal: {typed('invite')}")
        self._say(f"started the run {manifest.config.name} ({manifest.run_id[:12]})")
        if command := join_command(self.status()):
            self._say(f"others join by: {command[0]}")
            if why := narrow(command[1], bool(self._config.announce)):
                self._say(why)

    def _worker(self, spec: WorkerSpec) -> RemoteTrainer:
        if self._scripts:
            from node.training.script import ScriptTrainer

            if not self._scripts.has_owner:  # a script that has started this peer attaches by itself
                self._say(
                    f"waiting for a script: Swarm.join(model, optimizer, attach={str(self._scripts.state_dir)!r})"
                )
            waiting = partial(self._tracker.set_state, "waiting")
            return ScriptTrainer(spec, self._processes.compute, self._scripts, waiting)
        spec = replace(spec, record=self._state.data)
        if line := unused_gpus(self._config, spec):
            self._say(line)
        if spec.stage:
            from node.training.remote_stage import RemoteStage  # only runs with stages load pipelines

            return RemoteStage(spec, self._processes.compute, self._give_up_training)
        return RemoteTrainer(spec, self._processes.compute, self._give_up_training)

    async def _claim_state_dir(self, manifest: Manifest, run: RunInfo) -> None:
        """Assign the state directory and the status to this run."""
        state = self._state
        begin = partial(state.begin, manifest.run_id, run_id(state.manifest()), run.sealed, run.sample)
        self._processes.private.enter(manifest)  # a peer that may not leaves the directory as it was
        await self._processes.disk.run(begin, 0)
        self._tracker.enter_run(manifest)

    async def _load_restart_point(self, manifest: Manifest, entrance: StageEntrance | None) -> resume.RestartPoint:
        """Load the state from which this peer starts, and show that at once: the worker takes seconds to start."""
        own, shares_anchor = self._selector.own, manifest.config.protocol not in INDEPENDENT_PROTOCOLS
        me, seat = self._processes.me, entrance.seat if entrance else None
        load = partial(resume.load_restart_point, self._state, manifest, me, own, shares_anchor, seat)
        start = await self._processes.disk.run(load, 0)
        if line := start.description():
            self._say(line)
        removed = self._processes.private.exchange.has_removed
        if own and (line := start.waiting_reason(me, manifest.config.fork_peers, removed)):
            self._say(line)
        return start
