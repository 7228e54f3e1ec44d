"""A simulated network: `Transport` with latency, bandwidth, back-pressure, refusals, resets and silence.

Streams behave as TCP's and libp2p's do: what was sent before a process was killed still arrives, and then the reset;
a blocked link loses nothing but delays everything until it heals; opening a stream takes a round trip, so that a
refusal is definite.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from protocols.base import BadPayload, Buffer, Deadline, Handler, PeerGone, PeerId, PeerSilent, ProtocolError, Stream
from protocols.framing import FramedStream, accepted, opened
from protocols.tasks import Bell
from tests.sim.loop import PROCESS, SimProcess

WINDOW_BYTES = 1 << 20
"""A sender waits while this much of a stream is unread."""
OPENING_SECONDS = 10.0

_EOF = b"<eof>"
_RESET = b"<reset>"


class Trace:
    """What happened, as a hash of everything and as the last lines in words."""

    def __init__(self, keep: int = 400) -> None:
        self._hash = hashlib.sha256()
        self.lines: deque[str] = deque(maxlen=keep)

    def __call__(self, time: float, what: str) -> None:
        line = f"{time:.6f} {what}"
        self._hash.update(line.encode())
        self.lines.append(line)

    def digest(self) -> str:
        return self._hash.hexdigest()


@dataclass
class Link:
    """One direction between two peers."""

    latency_seconds: float
    blocked: bool = False
    parked: list[Callable[[], None]] = field(default_factory=list)


@dataclass
class Node:
    """One peer's place in the network."""

    peer: PeerId
    process: SimProcess
    up_bytes_per_second: float
    down_bytes_per_second: float
    up_free_at: float = 0.0
    down_free_at: float = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0
    messages: int = 0
    handlers: dict[str, Handler] = field(default_factory=dict)
    ends: dict[int, SimPipe] = field(default_factory=dict)


class SimPipe:
    """One end of a stream: writes travel to `other`, reads take what has arrived."""

    def __init__(self, network: SimNetwork, node: Node, number: int) -> None:
        self.network, self.node, self.number = network, node, number
        self.other: SimPipe
        self._flight: deque[bytes] = deque()
        self._last_arrival = 0.0
        self._arrived: deque[memoryview] = deque()
        self._unread_bytes = 0
        self._ended = False
        self._broken = False
        self._closed = False
        self._readable: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None

    async def write(self, data: Buffer) -> None:
        self._check()
        while self.other._unread_bytes >= WINDOW_BYTES:
            self._writable = asyncio.get_running_loop().create_future()
            await self._writable
            self._check()
        self.other._unread_bytes += len(data)
        self.network.departing(self, bytes(data))

    async def read_into(self, buffer: memoryview) -> None:
        filled = 0
        while filled < len(buffer):
            while not self._arrived:
                self._check_readable()
                self._readable = asyncio.get_running_loop().create_future()
                await self._readable
            filled += self._take(buffer[filled:])

    def _take(self, into: memoryview) -> int:
        if self._broken:
            raise ConnectionResetError("reset")
        piece = self._arrived[0]
        size = min(len(piece), len(into))
        into[:size] = piece[:size]
        if size == len(piece):
            self._arrived.popleft()
        else:
            self._arrived[0] = piece[size:]
        self._unread_bytes -= size
        _wake(self.other._writable)
        return size

    def _check(self) -> None:
        if self._closed or not self.node.process.alive:
            raise ConnectionResetError("closed here")
        if self._broken or (self.other._closed and self._ended):
            raise ConnectionResetError("closed by the peer")

    def _check_readable(self) -> None:
        if self._broken or self._closed:
            raise ConnectionResetError("reset")
        if self._ended:
            raise EOFError("closed by the peer")

    def close(self) -> None:
        """Close after what was written."""
        self._end(_EOF)

    def reset(self) -> None:
        self._end(_RESET)

    def _end(self, marker: bytes) -> None:
        if not self._closed:
            self._closed = True
            self.node.ends.pop(self.number, None)
            self.network.departing(self, marker)

    def deliver(self) -> None:
        """The next thing on its way from the other end is here."""
        data = self.other._flight.popleft()
        if data is _EOF or data is _RESET:
            self._ended = True
            self._broken = data is _RESET
        elif not self._closed:
            self._arrived.append(memoryview(data))
            self.node.received_bytes += len(data)
        _wake(self._readable)
        _wake(self._writable)


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


