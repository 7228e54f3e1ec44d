"""Connects a peer's page and metrics with the parts of the peer that they show."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING, Any

from node.config.peer_config import PeerConfig
from node.machine.probes import hottest_celsius
from node.network.address_scope import Scope, scope
from node.page.server import PageServer
from node.reporting.event_feed import EventFeed, RunCounters
from node.reporting.status import EventSink, Status, join_command, narrow, not_direct, who_joins
from node.runtime.clock import WallClock
from node.runtime.metrics import CpuMeter
from node.storage.statedir import StateDir
from node.ui.control import Command
from node.ui.status_tracker import StatusTracker

if TYPE_CHECKING:
    from node.network.libp2p import LibP2PTransport
    from node.page.app import PageSources
    from node.page.prometheus import MachineSample


@dataclass(frozen=True, slots=True)
class PageExtras:
    """Values beside the status, of this machine and for its user only."""

    time: float
    version: str
    # By direction, over the last seconds.
    bytes_per_second: Mapping[str, float] = field(default_factory=dict)
    # By class of traffic and direction, since the peer started; so are `peer_bytes`, (sent, received) by peer.
    network_bytes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    peer_bytes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    cpu_cores: float = float("nan")
    temperature_celsius: float = float("nan")
    # What the page's user may ask for.
    controls: tuple[str, ...] = ("pause", "finish")
    announced: bool = False  # whether the user chose the addresses that others see


def page_values(status: Status, extras: PageExtras) -> Mapping[str, Any]:
    """Everything that the page shows of the present moment."""
    join = join_command(status)
    shown = asdict(extras)
    shown["status"] = asdict(status)
    shown["join"] = {"command": join[0], "who": who_joins(join[1])} if join else None
    here_only = narrow(join[1], False) if join and not extras.announced else ""
    slow = not_direct(status.peers)
    lines = (status.clock, status.checkpoint_problem, here_only, slow and f"data goes to {slow}")
    shown["warnings"] = [line for line in lines if line]  # what the user should know or mend
    return shown


class PageSetup:
    """Collects what the page and the metrics show. Its `feed` takes the peer's messages and reports."""

    def __init__(self, config: PeerConfig, tracker: StatusTracker, view: EventSink) -> None:
        self._config, self._tracker, self._view = config, tracker, view
        self._counters, self._cpu = RunCounters(), CpuMeter()
        self._wall = WallClock().wall
        self.feed = EventFeed((view, self._counters), self._wall)
        installed = [each.version for each in metadata.distributions(name="starling")]
        self._version = installed[0] if installed else ""

    def server(
        self,
        state: StateDir,
        transport: LibP2PTransport,
        command: Command,
    ) -> PageServer:
        """The page's server; call it only if the page is on. `command` carries out {"do": "finish"} and the like."""
        # The link holds the token, so it goes to a terminal only, and not to a log or to the page itself.
        return PageServer(
            lambda: self._sources(state, transport, command),
            self._view.say,
            state_dir=state.path,
            port=self._config.page_port,
            hosts=self._config.page_hosts,
            show_token=sys.stderr.isatty(),
        )

    def _sources(
        self,
        state: StateDir,
        transport: LibP2PTransport,
        command: Command,
    ) -> PageSources:
        from node.page.app import PageSources
        from node.page.prometheus import metrics_text

        tracker = self._tracker
        return PageSources(
            incarnation=state.incarnation,
            status=lambda: page_values(tracker.status(), self._extras(transport)),
            feed=self.feed,
            metrics=lambda: metrics_text(
                tracker.status(), self._counters, self._machine_sample(transport), self._info()
            ),
            command=command,
        )

    def _extras(self, transport: LibP2PTransport) -> PageExtras:
        meter = transport.traffic.meter
        speeds = dict.fromkeys(("upload", "download"), 0.0)
        for (direction, _), rate in meter.rates().items():
            speeds[str(direction)] += rate
        by_class: dict[str, dict[str, int]] = {}
        for (direction, kind), count in meter.totals().items():
            by_class.setdefault(str(kind), {})[str(direction)] = count
        return PageExtras(
            time=self._wall(),
            version=self._version,
            bytes_per_second=speeds,
            network_bytes=by_class,
            peer_bytes={peer: (counts.sent, counts.received) for peer, counts in meter.peers().items()},
            cpu_cores=self._cpu.cores(self._tracker.pids(), asyncio.get_running_loop().time()),
            temperature_celsius=hottest_celsius()[0],
            announced=bool(self._config.announce) or all(scope(each) == Scope.MACHINE for each in self._config.listen),
        )

    def _machine_sample(self, transport: LibP2PTransport) -> MachineSample:
        from node.page.prometheus import MachineSample

        totals = transport.traffic.meter.totals()
        traffic = {(str(direction), str(kind)): count for (direction, kind), count in totals.items()}
        refused = {"streams": sum(transport.refused.values()), **self._tracker.refused()}
        restarts = {"p2pd": transport.restarts, **self._tracker.restarts()}
        return MachineSample(traffic, refused, restarts, {"temperature_celsius": hottest_celsius()[0]})

    def _info(self) -> Mapping[str, str]:
        status = self._tracker.status()
        return {"version": self._version, "protocol": status.protocol, "peer": status.peer, "name": status.run}
