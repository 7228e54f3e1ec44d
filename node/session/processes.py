"""What a peer holds from the start of its processes to their end: p2pd, threads, files, its page and its control."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from node._version import VERSION
from node.config.multiaddrs import FILE_SIGN
from node.config.peer_config import PeerConfig
from node.joining.addresses_file import AddressLine, read_addresses
from node.joining.bootstrap import BootstrapClient, RunInfo, ask_run
from node.machine.probes import hottest_celsius
from node.machine.service import is_service
from node.network.address_scope import Scope, scope, undialled
from node.network.daemon import PortTaken
from node.network.libp2p import LibP2PTransport
from node.page.server import PageServer
from node.reporting.event_feed import EventFeed
from node.reporting.report import RoundReport
from node.reporting.status import EventSink, Status, join_command, narrow, not_direct, who_joins
from node.runtime.clock import WallClock
from node.runtime.compute import ThreadCompute
from node.runtime.metrics import CpuMeter
from node.runtime.program import upgrade
from node.runtime.proxies import dialled_directly
from node.session.examination import DoctorService, ExaminationBeside
from node.session.pausing import PauseController
from node.session.private_run import PrivateCommands, PrivateMembership
from node.session.status_tracker import StatusTracker
from node.session.swarm_poller import SwarmPoller
from node.session.traffic_limits import TrafficLimits
from node.session.transport import make_transport
from node.storage.statedir import StateDir
from node.ui.control import Command, ControlServer
from protocols.base import Member

PORT_PAUSES_SECONDS = (10.0, 20.0, 40.0, 80.0, 160.0, 300.0)
"""Between a service's attempts to listen on a port that another program has. The last one is repeated."""


