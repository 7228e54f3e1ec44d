"""Connects a peer's page and metrics with the parts of the peer that they show."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from importlib import metadata
from typing import TYPE_CHECKING

from node.config.peer_config import PeerConfig
from node.machine.probes import hottest_celsius
from node.network.address_scope import Scope, scope
from node.page.server import PageConfig, PageServer
from node.page.values import PageExtras, page_values
from node.reporting.event_feed import EventFeed
from node.reporting.run_counters import RunCounters
from node.reporting.status import EventSink
from node.runtime.clock import WallClock
from node.runtime.metrics import CpuMeter
from node.storage.statedir import StateDir
from node.ui.commands import Command
from node.ui.status_tracker import StatusTracker

if TYPE_CHECKING:
    from node.network.libp2p import LibP2PTransport
    from node.page.app import PageSources
    from node.page.prometheus import MachineSample


def _is_local(address: str) -> bool:
    return scope(address) == Scope.MACHINE


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
        config = PageConfig(state.path, self._config.page_port, self._config.page_hosts, sys.stderr.isatty())
        sources = lambda: self._sources(state, transport, command)  # noqa: E731
        # The link holds the token, so it goes to a terminal only, and not to a log or to the page itself.
        return PageServer(config, sources, self._view.say)

    def _sources(
        self,
        state: StateDir,
        transport: LibP2PTransport,
        command: Command,
    ) -> PageSources:
        from node.page.app import PageSources
        from node.page.prometheus import MetricSources, PeerCollector, metrics_text
        from node.page.stream import StreamSources

        status = lambda: page_values(self._tracker.status(), self._extras(transport))  # noqa: E731
        sample = lambda: self._machine_sample(transport)  # noqa: E731
        collector = PeerCollector(MetricSources(self._tracker.status, self._counters, sample, self._info))
        stream = StreamSources(state.incarnation, status, self.feed)
        return PageSources(stream, lambda: metrics_text(collector), command)

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
            announced=bool(self._config.announce) or all(map(_is_local, self._config.listen)),
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
