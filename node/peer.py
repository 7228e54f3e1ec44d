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

from node.assembly import Parts
from node.clock import WallClock
from node.compute import ThreadCompute
from node.entering import resume
from node.entering.acquaintances import acquainted, hinted
from node.entering.addressfile import AddressesFile, Named, read_addresses, require_usable
from node.entering.choice import Choice, asks, run_id
from node.entering.entry import Door, Entry, Run, ask_run, ask_status
from node.entering.founding import found
from node.identity import IdentityError, create, verify
from node.members.addresses import shareable
from node.members.membership import Membership
from node.metrics import LoopLag
from node.network.daemon import DaemonError
from node.network.dht import DhtDirectory
from node.network.libp2p import LibP2PConfig, LibP2PTransport
from node.outfit import protocol_settings, stream_seed, worker_spec
from node.report import tokens_counted
from node.rounds.course import Course, OwnCourse
from node.rounds.round import Replica
from node.settings.config import ConfigError
from node.settings.manifest import Manifest, ManifestError, unseal
from node.settings.peerconfig import PeerConfig
from node.settings.runconfig import RunConfig
from node.status import Status, View, join_command, public
from node.stay import Limits, Means, Stay
from node.storage.feedback import feedback
from node.storage.keeper import Keeper
from node.storage.scratch import ScratchSpace
from node.storage.statedir import StateDir, StateError
from node.trace import traced
from node.training.remote import RemoteTrainer, WorkerError
from node.view.control import Control
from node.view.portrait import Portrait
from protocols import LOOSE, PROTOCOLS
from protocols.base import BadPayload, Host, Member, PeerError
from protocols.codec import codec
from protocols.gate import Gate
from protocols.rounds.partstore import LEAST_ROUNDS, PartStore
from protocols.tasks import alongside

log = logging.getLogger(__name__)

STATUS_SECONDS = 10.0
KEEP_CHECKPOINTS = 2
"""The parts of the rounds since so many checkpoints are kept at least: whoever takes one finds the rounds since."""


class Refused(Exception):
    """This peer cannot go on, for what its user or its machine gave it; one line says what, why and what to do."""


@dataclass(frozen=True, slots=True)
class _Tools:
    state: StateDir
    transport: LibP2PTransport
    compute: ThreadCompute
    disk: ThreadCompute
    files: ThreadCompute
    entry: Entry
    lag: LoopLag

    @property
    def me(self) -> Member:
        return Member(self.state.identity.peer_id, self.state.incarnation)


