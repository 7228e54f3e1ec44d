"""Opening a stream by method, on both sides; and the server: limits on streams, error boundary, orderly close.

The opener sends the name of a method and waits for one byte, which accepts it. It sends no data of its caller before.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Protocol

from node.runtime.bounded import count
from node.streams.traffic import StreamTraffic, Traffic
from protocols.base import BadPayload, Deadline, Handler, PeerError, PeerId, Stream
from protocols.streams.framing import Pipe, accepted

log = logging.getLogger(__name__)

METHOD_BYTES = 64
_ACCEPTED = b"\x01"
_OPENING_SECONDS = 10.0
_LINGER_SECONDS = 30.0
_FAREWELL_SECONDS = 1.0


class EndingPipe(Pipe, Protocol):
    def belong_to(self, traffic: StreamTraffic) -> None:
        """Count what moves from now on as `traffic`, and wait for its caps."""

    async def close(self, seconds: float) -> None:
        """End the stream in order: all data sent has arrived when the other side has ended it, too."""

    async def reset(self) -> None:
        """Harmless after `close`."""

    def abort(self) -> None:
        """Reset at once. Harmless after `close` and `reset`."""


class Access(Protocol):
    """Who may open streams, and what has to precede a stream to another peer. Each transport asks it, for each stream.

    `OpenAccess` lets everybody in; `node.membership.pass_exchange` is that of a private run.
    """

    def serves(self, peer: PeerId, method: str) -> bool:
        """Whether a peer may open a stream of this method now."""

    async def before(self, peer: PeerId, method: str, deadline: Deadline) -> None:
        """Called before a stream is opened. Raises `PeerGone` if none may be."""

    async def refused(self, peer: PeerId, method: str, deadline: Deadline) -> bool:
        """Called when a peer did not accept a stream. Whether it may accept the same now; `PeerGone` says why not."""


class OpenAccess:
    def serves(self, peer: PeerId, method: str) -> bool:
        return True

    async def before(self, peer: PeerId, method: str, deadline: Deadline) -> None:
        pass

    async def refused(self, peer: PeerId, method: str, deadline: Deadline) -> bool:
        return False


class Serving:
    access: Access = OpenAccess()

    def __init__(self, max_streams: int, max_streams_per_peer: int, traffic: Traffic) -> None:
        self.refused: Counter[tuple[PeerId, str]] = Counter()  # (peer, why) -> streams; the latest 1,024 pairs
        self._traffic = traffic
        self._max_streams = max_streams
        self._max_streams_per_peer = max_streams_per_peer
        self._handlers: dict[str, Handler] = {}
        self._active: Counter[PeerId] = Counter()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._answering: dict[asyncio.Task[Any], PeerId] = {}  # the tasks of incoming streams
        self._handled_by: dict[asyncio.Task[Any] | None, str] = {}  # the method that a stream's task carries out now
        self._lingering: set[asyncio.Task[Any]] = set()
        self._closed = False

    def serve(self, method: str, handler: Handler) -> None:
        """Serve streams for `method`, a name of at most 64 bytes that is not served yet."""
        if method in self._handlers or not 0 < len(method.encode()) <= METHOD_BYTES:
            raise ValueError(f"{method!r} is served already, or is not a name of 1 to {METHOD_BYTES} bytes")
        self._handlers[method] = handler

    @asynccontextmanager
    async def scope(self) -> AsyncIterator[None]:
        """What is served from within the context on ends with it, and so do its streams."""
        before = set(self._handlers)
        try:
            yield
        finally:
            gone = self._handlers.keys() - before
            for method in gone:
                del self._handlers[method]
            tasks = [task for task, method in self._handled_by.items() if task and method in gone]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def ask(self, peer: PeerId, pipe: EndingPipe, method: str) -> None:
        """Ask the other side to serve `method`. On failure (OSError, EOFError), abort: only the name has been sent."""
        name = method.encode()
        pipe.belong_to(self._traffic.stream(peer, ""))  # control traffic: a stream that has to wait would look dead
        try:
            await pipe.write(bytes((len(name),)) + name)
            await pipe.read_into(memoryview(bytearray(len(_ACCEPTED))))
            pipe.belong_to(self._traffic.stream(peer, method))
        except BaseException:
            pipe.abort()
            raise

    def take(self, peer: PeerId, pipe: EndingPipe) -> None:
        """Serve an incoming stream, or abort it if too many are being served."""
        pipe.belong_to(self._traffic.stream(peer, ""))  # its method is not known yet
        full = self._active.total() >= self._max_streams
        if self._closed or full or self._active[peer] >= self._max_streams_per_peer:
            self.refuse(peer, "too many streams")
            pipe.abort()
            return
        self._active[peer] += 1
        task = self.spawn(self._answer(peer, pipe))
        self._answering[task] = peer

        def release(ended: asyncio.Task[None]) -> None:
            pipe.abort()
            del self._answering[ended]
            self._active -= Counter((peer,))  # forgets the peer at zero

        # Not in the task itself: a task that is cancelled before its first step runs none of its code.
        task.add_done_callback(release)

    def served(self) -> set[PeerId]:
        return set(self._answering.values())

    def expel(self, peer: PeerId) -> None:
        """End the streams that a peer has opened, at once."""
        for task in [task for task, opener in self._answering.items() if opener == peer]:
            task.cancel()

    def finish(self, pipe: EndingPipe) -> asyncio.Task[None]:
        """Close a stream in order: all data sent on it arrives if the peer reads it within 30 seconds."""
        return self._see_out(pipe, pipe.close(_LINGER_SECONDS))

    def reset(self, pipe: EndingPipe) -> asyncio.Task[None]:
        return self._see_out(pipe, pipe.reset())

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` in a task of its own, until it is done or this object is closed."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("%s failed", task.get_coro(), exc_info=error)

    async def close(self) -> None:
        """Accept no more streams. Give closing streams another second, then abort all that are left."""
        self._closed = True
        if self._lingering:
            await asyncio.wait(self._lingering, timeout=_FAREWELL_SECONDS)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _see_out(self, pipe: EndingPipe, end: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self.spawn(end)
        self._lingering.add(task)
        task.add_done_callback(self._lingering.discard)
        task.add_done_callback(lambda _: pipe.abort())
        return task

    async def _answer(self, peer: PeerId, pipe: EndingPipe) -> None:
        # Either way the slot stays taken until the stream has ended.
        if await self._handled(peer, pipe):
            await self.finish(pipe)
        else:
            await self.reset(pipe)

    async def _handled(self, peer: PeerId, pipe: EndingPipe) -> bool:
        try:
            admitted = await self._admit(peer, pipe)
            if admitted is None:
                return False
            method, stream = admitted
            self._handled_by[asyncio.current_task()] = method
            await self._handlers[method](peer, stream)
        except BadPayload as error:
            self._on_bad(peer, error)
        except PeerError as error:
            log.debug("a handler gave up: %s", error)
        except Exception:
            log.exception("a handler failed; its stream from %s is reset", peer)
        else:
            return True
        finally:
            self._handled_by.pop(asyncio.current_task(), None)
        return False

    async def _admit(self, peer: PeerId, pipe: EndingPipe) -> tuple[str, Stream] | None:
        """The method that is asked for, and the stream; None if it is not served, or not to this peer.

        The only way to a handler, for streams over libp2p and over direct connections.
        """
        try:
            async with asyncio.timeout(_OPENING_SECONDS):
                size = bytearray(1)
                await pipe.read_into(memoryview(size))
                name = bytearray(size[0])
                await pipe.read_into(memoryview(name))
                method = name.decode(errors="replace")
                if method not in self._handlers:
                    self.refuse(peer, "method not served")
                    return None
                if not self.access.serves(peer, method):
                    self.refuse(peer, "not admitted to the run")
                    return None
                await pipe.write(_ACCEPTED)
                pipe.belong_to(self._traffic.stream(peer, method))
        except (OSError, EOFError):  # TimeoutError is an OSError
            return None
        stream = await accepted(peer, pipe, _OPENING_SECONDS, self._on_bad)
        return None if stream is None or method not in self._handlers else (method, stream)

    def _on_bad(self, peer: PeerId, error: BadPayload) -> None:
        new = self.refuse(peer, "bad payload")  # warn once: any peer can send bad payloads as often as it likes
        log.log(logging.WARNING if new else logging.DEBUG, "%s broke the rules: %s", peer, error)

    def refuse(self, peer: PeerId, why: str) -> bool:
        """Count something refused; returns whether this peer had not been refused for this reason lately."""
        return count(self.refused, (peer, why))
