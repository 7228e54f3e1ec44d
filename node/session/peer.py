"""One peer, from its first process to its last: the composition root, the only place that knows every adapter."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from node.config.derived import protocol_settings, stream_seed, worker_spec
from node.config.manifest import Manifest, ManifestError, unseal
from node.config.peer_config import PeerConfig
from node.config.run_config import RunConfig
from node.config.toml import ConfigError
from node.joining import resume
from node.joining.addresses_file import AddressesFile, AddressLine, read_addresses, require_usable
from node.joining.bootstrap import BootstrapClient, BootstrapServer, RunInfo, ask_run, ask_status
from node.joining.founding import found_run
from node.joining.known_peers import build_membership, hinted
from node.joining.run_selector import RunSelector, asks, run_id
from node.membership.addresses import shareable
from node.membership.membership import Membership
from node.network.daemon import DaemonError
from node.network.dht import DhtDirectory
from node.network.libp2p import LibP2PConfig, LibP2PTransport
from node.outer.replicated_loop import ReplicatedOuterLoop
from node.outer.round_history import LocalHistory, RoundHistory
from node.reporting.report import tokens_counted
from node.reporting.status import EventSink, Status, join_command, narrow, public
from node.runtime.clock import WallClock
from node.runtime.compute import ThreadCompute
from node.runtime.identity import IdentityError, create, verify
from node.runtime.metrics import LoopLag
from node.session.failpoints import with_failpoints
from node.session.outer_loop_factory import OuterLoopFactory
from node.session.peer_session import PeerSession, PeerSessionDeps, SessionLimits
from node.storage.checkpoint_manager import CheckpointManager
from node.storage.error_feedback import feedback
from node.storage.scratch import ScratchSpace
from node.storage.statedir import StateDir, StateError
from node.training.remote import RemoteTrainer, WorkerError
from node.ui.control import ControlServer
from node.ui.status_tracker import StatusTracker
from protocols import INDEPENDENT_PROTOCOLS, REPLICATED_PROTOCOLS
from protocols.aio import run_with_helper
from protocols.base import BadPayload, Host, Member, PeerError
from protocols.butterfly.part_store import LEAST_ROUNDS, PartStore
from protocols.codec import codec
from protocols.gate import Gate

log = logging.getLogger(__name__)

STATUS_SECONDS = 10.0
KEEP_CHECKPOINTS = 2
"""The parts of the rounds since so many checkpoints are kept at least: whoever takes one finds the rounds since."""


NO_WORKER = 3
"""The exit code of a peer that left in good order because its worker could not be kept alive."""


class FatalPeerError(Exception):
    """This peer cannot go on, for what its user or its machine gave it; one line says what, why and what to do.

    Attributes:
        code: the process's exit code.
    """

    def __init__(self, why: str, code: int = 2) -> None:
        super().__init__(why)
        self.code = code


@dataclass(frozen=True, slots=True)
class _PeerResources:
    state: StateDir
    transport: LibP2PTransport
    compute: ThreadCompute
    disk: ThreadCompute
    files: ThreadCompute
    entry: BootstrapClient
    lag: LoopLag

    @property
    def me(self) -> Member:
        return Member(self.state.identity.peer_id, self.state.incarnation)


class Peer:
    """A volunteer's peer. `run` is its whole life.

    Attributes:
        on_asked: called when the control door is asked to let the peer finish, and, with what has happened, when it
            has to leave for want of a worker.
    """

    def __init__(self, config: PeerConfig, run: RunConfig | None, view: EventSink) -> None:
        """
        Args:
            config: of this machine; its state directory is given.
            run: what to start, if no address leads into a run, and what a run in its state directory has to be.
        """
        self.on_asked: Callable[..., None] = self.finish
        self._config, self._wanted, self._view = config, run, view
        self._status_tracker = StatusTracker(config.nickname)
        self._clock = WallClock()
        self._session: PeerSession | None = None
        self._living: asyncio.Task[None] | None = None
        self._choice = RunSelector(config, (*REPLICATED_PROTOCOLS, *INDEPENDENT_PROTOCOLS), view.say)
        self._finishing, self._failure, self._no_worker = False, "", ""

    def finish(self, why: str = "") -> None:
        """End the round, hand in, leave; at once where there is no round yet."""
        if self._session:
            self._session.leave()
        elif self._living and not self._finishing:
            self._living.cancel()
        self._finishing = True

    def status(self) -> Status:
        """What this peer does, as of now."""
        return self._status_tracker.status()

    async def run(self) -> int:
        """Join or start a run, train, leave; returns the process's exit code.

        Raises:
            Refused: it cannot go on.
        """
        assert self._config.state_dir is not None
        me = asyncio.current_task()
        try:
            require_usable(self._config)
            self._living = asyncio.create_task(self._live(StateDir.open(self._config.state_dir)))
            await self._living
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
        """There is nothing to take part in any more: no fault of anybody's."""
        self._view.say(line)
        self._status_tracker.set_state("finished", "the run is over")

    def _fail(self, why: str) -> None:
        self._failure = why
        if self._living:
            self._living.cancel()

    def _give_up_training(self, why: str) -> None:
        """There will be no other worker: leave as if asked to, and say why at the end."""
        self._no_worker = why
        self.on_asked("there is no worker any more")

    async def _live(self, state: StateDir) -> None:
        config, status_tracker = self._config, self._status_tracker
        if line := self._choice.over(state, self._wanted):
            return self._end(line)
        status_tracker.peer, status_tracker.incarnation = state.identity.peer_id, state.incarnation
        kept = state.listening(config.listen)
        link = LibP2PConfig(state.identity, config.listen, kept, config.announce, nat=config.nat)
        async with (
            ControlServer(state.path, self.status, lambda: self.on_asked()),
            LoopLag() as lag,
            ThreadCompute() as compute,
            ThreadCompute() as disk,
            ThreadCompute() as files,
            LibP2PTransport(link) as transport,
            self._entry(transport, files) as entry,
        ):
            await disk.run(partial(state.listens, config.listen, transport.listening), 0)
            status_tracker.addresses = lambda: shareable(transport.addresses) or transport.addresses
            status_tracker.lag = lag
            tools = _PeerResources(state, transport, compute, disk, files, entry, lag)
            held = self._choice.held(state, self._wanted)
            if addresses := self._choice.addresses(state):
                status_tracker.set_state("joining", asks(addresses))
                run = await self._choice.ask(entry, state, addresses, held)
                if line := self._choice.is_over(state, run):
                    return self._end(line)
                await self._join(tools, run)
            elif held and held.has_state:
                await self._join(tools, self._choice.go_on(held))
            else:
                if not config.new:
                    resume.require_none(state)
                await self._found(tools)

    def _entry(self, transport: LibP2PTransport, files: ThreadCompute) -> BootstrapClient:
        async def read(path: Path) -> AddressLine | str:
            return await files.run(partial(read_addresses, transport.me, path), 0)

        return BootstrapClient(transport.connect, partial(ask_run, transport), self._choice.judge, self._view.say, read)

    # -- into a run ---------------------------------------------------------------------------------------------------

    async def _join(self, tools: _PeerResources, run: RunInfo) -> None:
        """Take part in a run that others started, or a former life of this peer."""
        manifest, state = unseal(run.sealed, verify), tools.state
        await self._begin(tools, manifest, run)
        async with AsyncExitStack() as stack:
            try:
                start = await self._start(tools, manifest)
                spec = worker_spec(manifest.config, self._config, start.data.seed, state.sample if run.sample else None)
                trainer = await stack.enter_async_context(RemoteTrainer(spec, tools.compute))
                manifest.require_layout(trainer.layout)
            except (WorkerError, ManifestError):  # this machine cannot train it
                await tools.disk.run(state.withdraw, 0)
                raise
            await self._settle(tools, trainer, manifest, run, start)

    async def _found(self, tools: _PeerResources) -> None:
        """Start a run: the initial state is drawn here, once, and downloaded by everybody else."""
        config = self._wanted
        if config is None:
            raise FatalPeerError("no address leads to a run: give one by --bootstrap, or start a run by --new")
        self._status_tracker.set_state("starting", "the model is built")
        seed = stream_seed(tools.me)
        async with RemoteTrainer(worker_spec(config, self._config, seed), tools.compute) as trainer:
            created = self._clock.wall()
            manifest, run = await found_run(config, tools.me, tools.state.identity, trainer, tools.compute, created)
            await self._begin(tools, manifest, run)
            self._view.say(f"started the run {manifest.config.name} ({manifest.run_id[:12]})")
            if command := join_command(self.status()):
                self._view.say(f"others join by: {command[0]}")
                if why := narrow(command[1], bool(self._config.announce)):
                    self._view.say(why)
            await self._settle(tools, trainer, manifest, run, await self._start(tools, manifest))

    async def _begin(self, tools: _PeerResources, manifest: Manifest, run: RunInfo) -> None:
        """This peer's directory, and what it shows, are of this run now."""
        state = tools.state
        begin = partial(state.begin, manifest.run_id, run_id(state.manifest()), run.sealed, run.sample)
        await tools.disk.run(begin, 0)
        status_tracker, config = self._status_tracker, manifest.config
        status_tracker.run, status_tracker.run_id, status_tracker.rounds = (
            config.name,
            manifest.run_id,
            config.recipe.rounds,
        )
        status_tracker.task, status_tracker.protocol = config.own_task, config.protocol

    async def _start(self, tools: _PeerResources, manifest: Manifest) -> resume.RestartPoint:
        """From where, which is told: a worker takes seconds to come up."""
        shares_anchor = manifest.config.protocol not in INDEPENDENT_PROTOCOLS
        start = partial(resume.load_restart_point, tools.state, manifest, tools.me, self._choice.own, shares_anchor)
        found = await tools.disk.run(start, 0)
        if line := found.words():
            self._view.say(line)
        if self._choice.own and (line := found.strange(tools.me, manifest.config.fork_peers)):
            self._view.say(line)
        return found

    # -- in the run ---------------------------------------------------------------------------------------------------

    async def _settle(
        self,
        tools: _PeerResources,
        trainer: RemoteTrainer,
        manifest: Manifest,
        run: RunInfo,
        start: resume.RestartPoint,
    ) -> None:
        """Put together what a peer in a run is made of, and stay until it is over."""
        config, status_tracker, state, transport = manifest.config, self._status_tracker, tools.state, tools.transport
        key = start.chain.head.key
        course = start.chain if start.shares_anchor else LocalHistory(tools.me, key)
        status_tracker.chain = course
        membership = status_tracker.membership = self._membership(tools, course)
        async with (
            DhtDirectory(transport, state.identity, self._clock, key.run, membership.offset_seconds) as directory,
            ScratchSpace(state.path, tools.disk) as scratch,
            self._checkpoints(tools, trainer, manifest, start) as checkpoints,
        ):
            status_tracker.checkpoint_age_seconds = lambda: checkpoints.age_seconds(self._clock.wall())
            remote = trainer
            frames, trainer, status_tracker.journal = with_failpoints(transport, trainer, state.rounds)
            host = Host(frames, directory, membership, tools.compute, self._clock, state.identity, config.seed)
            settings = protocol_settings(manifest, self._config, state.incarnation)
            made = OuterLoopFactory(host, settings, config, trainer, checkpoints, membership)
            if isinstance(course, LocalHistory):
                way = made.independent(
                    course, newcomer=not start.checkpoints and manifest.founder.peer != tools.me.peer
                )
            else:
                way = made.replicated(course, partial(self._past, scratch, tools), state.path)
            outer_loop = way.outer_loop
            await resume.restore(start, outer_loop, trainer, checkpoints)
            outer_loop.on_phase, status_tracker.waiting_for = (
                status_tracker.on_progress,
                lambda: outer_loop.waiting_for(),
            )
            status_tracker.pids = lambda: [pid for pid in (os.getpid(), trainer.pid, transport.daemon_pid) if pid]
            BootstrapServer(transport, run, lambda: asdict(public(self.status())))
            journal, clock, disk = status_tracker.journal, self._clock, tools.disk
            if isinstance(outer_loop, ReplicatedOuterLoop):
                outer_loop.recall(tokens_counted(await disk.run(journal.recent, 0)))
            deps = PeerSessionDeps(*way, trainer, membership, directory, state, journal, tools.lag, clock, disk)
            wait_for = self._config.wait_for_peers if course.head.key.round == 0 else 1
            limits = SessionLimits(config.recipe.rounds, self._config.rounds, wait_for)
            self._session = PeerSession(deps, limits, status_tracker, self._view)
            remote.on_given_up = self._give_up_training
            await self._told(self._session.run(), tools.files)

    async def _told(self, session: Coroutine[Any, Any, None], files: ThreadCompute) -> None:
        """While this peer can let others in, its addresses are where others look for them."""
        if path := self._config.addresses_file:
            kept = AddressesFile(path, self._status_tracker.addresses, files, self._view.say)
            await run_with_helper(session, kept.run())
        else:
            await session

    def _checkpoints(
        self, tools: _PeerResources, trainer: RemoteTrainer, manifest: Manifest, start: resume.RestartPoint
    ) -> CheckpointManager:
        every_rounds, limit_bytes = self._config.checkpoint_every, int(self._config.disk_limit_bytes)
        like = start.like(manifest.run_id, trainer.layout)
        error_feedback = feedback(codec(manifest.config.codec), sum(trainer.layout.sizes()), tools.compute)
        return CheckpointManager(
            tools.state.path, every_rounds, limit_bytes, like, trainer, tools.disk, start.archive.sync, error_feedback
        )

    def _past(self, scratch: ScratchSpace, tools: _PeerResources, gate: Gate) -> PartStore:
        least_rounds = max(LEAST_ROUNDS, KEEP_CHECKPOINTS * self._config.checkpoint_every)
        return PartStore(scratch.room, tools.disk, gate, least_rounds=least_rounds)

    def _membership(self, tools: _PeerResources, course: RoundHistory) -> Membership:
        unanswered = self._choice.given(tools.entry) if self._choice.alone else ()
        made = build_membership(
            tools.transport, self._clock, tools.state, self._status_tracker, course, tools.entry.met, unanswered
        )
        made.on_twin, made.host_monitor.say = self._fail, self._view.say
        tools.entry.on_named = hinted(made)
        return made


async def remote_status(address: str, seconds: float = STATUS_SECONDS) -> dict[str, Any]:
    """How the peer at a multiaddr says that it is doing, asked under an identity of a moment's life.

    Raises:
        Refused: it cannot be asked.
    """
    with tempfile.TemporaryDirectory() as directory:
        identity = create(Path(directory) / "identity.key")
        async with LibP2PTransport(LibP2PConfig(identity)) as transport:
            deadline = asyncio.get_running_loop().time() + seconds
            try:
                return await ask_status(transport, await transport.connect(address, deadline), deadline)
            except PeerError as error:
                raise FatalPeerError(f"{address}: {error.why}") from None
            except (BadPayload, ValueError) as error:
                raise FatalPeerError(f"{address}: {error}") from None
