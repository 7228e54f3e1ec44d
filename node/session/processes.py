"""What a peer holds from the start of its processes to their end: p2pd, threads, files, its page and its control."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from node.config.peer_config import PeerConfig
from node.joining.addresses_file import AddressLine, read_addresses
from node.joining.bootstrap import BootstrapClient, RunInfo, ask_run
from node.network.libp2p import LibP2PTransport
from node.page.server import PageServer
from node.reporting.event_feed import EventFeed
from node.reporting.status import EventSink
from node.runtime.clock import WallClock
from node.runtime.compute import ThreadCompute
from node.runtime.proxies import dialled_directly
from node.session.page_content import PageContent
from node.session.pausing import PauseController
from node.session.status_tracker import StatusTracker
from node.session.traffic_limits import TrafficLimits
from node.storage.statedir import StateDir
from node.ui.control import Command, ControlServer
from protocols.base import Member
from protocols.streams.framing import BULK_METHODS


class PeerProcesses:
    """The parts of a peer that do not depend on its run. Those declared without a value exist while it is `running`."""

    transport: LibP2PTransport
    bootstrap: BootstrapClient
    pauses: PauseController

    def __init__(self, config: PeerConfig, state: StateDir, view: EventSink) -> None:
        self.config, self.state, self.clock = config, state, WallClock()
        self.me = Member(state.identity.peer_id, state.incarnation)
        self.compute = ThreadCompute()
        self.disk = ThreadCompute()  # reads and writes the state directory
        # Reads and writes what must not wait for a checkpoint: files with addresses, settings, the quota.
        self.files = ThreadCompute()
        self.limits = TrafficLimits(config, self.clock.wall, state.path, self.files)
        self.tracker = StatusTracker(config.nickname, self.me, self.limits, self.clock)
        self._terminal, self.view = view, EventFeed(view, self.clock.wall)

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
        tracker.pauses = self.pauses = PauseController(state.path, self.clock, say)
        command = partial(carry_out, finish=on_asked, pauses=self.pauses, limits=self.limits)
        async with (
            tracker.lag,
            self.compute,
            self.disk,
            self.files,
            ControlServer(state.path, tracker.status, command),
            self.limits.kept(say, on_asked),
            libp2p as self.transport,
            self._bootstrap_client(judge) as self.bootstrap,
            self._page(command) if config.page else nullcontext(),
        ):
            await self.disk.run(partial(state.listens, config.listen, libp2p.listening), 0)
            tracker.transport = libp2p
            yield

    def _bootstrap_client(self, judge: Callable[[RunInfo], None]) -> BootstrapClient:
        connect, ask = self.transport.connect, partial(ask_run, self.transport)
        return BootstrapClient(connect, ask, judge, self.view.say, self._read_addresses, dialled_directly())

    async def _read_addresses(self, file: Path) -> AddressLine | str:
        return await self.files.run(partial(read_addresses, self.me.peer, file), 0)

    def _page(self, command: Command) -> PageServer:
        config = self.config
        return PageServer(
            PageContent(config, self.tracker, self.transport, self.view, command),
            self._terminal.say,  # the link holds the token: it must not get into the page itself, nor into a log
            state_dir=self.state.path,
            port=config.page_port,
            hosts=config.page_hosts,
            show_token=sys.stderr.isatty(),
        )


async def carry_out(
    request: Mapping[str, Any], finish: Callable[[], None], pauses: PauseController, limits: TrafficLimits
) -> Mapping[str, object]:
    """Carry out a request of the control socket or the page, a JSON object that names the command by `do`.

    The answer has `ok` and, with it, a `line` for the user; or `error` if the request is unknown.
    """
    try:
        match request:
            case {"do": "finish"}:
                finish()
                return {"ok": True}
            case {"do": "pause", "until": None | int() | float() as until, "after_round": bool(after)}:
                return {"ok": True, "line": pauses.pause("", until, after)}
            case {"do": "resume"}:
                return {"ok": True, "line": pauses.resume()}
            case {"do": "set", "name": str(name), "value": str(value)}:
                return {"ok": True, "line": await limits.change(name, value)}
    except ValueError as error:
        return {"ok": False, "line": str(error)}
    except OverflowError:  # an integer that is too large for a float
        return {"ok": False, "line": "a number of the request is far too large: give a smaller one"}
    return {"error": 'ask {"do": …} with "status", "finish", "pause", "resume" or "set"'}
