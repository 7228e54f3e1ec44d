"""hivemind's DHT node with limits on requests, on storage and on the lifetime of its tasks.

It changes these properties of hivemind 1.1.12, all confirmed there by experiment:

  - Its serializer decodes nested extensions recursively: 1 KB from any peer crashes the interpreter.
  - Its storage is unbounded, and it judges expiry by a clock that must agree with all others within 3 seconds.
  - Any peer can claim any node id, fill the routing table with invented ids, and ask for 200,000 keys at once.
  - It sends all stored values to each new node.
  - Tasks that it starts with `asyncio.create_task` continue after the node is shut down.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar, copy_context
from itertools import islice
from typing import Any, TypeAlias, TypeVar

from node.network import hivemind_import as hive  # noqa: F401 - before any part of hivemind

# isort: split
import hivemind.dht.node
import hivemind.dht.protocol
import hivemind.dht.traverse
from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import P2PContext, P2PDaemonError, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer
from hivemind.utils.timed_storage import ValueWithExpiration

from node.network.daemon_connection import LINK_ERRORS, DaemonConnection
from node.network.directory_records import MAX_HINTS_PER_KEY, RecordStore, loads
from protocols.base import PeerId

_MAX_NODES = 1024
_REQUESTS_PER_SECOND = 100
_CALL_SECONDS = 3.0
_DAEMON_SECONDS = 3.0
_BUCKET, _DEPTH, _REPLICAS = 20, 5, 5
_CALLS = 64

T = TypeVar("T")

Key: TypeAlias = Any  # a key of the DHT: hivemind's `DHTID`

RecordValidator: TypeAlias = Callable[[PeerId, Key, str, bytes, float], bool]
"""(sender, key, subkey, value, expiry) -> whether to keep the record."""

Refuse: TypeAlias = Callable[[PeerId, str], None]


def dht_key(name: bytes) -> Key:
    return DHTID.generate(source=name)


def _dictionary(entries: Iterable[tuple[str, bytes, float]]) -> Any:
    found = DictionaryDHTValue()
    found.frozen = True  # so that it does not consult hivemind's clock
    for entry in entries:
        found.store(*entry)
    return found


class _Serializer(MSGPackSerializer):  # type: ignore[misc]
    @staticmethod
    def loads(packed: bytes) -> Any:
        found = loads(packed)
        return _dictionary(found) if isinstance(found, list) else found


class _Storage:
    def __init__(self, records: RecordStore) -> None:
        self._records = records

    def store(self, key: Key, value: bytes, expiration_time: float, subkey: str) -> bool:
        return self._records.put(key, subkey, value, expiration_time)

    def get(self, key: Key) -> Any:
        live = self._records.live(key)
        if not live:
            return None
        found = _dictionary((subkey, value, expires) for subkey, (value, expires) in live.items())
        return ValueWithExpiration(found, found.latest_expiration_time)


_owner: ContextVar[set[asyncio.Task[Any]] | None] = ContextVar("_owner", default=None)


class _OwnedTasks:
    """The asyncio module for hivemind's DHT. Tasks that it starts belong to the node in whose context they start."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    @staticmethod
    def create_task(work: Coroutine[Any, Any, T], **options: Any) -> asyncio.Task[T]:
        task = asyncio.create_task(work, **options)
        if (owner := _owner.get()) is not None:
            owner.add(task)
            task.add_done_callback(owner.discard)
        return task


for _module in (hivemind.dht.node, hivemind.dht.protocol, hivemind.dht.traverse):
    _module.asyncio = _OwnedTasks()


