"""`Transport` over libp2p. p2pd runs as a supervised child process; hivemind's client talks to it.

One libp2p protocol carries all methods (`node.streams.serving`). So a new method needs no request to the daemon, and
each failure to open a stream, except a missed deadline, is definite.

With the option `nat`, peers behind routers reach each other through a peer that both can dial: p2pd finds out by itself
that a peer cannot be dialled, and reserves a place at one of the `relays` within half a minute (tests/faults/pairs.py).
It also asks the router for a port. Its hole punching does not work with so few peers.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Container, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Self, TypeVar

from multiaddr import Multiaddr

from node.direct.plane import DirectPlane
from node.direct.routes import Route, host_of, hosts_of, is_relayed
from node.network.address_scope import Scope, in_network, scope
from node.network.daemon import PRIVATE, DaemonError, PortTaken, arguments, with_ports
from node.network.daemon_connection import LINK_ERRORS, DaemonConnection
from node.network.dial_errors import (
    BACKOFF,
    CROSSED,
    has_crossed,
    in_use,
    is_silent,
    meaning,
    missing,
    not_listening,
    stands_for,
)
from node.network.pipe import SocketPipe
from node.network.sockets import socket_directory
from node.runtime.identity import Identity
from node.runtime.listening import interface_hosts, is_taken
from node.streams.serving import Access, EndingPipe, Serving
from node.streams.traffic import Traffic
from protocols.base import Deadline, Handler, NotAccepted, PeerError, PeerGone, PeerId, PeerSilent, Stream
from protocols.peers.estimates import RecentDict
from protocols.streams.framing import opened

log = logging.getLogger(__name__)

_REDIAL_SECONDS = 2.0
_BACKOFF_SECONDS = (0.0, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_STEADY_SECONDS = 30.0
_TAKEN_LOOKS, _TAKEN_SECONDS = 8, 0.25
_KEPT_PORT_ATTEMPTS = 4
_MAX_KNOWN, _MAX_HOSTS = 64, 256
_MAX_CAUSES, _MAX_CAUSES_PER_PEER = 256, 8
_PAUSE_SECONDS = (0.1, 0.6)
"""Bounds of the random pause after a dial that crossed the other peer's, so that the two do not cross again."""

_EXPEL_SECONDS = 5.0

T = TypeVar("T")


class _NotNow(PeerGone):
    """The dial does not show whether the peer is up: it crossed the peer's own dial, or p2pd did not dial at all."""


