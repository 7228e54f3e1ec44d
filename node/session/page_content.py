"""What a peer's page and its metrics show, collected from the parts of the peer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from typing import TYPE_CHECKING, Any

from node.config.peer_config import PeerConfig
from node.machine.probes import hottest_celsius
from node.network.address_scope import Scope, scope
from node.reporting.event_feed import EventFeed
from node.reporting.status import Status, join_command, narrow, not_direct, who_joins
from node.runtime.metrics import CpuMeter
from node.session.status_tracker import StatusTracker
from node.ui.control import Command

if TYPE_CHECKING:
    from node.network.libp2p import LibP2PTransport

CONTROLS = ("pause", "finish")
"""What the page's user may ask for."""


class PageContent:
    """`node.page.app.PageSources` of a running peer."""

    def __init__(
        self, config: PeerConfig, tracker: StatusTracker, transport: LibP2PTransport, feed: EventFeed, command: Command
    ) -> None:
        self.incarnation, self.feed, self.command = tracker.incarnation, feed, command
        self._transport, self._tracker = transport, tracker
        self._announced = bool(config.announce) or all(scope(each) == Scope.MACHINE for each in config.listen)
        self._cpu = CpuMeter()
        self._version = next((each.version for each in metadata.distributions(name="starling")), "")

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
            "version": self._version,
            "bytes_per_second": speeds,  # by direction, over the last seconds
            "network_bytes": by_class,  # by class of traffic and direction, since the peer started
            "peer_bytes": {peer: (counts.sent, counts.received) for peer, counts in meter.peers().items()},
            "cpu_cores": self._cpu.cores(self._tracker.pids(), asyncio.get_running_loop().time()),
            "temperature_celsius": hottest_celsius()[0],
            "controls": CONTROLS,
            **of_status(status, self._announced),
        }

    def metrics(self) -> bytes:
        from node.page.prometheus import metrics_text

        transport, status = self._transport, self._tracker.status()
        totals = transport.traffic.meter.totals()
        return metrics_text(
            status,
            self.feed.counters,
            info={"version": self._version, "protocol": status.protocol, "peer": status.peer, "name": status.run},
            network_bytes={(str(direction), str(kind)): count for (direction, kind), count in totals.items()},
            refused={"streams": sum(transport.refused.values()), **self._tracker.refused()},
            restarts={"p2pd": transport.restarts, **self._tracker.restarts()},
            temperature_celsius=hottest_celsius()[0],
        )


def of_status(status: Status, announced: bool = False) -> dict[str, Any]:
    """The status, and what follows from it. `announced`: whether the user chose the addresses that others see."""
    join = join_command(status)
    here_only = narrow(join[1], False) if join and not announced else ""
    slow = not_direct(status.peers)
    warnings: Sequence[str] = (status.clock, status.checkpoint_problem, here_only, slow and f"data goes to {slow}")
    return {
        "status": asdict(status),
        "join": {"command": join[0], "who": who_joins(join[1])} if join else None,
        "warnings": [line for line in warnings if line],  # what the user should know or mend
        "announced": announced,
    }
