"""What an averager is built from: its streams and their accounting, control messages, its sessions, and limits."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, Generic, TypeVar

from protocols import wire
from protocols.aio import Notifier, loop_time, run_with_helper
from protocols.base import (
    AveragingResult,
    BadPayload,
    Contribution,
    Deadline,
    Head,
    Header,
    Host,
    LocalProgress,
    Member,
    Outcome,
    PeerError,
    PeerFault,
    PeerGone,
    PeerId,
    PeerSilent,
    RoundKey,
    Settings,
    StoppedHere,
    Stream,
    Vector,
)
from protocols.wire import HeaderType

FIRST_FRAME_SECONDS = 10.0
MAX_STREAMS = 64  # Streams that a `StreamLimiter` allows at a time. Further ones are closed.
MAX_STREAMS_OF_ONE = 32
"""The same for one peer. It leaves room for a peer that was cut off for a while, which opens many at once."""
MAX_NAMED = 256  # limit of peers named between two reports: a stranger can use any number of peer ids
RECONNECT_SECONDS = 0.1
RECONNECT_LIMIT_SECONDS = 5.0
LOOK_SECONDS, MOVING_BYTES = 0.1, 4096
"""Data moves while its streams move at least this many bytes between two looks: votes alone are fewer."""
KEEP_MESSAGES = 64
"""Limit of messages kept for one peer: those to send, and those sent that may be lost. The oldest are dropped first."""

K = TypeVar("K")
Session = TypeVar("Session")


class RoundAccounting:
    """Counts bytes and names peers, each with its first reason, between two reports. Our own limits blame no peer."""

    def __init__(self) -> None:
        self._names: dict[PeerId, str] = {}
        self._stopped_here: set[PeerId] = set()
        self._bytes_sent = 0
        self._bytes_received = 0
        self.seconds_moving = 0.0
        self._open: dict[Stream, tuple[int, int]] = {}  # bytes sent and received that are already counted

    def name(self, peer: PeerId, why: str) -> None:
        if len(self._names) < MAX_NAMED:
            self._names.setdefault(peer, why)

    @asynccontextmanager
    async def counting(self, stream: Stream) -> AsyncIterator[Stream]:
        """Count a stream's bytes while it is used, and name its peer if it broke a rule."""
        self._open[stream] = (0, 0)
        try:
            yield stream
        except BadPayload as error:
            self.name(stream.peer, f"refused: {error}")
            raise
        except StoppedHere:
            if len(self._stopped_here) < MAX_NAMED:
                self._stopped_here.add(stream.peer)
            raise
        finally:
            self._count(stream)
            del self._open[stream]

    def _count(self, stream: Stream) -> None:
        sent, received = self._open[stream]
        self._bytes_sent += stream.bytes_sent - sent
        self._bytes_received += stream.bytes_received - received
        self._open[stream] = (stream.bytes_sent, stream.bytes_received)

    def moved_bytes(self) -> int:
        """Bytes that the open streams have carried so far, both ways."""
        return sum(stream.moved_bytes for stream in self._open)

    async def time_movement(self) -> None:
        """Add the time in which data moves to `seconds_moving`, until cancelled."""
        before, then = {stream: stream.moved_bytes for stream in self._open}, loop_time()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            seen, now = {stream: stream.moved_bytes for stream in self._open}, loop_time()
            moved = sum(count - before[stream] for stream, count in seen.items() if stream in before)
            self.seconds_moving += now - then if moved >= MOVING_BYTES else 0.0
            before, then = seen, now

    def take(self) -> tuple[tuple[PeerFault, ...], int, int]:
        """Return the peers named, bytes sent and bytes received since the last call, and begin anew."""
        for stream in self._open:
            self._count(stream)
        faults = tuple(PeerFault(peer, why) for peer, why in self._names.items() if peer not in self._stopped_here)
        taken = faults, self._bytes_sent, self._bytes_received
        self._names, self._stopped_here, self._bytes_sent, self._bytes_received = {}, set(), 0, 0
        return taken


