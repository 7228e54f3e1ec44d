"""`Transport` over libp2p: p2pd is our supervised child, hivemind's client speaks to it.

One libp2p protocol carries all methods (`node.network.serving`): serving one needs no word to the daemon, and every
failure to open but a missed deadline is definite.

What `nat` does, as far as it was tried, on one machine: peers behind no router find each other as before; a peer that
listens nowhere, and which p2pd was told to take for unreachable, reserved a place at other peers of the run within
seconds, and was reached through them. It takes four peers that can serve as relays; with fewer p2pd waits for three
minutes. That p2pd finds out by itself that it is unreachable, maps ports and punches holes is libp2p's word, not tried.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

from multiaddr import Multiaddr  # type: ignore[import-untyped]

from node.membership.addresses import BACKOFF, CROSSED, has_crossed, is_silent, meaning, missing, not_listening
from node.network.daemon import DaemonError, arguments, with_ports
from node.network.daemon_connection import LINK_ERRORS, DaemonConnection
from node.network.dns import stands_for
from node.network.pipe import SocketPipe
from node.network.serving import Serving, ask
from node.network.sockets import socket_directory
from node.runtime.bounded import renew
from node.runtime.identity import Identity
from protocols.base import Deadline, Handler, PeerGone, PeerId, PeerSilent, Stream
from protocols.framing import opened

log = logging.getLogger(__name__)

_REDIAL_SECONDS = 2.0
_BACKOFF_SECONDS = (0.0, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_STEADY_SECONDS = 30.0
_KEPT_PORT_ATTEMPTS = 4
_MAX_KNOWN = 64
_MAX_CAUSES, _MAX_CAUSES_PER_PEER = 256, 8
_PAUSE_SECONDS = (0.1, 0.6)
"""After a dial that crossed the other's, tries are as far apart, by chance: those two shall not cross again."""

T = TypeVar("T")


class _NotNow(PeerGone):
    """The dial says nothing about whether the peer is there: it crossed the peer's own, or was none at all."""


@dataclass(frozen=True, slots=True)
class LibP2PConfig:
    """What one peer's transport is made of.

    Attributes:
        identity: the key, and the file that p2pd reads it from.
        listen: multiaddrs to listen on; port 0 takes a free one, and keeps it when the daemon is restarted.
        kept: `listening` of an earlier life: ports that others may know, taken again if they are free.
        announce: multiaddrs to tell others instead of those found; need fixed ports.
        nat: map ports on the router, find out whether this peer is reachable, use and serve relays; see above.
        max_streams: incoming streams served at once.
        max_streams_per_peer: of these, from one peer.
        runtime_directory: where the directory of the control sockets is made; None: the system's place.
    """

    identity: Identity
    listen: tuple[str, ...] = ("/ip4/127.0.0.1/tcp/0",)
    kept: tuple[str, ...] = ()
    announce: tuple[str, ...] = ()
    nat: bool = False
    max_streams: int = 1024
    max_streams_per_peer: int = 128
    runtime_directory: Path | None = None