class PeerProcesses:
    """The parts of a peer that do not depend on its run. Those declared without a value exist while it is `running`."""

    transport: LibP2PTransport
    bootstrap: BootstrapClient
    pauses: PauseController

    def __init__(self, config: PeerConfig, state: StateDir, view: EventSink) -> None:
        self.config, self.state, self.clock = config, state, WallClock()
        self.me = Member(state.identity.peer_id, state.incarnation)
        self._recalled = False
        self.has_moved, self.rounds_done = False, 0  # between stages, in this process; in the sessions before
        self.compute = ThreadCompute()
        self.disk = ThreadCompute()  # reads and writes the state directory
        # Reads and writes what must not wait for a checkpoint: files with addresses, settings, the quota.
        self.files = ThreadCompute()
        self.limits = TrafficLimits(config, self.clock.wall, state.path, self.files)
        self.tracker = StatusTracker(config.nickname, self.me, self.limits, self.clock)
        self.doctor = DoctorService(self._examination)
        self._terminal, self.view = view, EventFeed(view, self.clock.wall)
        self.private = PrivateMembership(state, self.files, self.clock, config.nickname, self.view.say)
        self.private.contacts = self.tracker.contacts
        self.swarm = SwarmPoller(self.tracker.status, self.view.say, upgrade())

    def recall(self, reports: Sequence[RoundReport]) -> None:
        """Pass the reports of earlier processes on to the views; later sessions of this one have shown theirs."""
        if not self._recalled:
            self.view.recall(reports)
            for report in reports:
                self.swarm.counted.add(report)
        self._recalled = True

    async def begin_again(self) -> None:
        """Become the next incarnation of the peer, in the same processes. No session may be open. Raises StateError."""
        await self.disk.run(self.state.next_incarnation, 0)
        self.me = Member(self.me.peer, self.state.incarnation)
        self.tracker.begin_again(self.me)

    @asynccontextmanager
    async def running(self, judge: Callable[[RunInfo], None], on_asked: Callable[..., None]) -> AsyncIterator[None]:
        """Run the peer's processes.

        `judge` raises if this peer may not join the run that an address leads to. `on_asked` is called when the control
        channel or the quota asks the peer to finish, with a reason if it has one.
        """
        config, state, tracker, say = self.config, self.state, self.tracker, self.view.say
        tracker.pauses = self.pauses = PauseController(state.path, self.clock, say)
        command = partial(
            carry_out,
            finish=on_asked,
            pauses=self.pauses,
            limits=self.limits,
            swarm=self.swarm,
            doctor=self.doctor.ask,
            move=tracker.move,
            private=PrivateCommands(self.private, tracker, self.swarm).carry_out,
        )
        async with (
            tracker.lag,
            self.compute,
            self.disk,
            self.files,
            ControlServer(state.path, tracker.status, command),
            self.limits.kept(say, on_asked),
            self._listening() as self.transport,
            self.doctor,
            self._bootstrap_client(judge) as self.bootstrap,
            self._page(command) if config.page else nullcontext(),
        ):
            await self.disk.run(partial(state.listens, config.listen, self.transport.listening), 0)
            tracker.transport = self.transport
            yield

    @asynccontextmanager
    async def _listening(self) -> AsyncIterator[LibP2PTransport]:
        """The transport while it runs. A service waits for its port: systemd would start it again every ten seconds,
        and each start would say the same.
        """
        async with AsyncExitStack() as stack:
            yield await self._entered(stack)

    async def _entered(self, stack: AsyncExitStack) -> LibP2PTransport:
        said = ""
        for pause_seconds in chain(PORT_PAUSES_SECONDS, repeat(PORT_PAUSES_SECONDS[-1])):
            known = await self._given_addresses()
            transport = make_transport(self.config, self.state, known, self.limits.traffic)
            self._restrict(transport)
            try:
                return await stack.enter_async_context(transport)
            except PortTaken as error:
                if not is_service():
                    raise
                if str(error) != said:
                    self.view.say(f"{error}; this service waits, and tries again ever more rarely")
                said = str(error)
            await asyncio.sleep(pause_seconds)
        raise AssertionError("unreachable")

    def _restrict(self, transport: LibP2PTransport) -> None:
        """In a private run, only members open streams."""
        exchange = self.private.exchange
        exchange.expel, exchange.served = transport.expel, transport.served
        exchange.serve(transport)
        transport.restrict(exchange)

    async def _given_addresses(self) -> list[str]:
        """Those that the user gave, and those that files hold now."""
        found: list[str] = []
        for each in self.config.bootstrap:
            content = await self._read_addresses(Path(each[1:])) if each.startswith(FILE_SIGN) else None
            found += content.addresses if isinstance(content, AddressLine) else () if content else [each]
        return found

    def _bootstrap_client(self, judge: Callable[[RunInfo], None]) -> BootstrapClient:
        connect, ask = self.transport.connect, partial(ask_run, self.transport)
        return BootstrapClient(connect, ask, judge, self.view.say, self._read_addresses, dialled_directly())

    async def _read_addresses(self, file: Path) -> AddressLine | str:
        return await self.files.run(partial(read_addresses, self.me.peer, file), 0)

    def _examination(self, given: str) -> ExaminationBeside:
        if self.tracker.transport is None:
            raise ValueError("the peer is starting: ask again in a few seconds")
        device = self.tracker.status().device
        return ExaminationBeside(self.config, self.state, self.transport, self.tracker.contacts(), device, given)

    def _page(self, command: Command) -> PageServer:
        config = self.config
        return PageServer(
            PageContent(config, self.tracker, self.transport, self.view, command, self.swarm),
            self._terminal.say,  # the link holds the token: it must not get into the page itself, nor into a log
            state_dir=self.state.path,
            port=config.page_port,
            hosts=config.page_hosts,
            show_token=sys.stderr.isatty(),
        )


async def carry_out(
    request: Mapping[str, Any],
    *,
    finish: Callable[[], None],
    pauses: PauseController,
    limits: TrafficLimits,
    swarm: SwarmPoller,
    doctor: Callable[[int | None, str], Mapping[str, object]],
    move: Callable[[int], str],
    private: Callable[[Mapping[str, Any]], Awaitable[Mapping[str, object] | None]],
) -> Mapping[str, object]:
    """Carry out a request of the control socket or the page, a JSON object that names the command by `do`.

    The answer has `ok` and, with it, a `line` for the user; or `error` if the request is unknown. That to "swarm" is a
    `SwarmStatus`, which the next answers fill.
    """
    try:
        match request:
            case {"do": "swarm"}:
                swarm.want()
                return asdict(swarm.view())
            case {"do": "finish"}:
                finish()
                return {"ok": True}
            case {"do": "pause", "until": None | int() | float() as until, "after_round": bool(after)}:
                return {"ok": True, "line": pauses.pause("", until, after)}
            case {"do": "resume"}:
                return {"ok": True, "line": pauses.resume()}
            case {"do": "set", "name": str(name), "value": str(value)}:
                return {"ok": True, "line": await limits.change(name, value)}
            case {"do": "move", "stage": int(stage)}:
                return {"ok": True, "line": move(stage)}
            case {"do": "doctor", "number": None | int() as number, "address": str(address)}:
                return doctor(number, address)
    except ValueError as error:
        return {"ok": False, "line": str(error)}
    except OverflowError:  # an integer that is too large for a float
        return {"ok": False, "line": "a number of the request is far too large: give a smaller one"}
    known = "status, swarm, finish, pause, resume, set, move, invite, members, revoke or doctor"
    return await private(request) or {"error": f'ask {{"do": …}} with {known}'}