class ProtocolEndpoint:
    """Opens and serves the streams of a protocol, counts their bytes, and names each peer that breaks a rule.

    A data stream is served if its first frame

    - comes within `FIRST_FRAME_SECONDS`, from a live member or a peer that this one is or gets acquainted with by then,
    - is of a kind that its method has a handler for, and bound to the run and scope of this peer's rounds,
    - names as `sender` and receiver (`to`), if any, the current incarnations of the stream's peer and of this one.

    A control stream carries any number of messages; those of another kind, run or scope are not passed to a handler.
    """

    def __init__(
        self,
        host: Host,
        settings: Settings,
        limit_bytes: int = wire.MAX_HEADER_BYTES,
        is_acquainted: Callable[[Stream, Header], Awaitable[bool]] | None = None,
    ) -> None:
        """`is_acquainted`: whether a stream that begins with a header is served although its opener may not be live. It
        may wait for what makes the opener known.
        """
        self.host, self.settings = host, settings
        self.me, self.accounting = Member(host.me, settings.incarnation), RoundAccounting()
        self._limit_bytes, self._is_acquainted = limit_bytes, is_acquainted
        self._handlers: dict[str, dict[type[Header], Callable[..., Any]]] = {}
        self._run: tuple[bytes, str] | None = None

    def bind(self, key: RoundKey) -> None:
        """From now on, refuse frames of another run or scope. Before the first call all are accepted."""
        self._run = key.run, key.scope

    @asynccontextmanager
    async def open(self, peer: PeerId, method: str, deadline: Deadline) -> AsyncIterator[Stream]:
        async with self.host.transport.open(peer, method, deadline) as stream, self.accounting.counting(stream):
            yield stream

    def serve(
        self, method: str, kind: type[HeaderType], handle: Callable[[Stream, HeaderType], Awaitable[None]]
    ) -> None:
        """Let `handle` serve the streams of a method whose first frame is of this kind."""
        self._handlers_of(method, self._serve, kind)[kind] = handle

    def listen(
        self, method: str, kinds: Iterable[type[HeaderType]], take: Callable[[PeerId, HeaderType], None]
    ) -> None:
        """Pass each message of these kinds on a method's control streams to `take`, which may raise `BadPayload`."""
        for kind in kinds:
            self._handlers_of(method, self._serve_messages, kind)[kind] = take

    def deliver(self, method: str, peer: PeerId, message: Header) -> None:
        try:
            handle = self._handler(method, message, "on a control stream")
            handle(peer, message)
        except BadPayload as error:
            self.accounting.name(peer, f"refused: {error}")

    def _handlers_of(
        self, method: str, serve: Callable[..., Awaitable[None]], kind: type[Header]
    ) -> dict[type[Header], Callable[..., Any]]:
        names = wire.described(kind).keys()
        if not {"run", "scope"} <= names and "key" not in names:
            raise TypeError(f"{kind.__name__} opens a stream, but has neither the fields run and scope nor a key")
        if method not in self._handlers:
            self._handlers[method] = {}
            self.host.transport.serve(method, partial(serve, method))
        return self._handlers[method]

    async def _serve(self, method: str, peer: PeerId, stream: Stream) -> None:
        async with self.accounting.counting(stream):
            header = await self._first_frame(stream)
            handle = self._handler(method, header, "opens no exchange")
            self._check_ends(peer, header)
            await handle(stream, header)

    async def _serve_messages(self, method: str, peer: PeerId, stream: Stream) -> None:
        async with self.accounting.counting(stream):
            message = await self._first_frame(stream)
            while True:
                self.deliver(method, peer, message)
                try:
                    message = await stream.receive(self._limit_bytes)
                except PeerSilent:
                    return

    async def _first_frame(self, stream: Stream) -> Header:
        """Read the first frame. The time limit keeps strangers from holding streams: an opener has its frame ready."""
        try:
            async with asyncio.timeout(FIRST_FRAME_SECONDS):
                header = await stream.receive(self._limit_bytes)
                if any(member.peer == stream.peer for member in self.host.members.live()):
                    return header
                if self._is_acquainted and await self._is_acquainted(stream, header):
                    return header
        except TimeoutError:
            raise PeerSilent(stream.peer, "opened a stream, and did not send a frame or become known in time") from None
        raise PeerSilent(stream.peer, "not a live member")

    def _handler(self, method: str, header: Any, why: str) -> Callable[..., Any]:
        handle = self._handlers[method].get(type(header))
        if handle is None:
            raise BadPayload(f"{type(header).__name__} {why}")
        bound = header if hasattr(header, "run") else header.key
        if self._run not in (None, (bound.run, bound.scope)):
            raise BadPayload("a frame of another run or scope")
        return handle

    def _check_ends(self, peer: PeerId, header: Header) -> None:
        """Check the sender and receiver that a frame names. One with another incarnation may only be late."""
        sender, receiver = getattr(header, "sender", None), getattr(header, "to", self.me)
        if receiver.peer != self.me.peer or (sender and sender.peer != peer):
            raise BadPayload(f"a frame in the name of {sender.peer if sender else peer} for {receiver.peer}")
        if receiver != self.me or (sender and sender not in self.host.members.live()):
            raise PeerSilent(peer, "sent by a member that is not live, or for another incarnation of this peer")