class SimTransport:
    """`protocols.base.Transport` for one simulated peer."""

    def __init__(self, network: SimNetwork, node: Node) -> None:
        self.network, self.node = network, node
        self.me = node.peer
        self.refused: list[tuple[PeerId, str]] = []
        self.disguise: Callable[[str, FramedStream, SimPipe], Stream] = lambda method, stream, pipe: stream
        """What a lying peer puts between its honest code and its streams."""

    def serve(self, method: str, handler: Handler) -> None:
        if method in self.node.handlers:
            raise ValueError(f"{method} is served already")
        self.node.handlers[method] = handler

    @asynccontextmanager
    async def open(self, peer: PeerId, method: str, deadline: Deadline) -> AsyncIterator[Stream]:
        end = await self.network.connect(self.node, peer, method, deadline)
        try:
            yield self.disguise(method, await opened(peer, end, deadline), end)
        except BaseException:
            end.reset()
            raise
        end.close()

    async def answer(self, peer: PeerId, method: str, end: SimPipe) -> None:
        """Serve one incoming stream: the handler boundary."""
        try:
            stream = await accepted(peer, end, OPENING_SECONDS, self._refuse)
            if stream is None:
                return end.reset()
            await self.node.handlers[method](peer, self.disguise(method, stream, end))
            end.close()
        except ProtocolError as error:
            if isinstance(error, BadPayload):
                self._refuse(peer, error)
            end.reset()
        except asyncio.CancelledError:
            end.reset()
            raise
        except Exception as error:  # noqa: BLE001 - the handler boundary; a bug is kept and fails the run
            self.network.bugs.append(error)
            end.reset()

    def _refuse(self, peer: PeerId, error: BadPayload) -> None:
        self.refused.append((peer, str(error)))


