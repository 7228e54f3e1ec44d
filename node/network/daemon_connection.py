"""One p2pd process with hivemind's client. Only this module and `node.network.kademlia` import hivemind."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from node.network import hivemind_import as hive  # noqa: F401 - before any part of hivemind

# isort: split
from hivemind.p2p import P2P, P2PDaemonError, PeerID
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from hivemind.p2p.p2p_daemon_bindings.utils import raise_if_failed, read_pbmsg_safe, write_pbmsg
from hivemind.proto import p2pd_pb2
from hivemind.utils.logging import use_hivemind_log_handler
from hivemind.utils.multiaddr import Multiaddr as HivemindMultiaddr
from multiaddr import Multiaddr

from node.network.daemon import DaemonError, PlacesAtRelays, start_daemon
from node.network.pipe import SocketPipe
from node.runtime.child_process import ChildProcess
from protocols.base import PeerId

log = logging.getLogger(__name__)

LINK_ERRORS = (P2PDaemonError, OSError, EOFError)
"""Errors of calls on a `DaemonConnection`: p2pd reported an error, or is not running. A timeout is an OSError."""

_PROTOCOL = "/starling/stream/1"
_ATTACH_SECONDS = 10.0
_PROBE_EVERY_SECONDS = 2.0
_PROBE_SECONDS = 3.0
_PROBES = 2
_PLACES = "/libp2p/circuit/relay/0.2.0/hop"
"""The protocol by which a relay gives places, once it has found that others can dial it."""

IncomingHandler = Callable[[PeerId, str, asyncio.StreamReader, asyncio.StreamWriter], None]
"""Called with each stream that a peer has opened, and the peer's multiaddr. It must not block."""

use_hivemind_log_handler("nowhere")  # hivemind would write to stderr itself: leave its output to the root logger


