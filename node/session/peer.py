"""One peer, from the start of its processes to their end.

`Peer` is the composition root, together with `SessionSetup`, which builds what a `PeerSession` needs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from node.config.derived import stage_values, stream_seed, worker_spec
from node.config.manifest import Manifest, ManifestError, unseal
from node.config.peer_config import PeerConfig
from node.config.run_config import RunConfig
from node.config.toml import ConfigError
from node.direct.plane import DirectConfig
from node.joining import resume
from node.joining.addresses_file import AddressLine, read_addresses
from node.joining.bootstrap import BootstrapClient, RunInfo, ask_run
from node.joining.founding import Founder, found_run
from node.joining.run_selector import RunSelector, asks, run_id
from node.joining.stages import StagePlace
from node.network.address_scope import shareable
from node.network.daemon import DaemonError
from node.network.libp2p import LibP2PConfig, LibP2PTransport
from node.reporting.status import EventSink, Status, join_command, narrow
from node.runtime.clock import WallClock
from node.runtime.compute import ThreadCompute
from node.runtime.identity import IdentityError, verify
from node.runtime.metrics import LoopLag
from node.runtime.proxies import dialled_directly
from node.session.fatal import NO_RESULT, NO_WORKER, REPLACED, FatalPeerError
from node.session.page_setup import PageSetup
from node.session.pausing import PauseController
from node.session.peer_session import PeerSession
from node.session.resources import EnteredRun, PeerResources
from node.session.session_setup import PeerServices, SessionSetup
from node.session.stage_entrance import require_stage
from node.session.stage_setup import StageSetup, values_of
from node.session.traffic_limits import TrafficLimits
from node.storage.statedir import StateDir, StateError
from node.training.remote import RemoteTrainer, WorkerError, WorkerSpec
from node.ui.commands import PeerCommands
from node.ui.control import ControlServer
from node.ui.status_tracker import RunLabels, StatusTracker
from protocols.registry import INDEPENDENT_PROTOCOLS, REPLICATED_PROTOCOLS
from protocols.streams.framing import BULK_METHODS

T = TypeVar("T")


class Peer:
    """A volunteer's peer. `run` starts its processes, joins or starts a run, trains in a `PeerSession` and leaves."""

    def __init__(
        self,
        config: PeerConfig,
        run: RunConfig | None,
        state: StateDir,
        view: EventSink,
        on_asked: Callable[..., None] | None = None,
    ) -> None:
        """
        Args:
            config: settings of this machine.
            state: its state directory.
            run: the run to start if no address leads to one. A run in the state directory must agree with it.
            on_asked: called without arguments when the control channel asks the peer to finish, and with a reason when
                the peer has to leave because it has no worker. None: `finish`.
        """
        self._on_asked = on_asked or self.finish
        self._config, self._wanted, self._state = config, run, state
        self._status_tracker = StatusTracker(config.nickname)
        self._page = PageSetup(config, self._status_tracker, view)
        self._view = self._page.feed
        self._clock = WallClock()
        self._limits = TrafficLimits(config, self._clock.wall)
        self._status_tracker.set_limits(self._limits.describe)
        self._session: PeerSession | None = None
        self._main: asyncio.Task[None] | None = None
        self._selector = RunSelector(config, (*REPLICATED_PROTOCOLS, *INDEPENDENT_PROTOCOLS), self._view.say)
        self._finishing, self._failure, self._no_worker, self._no_result = False, "", "", ""

    def finish(self, why: str = "") -> None:
        """Finish the round under way, then leave. Before the session begins, leave at once."""
        if self._session:
            self._finishing = True
            self._session.leave()
        elif self._main and not self._finishing:
            self._main.cancel()
        self._finishing = True

    def status(self) -> Status:
        """The present status of this peer."""
        return self._status_tracker.status()

    async def run(self) -> int:
        """Join or start a run, train and leave; returns the process's exit code.

        Raises:
            FatalPeerError: the peer cannot go on.
        """
        me = asyncio.current_task()
        try:
            self._main = asyncio.create_task(self._run_processes(self._state))
            await self._main
        except asyncio.CancelledError:
            if me is None or me.cancelling() or not (self._finishing or self._failure):
                raise
        except (StateError, IdentityError, DaemonError, WorkerError, ManifestError, ConfigError) as error:
            raise FatalPeerError(str(error)) from None
        if self._failure:
            raise FatalPeerError(self._failure)
        if self._no_worker:
            raise FatalPeerError(self._no_worker, NO_WORKER)
        if self._no_result:
            raise FatalPeerError(self._no_result, NO_RESULT)
        self._status_tracker.set_state("finished", self._status_tracker.reason)
        return 0

    def _end(self, line: str) -> None:
        """Finish without an error because the run is over."""
        self._view.say(line)
        self._status_tracker.set_state("finished", "the run is over")

    def _fail(self, why: str) -> None:
        self._failure = why
        if self._main:
            self._main.cancel()

    def _give_up_training(self, why: str) -> None:
        """Leave in good order because the worker cannot be restarted; `run` raises the reason at the end.

        Before there is a session, the trainer's own error ends the peer.
        """
        if self._session:
            self._no_worker = why
            self._on_asked("there is no worker any more")

    async def _run_processes(self, state: StateDir) -> None:
        config, status_tracker = self._config, self._status_tracker
        if line := self._selector.over(state, self._wanted):
            return self._end(line)
        status_tracker.set_identity(state.identity.peer_id, state.incarnation)
        kept = state.listening(config.listen)
        direct = None if config.direct_port == "off" else DirectConfig(BULK_METHODS, config.direct_port)
        nat, relay = config.nat, config.relays
        link = LibP2PConfig(state.identity, config.listen, kept, config.announce, nat, relay, direct=direct)
        pauses = PauseController(state.path, self._clock, self._view.say)
        status_tracker.set_pauses(lambda: pauses.reason)
        async with (
            LoopLag() as lag,
            ThreadCompute() as compute,
            ThreadCompute() as disk,
            ThreadCompute() as files,
        ):
            change = partial(self._limits.change, state.path, files)
            commands = PeerCommands(self._on_asked, pauses, change)
            async with (
                ControlServer(state.path, self.status, commands),
                self._limits.kept(state.path, files, self._view.say, self._on_asked),
                LibP2PTransport(link, self._limits.traffic) as transport,
                self._bootstrap_client(transport, files) as bootstrap,
                self._page.server(state, transport, commands.carry_out) if config.page else nullcontext(),
            ):
                await disk.run(partial(state.listens, config.listen, transport.listening), 0)
                addresses = lambda: shareable(transport.addresses) or transport.addresses  # noqa: E731
                status_tracker.set_network(addresses, lag, lambda: transport.routes)
                await self._enter_run(PeerResources(state, transport, compute, disk, files, bootstrap, lag, pauses))

    def _bootstrap_client(self, transport: LibP2PTransport, files: ThreadCompute) -> BootstrapClient:
        async def read(path: Path) -> AddressLine | str:
            return await files.run(partial(read_addresses, transport.me, path), 0)

        ask = partial(ask_run, transport)
        hint = dialled_directly()
        return BootstrapClient(transport.connect, ask, self._selector.judge, self._view.say, read, hint)

    # -- into a run ---------------------------------------------------------------------------------------------------

    async def _enter_run(self, resources: PeerResources) -> None:
        """Join the run that an address leads to, else resume the one in the state directory, else start one."""
        state, selector = resources.state, self._selector
        held = selector.held(state, self._wanted)
        if addresses := selector.addresses(state):
            self._status_tracker.set_state("joining", asks(addresses))
            run = await selector.ask(resources.bootstrap, state, addresses, held)
            if line := selector.is_over(state, run):
                return self._end(line)
            await self._join_run(resources, run)
        elif held and held.has_state:
            await self._join_run(resources, selector.resume_held(held))
        else:
            if not self._config.new:
                resume.require_none(state)
            await self._start_run(resources)

    async def _join_run(self, resources: PeerResources, run: RunInfo) -> None:
        """Take part in a run that another peer or an earlier incarnation of this one started."""
        manifest, state = unseal(run.sealed, verify), resources.state
        require_stage(manifest, self._config.stage)
        await self._claim_state_dir(resources, manifest, run)
        setup = StageSetup(resources, self._status_tracker, self._view.say)
        entrance, place = await setup.enter(manifest, self._config.stage)
        stage = place.stage if place else 0
        self._limits.join_run(manifest, stage)
        async with AsyncExitStack() as stack:
            try:
                start = await self._load_restart_point(resources, manifest, place)
                sample = state.sample if run.sample and not stage else None
                values = values_of(manifest, stage, resources.me)
                spec = worker_spec(manifest.config, self._config, start.data.seed, sample, values, manifest.model)
                trainer = await stack.enter_async_context(self._trainer(spec, resources))
                manifest.require_layout(trainer.layout, stage)
            except (WorkerError, ManifestError, ConfigError):  # this machine cannot train it
                await resources.disk.run(state.withdraw, 0)
                raise
            await self._run_session(resources, EnteredRun(manifest, run, start, trainer, entrance, place))

    async def _start_run(self, resources: PeerResources) -> None:
        """Start a run. This peer draws the initial state, which all others download or, with stages, draw as well."""
        config = self._wanted
        if config is None:
            raise FatalPeerError("no address leads to a run: give one by --bootstrap, or start a run by --new")
        self._status_tracker.set_state("starting", "the model is built")
        if self._config.stage:
            raise FatalPeerError("the peer that starts a run is in stage 0: leave --stage out")
        setup = StageSetup(resources, self._status_tracker, self._view.say)
        plan = await setup.plan(config)
        me, identity = resources.me, resources.state.identity
        values = stage_values(config, plan.bounds, plan.elements[0], 0, me) if plan else None
        spec = worker_spec(config, self._config, stream_seed(me), stage=values)
        async with self._trainer(spec, resources) as trainer:
            founder = Founder(me, identity, self._clock.wall())
            manifest, run = await found_run(config, founder, trainer, resources.compute, plan)
            await self._claim_state_dir(resources, manifest, run)
            entrance, place = await setup.found(manifest)
            self._limits.enter_run(manifest, place.stage if place else 0)
            self._announce_run(manifest)
            start = await self._load_restart_point(resources, manifest, place)
            await self._run_session(resources, EnteredRun(manifest, run, start, trainer, entrance, place))

    def _announce_run(self, manifest: Manifest) -> None:
        """Tell the user how others join the new run."""
        self._view.say(f"started the run {manifest.config.name} ({manifest.run_id[:12]})")
        if command := join_command(self.status()):
            self._view.say(f"others join by: {command[0]}")
            if why := narrow(command[1], bool(self._config.announce)):
                self._view.say(why)

    def _trainer(self, spec: WorkerSpec, resources: PeerResources) -> RemoteTrainer:
        spec = replace(spec, record=resources.state.data)
        if spec.stage:
            from node.training.remote_stage import RemoteStage  # only runs with stages load pipelines

            return RemoteStage(spec, resources.compute, self._give_up_training)
        return RemoteTrainer(spec, resources.compute, self._give_up_training)

    async def _claim_state_dir(self, resources: PeerResources, manifest: Manifest, run: RunInfo) -> None:
        """Assign the state directory and the status to this run."""
        state, config = resources.state, manifest.config
        begin = partial(state.begin, manifest.run_id, run_id(state.manifest()), run.sealed, run.sample)
        await resources.disk.run(begin, 0)
        rounds = config.recipe.rounds
        self._status_tracker.enter_run(
            RunLabels(config.name, manifest.run_id, config.consent_task, config.protocol, rounds)
        )

    async def _load_restart_point(
        self, resources: PeerResources, manifest: Manifest, place: StagePlace | None
    ) -> resume.RestartPoint:
        """Load the state from which this peer starts, and show that at once: the worker takes seconds to start."""
        own, shares_anchor = self._selector.own, manifest.config.protocol not in INDEPENDENT_PROTOCOLS
        load = partial(resume.load_restart_point, resources.state, manifest, resources.me, own, shares_anchor, place)
        start = await resources.disk.run(load, 0)
        if line := start.description():
            self._view.say(line)
        if own and (line := start.waiting_reason(resources.me, manifest.config.fork_peers)):
            self._view.say(line)
        return start

    async def _run_session(self, resources: PeerResources, entered: EnteredRun) -> None:
        """Run a session until the run is over or this peer leaves."""
        services = PeerServices(
            self._config, self._clock, self._view, self._status_tracker, self._limits, self._selector
        )

        def on_built(session: PeerSession) -> None:
            self._session = session

        await SessionSetup(services, resources, entered, self._fail, lambda: self._finishing).run(on_built)
        trainer = entered.trainer
        if trainer.restarts:
            times = "once" if trainer.restarts == 1 else f"{trainer.restarts} times"
            self._view.say(f"{REPLACED} {times}, at last because of this: {trainer.last_failure}")
        if self._session:
            self._no_result = self._session.outcome.failure(trainer.last_failure)
