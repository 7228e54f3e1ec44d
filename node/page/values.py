"""What the page shows about a peer, as values ready for JSON. The page's scripts give them their form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from node.reporting.status import Status, join_command, narrow, who_joins


@dataclass(frozen=True, slots=True)
class PageExtras:
    """Values beside the status, of this machine and for its user only.

    Attributes:
        time: seconds since 1970, at this machine.
        version: of this program.
        bytes_per_second: direction -> bytes per second, over the last seconds.
        network_bytes: class of traffic -> direction -> bytes since the peer started.
        peer_bytes: peer -> (sent, received) since the peer started.
        cpu_cores: cores that the peer's processes keep busy.
        temperature_celsius: the highest of this machine's sensors; nan if it has none.
        controls: what the page's user may ask for.
        announced: whether the user chose the addresses that others see.
    """

    time: float
    version: str
    bytes_per_second: Mapping[str, float] = field(default_factory=dict)
    network_bytes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    peer_bytes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    cpu_cores: float = float("nan")
    temperature_celsius: float = float("nan")
    controls: tuple[str, ...] = ("pause", "finish")
    announced: bool = False


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
