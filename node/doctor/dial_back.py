"""Dial-back: a peer has another one dial its ports, and so learns whether they are open from outside.

The helper opens plain TCP, because libp2p would reuse the connection that there is, and prove nothing. It dials only
the host at the other end of its libp2p connection to the peer that asks: nobody can have it dial a third host.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable, Sequence
from ipaddress import ip_address, ip_network
from typing import TypeAlias

from node.direct.messages import MIN_PORT
from node.doctor.network import DialBackReport, scope_of
from node.membership.hello import BOOTSTRAP_METHOD, PortResult, PortsProbed, ProbedPort, ProbePorts
from node.network.address_scope import Scope, canonical
from node.reporting.status import printable
from protocols import wire
from protocols.aio import loop_time
from protocols.base import BadPayload, Deadline, PeerError, PeerId, Transport
from protocols.peers.estimates import RecentDict

DIAL_SECONDS = 5.0
BANNER_SECONDS = 2.0  # of these, after a port has accepted: libp2p speaks first, the data plane does not
ASK_SECONDS = DIAL_SECONDS + 3.0
PAUSE_SECONDS = 60.0
PEER_REQUESTS = 3  # of one peer in that time: once more after each port that its user has opened
HOST_REQUESTS = 4  # of all peers at one host, or in one /64 of IPv6: identities cost nothing, nor do addresses there
AT_ONCE = 4
MAX_REMEMBERED = 1024
BANNER = b"\x13/multistream/1.0.0\n"

Connect: TypeAlias = Callable[[str, int], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


class PortProber:
    """Dials ports for peers that ask: few, rarely, and never at another host than their own."""

    def __init__(self, host_of: Callable[[PeerId], str | None], connect: Connect = asyncio.open_connection) -> None:
        """`host_of` is the IP address at the other end of the libp2p connection to a peer; None for a relay's."""
        self._host_of, self._connect = host_of, connect
        self._by_peer: RecentDict[PeerId, tuple[float, ...]] = RecentDict(MAX_REMEMBERED)
        self._by_host: RecentDict[str, tuple[float, ...]] = RecentDict(MAX_REMEMBERED)
        self._running = 0

    async def probe(self, peer: PeerId, request: ProbePorts) -> PortsProbed:
        seen = self._host_of(peer)
        host = canonical(seen or "")
        if seen is None:
            return PortsProbed("", "it is connected through a relay", ())
        if scope_of(host) is Scope.NOWHERE or (host != seen and scope_of(host) is Scope.MACHINE):
            return PortsProbed("", f"it is connected from {seen:.80}, which is not dialled", ())
        if why := self._refusal(peer, host, request.ports):
            return PortsProbed("", why, ())
        self._running += 1
        try:
            results = await asyncio.gather(*(self._dial(host, port) for port in dict.fromkeys(request.ports)))
        finally:
            self._running -= 1
        return PortsProbed(host, "", tuple(results))

    def _refusal(self, peer: PeerId, host: str, ports: Sequence[int]) -> str:
        now = loop_time()
        if not ports or min(ports) < MIN_PORT:
            return f"only ports from {MIN_PORT} on are dialled"
        if self._running >= AT_ONCE:
            return "it helps too many others now"
        block = str(ip_network(f"{host}/64", strict=False)) if ":" in host else host
        of_peer, of_host = (
            tuple(each for each in before if now - each < PAUSE_SECONDS)
            for before in (self._by_peer.get(peer, ()), self._by_host.get(block, ()))
        )
        if len(of_peer) >= PEER_REQUESTS or len(of_host) >= HOST_REQUESTS:
            return "it was asked too often in the last minute"
        self._by_peer[peer], self._by_host[block] = (*of_peer, now), (*of_host, now)
        return ""

    async def _dial(self, host: str, port: int) -> ProbedPort:
        began = loop_time()
        try:
            async with asyncio.timeout(DIAL_SECONDS):
                reader, writer = await self._connect(host, port)
        except TimeoutError:
            return ProbedPort(port, PortResult.SILENT, loop_time() - began)
        except OSError as error:
            refused = error.errno in (errno.ECONNREFUSED, errno.ECONNRESET)
            result = PortResult.REFUSED if refused else PortResult.UNREACHABLE
            return ProbedPort(port, result, min(loop_time() - began, DIAL_SECONDS))
        seconds = min(loop_time() - began, DIAL_SECONDS)
        try:
            if writer.get_extra_info("sockname") == writer.get_extra_info("peername"):  # TCP allows it on one machine
                return ProbedPort(port, PortResult.REFUSED, seconds)
            return ProbedPort(port, await _speaker(reader, began + DIAL_SECONDS), seconds)
        finally:
            writer.transport.abort()


async def _speaker(reader: asyncio.StreamReader, until: Deadline) -> PortResult:
    """What has accepted a connection, by what it says first."""
    try:
        async with asyncio.timeout_at(min(until, loop_time() + BANNER_SECONDS)):
            said = await reader.readexactly(len(BANNER))
    except (TimeoutError, EOFError, OSError):
        return PortResult.OPEN
    return PortResult.LIBP2P if said == BANNER else PortResult.OPEN


async def ask_dial_back(transport: Transport, peer: PeerId, name: str, ports: Sequence[int]) -> DialBackReport:
    """Have a peer, shown as `name`, dial these ports of this one."""
    deadline = loop_time() + ASK_SECONDS
    try:
        async with transport.open(peer, BOOTSTRAP_METHOD, deadline) as stream:
            await stream.send(ProbePorts(tuple(ports)))
            answer = wire.expect(await stream.receive(wire.MAX_HEADER_BYTES), PortsProbed)
    except BadPayload as error:
        return DialBackReport(name, why=str(error))
    except PeerError:
        return DialBackReport(name, why="it did not answer; does it run an older version?")
    if not answer.why and _valid(answer, ports):
        return DialBackReport(name, answer.host, ports=answer.ports)
    return DialBackReport(name, why=printable(answer.why) or "its answer makes no sense")


def _valid(answer: PortsProbed, ports: Sequence[int]) -> bool:
    try:
        ip_address(answer.host)
    except ValueError:
        return False
    known = {str(each) for each in PortResult}
    is_host = "%" not in answer.host and scope_of(answer.host) is not Scope.NOWHERE
    return (
        is_host
        and {each.port for each in answer.ports} == {*ports}
        and known.issuperset(p.result for p in answer.ports)
    )