class SimNetwork:
    """All links and nodes. Every number is deterministic: no randomness of its own."""

    def __init__(self, trace: Trace, latency_seconds: float = 0.02, bytes_per_second: float = 12.5e6) -> None:
        self.trace = trace
        self.latency_seconds = latency_seconds
        self.bytes_per_second = bytes_per_second
        self.nodes: dict[PeerId, Node] = {}
        self.transports: dict[PeerId, SimTransport] = {}
        self.links: dict[tuple[PeerId, PeerId], Link] = {}
        self.bugs: list[Exception] = []
        self.deaths = 0
        self.died = Bell()
        self._streams = 0

    def join(self, peer: PeerId, bytes_per_second: float | None = None) -> SimTransport:
        rate = bytes_per_second or self.bytes_per_second
        self.nodes[peer] = Node(peer, SimProcess(peer), rate, rate)
        self.transports[peer] = SimTransport(self, self.nodes[peer])
        return self.transports[peer]

    def link(self, source: PeerId, target: PeerId) -> Link:
        key = (source, target)
        if key not in self.links:
            self.links[key] = Link(self.latency_seconds)
        return self.links[key]

    def block(self, source: PeerId, target: PeerId) -> None:
        """Silence from `source` to `target`: what is sent arrives only after `heal`."""
        self.link(source, target).blocked = True

    def heal(self, source: PeerId, target: PeerId) -> None:
        link = self.link(source, target)
        link.blocked = False
        parked, link.parked = link.parked, []
        for departure in parked:
            departure()

    def kill(self, peer: PeerId) -> None:
        """SIGKILL: the tasks stop at once; what had been sent still arrives, then a reset."""
        node = self.nodes[peer]
        self.trace(_now(), f"{peer} killed")
        self.reset_streams(peer)
        node.process.kill()
        self.deaths += 1
        self.died.ring()

    def reset_streams(self, peer: PeerId) -> None:
        """Reset every stream of a peer, as the death of its daemon does."""
        for end in list(self.nodes[peer].ends.values()):
            end.reset()
            end._broken = True
            _wake(end._readable)
            _wake(end._writable)

    async def connect(self, node: Node, peer: PeerId, method: str, deadline: Deadline) -> SimPipe:
        """The opener's end of a new stream; the peer's handler starts when the opening arrives."""
        if not node.process.alive:
            raise PeerGone(peer, "this process is dead")
        answer: asyncio.Future[SimPipe | None] = asyncio.get_running_loop().create_future()
        self._travel(node.peer, peer, 0.0, lambda: self._knock(node, peer, method, answer))
        try:
            async with asyncio.timeout_at(deadline):
                end = await answer
        except TimeoutError:
            raise PeerSilent(peer, "no answer before the deadline") from None
        if end is None:
            raise PeerGone(peer, f"cannot be reached, or does not serve {method}")
        return end

    def _knock(self, node: Node, peer: PeerId, method: str, answer: asyncio.Future[SimPipe | None]) -> None:
        """An opening arrives; the answer goes back."""
        target = self.nodes.get(peer)
        if target is None or not target.process.alive or method not in target.handlers:
            self._travel(peer, node.peer, 0.0, lambda: answer.done() or answer.set_result(None))
            return
        self._streams += 1
        mine, theirs = SimPipe(self, node, self._streams), SimPipe(self, target, self._streams)
        mine.other, theirs.other = theirs, mine
        self._accept(target, node.peer, method, theirs)
        self._travel(peer, node.peer, 0.0, lambda: self._answered(mine, answer))

    def _answered(self, end: SimPipe, answer: asyncio.Future[SimPipe | None]) -> None:
        if answer.done() or not end.node.process.alive:  # the caller gave up, or died
            end.reset()
            return
        end.node.ends[end.number] = end
        answer.set_result(end)

    def _accept(self, node: Node, source: PeerId, method: str, end: SimPipe) -> None:
        node.ends[end.number] = end
        token = PROCESS.set(node.process)
        try:
            asyncio.get_running_loop().create_task(self.transports[node.peer].answer(source, method, end))
        finally:
            PROCESS.reset(token)

    def departing(self, end: SimPipe, data: bytes) -> None:
        """Queue data behind what its sender's uplink and its receiver's downlink already carry."""
        node, target = end.node, end.other.node
        node.messages += 1
        size = 0 if data is _EOF or data is _RESET else len(data)
        node.sent_bytes += size
        now = _now()
        self.trace(now, f"{node.peer}>{target.peer} #{end.number} {size if size else data!r}")
        end._flight.append(data)
        node.up_free_at = max(now, node.up_free_at) + size / node.up_bytes_per_second
        delay = node.up_free_at - now
        self._travel(node.peer, target.peer, delay, lambda: self._arrive(end, size))

    def _travel(self, source: PeerId, target: PeerId, delay_seconds: float, arrive: Callable[[], None]) -> None:
        link = self.link(source, target)
        if link.blocked:
            link.parked.append(lambda: self._travel(source, target, 0.0, arrive))
            return
        asyncio.get_running_loop().call_later(delay_seconds + link.latency_seconds, arrive)

    def _arrive(self, end: SimPipe, size: int) -> None:
        target = end.other.node
        now = _now()
        finish = max(now, target.down_free_at + size / target.down_bytes_per_second)
        target.down_free_at = finish
        asyncio.get_running_loop().call_at(finish, end.other.deliver)


def _now() -> float:
    return asyncio.get_running_loop().time()