class _Outbox:
    def __init__(self) -> None:
        self.waiting: deque[Header] = deque(maxlen=KEEP_MESSAGES)
        self.sent: deque[Header] = deque(maxlen=KEEP_MESSAGES)
        self.more = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self.idle = False

    def again(self) -> None:
        self.waiting = deque((*self.sent, *self.waiting), maxlen=KEEP_MESSAGES)
        self.sent.clear()


class ControlChannel:
    """Sends control messages in order, on one stream to each peer, which stays open: opening one takes a round trip.

    Messages of a broken stream are sent again: they are idempotent. The channel notices at once when a peer dies.
    """

    def __init__(self, endpoint: ProtocolEndpoint, method: str) -> None:
        self.on_gone: Callable[[PeerId], None] = lambda peer: None
        self.round_trip_seconds: dict[PeerId, float] = {}
        self._endpoint, self._method = endpoint, method
        self._outboxes: dict[PeerId, _Outbox] = {}
        self._group: asyncio.TaskGroup | None = None
        self._deadline = 0.0
        self._stopping = False

    def send(self, peer: PeerId, message: Header) -> None:
        """Queue a message, which may arrive twice. It is dropped only if more than `KEEP_MESSAGES` wait."""
        outbox = self._outboxes.setdefault(peer, _Outbox())
        outbox.waiting.append(message)
        outbox.more.set()
        self._start(peer, outbox)

    @asynccontextmanager
    async def run(self, group: asyncio.TaskGroup, deadline: Deadline, keep: Collection[PeerId]) -> AsyncIterator[None]:
        """Send messages inside this context, with tasks in `group`; drop those for peers not in `keep`."""
        self._group, self._deadline, self._stopping = group, deadline, False
        self._outboxes = {peer: outbox for peer, outbox in self._outboxes.items() if peer in keep}
        for peer, outbox in self._outboxes.items():
            if outbox.waiting:
                self._start(peer, outbox)
        try:
            yield
        finally:
            self._group, self._stopping = None, True
            for outbox in self._outboxes.values():
                outbox.more.set()
                if outbox.task and not outbox.idle:
                    outbox.task.cancel()

    def _start(self, peer: PeerId, outbox: _Outbox) -> None:
        if self._group and outbox.task is None:
            outbox.task = self._group.create_task(self._carry(peer, outbox))

    async def _carry(self, peer: PeerId, outbox: _Outbox) -> None:
        loop, pause_seconds = asyncio.get_running_loop(), RECONNECT_SECONDS
        try:
            while not self._stopping and loop.time() < self._deadline:
                began = loop.time()
                try:
                    async with self._endpoint.open(peer, self._method, self._deadline) as stream:
                        self.round_trip_seconds[peer] = loop.time() - began
                        return await run_with_helper(self._feed(outbox, stream), _watch(stream))
                except PeerGone:
                    self.on_gone(peer)
                except BadPayload:
                    pause_seconds = RECONNECT_LIMIT_SECONDS  # `counting` has named the peer
                except PeerError:
                    if loop.time() - began > RECONNECT_SECONDS and outbox.sent:
                        pause_seconds = 0.0  # the stream had worked: find out at once whether the peer is still there
                outbox.again()
                await asyncio.sleep(min(pause_seconds, max(0.0, self._deadline - loop.time())))
                pause_seconds = min(max(RECONNECT_SECONDS, 2 * pause_seconds), RECONNECT_LIMIT_SECONDS)
        finally:
            outbox.again()
            outbox.task, outbox.idle = None, False

    async def _feed(self, outbox: _Outbox, stream: Stream) -> None:
        while not self._stopping:
            if outbox.waiting:
                outbox.sent.append(message := outbox.waiting.popleft())
                await stream.send(message)
                continue
            outbox.more.clear()
            outbox.idle = True
            try:
                await outbox.more.wait()
            finally:  # not idle after a broken stream: the task then retries, and is cancelled at the end of the round
                outbox.idle = False
        outbox.sent.clear()