class StarlingDHT(DHTProtocol):  # type: ignore[misc]
    """hivemind's calls between nodes. Their names on the wire contain the name of this class."""

    serializer = _Serializer

    def prepare(self, records: RecordStore, judge: RecordValidator, refuse: Refuse) -> None:
        self._records = records
        self.storage = self.cache = _Storage(records)
        self.tasks: set[asyncio.Task[Any]] = set()
        self._judge, self._refuse = judge, refuse
        self._second, self._requests = 0, Counter[PeerId]()
        self.client_mode, self.node_info = False, dht_pb2.NodeInfo(node_id=self.node_id.to_bytes())

    async def rpc_ping(self, request: dht_pb2.PingRequest, context: P2PContext) -> dht_pb2.PingResponse:
        await self._admit(request, context)
        return dht_pb2.PingResponse(peer=self.node_info)

    async def rpc_find(self, request: dht_pb2.FindRequest, context: P2PContext) -> dht_pb2.FindResponse:
        initiator = await self._admit(request, context)
        if len(request.keys) != 1 or len(request.keys[0]) != DHTID.HASH_NBYTES:
            raise self._refused(context.remote_id, "asks for several keys at once, or none")
        key = DHTID.from_bytes(request.keys[0])
        result = dht_pb2.FindResult(type=dht_pb2.NOT_FOUND)
        if found := self.storage.get(key):
            fields = {"value": _Serializer.dumps(found.value), "expiration_time": found.expiration_time}
            result = dht_pb2.FindResult(type=dht_pb2.FOUND_DICTIONARY, **fields)
        for node, peer in self.routing_table.get_nearest_neighbors(key, self.bucket_size, exclude=initiator):
            result.nearest_node_ids.append(node.to_bytes())
            result.nearest_peer_ids.append(peer.to_bytes())
        return dht_pb2.FindResponse(results=[result], peer=self.node_info)

    async def rpc_store(self, request: dht_pb2.StoreRequest, context: P2PContext) -> dht_pb2.StoreResponse:
        await self._admit(request, context)
        fields = (request.keys, request.subkeys, request.values, request.expiration_time)
        if any(len(field) != 1 for field in fields):
            raise self._refused(context.remote_id, "stores several at once, or none")
        is_stored = self._take(context.remote_id, *(field[0] for field in fields))
        return dht_pb2.StoreResponse(store_ok=[is_stored], peer=self.node_info)

    async def call_ping(self, peer: PeerID, validate: bool = False, strict: bool = True) -> Any:
        with suppress(AssertionError):  # the answer is not a node id
            return await super().call_ping(peer, validate=False)

    async def call_find(self, peer: PeerID, keys: Collection[Key]) -> Any:
        found = await super().call_find(peer, keys)
        return found and {
            key: (self._store_valid(peer, key, value), self._true_nodes(nearest))
            for key, (value, nearest) in found.items()
        }

    async def update_routing_table(self, node_id: Key, peer_id: PeerID, responded: bool = True) -> None:
        """Update the table as hivemind does, but send nothing to new nodes, and accept only the hash of a peer's id."""
        table = self.routing_table
        if not responded:
            known = table.get(peer_id=peer_id)
            if known is not None:
                del table[known]
        elif node_id == dht_key(peer_id.to_bytes()) and (node_id in table or len(table.uid_to_peer_id) < _MAX_NODES):
            doubtful = table.add_or_update_node(node_id, peer_id)
            if doubtful is not None:
                _OwnedTasks.create_task(self.call_ping(doubtful[1]))

    async def _admit(self, request: Any, context: P2PContext) -> Key:
        """Returns the id of the node that sent the request."""
        _owner.set(self.tasks)
        second, peer = int(asyncio.get_running_loop().time()), context.remote_id.to_base58()
        if second != self._second:
            self._second, self._requests = second, Counter()
        self._requests[peer] += 1
        if self._requests[peer] > _REQUESTS_PER_SECOND:
            raise self._refused(context.remote_id, "too many requests")
        sender = dht_key(context.remote_id.to_bytes())
        if request.peer.node_id not in (b"", sender.to_bytes()):
            raise self._refused(context.remote_id, "claims a node id that is not its own")
        if request.peer.node_id:
            await self.update_routing_table(sender, context.remote_id)
        return sender

    def _refused(self, peer: PeerID, why: str) -> ValueError:
        self._refuse(peer.to_base58(), why)
        return ValueError(why)

    def _take(self, sender: PeerID, key: bytes, tag: bytes, value: bytes, expiration_time: float) -> bool:
        try:
            subkey, where = loads(tag), DHTID.from_bytes(key)
        except (ValueError, AssertionError):
            raise self._refused(sender, "malformed record") from None
        if not isinstance(subkey, str):
            raise self._refused(sender, "malformed record")
        sound = self._judge(sender.to_base58(), where, subkey, value, expiration_time)
        return sound and self._records.put(where, subkey, value, expiration_time)

    def _store_valid(self, sender: PeerID, key: Key, found: Any) -> Any:
        if found is not None and isinstance(found.value, DictionaryDHTValue):
            known = self._records.live(key)
            for subkey, (value, expires) in islice(found.value.items(), MAX_HINTS_PER_KEY):
                is_new = (value, expires) != known.get(subkey)
                if is_new and self._judge(sender.to_base58(), key, subkey, value, expires):
                    self._records.put(key, subkey, value, expires)
        return self.storage.get(key)

    def _true_nodes(self, nearest: Mapping[Key, PeerID]) -> dict[Key, PeerID]:
        some = islice(nearest.items(), self.bucket_size)
        return {node: peer for node, peer in some if node == dht_key(peer.to_bytes())}


