"""p2pd, the go-libp2p daemon that the hivemind wheel ships, as one child process. Start it from the main thread.

This file relies on these facts about the daemon (read in its source, and tested):

  - It prints "Peer ID:" when its control socket listens.
  - It exits when the last persistent connection to it has ended, or if none was made within `-idleTimeout`.
  - SIGTERM closes it in good order. So does SIGINT, so it runs in a session of its own, which Ctrl-C does not reach.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

from node.network.address_scope import Scope, scope
from node.runtime.child_process import ChildProcess
from node.runtime.identity import is_peer_id
from protocols.base import PeerId

log = logging.getLogger(__name__)

_START_SECONDS = 20.0
_GOGC = "50"
"""Go's garbage collector target, in percent. p2pd keeps 23 MB alive, nearly all of it a table of the world's networks,
and each stream leaves 64 KB of garbage. Go's default, 100, collects when the heap has doubled. At 50 p2pd takes 15 MB
less, for 0.1 ms a stream."""


_MAX_RELAYS, _MAX_RELAYS_OF_PEER = 8, 2
_MAX_CONSIDERED = 1024
_CIRCUIT = "/p2p-circuit"


class DaemonError(Exception):
    """p2pd cannot be found or did not start. The message contains its last output."""


class PortTaken(DaemonError):
    """It cannot listen where it was told to."""


def binary() -> Path:
    """Path of the p2pd in the hivemind wheel, without importing hivemind."""
    spec = find_spec("hivemind")
    path = Path(spec.origin).parent / "hivemind_cli" / "p2pd" if spec and spec.origin else None
    if path is None or not os.access(path, os.X_OK):
        raise DaemonError("p2pd is not installed. Install it with: pip install hivemind==1.1.12")
    return path


_RELAY = re.compile(
    r"/(?P<kind>ip4|ip6|dns[46]?)/(?P<host>[\w.:-]{1,253})/tcp/(?P<port>\d{1,5})/p2p/(?P<peer>\w+)", re.ASCII
)


def known_relays(addresses: Iterable[str], me: PeerId) -> tuple[str, ...]:
    """Public addresses, and the relays of circuits, among the known addresses of peers: at most 8, two for each peer.

    A peer that has a circuit cannot be dialled itself. p2pd panics on an address that it cannot read, so each is read
    here.
    """
    known = list(islice(addresses, _MAX_CONSIDERED))
    behind = {each.rpartition("/p2p/")[2] for each in known if _CIRCUIT in each} | {me}
    found: dict[str, PeerId] = {}
    for address in (each.partition(_CIRCUIT)[0] for each in known):
        peer = _relay(address)
        if peer and peer not in behind and [*found.values()].count(peer) < _MAX_RELAYS_OF_PEER:
            found[address] = peer
    return tuple(found)[:_MAX_RELAYS]


def _relay(address: str) -> PeerId:
    """The peer at a public address; empty if it is not one."""
    parts = _RELAY.fullmatch(address)
    if parts is None or not 0 < int(parts["port"]) < 1 << 16 or not is_peer_id(parts["peer"]):
        return ""
    fits = parts["kind"].startswith("dns") or (":" in parts["host"]) == (parts["kind"] == "ip6")
    return parts["peer"] if fits and scope(address) == Scope.ANYWHERE else ""


PRIVATE = ("-forceReachabilityPrivate=1",)
"""For a p2pd that follows one that had a place at a relay: it asks for one at once, and not after 15 s. It does not
find out any more that others can dial this peer."""


class PlacesAtRelays:
    """Notices that p2pd has lost its places at relays. go-libp2p does not ask a relay again for an hour."""

    def __init__(self, relays: Sequence[str]) -> None:
        self.relays = {each.rpartition("/p2p/")[2] for each in relays}
        self._had = self.are_lost = False

    def look(self, addresses: Iterable[str]) -> None:
        """p2pd has these addresses now."""
        has = any(_CIRCUIT in each for each in addresses)
        self._had = self._had or has
        self.are_lost = self._had and not has


def arguments(
    control: Path,
    identity: Path,
    listen: Sequence[str],
    announce: Sequence[str] = (),
    nat: bool = False,
    relay: bool = False,
    relays: Sequence[str] = (),
) -> list[str]:
    """p2pd's command line. It names no bootstrap peers, because p2pd exits if they are unreachable.

    `nat`: map ports, detect whether this peer is reachable, use relays, and introduce others: p2pd carries 128 KiB and
    two minutes for each of their connections, without `relayService`, too. `relay`: carry 4 GiB and 30 minutes, once
    another public peer has found this one reachable. `relays`: multiaddrs of relays to use, as `known_relays` makes
    them. Without any, p2pd looks for some, and waits until it has found four, or for three minutes.
    """
    flags = {
        "listen": f"/unix{control}",
        "id": identity,
        "hostAddrs": ",".join(listen),
        # Peers that met through a third peer find each other's addresses in libp2p's own DHT.
        "dhtServer": 1,
        "connManager": 1,
        "natPortMap": int(nat),
        "autonat": int(nat),
        "relay": int(nat),
        "autoRelay": int(nat),
        "relayService": int(nat and relay),
        "idleTimeout": "30s",
    }
    if announce:
        flags["announceAddrs"] = ",".join(announce)
    if nat and relays:  # p2pd panics on an empty list
        flags |= {"relayDiscovery": 0, "trustedRelays": ",".join(relays)}
    return [f"-{name}={value}" for name, value in flags.items()]


_IP_PORT = re.compile(r"/(?P<family>ip[46])/(?P<host>[^/]+)/(?P<kind>tcp|udp)/(?P<port>\d+)(?P<rest>.*)")


def with_ports(listen: Sequence[str], found: Sequence[str]) -> tuple[str, ...]:
    """`listen` with each port 0 replaced by the port that p2pd chose, taken from the addresses found."""
    seen = [match for address in found if (match := _IP_PORT.fullmatch(address))]

    def fixed(address: str) -> str:
        match = _IP_PORT.fullmatch(address)
        if match is None or match["port"] != "0":
            return address
        # For an unspecified address p2pd lists those of all interfaces. A router never maps a port of the loopback.
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(match["host"], match["host"])
        wanted = (match["family"], host, match["kind"], match["rest"])
        ports = [s["port"] for s in seen if (s["family"], s["host"], s["kind"], s["rest"]) == wanted]
        if not ports:
            return address
        return f"/{match['family']}/{match['host']}/{match['kind']}/{ports[0]}{match['rest']}"

    return tuple(fixed(address) for address in listen)


async def start_daemon(command_arguments: Sequence[str], keeps_port: bool = True) -> ChildProcess:
    """Run p2pd until its control socket listens, within 20 seconds; else raise `DaemonError`.

    `keeps_port`: it dials from the port that it listens on, so that others see where it may be dialled. Without, its
    dials never cross those of peers that dial it there.
    """
    ready: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def on_line(line: str | None) -> None:
        if line is not None:
            log.debug("p2pd: %s", line)
        if not ready.done() and (line is None or line.startswith("Peer ID:")):
            ready.set_result(line is not None)

    environment = {"GOLOG_LOG_LEVEL": "error", "GOGC": os.environ.get("GOGC", _GOGC)}
    if not keeps_port:
        environment["LIBP2P_TCP_REUSEPORT"] = "false"
    child = await ChildProcess.start("p2pd", (str(binary()), *command_arguments), on_line, environment)
    try:
        async with asyncio.timeout(_START_SECONDS):
            if not await ready:
                raise DaemonError(f"p2pd did not start: {child.output_tail}")
    except TimeoutError:
        await child.kill()
        raise DaemonError(f"p2pd was not ready within {_START_SECONDS:g} s: {child.output_tail}") from None
    except BaseException:
        await child.kill()
        raise
    return child
