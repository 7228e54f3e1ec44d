"""`Transport` over libp2p: p2pd is our supervised child, hivemind's client speaks to it.

The only file that imports hivemind. One libp2p protocol carries all methods (`node.serving`), so that serving a method
needs no word to the daemon, and every failure to open but a missed deadline is definite.
"""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from hivemind.p2p import P2P, P2PDaemonError, PeerID
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from hivemind.p2p.p2p_daemon_bindings.utils import raise_if_failed, read_pbmsg_safe, write_pbmsg
from hivemind.proto import p2pd_pb2
from hivemind.utils.multiaddr import Multiaddr as HivemindMultiaddr
from multiaddr import Multiaddr  # type: ignore[import-untyped]

from node.daemon import Daemon, DaemonError, arguments, socket_directory, with_ports
from node.identity import Identity
from node.pipe import SocketPipe
from node.serving import Serving, ask
from protocols.base import Deadline, Handler, PeerGone, PeerId, PeerSilent, Stream
from protocols.framing import opened

log = logging.getLogger(__name__)

_PROTOCOL = "/starling/stream/1"
_ATTACH_SECONDS = 10.0
_REDIAL_SECONDS = 2.0
_BACKOFF_SECONDS = (0.0, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_STEADY_SECONDS = 30.0
_KEPT_PORT_ATTEMPTS = 4
_MAX_KNOWN = 64

_Incoming = Callable[[StreamInfo, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class LibP2PConfig:
    """What one peer's transport is made of.

    Attributes:
        identity: the key, and the file that p2pd reads it from.
        listen: multiaddrs to listen on; port 0 takes a free one, and keeps it when the daemon is restarted.
        announce: multiaddrs to tell others instead of those found; need fixed ports.
        nat: map ports on the router, find out whether this peer is reachable, use and serve relays.
        max_streams: incoming streams served at once.
        max_streams_per_peer: of these, from one peer.
        runtime_directory: where the directory of the control sockets is made; None: the system's place.
    """

    identity: Identity
    listen: tuple[str, ...] = ("/ip4/127.0.0.1/tcp/0",)
    announce: tuple[str, ...] = ()
    nat: bool = False
    max_streams: int = 1024
    max_streams_per_peer: int = 128
    runtime_directory: Path | None = None


class _Link:
    """One life of p2pd, and hivemind's client attached to it."""

    def __init__(self, daemon: Daemon, control: Path) -> None:
        self.daemon = daemon
        self._control = control
        self._p2p: Any = None

    @classmethod
    async def start(cls, config: LibP2PConfig, directory: Path, listen: Sequence[str], incoming: _Incoming) -> Self:
        """Start p2pd and have it hand the streams of our protocol to `incoming`.

        Raises:
            DaemonError, P2PDaemonError, OSError, EOFError: it does not come up.
        """
        control = directory / "control"
        control.unlink(missing_ok=True)  # a killed daemon leaves its socket behind
        command = arguments(control, config.identity.path, listen, config.announce, config.nat)
        link = cls(await Daemon.start(command), control)
        try:
            async with asyncio.timeout(_ATTACH_SECONDS):
                await link._attach(directory, config.identity.peer_id, incoming)
        except BaseException:
            await link.close()
            raise
        return link

    async def _attach(self, directory: Path, me: PeerId, incoming: _Incoming) -> None:
        # hivemind would put the client's socket into /tmp, open to everybody on this machine.
        client: Any = type("AttachedP2P", (P2P,), {"_UNIX_SOCKET_PREFIX": f"/unix{directory}/"})
        self._p2p = await client.replicate(HivemindMultiaddr(f"/unix{self._control}"))
        if self._p2p.peer_id.to_base58() != me:
            raise DaemonError(f"p2pd runs as {self._p2p.peer_id}, not as {me}")
        await self._p2p.add_binary_stream_handler(_PROTOCOL, incoming)

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(str(address) for address in self._p2p._visible_maddrs)

    async def stream(self, peer: PeerId, seconds: int) -> SocketPipe:
        target = p2pd_pb2.StreamOpenRequest(peer=_peer_bytes(peer), proto=[_PROTOCOL], timeout=seconds)
        return SocketPipe(*await self._ask(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=target))

    async def connect(self, peer: PeerId, address: str, seconds: int) -> None:
        where = HivemindMultiaddr(address).to_bytes()
        target = p2pd_pb2.ConnectRequest(peer=_peer_bytes(peer), addrs=[where], timeout=seconds)
        _, writer = await self._ask(type=p2pd_pb2.Request.CONNECT, connect=target)
        writer.close()

    async def _ask(self, **request: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Ask p2pd; the connection that comes back is the stream, if one was asked for.

        hivemind's own calls leave the connection open when they fail or are cancelled, and set no time limit, so that
        p2pd would go on for a minute.
        """
        reader, writer = await asyncio.open_unix_connection(self._control)
        try:
            await write_pbmsg(writer, p2pd_pb2.Request(**request))
            response = p2pd_pb2.Response()
            await read_pbmsg_safe(reader, response)
            raise_if_failed(response)
        except BaseException:
            writer.transport.abort()
            raise
        return reader, writer

    async def close(self) -> None:
        """End the client's tasks, which hivemind cancels but does not wait for, and the daemon."""
        if self._p2p is not None:
            control = self._p2p._client.control
            tasks = [task for task in (self._p2p._listen_task, control._read_task, control._write_task) if task]
            await self._p2p.shutdown()
            await asyncio.gather(*tasks, return_exceptions=True)
        await self.daemon.stop()


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
        self._link: _Link | None = None
        self._up = asyncio.Event()
        self._supervision: asyncio.Task[None] | None = None
        self._starts_in_a_row = 0
        self._known: dict[PeerId, str] = {}
        self._seen: dict[PeerId, str] = {}
        self._exit = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Start p2pd; from the main thread, because p2pd dies with the thread that started it.

        Raises:
            IdentityError: another process holds the identity.
            DaemonError: p2pd does not come up.
        """
        async with AsyncExitStack() as stack:
            stack.enter_context(self._config.identity.held())
            self._directory = socket_directory(self._config.runtime_directory)
            stack.callback(shutil.rmtree, self._directory, ignore_errors=True)
            stack.callback(self._up.set)  # whoever waits for the daemon learns that there will be none
            stack.push_async_callback(self._close_link)
            try:
                link = await self._launch(self._config.listen)
            except (P2PDaemonError, OSError, EOFError) as error:
                raise DaemonError(f"p2pd started but does not answer: {error or type(error).__name__}") from error
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
        """Multiaddrs that others can `connect` to, as p2pd knew them when it started; none while it is down."""
        return tuple(f"{address}/p2p/{self.me}" for address in self._link.addresses) if self._link else ()

    @property
    def daemon_pid(self) -> int | None:
        """The process id of p2pd; None while it is down."""
        return self._link.daemon.pid if self._link else None

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
            PeerGone: it cannot be reached there, or another peer is there.
            PeerSilent: no answer before the deadline.
        """
        where, _, peer = str(Multiaddr(str(address))).rpartition("/p2p/")
        if not where:
            raise ValueError(f"{address} does not say who is there: it must end in /p2p/<peer id>")
        async with self._reaching(peer, deadline) as (link, seconds):
            await link.connect(peer, where, seconds)
        _remember(self._known, peer, where)
        return peer

    async def _dial(self, peer: PeerId, method: str, deadline: Deadline) -> SocketPipe:
        while True:
            async with self._reaching(peer, deadline) as (link, seconds):
                try:
                    pipe = await link.stream(peer, seconds)
                except (ConnectionError, FileNotFoundError, EOFError):
                    await link.daemon.ended()  # our daemon's fault, not the peer's: ask the next one
                    continue
                await ask(pipe, method)
                return pipe

    @asynccontextmanager
    async def _reaching(self, peer: PeerId, deadline: Deadline) -> AsyncIterator[tuple[_Link, int]]:
        """The daemon, when it is up, and the whole seconds left; inside, every failure becomes one about `peer`."""
        try:
            async with asyncio.timeout_at(deadline):
                await self._up.wait()
                if self._link is None:
                    raise PeerGone(peer, "this transport is closed")
                yield self._link, max(1, math.ceil(deadline - asyncio.get_running_loop().time()))
        except TimeoutError:
            raise PeerSilent(peer, "no answer before the deadline") from None
        except EOFError:
            raise PeerGone(peer, "did not accept the stream: method not served, too many streams, or gone") from None
        except (OSError, ValueError, P2PDaemonError) as error:
            raise PeerGone(peer, f"cannot be reached: {error or type(error).__name__}") from None

    async def _incoming(self, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer: PeerId = info.peer_id.to_base58()
        # p2pd dials from the port that it listens on, so that whence a peer came is where it can be found.
        _remember(self._seen, peer, str(info.addr))
        # In a task of ours: asyncio reports an error when the one that it made for this call is cancelled.
        self._serving.take(peer, SocketPipe(reader, writer))

    async def _launch(self, listen: Sequence[str]) -> _Link:
        self._link = await _Link.start(self._config, self._directory, listen, self._incoming)
        return self._link

    async def _close_link(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            await link.close()

    async def _supervise(self, link: _Link) -> None:
        loop = asyncio.get_running_loop()
        while True:
            since = loop.time()
            how = await link.daemon.ended()
            self._up.clear()
            if loop.time() - since >= _STEADY_SECONDS:
                self._starts_in_a_row = 0
            log.warning("p2pd %d ended (%s): it is started again", link.daemon.pid, how)
            await self._close_link()
            link = await self._relaunch()
            await self._redial(link)
            self.restarts += 1
            self._up.set()

    async def _relaunch(self) -> _Link:
        """Start p2pd again, for as long as it takes; on its old port, unless somebody else has taken that."""
        attempt = 0
        while True:
            await asyncio.sleep(_BACKOFF_SECONDS[min(self._starts_in_a_row, len(_BACKOFF_SECONDS) - 1)])
            self._starts_in_a_row += 1
            attempt += 1
            try:
                return await self._launch(self._listen if attempt <= _KEPT_PORT_ATTEMPTS else self._config.listen)
            except (DaemonError, P2PDaemonError, OSError, EOFError) as error:
                log.warning("p2pd does not start (attempt %d): %s", attempt, error or type(error).__name__)

    async def _redial(self, link: _Link) -> None:
        """Connect again to the peers we knew. The new daemon knows none of them; and those of them that found us gone
        do not dial again for five seconds and more (libp2p's backoff), while a call from us ends that."""

        async def dial(peer: PeerId, address: str) -> None:
            with suppress(P2PDaemonError, OSError, EOFError):
                await link.connect(peer, address, math.ceil(_REDIAL_SECONDS))

        with suppress(TimeoutError):
            async with asyncio.timeout(_REDIAL_SECONDS):
                await asyncio.gather(*(dial(peer, address) for peer, address in (self._seen | self._known).items()))


def _remember(addresses: dict[PeerId, str], peer: PeerId, address: str) -> None:
    """Note the address as the latest, and forget the oldest beyond the bound."""
    addresses.pop(peer, None)
    addresses[peer] = address
    if len(addresses) > _MAX_KNOWN:
        del addresses[next(iter(addresses))]


def _peer_bytes(peer: PeerId) -> bytes:
    data: bytes = PeerID.from_base58(peer).to_bytes()
    return data