class Node:
    def __init__(self, node: DHTNode) -> None:
        self._node = node
        self._protocol: StarlingDHT = node.protocol

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        context = copy_context()
        context.run(_owner.set, self._protocol.tasks)
        return context.run(_OwnedTasks.create_task, work)

    @property
    def peers(self) -> tuple[PeerId, ...]:
        return tuple(peer.to_base58() for peer in self._protocol.routing_table.peer_id_to_uid)

    async def meet(self, peer: PeerId) -> bool:
        """Ping a peer, which adds both nodes to each other's routing table; False if it does not answer."""
        other = PeerID.from_base58(peer)
        node_id = await self._protocol.call_ping(other)
        await self._protocol.update_routing_table(node_id, other, responded=node_id is not None)
        return node_id is not None

    async def store(self, name: bytes, subkey: PeerId, value: bytes, expires: float) -> None:
        self._protocol.storage.store(dht_key(name), _Serializer.dumps(value), expires, subkey)
        await self._node.store(name, value, expires, subkey=subkey)

    async def search(self, name: bytes) -> None:
        """Ask the nodes nearest to a key; valid records go into the record store as they arrive."""
        if len(self._node.blacklist.ban_counter) > _MAX_NODES:  # it counts all nodes that ever failed to answer
            self._node.blacklist.clear()
        await self._node.get(name, latest=True)


@asynccontextmanager
async def running_node(
    link: DaemonConnection, records: RecordStore, judge: RecordValidator, refuse: Refuse
) -> AsyncIterator[Node]:
    """Run a node on this p2pd process. On exit, all its tasks are cancelled and awaited."""
    me = dht_key(link.client.peer_id.to_bytes())
    options = {"node_id": me, "wait_timeout": _CALL_SECONDS, "client_mode": True}
    caches = {"cache_locally": False, "cache_nearest": 0, "cache_on_store": False, "cache_refresh_before_expiry": 0}
    # In client mode neither registers with p2pd, so no peer reaches the node before its limits are set.
    node = await DHTNode.create(p2p=link.client, **options, **caches)
    node.protocol = protocol = await StarlingDHT.create(
        link.client, me, _BUCKET, _DEPTH, _REPLICAS, _CALL_SECONDS, _CALLS, client_mode=True
    )
    protocol.prepare(records, judge, refuse)
    try:
        with suppress(P2PDaemonError):  # there are none, unless p2pd was too slow for an earlier node
            await link.call(protocol.remove_p2p_handlers(link.client), _DAEMON_SECONDS)
        await link.call(protocol.add_p2p_handlers(link.client), _DAEMON_SECONDS)
        yield Node(node)
    finally:
        await _stop(node, protocol.tasks, link)


async def _stop(node: DHTNode, tasks: Collection[asyncio.Task[Any]], link: DaemonConnection) -> None:
    try:
        if not link.gone.is_set():
            await link.call(node.shutdown(), _DAEMON_SECONDS)
    except LINK_ERRORS:
        pass  # p2pd forgets the node when it ends
    finally:
        left = tuple(tasks)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