class LibP2PTransport:
    """`protocols.base.Transport` over libp2p. Use it as an async context manager."""

    def __init__(
        self,
        identity: Identity,
        *,
        listen: tuple[str, ...] = ("/ip4/127.0.0.1/tcp/0",),  # port 0 takes a free one, and keeps it
        kept: tuple[str, ...] = (),  # `listening` of an earlier incarnation: ports that others may know
        announce: tuple[str, ...] = (),  # instead of the addresses that p2pd finds; they need fixed ports
        nat: bool = False,  # map ports on the router, detect whether this peer is reachable, use relays
        relay: bool = False,  # with `nat`: relay data, too. What p2pd relays is not counted, and under no cap
        relays: tuple[str, ...] = (),  # with `nat`: multiaddrs of peers through which others may find this one
        max_streams: int = 1024,
        max_streams_per_peer: int = 128,
        direct_methods: Container[str] | None = None,  # whose streams go directly if they can; None: no direct plane
        direct_port: int = 0,
        runtime_directory: Path | None = None,  # for the control sockets; None: among the temporary files
        traffic: Traffic | None = None,
    ) -> None:
        self.me: PeerId = identity.peer_id
        self.restarts = 0  # how often p2pd died and was started again
        self.traffic = traffic or Traffic()
        self._identity, self._wanted_listen, self._kept, self._announce = identity, listen, kept, announce
        self._nat, self._relay, self._relays, self._runtime_directory = nat, relay, relays, runtime_directory
        self._direct_methods, self._direct_port = direct_methods, direct_port
        self._serving = Serving(max_streams, max_streams_per_peer, self.traffic)
        self.refused: Counter[tuple[PeerId, str]] = self._serving.refused
        self.listening = listen  # with the chosen ports in place of port 0, once p2pd runs
        self._directory = Path()
        self._link: DaemonConnection | None = None
        self._up = asyncio.Event()
        self._starts_in_a_row = 0
        self._known: RecentDict[PeerId, str] = RecentDict(_MAX_KNOWN)  # connected to at this multiaddr
        self._seen: RecentDict[PeerId, str] = RecentDict(_MAX_KNOWN)  # came from this one
        self._causes: RecentDict[PeerId, RecentDict[str, str]] = RecentDict(_MAX_CAUSES)
        self._chance = random.Random(self.me)  # seeded differently for each peer, so that two peers' dials diverge
        self._hosts: RecentDict[PeerId, str | None] = RecentDict(_MAX_HOSTS)
        self._direct: DirectPlane | None = None
        self._access = self._serving.access
        self._exit = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Start p2pd, which dies with the thread that starts it: call this from the main thread."""
        async with AsyncExitStack() as stack:
            stack.enter_context(self._identity.held())
            self._directory = stack.enter_context(socket_directory(self._runtime_directory))
            stack.callback(self._up.set)  # tasks that wait for the daemon learn that there will be none
            stack.push_async_callback(self._close_link)
            link = await self._first_launch()
            self.listening = with_ports(self._wanted_listen, link.addresses)
            self._up.set()
            self._supervision = self._serving.spawn(self._supervise(link))
            if self._direct_methods is not None:
                self._direct = self.make_direct_plane(self._direct_methods)
                self._direct.start(hosts_of(self.listening), self._direct_port)
                stack.push_async_callback(self._direct.close)
            stack.push_async_callback(self._serving.close)
            self._exit = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._exit.aclose()

    def make_direct_plane(self, methods: Container[str]) -> DirectPlane:
        return DirectPlane(self.me, methods, open_stream=self._stream, host_of=self._hosts.get, serving=self._serving)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Multiaddrs at which p2pd believes it can be reached now; none while it is down."""
        return tuple(f"{address}/p2p/{self.me}" for address in self._link.addresses) if self._link else ()

    @property
    def hidden_addresses(self) -> tuple[str, ...]:
        """Multiaddrs for peers of the same network, which p2pd does not name if there are addresses to announce."""
        if not self._announce or not self._link:
            return ()
        return tuple(f"{address}/p2p/{self.me}" for address in in_network(self.listening, interface_hosts()))

    @property
    def direct_port(self) -> int:
        """The TCP port of the direct plane; 0 if there is none."""
        return self._direct.port if self._direct else 0

    def host_of(self, peer: PeerId) -> str | None:
        """The IP address at the other end of the latest libp2p connection to a peer; None for a relay's, or none."""
        return self._hosts.get(peer)

    def seen_at(self, peer: PeerId) -> str:
        """The public multiaddr from which a peer has connected to this one; empty if there is none.

        p2pd itself believes such an address of its own only once four peers have seen it.
        """
        address = (self._link.peers.get(peer) if self._link else None) or self._seen.get(peer) or ""
        return address if scope(address) == Scope.ANYWHERE and not is_relayed(address) else ""

    @property
    def daemon_pid(self) -> int | None:
        return self._link.daemon.pid if self._link else None

    async def link(self) -> DaemonConnection:
        """Wait until p2pd is up. Raises `DaemonError` once this transport is closed."""
        await self._up.wait()
        if self._link is None:
            raise DaemonError("this transport is closed")
        return self._link

    @property
    def routes(self) -> Mapping[PeerId, Route]:
        return self._direct.routes if self._direct else {}

    def serve(self, method: str, handler: Handler) -> None:
        self._serving.serve(method, handler)

    def restrict(self, access: Access) -> None:
        """From now on, `access` decides about each stream, also about those of the direct plane."""
        self._access = self._serving.access = access

    def served(self) -> Collection[PeerId]:
        """The peers that have streams open to this one."""
        return self._serving.served()

    def expel(self, peer: PeerId, seconds: float = _EXPEL_SECONDS) -> None:
        """End all streams from and to a peer at once, and close the connections to it."""

        async def disconnect() -> None:
            with suppress(PeerError):
                await self.forget(peer, asyncio.get_running_loop().time() + seconds)

        self._serving.expel(peer)
        self._serving.spawn(disconnect())

    def scope(self) -> AbstractAsyncContextManager[None]:
        """See `Serving.scope`."""
        return self._serving.scope()

    def open(self, peer: PeerId, method: str, deadline: Deadline) -> AbstractAsyncContextManager[Stream]:
        return self._stream(peer, method, deadline, self._direct)

    @asynccontextmanager
    async def _stream(
        self, peer: PeerId, method: str, deadline: Deadline, direct: DirectPlane | None = None
    ) -> AsyncIterator[Stream]:
        await self._access.before(peer, method, deadline)
        pipe: EndingPipe | None = await direct.open(peer, method, deadline) if direct else None
        if pipe is None:
            is_bulk = direct is not None and method in direct.methods
            try:
                pipe = await self._dial(peer, method, deadline, is_bulk)
            except NotAccepted:  # the peer may have started anew, and not know this one
                if not await self._access.refused(peer, method, deadline):
                    raise
                pipe = await self._dial(peer, method, deadline, is_bulk)
        try:
            yield await opened(peer, pipe, deadline)
        except BaseException:
            self._serving.reset(pipe)
            raise
        self._serving.finish(pipe)

    async def connect(self, address: str | Multiaddr, deadline: Deadline) -> PeerId:
        """Connect to the peer at a multiaddr that ends in /p2p/<its id>; else ValueError. Survives p2pd's restarts."""
        try:
            where, _, peer = str(Multiaddr(str(address))).rpartition("/p2p/")
        except ValueError as error:
            raise ValueError(
                f"{address!s:.200} is not a multiaddr like /ip4/203.0.113.5/tcp/4001/p2p/…: {error}"
            ) from None
        if not where or "/" in peer:
            raise ValueError(f"{address!s:.200} does not name the peer: it must end in /p2p/<peer id>")
        await self._calling(peer, deadline, lambda link, seconds: link.connect(peer, where, seconds), where)
        self._known[peer] = where
        return peer

    async def forget(self, peer: PeerId, deadline: Deadline) -> None:
        """Close the connections to a peer, which resets its streams, and do not reconnect to it after a restart."""
        self._known.pop(peer, None)
        self._seen.pop(peer, None)
        self._hosts.pop(peer, None)
        if self._direct:
            self._direct.forget(peer)
        async with self._reaching(peer, deadline) as (link, _):
            await link.disconnect(peer)

    async def _dial(self, peer: PeerId, method: str, deadline: Deadline, is_bulk: bool) -> EndingPipe:
        pipe, address = await self._calling(peer, deadline, lambda link, seconds: link.stream(peer, seconds))
        self._hosts[peer] = host_of(address)
        if is_bulk and is_relayed(address):  # after 128 KiB the relay would end all streams to the peer
            pipe.abort()
            raise PeerGone(peer, "is reached through a relay only, which carries no bulk data")
        async with self._reaching(peer, deadline):
            await self._serving.ask(peer, pipe, method)
        return pipe

    async def _calling(
        self, peer: PeerId, deadline: Deadline, call: Callable[[DaemonConnection, int], Awaitable[T]], where: str = ""
    ) -> T:
        """Have p2pd dial. Try again if p2pd died meanwhile, or if the peer dialled this one at the same instant.

        In that case both dial from the port on which they listen, so TCP merges the two dials into one connection, on
        which each side waits for the other's answer. Both give up, and do not dial the other again for five seconds.
        """
        before: _NotNow | None = None
        while True:
            try:
                async with self._reaching(peer, deadline, where) as (link, seconds):
                    try:
                        result = await call(link, seconds)
                    except (ConnectionError, FileNotFoundError, EOFError):
                        await link.gone.wait()  # p2pd failed, not the peer: ask the next p2pd
                    else:
                        self._causes.pop(peer, None)
                        return result
            except PeerSilent as error:  # the deadline has passed: what ended an earlier attempt says more
                raise (before or error) from None
            except _NotNow as error:
                before, pause = error, self._chance.uniform(*_PAUSE_SECONDS)
                if asyncio.get_running_loop().time() + pause >= deadline:
                    raise
                await asyncio.sleep(pause)

    @asynccontextmanager
    async def _reaching(
        self, peer: PeerId, deadline: Deadline, where: str = ""
    ) -> AsyncIterator[tuple[DaemonConnection, int]]:
        """Wait for the daemon, and yield it with the whole seconds left. Failures inside become errors about `peer`."""
        try:
            async with asyncio.timeout_at(deadline):
                await self._up.wait()
                if self._link is None:
                    raise PeerGone(peer, "this transport is closed")
                yield self._link, max(1, math.ceil(deadline - asyncio.get_running_loop().time()))
        except TimeoutError:
            raise PeerSilent(
                peer, "no answer before the deadline: it is down, it hangs, or a firewall blocks it"
            ) from None
        except EOFError:
            why = "did not accept the stream: method not served, too many streams, or gone"
            raise NotAccepted(peer, why) from None
        except (ValueError, *LINK_ERRORS) as error:
            text = str(error) or type(error).__name__
            before = self._causes[peer].get("") if peer in self._causes else None
            means = CROSSED if has_crossed(text, before) else meaning(text, where, await stands_for(where, deadline))
            cause = self._cause(peer, where, means)
            # p2pd also dials by itself. Its backoff after that says nothing about the address that the caller gave.
            not_now = cause == CROSSED or (cause == BACKOFF and where != "" and before is None)
            kind = _NotNow if not_now else PeerSilent if is_silent(text) else PeerGone
            raise kind(peer, f"cannot be reached: {cause}") from None

    def _cause(self, peer: PeerId, where: str, why: str) -> str:
        """Why a dial failed (`open` names no address); if p2pd reports only a backoff, that of the dial before."""
        if why != BACKOFF:
            causes = self._causes.put_newest(peer, lambda: RecentDict(_MAX_CAUSES_PER_PEER))
            causes[where] = causes[""] = why
        return self._causes[peer].get(where, why) if peer in self._causes else why

    def _incoming(self, peer: PeerId, address: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if address:
            # p2pd dials from the port that it listens on, so a peer can be reached at the address that it came from.
            self._seen[peer] = address
            self._hosts[peer] = host_of(address)
        # In a new task: asyncio logs an error when the task that it created for this call is cancelled.
        self._serving.take(peer, SocketPipe(reader, writer))

    async def _first_launch(self) -> DaemonConnection:
        if kept := self._kept:
            with suppress(DaemonError, *LINK_ERRORS):
                link = await self._launch(kept)
                if not self._unserved([each for each in kept if each not in self._wanted_listen], link):
                    return link
            await self._close_link()
            log.warning("this peer's previous port is taken: other peers must find it at another one")
        try:
            link = await self._launch(self._wanted_listen)
        except DaemonError as error:
            if taken := not_listening(str(error)):
                raise PortTaken(taken) from None
            raise
        except LINK_ERRORS as error:
            raise DaemonError(f"p2pd started but does not answer: {str(error) or type(error).__name__}") from error
        for address in self._unserved(self._wanted_listen, link):
            log.warning("not listening on %s: the port is taken, or this machine has no such interface", address)
        return link

    def _unserved(self, listen: Sequence[str], link: DaemonConnection) -> tuple[str, ...]:
        return () if self._announce else missing(listen, link.addresses)

    async def _launch(self, listen: Sequence[str], private: bool = False) -> DaemonConnection:
        control = self._directory / "control"
        identity, announce = self._identity.path, self._announce
        listen = await _not_taken(listen)
        command = arguments(control, identity, listen, announce, self._nat, self._relay, self._relays)
        command += PRIVATE if private else ()
        self._link = await DaemonConnection.start(command, control, self.me, self._incoming, self._relays, not private)
        return self._link

    async def _close_link(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            await link.close()

    async def _supervise(self, link: DaemonConnection) -> None:
        loop = asyncio.get_running_loop()
        while True:
            since = loop.time()
            how = await link.ended()
            self._up.clear()
            for peer, address in link.peers.items():
                self._seen[peer] = address
            if loop.time() - since >= _STEADY_SECONDS:
                self._starts_in_a_row = 0
            if not link.is_renewed:
                log.warning("p2pd %d ended (%s): it is started again", link.daemon.pid, how)
            await self._close_link()
            link = await self._relaunch(private=link.is_renewed)
            await self._redial(link)
            self.restarts += 1
            self._up.set()

    async def _relaunch(self, private: bool) -> DaemonConnection:
        """After a few failures, give up the old port, which may be taken."""
        attempt = 0
        while True:
            await asyncio.sleep(_BACKOFF_SECONDS[min(self._starts_in_a_row, len(_BACKOFF_SECONDS) - 1)])
            self._starts_in_a_row += 1
            attempt += 1
            try:
                listen = self.listening if attempt <= _KEPT_PORT_ATTEMPTS else self._wanted_listen
                return await self._launch(listen, private)
            except (DaemonError, *LINK_ERRORS) as error:
                log.warning("p2pd does not start (attempt %d): %s", attempt, str(error) or type(error).__name__)

    async def _redial(self, link: DaemonConnection) -> None:
        """Connect again to the known peers. That ends libp2p's backoff at peers that could not reach this one."""

        async def dial(peer: PeerId, address: str) -> None:
            with suppress(ValueError, *LINK_ERRORS):
                await link.connect(peer, address, math.ceil(_REDIAL_SECONDS))

        with suppress(TimeoutError):
            async with asyncio.timeout(_REDIAL_SECONDS):
                await asyncio.gather(*(dial(peer, address) for peer, address in {**self._seen, **self._known}.items()))


async def _not_taken(listen: Sequence[str]) -> Sequence[str]:
    """Those where no other program listens: two p2pds would share a port, and each get half of the other's dials.

    A p2pd whose peer was killed may need a moment to end. Raises `PortTaken` if none is left.
    """
    for _ in range(_TAKEN_LOOKS):
        if (free := [each for each in listen if not is_taken(each)]) or not listen:
            return free
        await asyncio.sleep(_TAKEN_SECONDS)
    raise PortTaken(in_use(["tcp {2}:{4}".format(*each.split("/")) for each in listen]))
