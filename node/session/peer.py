"""One peer, from the start of its processes to their end.

`Peer` is the composition root: the only class that knows every adapter. It builds what a `PeerSession` needs.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from node.config.derived import protocol_settings, stage_values, stream_seed, worker_spec
from node.config.manifest import Manifest, ManifestError, unseal
from node.config.peer_config import PeerConfig
from node.config.run_config import RunConfig
from node.config.toml import ConfigError
from node.direct.plane import DirectConfig
from node.joining import resume
from node.joining.addresses_file import AddressesFile, AddressLine, read_addresses, require_usable
from node.joining.bootstrap import BootstrapClient, BootstrapServer, RunInfo, ask_run
from node.joining.founding import Founder, found_run
from node.joining.known_peers import KnownPeers, build_membership, hinted, local_peer
from node.joining.run_selector import RunSelector, asks, run_id
from node.joining.stages import StagePlace
from node.membership.addresses import shareable
from node.membership.handshake import LocalStage
from node.membership.membership import Membership, MembershipCallbacks
from node.network.daemon import DaemonError
from node.network.dht import DhtDirectory
from node.network.libp2p import LibP2PConfig, LibP2PTransport
from node.outer.replicated_loop import ReplicatedOuterLoop
from node.outer.round_history import LocalHistory, RoundHistory
from node.reporting.report import tokens_counted
from node.reporting.status import EventSink, Status, join_command, narrow, public
from node.runtime.clock import WallClock
from node.runtime.compute import ThreadCompute
from node.runtime.identity import IdentityError, verify
from node.runtime.metrics import LoopLag
from node.session.failpoints import with_failpoints
from node.session.fatal import FatalPeerError
from node.session.machine_watch import watch_machine
from node.session.outer_loop_factory import OuterLoopFactory
from node.session.page_setup import PageSetup
from node.session.pausing import PauseController
from node.session.peer_session import SAMPLE_PROMPT, OuterLoopStack, PeerSession, PeerSessionDeps, SessionLimits
from node.session.resources import EnteredRun, PeerResources
from node.session.stage_entrance import require_stage
from node.session.stage_setup import StageSetup, values_of
from node.session.traffic_limits import TrafficLimits
from node.storage.checkpoint_manager import CheckpointManager, CheckpointStorage
from node.storage.error_feedback import feedback
from node.storage.journal import Journal
from node.storage.scratch import ScratchSpace
from node.storage.statedir import StateDir, StateError
from node.training.remote import RemoteTrainer, WorkerError, WorkerSpec
from node.ui.commands import PeerCommands
from node.ui.control import ControlServer
from node.ui.status_tracker import OuterLoopSources, RunLabels, StatusTracker
from protocols import INDEPENDENT_PROTOCOLS, REPLICATED_PROTOCOLS
from protocols.aio import run_with_helper
from protocols.base import Host
from protocols.bulk import BULK_METHODS
from protocols.butterfly.part_store import LEAST_ROUNDS, PartStore
from protocols.codec import codec
from protocols.gate import Gate

T = TypeVar("T")

KEEP_CHECKPOINTS = 2
"""Checkpoints for which a peer keeps at least the reduced parts since: a joiner that fetches one needs them."""

NO_WORKER = 3
"""Exit code of a peer that left in good order because its worker could not be kept running."""


class Peer:
    """A volunteer's peer. `run` starts its processes, joins or starts a run, trains in a `PeerSession` and leaves."""

    def __init__(
        self, config: PeerConfig, run: RunConfig | None, view: EventSink, on_asked: Callable[..., None] | None = None
    ) -> None:
        """
        Args:
            config: settings of this machine; `state_dir` must be set.
            run: the run to start if no address leads to one. A run in the state directory must agree with it.
            on_asked: called without arguments when the control channel asks the peer to finish, and with a reason when
                the peer has to leave because it has no worker. None: `finish`.
        """
        self._on_asked = on_asked or self.finish
        self._config, self._wanted = config, run
        self._status_tracker = StatusTracker(config.nickname)
        self._page = PageSetup(config, self._status_tracker, view)
        self._view = self._page.feed
        self._clock = WallClock()
        self._limits = TrafficLimits(config, self._clock.wall)
        self._status_tracker.set_limits(self._limits.describe)
        self._session: PeerSession | None = None
        self._main: asyncio.Task[None] | None = None
        self._selector = RunSelector(config, (*REPLICATED_PROTOCOLS, *INDEPENDENT_PROTOCOLS), self._view.say)
        self._finishing, self._failure, self._no_worker = False, "", ""

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
        assert self._config.state_dir is not None
        me = asyncio.current_task()
        try:
            require_usable(self._config)
            self._main = asyncio.create_task(self._run_processes(StateDir.open(self._config.state_dir)))
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
        self._pauses = PauseController(state.path, self._clock, self._view.say)
        status_tracker.set_pauses(lambda: self._pauses.reason)
        async with (
            LoopLag() as lag,
            ThreadCompute() as compute,
            ThreadCompute() as disk,
            ThreadCompute() as files,
        ):
            change = partial(self._limits.change, state.path, files)
            commands = PeerCommands(self._on_asked, self._pauses, change)
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
                await self._enter_run(PeerResources(state, transport, compute, disk, files, bootstrap, lag))

    def _bootstrap_client(self, transport: LibP2PTransport, files: ThreadCompute) -> BootstrapClient:
        async def read(path: Path) -> AddressLine | str:
            return await files.run(partial(read_addresses, transport.me, path), 0)

        ask = partial(ask_run, transport)
        return BootstrapClient(transport.connect, ask, self._selector.judge, self._view.say, read)

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

    # -- in the run ---------------------------------------------------------------------------------------------------

    async def _run_session(self, resources: PeerResources, entered: EnteredRun) -> None:
        """Build a session and run it until the run is over or this peer leaves."""
        config, start, state, disk = entered.manifest.config, entered.start, resources.state, resources.disk
        key, status_tracker, transport = start.chain.head.key, self._status_tracker, resources.transport
        history = start.chain if start.shares_anchor else LocalHistory(resources.me, key)
        membership = self._membership(resources, history, entered)
        setup = StageSetup(resources, status_tracker, self._view.say)
        status_tracker.join_swarm(history, membership)
        async with (
            DhtDirectory(transport, state.identity, self._clock, key.run, membership.offset_seconds) as directory,
            ScratchSpace(state.path, disk) as scratch,
            self._checkpoints(resources, entered) as checkpoints,
        ):
            frames, trainer, journal = with_failpoints(transport, entered.trainer, state.rounds)
            host = Host(frames, directory, membership, resources.compute, self._clock, state.identity, config.seed)
            stage = entered.place.stage if entered.place else 0
            settings = protocol_settings(entered.manifest, self._config, state.incarnation, stage, self._limits.claim)
            pipeline = None
            if entered.place:
                pipeline = setup.trainer(entered, host, membership, lambda: stack.outer_loop, lambda: self._finishing)
                trainer, host = cast(RemoteTrainer, pipeline), pipeline.host
            factory = OuterLoopFactory(
                host, settings, config, trainer, checkpoints, membership, status_tracker.on_progress
            )
            if isinstance(history, LocalHistory):
                newcomer = not start.checkpoints and entered.manifest.founder.peer != resources.me.peer
                stack = factory.independent(history, newcomer)
            else:
                stack = factory.replicated(history, partial(self._part_store, scratch, resources), state.path)
            sources = self._status_sources(resources, trainer, journal, checkpoints, stack)
            status_tracker.start_outer_loop(
                replace(sources, waiting_reason=pipeline.waiting_reason) if pipeline else sources
            )
            await resume.restore(start, stack.outer_loop, trainer, checkpoints)
            status = lambda: asdict(public(self.status()))  # noqa: E731
            BootstrapServer(transport, entered.run, status, setup.assigner(entered, membership))
            past = await disk.run(journal.recent, 0)
            self._view.recall(past)
            if isinstance(stack.outer_loop, ReplicatedOuterLoop):
                stack.outer_loop.recall(tokens_counted(past))
            lag, clock = resources.lag, self._clock
            deps = PeerSessionDeps(*stack, trainer, membership, directory, state, journal, lag, clock, disk)
            prompt = b"" if config.hf else SAMPLE_PROMPT
            deps = replace(deps, texts=self._view, prompt=prompt, on_round_end=self._pauses.round_ended)
            self._pauses.attach(stack.outer_loop.pause, lambda: stack.outer_loop.holds_up_run)
            if pipeline:
                over, lacking = pipeline.is_run_over, pipeline.waiting_reason
                deps = replace(deps, annotate=pipeline.annotate, is_run_over=over, lacking=lacking)
            wait_for = self._config.wait_for_peers if key.round == 0 else 1
            limits = SessionLimits(config.recipe.rounds, self._config.rounds, wait_for)
            self._session = PeerSession(deps, limits, status_tracker, self._view)

            async def save() -> None:
                await stack.outer_loop.keep()
                await checkpoints.published()

            watch = watch_machine(self._config, self._pauses, self._limits.quota, resources.files, save)
            session = run_with_helper(self._session.run(), watch)
            await self._publish_addresses(session, resources.files)

    def _status_sources(
        self,
        of: PeerResources,
        trainer: RemoteTrainer,
        journal: Journal,
        made: CheckpointManager,
        stack: OuterLoopStack,
    ) -> OuterLoopSources:
        return OuterLoopSources(
            journal,
            stack.outer_loop.waiting_for,
            stack.sync.sync_progress.progress,
            lambda: made.age_seconds(self._clock.wall()),
            lambda: [pid for pid in (os.getpid(), trainer.pid, of.transport.daemon_pid) if pid],
            worker_restarts=lambda: trainer.restarts,
            joiners=lambda: stack.sync.joiners,
            checkpoint_problem=lambda: made.problem,
        )

    async def _publish_addresses(self, session: Coroutine[Any, Any, None], files: ThreadCompute) -> None:
        """Run the session, and meanwhile keep this peer's addresses in the file where others look for them."""
        if path := self._config.addresses_file:
            kept = AddressesFile(path, self._status_tracker.addresses, files, self._view.say)
            await run_with_helper(session, kept.run())
        else:
            await session

    def _checkpoints(self, resources: PeerResources, entered: EnteredRun) -> CheckpointManager:
        every_rounds, limit_bytes = self._config.checkpoint_every, int(self._config.disk_limit_bytes)
        path, sync, trainer = resources.state.path, entered.start.archive.sync, entered.trainer
        like = entered.start.like(entered.manifest.run_id, trainer.layout)
        not_sent = feedback(codec(entered.manifest.config.codec), sum(trainer.layout.sizes()), resources.compute)
        storage = CheckpointStorage(path, every_rounds, limit_bytes, resources.disk, sync)
        return CheckpointManager(storage, like, trainer, not_sent)

    def _part_store(self, scratch: ScratchSpace, resources: PeerResources, gate: Gate) -> PartStore:
        least_rounds = max(LEAST_ROUNDS, KEEP_CHECKPOINTS * self._config.checkpoint_every)
        return PartStore(scratch.allocate, resources.disk, gate, least_rounds=least_rounds)

    def _membership(self, resources: PeerResources, history: RoundHistory, entered: EnteredRun) -> Membership:
        """Build the run's membership. From now on it receives the peers that files of addresses name."""
        tracker, bootstrap, state = self._status_tracker, resources.bootstrap, resources.state
        local = local_peer(resources.me, tracker.nickname, tracker.addresses, history)
        if entered.place and entered.entrance:
            place, seats = entered.place, entered.entrance.seats
            local = replace(local, stage=LocalStage(place.stage, place.seat, seats.judge))
        unanswered = self._selector.given(bootstrap) if self._selector.alone else ()
        known = KnownPeers(bootstrap.met, unanswered, state.peers())
        callbacks = MembershipCallbacks(self._fail, self._view.say)
        membership = build_membership(
            resources.transport, self._clock, state.identity, local, history, known, callbacks
        )
        bootstrap.set_listener(hinted(membership))
        return membership
