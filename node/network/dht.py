"""`protocols.base.Directory` on hivemind's DHT: signed, bounded, short-lived records. It decides nothing."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Protocol, Self, TypeVar

from node.network.daemon import DaemonError
from node.network.daemon_connection import LINK_ERRORS, DaemonConnection
from node.network.directory_records import TTL_SECONDS, DirectoryRecord, RecordStore, check, loads, name_of, unpack
from node.network.kademlia import Key, Node, dht_key, running_node
from node.runtime.bounded import count
from protocols.base import BadPayload, Clock, Deadline, PeerId, Signer
from protocols.peers.estimates import RecentDict

log = logging.getLogger(__name__)

T = TypeVar("T")

_AGAIN_SECONDS = 10.0
_RETRY_SECONDS = 1.0
_MAX_ANNOUNCED = 64
_MAX_MET = 64


class Carrier(Protocol):
    """The part of `node.network.libp2p.LibP2PTransport` that the directory needs."""

    me: PeerId

    async def link(self) -> DaemonConnection: ...


class DhtDirectory:
    """The directory in which peers of one run find each other. Use as an async context manager, inside the transport.

    If p2pd is restarted, it meets its peers again and repeats its announcements. Network failures raise nothing.
    """

    def __init__(
        self,
        transport: Carrier,
        signer: Signer,
        clock: Clock,
        run: bytes,
        offset_seconds: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.refused: Counter[tuple[PeerId, str]] = Counter()
        self._transport, self._signer, self._clock, self._run = transport, signer, clock, run
        self._offset_seconds = offset_seconds
        self._records = RecordStore(self._now)
        self._node: Node | None = None
        self._up = asyncio.Event()
        self._announced: RecentDict[str, DirectoryRecord] = RecentDict(_MAX_ANNOUNCED)
        self._met: RecentDict[PeerId, None] = RecentDict(_MAX_MET)
        self._keeping: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._keeping = asyncio.create_task(self._keep(), name="dht")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)

    async def announce(self, scope: str, value: bytes, ttl_seconds: float, deadline: Deadline) -> None:
        """Announce `value` (at most 4 KiB) in a scope (128 bytes) for at most ten minutes; it replaces the last one."""
        if not 0 < ttl_seconds <= TTL_SECONDS:
            raise ValueError(f"ttl_seconds must be above 0 and at most {TTL_SECONDS:g}, not {ttl_seconds:g}")
        draft = DirectoryRecord(self._transport.me, scope, self._now() + ttl_seconds, value)
        message = draft.message(self._run)
        hint = DirectoryRecord(draft.peer, scope, draft.expires, value, self._signer.sign(message))
        hint.pack()
        self._announced[scope] = hint
        await self._ask(deadline, lambda node: self._store(node, hint))

    async def find(self, scope: str, limit: int, deadline: Deadline) -> Sequence[tuple[PeerId, bytes]]:
        """Announcements in a scope, this peer's included, the latest first; at the deadline, those known then."""
        name = name_of(self._run, scope)
        await self._ask(deadline, lambda node: node.search(name))
        entries = sorted(self._records.live(dht_key(name)).items(), key=lambda pair: pair[1].expires, reverse=True)
        return [(peer, unpack(_content(entry.value)).value) for peer, entry in entries[:limit]]

    async def meet(self, peer: PeerId, deadline: Deadline) -> bool:
        """Add both nodes to each other's routing table, if the transport can reach the peer; False if it is silent."""
        self._met[peer] = None
        return bool(await self._ask(deadline, lambda node: node.meet(peer)))

    def _now(self) -> float:
        return self._clock.wall() + self._offset_seconds()

    async def _store(self, node: Node, hint: DirectoryRecord) -> None:
        await node.store(name_of(self._run, hint.scope), hint.peer, hint.pack(), hint.expires)

    async def _ask(self, deadline: Deadline, question: Callable[[Node], Coroutine[Any, Any, T]]) -> T | None:
        """Ask the node; if p2pd ends meanwhile, ask the next node. None if there is no answer by the deadline."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                while True:
                    await self._up.wait()
                    assert self._node is not None
                    task = self._node.spawn(question(self._node))
                    try:
                        await asyncio.wait({task})
                    finally:
                        task.cancel()
                    if not task.cancelled():
                        return _result(task)
        return None

    async def _keep(self) -> None:
        while True:
            try:
                link = await self._transport.link()
                async with running_node(link, self._records, self._is_sound, self._refuse) as node:
                    await self._serve(node, link)
            except DaemonError:
                return  # the transport is closed
            except LINK_ERRORS as error:
                log.warning("cannot run the DHT node (%s); trying again", str(error) or type(error).__name__)
                await asyncio.sleep(_RETRY_SECONDS)

    async def _serve(self, node: Node, link: DaemonConnection) -> None:
        self._node = node
        self._up.set()
        again = node.spawn(self._again(node))
        try:
            await link.gone.wait()
        finally:
            again.cancel()
            self._up.clear()
            self._node = None
            for peer in node.peers[:_MAX_MET]:
                self._met[peer] = None

    async def _again(self, node: Node) -> None:
        """Contact the peers again that the previous node knew, and repeat the announcements."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_AGAIN_SECONDS):
                await asyncio.gather(*(node.meet(peer) for peer in self._met), return_exceptions=True)
                current = [hint for hint in self._announced.values() if hint.expires > self._now()]
                await asyncio.gather(*(self._store(node, hint) for hint in current))

    def _is_sound(self, sender: PeerId, key: Key, subkey: str, packed: bytes, expires: float) -> bool:
        try:
            hint = unpack(_content(packed))
            if (hint.peer, hint.expires, dht_key(name_of(self._run, hint.scope))) != (subkey, expires, key):
                raise BadPayload("a record of another run, or under a key that is not its own")
            check(hint, self._run, self._now(), self._signer)
        except BadPayload as error:
            self._refuse(sender, str(error))
            return False
        return True

    def _refuse(self, peer: PeerId, why: str) -> None:
        log.debug("refused from %s: %s", peer, why)
        count(self.refused, (peer, why))


def _content(packed: bytes) -> bytes:
    try:
        content = loads(packed)
    except ValueError:
        content = None
    if not isinstance(content, bytes):
        raise BadPayload("not a directory record")
    return content


def _result(task: asyncio.Task[T]) -> T | None:
    if error := task.exception():
        log.warning("a DHT request failed: %s", str(error) or type(error).__name__)
        return None
    return task.result()
