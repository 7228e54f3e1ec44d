"""What a peer holds from the start of its processes to their end: p2pd, threads, files, its page and its control."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path

from node.config.peer_config import PeerConfig
from node.joining.addresses_file import AddressLine, read_addresses
from node.joining.bootstrap import BootstrapClient, RunInfo, ask_run
from node.network.address_scope import shareable
from node.network.libp2p import LibP2PTransport
from node.reporting.status import EventSink
from node.runtime.clock import WallClock
from node.runtime.compute import ThreadCompute
from node.runtime.metrics import LoopLag
from node.runtime.proxies import dialled_directly
from node.session.page_setup import PageSetup
from node.session.pausing import PauseController
from node.session.traffic_limits import TrafficLimits
from node.storage.statedir import StateDir
from node.ui.control import ControlServer, PeerCommands
from node.ui.status_tracker import StatusTracker
from protocols.base import Member
from protocols.streams.framing import BULK_METHODS


class PeerProcesses:
    """The parts of a peer that do not depend on its run. Those declared without a value exist while it is `running`."""

    transport: LibP2PTransport
    bootstrap: BootstrapClient
    pauses: PauseController
    lag: LoopLag
    compute: ThreadCompute
    disk: ThreadCompute
    """Reads and writes the state directory."""
    files: ThreadCompute
    """Reads and writes what must not wait for a checkpoint: files with addresses, settings, the quota."""

    def __init__(self, config: PeerConfig, state: StateDir, view: EventSink) -> None:
        self.config, self.state, self.clock = config, state, WallClock()
        self.me = Member(state.identity.peer_id, state.incarnation)
        self.limits = TrafficLimits(config, self.clock.wall)
        self.tracker = StatusTracker(config.nickname, self.me, self.limits.describe)
        self._page = PageSetup(config, self.tracker, view)
        self.view = self._page.feed

    @asynccontextmanager
    async def running(self, judge: Callable[[RunInfo], None], on_asked: Callable[..., None]) -> AsyncIterator[None]:
        """Run the peer's processes.

        `judge` raises if this peer may not join the run that an address leads to. `on_asked` is called when the control
        channel or the quota asks the peer to finish, with a reason if it has one.
        """
        config, state, tracker, say = self.config, self.state, self.tracker, self.view.say
        libp2p = LibP2PTransport(
            state.identity,
            listen=config.listen,
            kept=state.listening(config.listen),
            announce=config.announce,
            nat=config.nat,
            relay=config.relays,
            direct_methods=None if config.direct_port == "off" else BULK_METHODS,
            direct_port=0 if config.direct_port == "off" else config.direct_port,
            traffic=self.limits.traffic,
        )
        pauses = self.pauses = PauseController(state.path, self.clock, say)
        tracker.set_pauses(lambda: pauses.reason)
        async with (
            LoopLag() as self.lag,
            ThreadCompute() as self.compute,
            ThreadCompute() as self.disk,
            ThreadCompute() as files,
        ):
            self.files = files
            commands = PeerCommands(on_asked, pauses, partial(self.limits.change, state.path, files))
            async with (
                ControlServer(state.path, tracker.status, commands),
                self.limits.kept(state.path, files, say, on_asked),
                libp2p as transport,
                self._bootstrap_client(transport, judge) as self.bootstrap,
                self._page.server(state, transport, commands.carry_out) if config.page else nullcontext(),
            ):
                self.transport = transport
                await self.disk.run(partial(state.listens, config.listen, transport.listening), 0)
                addresses = lambda: shareable(transport.addresses) or transport.addresses  # noqa: E731
                tracker.set_network(addresses, self.lag, lambda: transport.routes)
                yield

    def _bootstrap_client(self, transport: LibP2PTransport, judge: Callable[[RunInfo], None]) -> BootstrapClient:
        async def read(path: Path) -> AddressLine | str:
            return await self.files.run(partial(read_addresses, transport.me, path), 0)

        ask = partial(ask_run, transport)
        return BootstrapClient(transport.connect, ask, judge, self.view.say, read, dialled_directly())