async def _watch(stream: Stream) -> None:
    """Wait for the end of a control stream: the receiver sends nothing back on it."""
    await stream.receive(0)
    raise PeerSilent(stream.peer, "answered on a control stream")


class SessionTable(Generic[K, Session]):
    """Sessions by key. A stream that comes before its session has begun at this peer waits for it."""

    def __init__(self) -> None:
        self._sessions: dict[K, Session] = {}
        self._notifier = Notifier()

    def open(self, key: K, session: Session) -> None:
        self._sessions[key] = session
        self._notifier.notify()

    def close(self, keys: Iterable[K]) -> list[Session]:
        """Remove these sessions, so that they get no further streams, and return those that there were."""
        return [self._sessions.pop(key) for key in list(keys) if key in self._sessions]

    def get(self, key: K) -> Session | None:
        return self._sessions.get(key)

    def keys(self) -> tuple[K, ...]:
        return tuple(self._sessions)

    def values(self) -> tuple[Session, ...]:
        return tuple(self._sessions.values())

    def wake(self) -> None:
        self._notifier.notify()

    async def wait_for(
        self, key: K, stream: Stream, over: Callable[[], bool], until: Deadline | None = None
    ) -> Session | None:
        """Wait until this session has begun. None as soon as it is `over` and never will; else `PeerSilent`."""
        deadline = stream.deadline if until is None else min(until, stream.deadline)
        try:
            await self._notifier.until(lambda: key in self._sessions or over(), deadline)
        except TimeoutError:
            raise PeerSilent(stream.peer, "the session of its stream did not begin here") from None
        return self._sessions.get(key)


class SessionBase:
    """An `IndependentSession` without `average`. Its shared state is not averaged with: peers average only during
    `average`.
    """

    def __init__(self, head: Head, deadline: Deadline, accounting: RoundAccounting) -> None:
        self.head, self.deadline = head, deadline
        self.cut = asyncio.Event()
        self.round, self.group = head.key.round, ""
        self.half_exchanges, self.mass_drift = 0, 0.0
        self._accounting = accounting

    def offer(self, work: LocalProgress) -> None:
        if work.complete or work.leaving or work.resting:
            self.cut.set()

    def share(self, state: Sequence[Vector]) -> None:
        """Without effect: peers average only during `average`."""

    async def reclaim(self) -> Mapping[PeerId, Contribution]:
        return {}

    def count_half(self, drift: float) -> None:
        """Count an exchange that may have moved one end only, by this share of the state's norm."""
        self.half_exchanges += 1
        self.mass_drift += drift

    def _result(
        self, committed: bool, contributions: Mapping[PeerId, Contribution], weights: Mapping[PeerId, float]
    ) -> AveragingResult:
        outcome = Outcome.COMMITTED if committed else Outcome.SKIPPED
        return AveragingResult(outcome, None, None, contributions, weights, *self._accounting.take())


class StreamLimiter:
    def __init__(self) -> None:
        self._taken = Counter[PeerId]()

    @contextmanager
    def one_for(self, peer: PeerId) -> Iterator[bool]:
        """Yield whether another stream of this peer may be served. If so, it counts inside this context."""
        if self._taken.total() >= MAX_STREAMS or self._taken[peer] >= MAX_STREAMS_OF_ONE:
            yield False
            return
        self._taken[peer] += 1
        try:
            yield True
        finally:
            self._taken -= Counter((peer,))  # forgets the peer at zero