class Peer:
    """A volunteer's peer. `run` is its whole life.

    Attributes:
        on_asked: called when the control door is asked to let the peer finish.
    """

    def __init__(self, config: PeerConfig, run: RunConfig | None, view: View) -> None:
        """
        Args:
            config: of this machine; its state directory is given.
            run: what to start, if no address leads into a run, and what a run in its state directory has to be.
        """
        self.on_asked: Callable[[], None] = self.finish
        self._config, self._wanted, self._view = config, run, view
        self._portrait = Portrait(config.nickname)
        self._clock = WallClock()
        self._stay: Stay | None = None
        self._living: asyncio.Task[None] | None = None
        self._choice = Choice(config, (*PROTOCOLS, *LOOSE), view.say)
        self._finishing, self._failure = False, ""

    def finish(self) -> None:
        """End the round, hand in, leave; at once where there is no round yet."""
        if self._stay:
            self._stay.leave()
        elif self._living and not self._finishing:
            self._living.cancel()
        self._finishing = True

    def status(self) -> Status:
        """What this peer does, as of now."""
        return self._portrait.status()

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
            raise Refused(str(error)) from None
        if self._failure:
            raise Refused(self._failure)
        self._portrait.becomes("finished", self._portrait.reason)
        return 0

    def _fail(self, why: str) -> None:
        self._failure = why
        if self._living:
            self._living.cancel()

    async def _live(self, state: StateDir) -> None:
        config, portrait = self._config, self._portrait
        portrait.peer, portrait.incarnation = state.identity.peer_id, state.incarnation
        kept = state.listening(config.listen)
        link = LibP2PConfig(state.identity, config.listen, kept, config.announce, nat=config.nat)
        async with (
            Control(state.path, self.status, lambda: self.on_asked()),
            LoopLag() as lag,
            ThreadCompute() as compute,
            ThreadCompute() as disk,
            ThreadCompute() as files,
            LibP2PTransport(link) as transport,
            self._entry(transport, files) as entry,
        ):
            await disk.run(partial(state.listens, config.listen, transport.listening), 0)
            portrait.addresses = lambda: shareable(transport.addresses) or transport.addresses
            portrait.lag = lag
            tools = _Tools(state, transport, compute, disk, files, entry, lag)
            held = self._choice.held(state, self._wanted)
            if addresses := self._choice.addresses(state):
                portrait.becomes("joining", asks(addresses))
                await self._join(tools, await self._choice.ask(entry, state, addresses, held))
            elif held and held.has_state:
                await self._join(tools, self._choice.go_on(held))
            else:
                if not config.new:
                    resume.require_none(state)
                await self._found(tools)

    def _entry(self, transport: LibP2PTransport, files: ThreadCompute) -> Entry:
        async def read(path: Path) -> Named | str:
            return await files.run(partial(read_addresses, transport.me, path), 0)

        return Entry(transport.connect, partial(ask_run, transport), self._choice.judge, self._view.say, read)

    # -- into a run ---------------------------------------------------------------------------------------------------

    async def _join(self, tools: _Tools, run: Run) -> None:
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

    async def _found(self, tools: _Tools) -> None:
        """Start a run: the initial state is drawn here, once, and downloaded by everybody else."""
        config = self._wanted
        if config is None:
            raise Refused("no address leads to a run: give one by --bootstrap, or start a run by --new")
        self._portrait.becomes("starting", "the model is built")
        seed = stream_seed(tools.me)
        async with RemoteTrainer(worker_spec(config, self._config, seed), tools.compute) as trainer:
            created = self._clock.wall()
            manifest, run = await found(config, tools.me, tools.state.identity, trainer, tools.compute, created)
            await self._begin(tools, manifest, run)
            self._view.say(f"started the run {manifest.config.name} ({manifest.run_id[:12]})")
            if command := join_command(self.status()):
                self._view.say(f"others join by: {command[0]}")
                if not command[1]:
                    self._view.say("this address works on this machine only: --listen on another for others to join")
            await self._settle(tools, trainer, manifest, run, await self._start(tools, manifest))

    async def _begin(self, tools: _Tools, manifest: Manifest, run: Run) -> None:
        """This peer's directory, and what it shows, are of this run now."""
        state = tools.state
        begin = partial(state.begin, manifest.run_id, run_id(state.manifest()), run.sealed, run.sample)
        await tools.disk.run(begin, 0)
        portrait, config = self._portrait, manifest.config
        portrait.run, portrait.run_id, portrait.rounds = config.name, manifest.run_id, config.recipe.rounds
        portrait.task, portrait.protocol = config.own_task, config.protocol

    async def _start(self, tools: _Tools, manifest: Manifest) -> resume.Start:
        """From where, which is told: a worker takes seconds to come up."""
        shares_anchor = manifest.config.protocol not in LOOSE
        start = partial(resume.start, tools.state, manifest, tools.me, self._choice.own, shares_anchor)
        found = await tools.disk.run(start, 0)
        if line := found.words():
            self._view.say(line)
        if self._choice.own and (line := found.strange(tools.me)):
            self._view.say(line)
        return found

    # -- in the run ---------------------------------------------------------------------------------------------------

    async def _settle(
        self, tools: _Tools, trainer: RemoteTrainer, manifest: Manifest, run: Run, start: resume.Start
    ) -> None:
        """Put together what a peer in a run is made of, and stay until it is over."""
        config, portrait, state, transport = manifest.config, self._portrait, tools.state, tools.transport
        key = start.chain.head.key
        course = start.chain if start.shares_anchor else OwnCourse(tools.me, key)
        portrait.chain = course
        membership = portrait.membership = self._membership(tools, course)
        async with (
            DhtDirectory(transport, state.identity, self._clock, key.run, membership.offset_seconds) as directory,
            ScratchSpace(state.path, tools.disk) as scratch,
            self._keeper(tools, trainer, manifest, start) as keeper,
        ):
            portrait.checkpoint_age_seconds = lambda: keeper.age_seconds(self._clock.wall())
            frames, trainer, portrait.journal = traced(transport, trainer, state.rounds)
            host = Host(frames, directory, membership, tools.compute, self._clock, state.identity, config.seed)
            settings = protocol_settings(manifest, self._config, state.incarnation)
            made = Parts(host, settings, config, trainer, keeper, membership)
            if isinstance(course, OwnCourse):
                way = made.loose(course, newcomer=not start.checkpoints and manifest.founder.peer != tools.me.peer)
            else:
                way = made.anchored(course, partial(self._past, scratch, tools), state.path)
            replica = way.replica
            await resume.take_up(start, replica, trainer, keeper)
            replica.on_phase, portrait.awaited = portrait.works, lambda: replica.awaited()
            portrait.pids = lambda: [pid for pid in (os.getpid(), trainer.pid, transport.daemon_pid) if pid]
            Door(transport, run, lambda: asdict(public(self.status())))
            journal, clock, disk = portrait.journal, self._clock, tools.disk
            if isinstance(replica, Replica):
                replica.recall(tokens_counted(await disk.run(journal.recent, 0)))
            means = Means(*way, trainer, membership, directory, state, journal, tools.lag, clock, disk)
            wait_for = self._config.wait_for_peers if course.head.key.round == 0 else 1
            limits = Limits(config.recipe.rounds, self._config.rounds, wait_for)
            self._stay = Stay(means, limits, portrait, self._view)
            await self._told(self._stay.run(), tools.files)

    async def _told(self, stay: Coroutine[Any, Any, None], files: ThreadCompute) -> None:
        """While this peer can let others in, its addresses are where others look for them."""
        if path := self._config.addresses_file:
            kept = AddressesFile(path, self._portrait.addresses, files, self._view.say)
            await alongside(stay, kept.run())
        else:
            await stay

    def _keeper(self, tools: _Tools, trainer: RemoteTrainer, manifest: Manifest, start: resume.Start) -> Keeper:
        every_rounds, limit_bytes = self._config.checkpoint_every, int(self._config.disk_limit_bytes)
        like = start.like(manifest.run_id, trainer.layout)
        owed = feedback(codec(manifest.config.codec), sum(trainer.layout.sizes()), tools.compute)
        return Keeper(tools.state.path, every_rounds, limit_bytes, like, trainer, tools.disk, start.archive.sync, owed)

    def _past(self, scratch: ScratchSpace, tools: _Tools, gate: Gate) -> PartStore:
        least_rounds = max(LEAST_ROUNDS, KEEP_CHECKPOINTS * self._config.checkpoint_every)
        return PartStore(scratch.room, tools.disk, gate, least_rounds=least_rounds)

    def _membership(self, tools: _Tools, course: Course) -> Membership:
        unanswered = self._choice.given(tools.entry) if self._choice.alone else ()
        made = acquainted(
            tools.transport, self._clock, tools.state, self._portrait, course, tools.entry.met, unanswered
        )
        made.on_twin, made.vigil.say = self._fail, self._view.say
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
                raise Refused(f"{address}: {error.why}") from None
            except (BadPayload, ValueError) as error:
                raise Refused(f"{address}: {error}") from None
