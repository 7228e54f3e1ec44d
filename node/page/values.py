"""What the page shows about a peer, as values ready for JSON. The page's scripts give them their form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from node.reporting.status import Status, join_command, narrow, who_joins


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
    shown["warnings"] = warnings(status, extras)
    return shown


def warnings(status: Status, extras: PageExtras) -> list[str]:
    """What the user should know or mend, one line each."""
    lines = [status.clock, status.checkpoint_problem]
    if join := join_command(status):
        lines.append("" if extras.announced else narrow(join[1], False))
    slow = [each for each in status.peers if each.live and each.route_reason]
    if slow:
        more = f" (and {len(slow) - 1} more)" if len(slow) > 1 else ""
        name = slow[0].nickname or slow[0].peer[-6:]
        lines.append(f"data goes to {name} over libp2p{more}: {slow[0].route_reason}")
    return [line for line in lines if line]