class DaemonConnection:
    def __init__(self, daemon: ChildProcess, control: Path) -> None:
        self.client: Any = None  # hivemind's `P2P`, for its DHT
        self.addresses: tuple[str, ...] = ()  # without p2pd's id, and at most a few seconds old, as are `peers`
        self.peers: dict[PeerId, str] = {}
        self.gone = asyncio.Event()  # p2pd has ended; the client is not closed yet
        self.places = PlacesAtRelays(())
        self.is_renewed = False  # p2pd was ended to be started again
        self.daemon = daemon
        self._control = control
        self._late: set[asyncio.Task[None]] = set()  # calls of hivemind's, some of which nobody awaits any more

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        control: Path,
        me: PeerId,
        incoming: IncomingHandler,
        relays: Sequence[str] = (),
        keeps_port: bool = True,
    ) -> Self:
        """Start p2pd, which uses these relays (`start_daemon`). Streams that peers open go to `incoming`.

        Raises `DaemonError`, or one of `LINK_ERRORS`.
        """
        with suppress(FileNotFoundError):
            os.unlink(control)  # a killed daemon leaves its socket behind
        link = cls(await start_daemon(command, keeps_port), control)
        link.places = PlacesAtRelays(relays)
        try:
            async with asyncio.timeout(_ATTACH_SECONDS):
                await link._attach(me, incoming)
        except BaseException:
            await link.close()
            raise
        return link

    async def _attach(self, me: PeerId, incoming: IncomingHandler) -> None:
        # hivemind would create the client's socket in /tmp, where every user of this machine could connect to it.
        client: Any = type("AttachedP2P", (P2P,), {"_UNIX_SOCKET_PREFIX": f"/unix{self._control.parent}/"})
        self.client = await client.replicate(HivemindMultiaddr(f"/unix{self._control}"))
        if self.client.peer_id.to_base58() != me:
            raise DaemonError(f"p2pd runs as {self.client.peer_id}, not as {me}")

        async def take(info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            incoming(info.peer_id.to_base58(), _text(info.addr.to_bytes()), reader, writer)

        await self.client.add_binary_stream_handler(_PROTOCOL, take)
        await self._look()

    async def call(self, work: Coroutine[Any, Any, None], seconds: float) -> None:
        """Await a call of hivemind's, which has no time limit. After so many seconds it goes on, and TimeoutError is
        raised.

        Cancelled, it would be the last one: at the answer to a cancelled call, hivemind's reader of answers ends.
        """
        task = asyncio.create_task(work)
        self._late.add(task)
        task.add_done_callback(self._ended)
        async with asyncio.timeout(seconds):
            await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._late.discard(task)
        if not task.cancelled():
            task.exception()  # whoever still waited has it

    async def stream(self, peer: PeerId, seconds: int) -> tuple[SocketPipe, str]:
        """Also returns the peer's multiaddr."""
        target = p2pd_pb2.StreamOpenRequest(peer=_peer_bytes(peer), proto=[_PROTOCOL], timeout=seconds)
        response, reader, writer = await self._ask(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=target)
        return SocketPipe(reader, writer), _text(response.streamInfo.addr)

    async def connect(self, peer: PeerId, address: str, seconds: int) -> None:
        where = Multiaddr(address).to_bytes()  # not hivemind's Multiaddr, which cannot encode the id of a relay
        target = p2pd_pb2.ConnectRequest(peer=_peer_bytes(peer), addrs=[where], timeout=seconds)
        await self._request(type=p2pd_pb2.Request.CONNECT, connect=target)

    async def disconnect(self, peer: PeerId) -> None:
        target = p2pd_pb2.DisconnectRequest(peer=_peer_bytes(peer))
        await self._request(type=p2pd_pb2.Request.DISCONNECT, disconnect=target)

    async def ended(self) -> str:
        """Wait until p2pd has ended, and say how. A p2pd that hangs is killed."""
        probing = asyncio.create_task(self._probe())
        try:
            return await self.daemon.ended()
        finally:
            probing.cancel()
            await asyncio.gather(probing, return_exceptions=True)

    async def _probe(self) -> None:
        missed = 0
        while missed < _PROBES:
            await asyncio.sleep(0 if missed else _PROBE_EVERY_SECONDS)
            try:
                async with asyncio.timeout(_PROBE_SECONDS):
                    await self._look()
                missed = 0
                if self.places.are_lost and await self._gives_places():
                    log.info("p2pd %d has lost its places at relays: it is started again", self.daemon.pid)
                    self.is_renewed = True
                    return await self.daemon.kill()
            except LINK_ERRORS:
                missed += 1
        log.warning("p2pd %d does not answer and is killed", self.daemon.pid)
        await self.daemon.kill()

    async def _gives_places(self) -> bool:
        """Whether a connected relay gives places now."""
        relays = self.places.relays & self.peers.keys()
        return any(await asyncio.gather(*map(self._serves_places, relays)))

    async def _serves_places(self, relay: PeerId) -> bool:
        target = p2pd_pb2.StreamOpenRequest(peer=_peer_bytes(relay), proto=[_PLACES], timeout=1)
        try:
            async with asyncio.timeout(_PROBE_SECONDS):
                await self._request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=target)
        except LINK_ERRORS:
            return False
        return True

    async def _look(self) -> None:
        mine = await self._request(type=p2pd_pb2.Request.IDENTIFY)
        own = (_text(address) for address in mine.identify.addrs)
        # port 0: the router has refused a port, and go-libp2p announces the mapping all the same
        self.addresses = tuple(address for address in own if address and not address.endswith("/tcp/0"))
        others = await self._request(type=p2pd_pb2.Request.LIST_PEERS)
        found = ((PeerID(each.id).to_base58(), _text(each.addrs[0])) for each in others.peers if each.addrs)
        self.peers = {peer: address for peer, address in found if address}
        self.places.look(self.addresses)

    async def _request(self, **request: Any) -> Any:
        response, _, writer = await self._ask(**request)
        writer.close()
        return response

    async def _ask(self, **request: Any) -> tuple[Any, asyncio.StreamReader, asyncio.StreamWriter]:
        """Send p2pd a request. If it opens a stream, the returned connection is the stream.

        Not by hivemind's calls: they leave the connection open when they fail, and set no time limit.
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
        return response, reader, writer

    async def close(self) -> None:
        """hivemind does not await the client's tasks, or loses track of them."""
        self.gone.set()
        if self.client is not None:
            control = self.client._client.control
            tasks = [self.client._listen_task, control._read_task, control._write_task]
            running = [task for task in (*tasks, *control._handler_tasks.values(), *self._late) if task]
            await self.client.shutdown()
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        await self.daemon.stop()


def _peer_bytes(peer: PeerId) -> bytes:
    data: bytes = PeerID.from_base58(peer).to_bytes()
    return data


def _text(address: bytes) -> str:
    """A multiaddr as text; empty if it is of an unknown kind. hivemind's own decoder fails on the id of a relay."""
    try:
        return str(Multiaddr(address))
    except (ValueError, LookupError):
        return ""