CONTROLS = ("pause", "finish")  # What the page's user may ask for
SWARM_SECONDS = 5.0  # How old the page's table of peers may be, unless a round ends, or a peer comes or goes


class PageContent:
    """`node.page.app.PageSources` of a running peer."""

    def __init__(
        self,
        config: PeerConfig,
        tracker: StatusTracker,
        transport: LibP2PTransport,
        feed: EventFeed,
        command: Command,
        swarm: SwarmPoller,
    ) -> None:
        self.incarnation, self.feed, self.command = tracker.incarnation, feed, command
        self._transport, self._tracker, self._swarm = transport, tracker, swarm
        self._announced = bool(config.announce) or all(scope(each) == Scope.MACHINE for each in config.listen)
        self._cpu = CpuMeter()
        self._shown: tuple[object, ...] = ()
        self._peers: Mapping[str, Any] = {}
        self._swarm_due = 0.0

    def values(self) -> Mapping[str, Any]:
        meter, status = self._transport.traffic.meter, self._tracker.status()
        speeds = dict.fromkeys(("upload", "download"), 0.0)
        for (direction, _), rate in meter.rates().items():
            speeds[str(direction)] += rate
        by_class: dict[str, dict[str, int]] = {}
        for (direction, kind), count in meter.totals().items():
            by_class.setdefault(str(kind), {})[str(direction)] = count
        return {
            "time": self._tracker.clock.wall(),
            "bytes_per_second": speeds,  # by direction, over the last seconds
            "network_bytes": by_class,  # by class of traffic and direction, since the peer started
            "cpu_cores": self._cpu.cores(self._tracker.pids(), asyncio.get_running_loop().time()),
            "temperature_celsius": hottest_celsius()[0],
            "controls": CONTROLS,
            **of_status(status, self._announced),
            **self._of_swarm(status),
        }

    def _of_swarm(self, status: Status) -> Mapping[str, Any]:
        """What grows with the swarm changes only now and then, so that the page is not sent it each second."""
        self._swarm.want()  # a page is there
        now = asyncio.get_running_loop().time()
        key = status.round, tuple((each.peer, each.live) for each in status.peers)
        if key != self._shown or now >= self._swarm_due:
            self._shown, self._swarm_due = key, now + SWARM_SECONDS
            meter = self._transport.traffic.meter
            self._peers = {
                "swarm": asdict(self._swarm.view(status)),
                "peer_bytes": {peer: (counts.sent, counts.received) for peer, counts in meter.peers().items()},
            }
        return self._peers

    def _refused(self) -> Mapping[str, int]:
        """Part of the peer -> number of peers and messages refused by it."""
        streams, unreadable = sum(self._transport.refused.values()), sum(self._swarm.unreadable.values())
        return {"streams": streams, "status": unreadable, **self._tracker.refused()}

    def metrics(self) -> bytes:
        from node.page.prometheus import metrics_text

        transport, status = self._transport, self._tracker.status()
        totals = transport.traffic.meter.totals()
        return metrics_text(
            status,
            self.feed.counters,
            info={"version": VERSION, "protocol": status.protocol, "peer": status.peer, "name": status.run},
            network_bytes={(str(direction), str(kind)): count for (direction, kind), count in totals.items()},
            refused=self._refused(),
            restarts={"p2pd": transport.restarts, **self._tracker.restarts()},
            temperature_celsius=hottest_celsius()[0],
        )


def of_status(status: Status, announced: bool = False) -> dict[str, Any]:
    """The status, and what follows from it. `announced`: whether the user chose the addresses that others see."""
    join = join_command(status)
    here_only = narrow(join[1], False) if join and not announced else ""
    slow = not_direct(status.peers)
    data = slow and f"data goes to {slow}"
    warnings = (status.clock, status.checkpoint_problem, here_only, undialled(status.addresses), data)
    return {
        "status": asdict(replace(status, peers=())),  # the page has them with the swarm
        "join": {"command": join[0], "who": who_joins(join[1])} if join else None,
        "warnings": [line for line in warnings if line],  # what the user should know or mend
        "announced": announced,
    }