class LibP2PTransport:
    """`protocols.base.Transport` over libp2p. Does nothing before `async with`.

    Attributes:
        me: this peer's id.
        restarts: how often p2pd died and was started again.
        refused: (peer, why) -> incoming streams turned away, or reset because they broke the rules.
    """

    def __init__(self, config: LibP2PConfig) -> None:
        self.me: PeerId = config.identity.peer_id
        self.restarts = 0
        self._config = config
        self._serving = Serving(config.max_streams, config.max_streams_per_peer)
        self.refused: Counter[tuple[PeerId, str]] = self._serving.refused
        self._listen = config.listen
        self._directory = Path()
        self._link: DaemonConnection | None = None
        self._up = asyncio.Event()
        self._supervision: asyncio.Task[None] | None = None
        self._starts_in_a_row = 0
        self._known: dict[PeerId, str] = {}
        self._seen: dict[PeerId, str] = {}
        self._causes: dict[PeerId, dict[str, str]] = {}
        self._chance = random.Random(self.me)  # another for each peer: that is what it is for
        self._exit = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Start p2pd; from the main thread, because p2pd dies with the thread that started it.

        Raises:
            IdentityError: another process holds the identity.
            DaemonError: p2pd does not come up; the message says why and what to do.
        """
        async with AsyncExitStack() as stack:
            stack.enter_context(self._config.identity.held())
            self._directory = stack.enter_context(socket_directory(self._config.runtime_directory))
            stack.callback(self._up.set)  # whoever waits for the daemon learns that there will be none
            stack.push_async_callback(self._close_link)
            link = await self._first_launch()
            self._listen = with_ports(self._config.listen, link.addresses)
            self._up.set()
            self._supervision = self._serving.spawn(self._supervise(link))
            stack.push_async_callback(self._serving.close)
            self._exit = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._exit.aclose()

    @property
    def addresses(self) -> tuple[str, ...]:
        """Multiaddrs at which p2pd believes it can be reached now, as others `connect` to them; none while it is down.

        They change: an interface comes up, a router maps a port, a relay takes us in.
        """
        return tuple(f"{address}/p2p/{self.me}" for address in self._link.addresses) if self._link else ()

    @property
    def listening(self) -> tuple[str, ...]:
        """The multiaddrs to listen on, with the ports that were taken."""
        return self._listen

    @property
    def daemon_pid(self) -> int | None:
        """The process id of p2pd; None while it is down."""
        return self._link.daemon.pid if self._link else None

    async def link(self) -> DaemonConnection:
        """This life of p2pd, when it is up: for hivemind's DHT, which needs a new node in each life.

        Raises:
            DaemonError: this transport is closed.
        """
        await self._up.wait()
        if self._link is None:
            raise DaemonError("this transport is closed")
        return self._link

    def serve(self, method: str, handler: Handler) -> None:
        self._serving.serve(method, handler)

    @asynccontextmanager
    async def open(self, peer: PeerId, method: str, deadline: Deadline) -> AsyncIterator[Stream]:
        pipe = await self._dial(peer, method, deadline)
        try:
            yield await opened(peer, pipe, deadline)
        except BaseException:
            self._serving.reset(pipe)
            raise
        self._serving.finish(pipe)

    async def connect(self, address: str | Multiaddr, deadline: Deadline) -> PeerId:
        """Connect to the peer at a multiaddr that ends in /p2p/<its id>; again by itself if p2pd is restarted.

        Raises:
            ValueError: not such a multiaddr.
            PeerGone: nothing listens there, something else does, or no way leads there; `why` says which.
            PeerSilent: no answer before the deadline.
        """
        try:
            where, _, peer = str(Multiaddr(str(address))).rpartition("/p2p/")
        except ValueError as error:
            raise ValueError(
                f"{address!s:.200} is not a multiaddr like /ip4/203.0.113.5/tcp/4001/p2p/…: {error}"
            ) from None
        if not where or "/" in peer:
            raise ValueError(f"{address!s:.200} does not say who is there: it must end in /p2p/<peer id>")
        await self._calling(peer, deadline, lambda link, seconds: link.connect(peer, where, seconds), where)
        renew(self._known, peer, where, _MAX_KNOWN)
        return peer

    async def forget(self, peer: PeerId, deadline: Deadline) -> None:
        """Close the connections to a peer, and do not dial it by ourselves any more. Its streams are reset.

        Raises:
            PeerGone, PeerSilent: p2pd failed, not the peer: it may still be connected.
        """
        self._known.pop(peer, None)
        self._seen.pop(peer, None)
        async with self._reaching(peer, deadline) as (link, _):
            await link.disconnect(peer)

    async def _dial(self, peer: PeerId, method: str, deadline: Deadline) -> SocketPipe:
        pipe = await self._calling(peer, deadline, lambda link, seconds: link.stream(peer, seconds))
        async with self._reaching(peer, deadline):
            await ask(pipe, method)
        return pipe

    async def _calling(
        self, peer: PeerId, deadline: Deadline, call: Callable[[DaemonConnection, int], Awaitable[T]], where: str = ""
    ) -> T:
        """Have p2pd dial; again when it died meanwhile, or when the peer dialled us at the same instant.

        Both dial from the port on which they listen, so that TCP makes one connection of the two, at whose ends both
        wait for the other's answer. Both give up, and do not dial the other again for five seconds.
        """
        while True:
            try:
                async with self._reaching(peer, deadline, where) as (link, seconds):
                    try:
                        result = await call(link, seconds)
                    except (ConnectionError, FileNotFoundError, EOFError):
                        await link.gone.wait()  # our daemon's fault, not the peer's: ask the next one
                    else:
                        self._causes.pop(peer, None)
                        return result
            except _NotNow:
                pause = self._chance.uniform(*_PAUSE_SECONDS)
                if asyncio.get_running_loop().time() + pause >= deadline:
                    raise
                await asyncio.sleep(pause)

    @asynccontextmanager
    async def _reaching(
        self, peer: PeerId, deadline: Deadline, where: str = ""
    ) -> AsyncIterator[tuple[DaemonConnection, int]]:
        """The daemon, when it is up, and the whole seconds left; inside, every failure becomes one about `peer`."""
        try:
            async with asyncio.timeout_at(deadline):
                await self._up.wait()
                if self._link is None:
                    raise PeerGone(peer, "this transport is closed")
                yield self._link, max(1, math.ceil(deadline - asyncio.get_running_loop().time()))
        except TimeoutError:
            raise PeerSilent(peer, "no answer before the deadline: a firewall, or it is down or hangs") from None
        except EOFError:
            raise PeerGone(peer, "did not accept the stream: method not served, too many streams, or gone") from None
        except (ValueError, *LINK_ERRORS) as error:
            words = str(error) or type(error).__name__
            before = self._causes.get(peer, {}).get("")
            means = CROSSED if has_crossed(words, before) else meaning(words, where, await stands_for(where, deadline))
            cause = self._cause(peer, where, means)
            # p2pd dials of its own accord, too: whoever gives an address wants to know more than that it has.
            not_now = cause == CROSSED or (cause == BACKOFF and where != "" and before is None)
            kind = _NotNow if not_now else PeerSilent if is_silent(words) else PeerGone
            raise kind(peer, f"cannot be reached: {cause}") from None

    def _cause(self, peer: PeerId, where: str, why: str) -> str:
        """For some seconds after a dial that failed, p2pd says only that one did: what counts is why.

        The last cause stands under no address, too: for `open`, which names none.
        """
        causes = self._causes.get(peer, {})
        if why != BACKOFF:
            for each in {where, ""}:
                renew(causes, each, why, _MAX_CAUSES_PER_PEER)
            renew(self._causes, peer, causes, _MAX_CAUSES)
        return causes.get(where, why)

    def _incoming(self, peer: PeerId, address: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if address:
            # p2pd dials from the port that it listens on, so that whence a peer came is where it can be found.
            renew(self._seen, peer, address, _MAX_KNOWN)
        # In a task of ours: asyncio reports an error when the one that it made for this call is cancelled.
        self._serving.take(peer, SocketPipe(reader, writer))

    async def _first_launch(self) -> DaemonConnection:
        if kept := self._config.kept:
            with suppress(DaemonError, *LINK_ERRORS):
                link = await self._launch(kept)
                if not self._unserved([each for each in kept if each not in self._config.listen], link):
                    return link
            await self._close_link()
            log.warning("the port of the last life is taken: others have to find this peer at another")
        try:
            link = await self._launch(self._config.listen)
        except DaemonError as error:
            if taken := not_listening(str(error)):
                raise DaemonError(taken) from None
            raise
        except LINK_ERRORS as error:
            raise DaemonError(f"p2pd started but does not answer: {error or type(error).__name__}") from error
        for address in self._unserved(self._config.listen, link):
            log.warning("not listening on %s: the port is taken, or this machine has no such interface", address)
        return link

    def _unserved(self, listen: Sequence[str], link: DaemonConnection) -> tuple[str, ...]:
        """Where p2pd was to listen and does not. Told what to announce, it shows that, and nobody can tell."""
        return () if self._config.announce else missing(listen, link.addresses)

    async def _launch(self, listen: Sequence[str]) -> DaemonConnection:
        config, control = self._config, self._directory / "control"
        command = arguments(control, config.identity.path, listen, config.announce, config.nat)
        self._link = await DaemonConnection.start(command, control, self.me, self._incoming)
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
                renew(self._seen, peer, address, _MAX_KNOWN)
            if loop.time() - since >= _STEADY_SECONDS:
                self._starts_in_a_row = 0
            log.warning("p2pd %d ended (%s): it is started again", link.daemon.pid, how)
            await self._close_link()
            link = await self._relaunch()
            await self._redial(link)
            self.restarts += 1
            self._up.set()

    async def _relaunch(self) -> DaemonConnection:
        """Start p2pd again, for as long as it takes; on its old port, unless somebody else has taken that."""
        attempt = 0
        while True:
            await asyncio.sleep(_BACKOFF_SECONDS[min(self._starts_in_a_row, len(_BACKOFF_SECONDS) - 1)])
            self._starts_in_a_row += 1
            attempt += 1
            try:
                return await self._launch(self._listen if attempt <= _KEPT_PORT_ATTEMPTS else self._config.listen)
            except (DaemonError, *LINK_ERRORS) as error:
                log.warning("p2pd does not start (attempt %d): %s", attempt, error or type(error).__name__)

    async def _redial(self, link: DaemonConnection) -> None:
        """Connect again to the peers we knew. The new daemon knows none of them; and those of them that found us gone
        do not dial again for five seconds and more (libp2p's backoff), while a call from us ends that."""

        async def dial(peer: PeerId, address: str) -> None:
            with suppress(ValueError, *LINK_ERRORS):
                await link.connect(peer, address, math.ceil(_REDIAL_SECONDS))

        with suppress(TimeoutError):
            async with asyncio.timeout(_REDIAL_SECONDS):
                await asyncio.gather(*(dial(peer, address) for peer, address in (self._seen | self._known).items()))
