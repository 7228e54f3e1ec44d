"""The stream of a peer's status and events, as `text/event-stream`.

Each event but the status has an id, `<incarnation>-<number>`. A browser that reconnects names the last one it has, and
gets what it missed. If that is of another incarnation of the peer, or too long ago, it gets `reset` and the history.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from node.reporting.event_feed import EventFeed, Subscription
from node.reporting.status import to_json

MAX_STREAMS = 8
STATUS_SECONDS = 1.0
FAREWELL_SECONDS = 0.5
_ID = re.compile(r"(\d{1,9})-(\d{1,15})")


class EventStream:
    """An ASGI endpoint that streams to at most `MAX_STREAMS` readers at once."""

    def __init__(
        self, incarnation: int, values: Callable[[], Mapping[str, Any]], feed: EventFeed, stop: asyncio.Event
    ) -> None:
        self._incarnation, self._values, self._feed, self._stop = incarnation, values, feed, stop
        self._streams = 0
        self._status, self._status_at = b"", 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        after = self._after(Request(scope).headers.get("last-event-id", ""))
        if self._streams >= MAX_STREAMS or self._stop.is_set():
            await PlainTextResponse("too many pages are open: close some\n", 503)(scope, receive, send)
            return
        self._streams += 1
        subscription = self._feed.subscribe(after)
        try:
            await _send_stream(self._pieces(subscription), receive, send, self._stop)
        finally:
            self._streams -= 1
            subscription.close()

    def _after(self, last_id: str) -> int | None:
        """Number of the last event that the reader has; None if it has none of this incarnation."""
        found = _ID.fullmatch(last_id)
        return int(found[2]) if found and int(found[1]) == self._incarnation else None

    async def _pieces(self, subscription: Subscription) -> AsyncIterator[bytes]:
        """The stream's content: first what the reader lacks, then events as they come and the status each second."""
        loop, feed = asyncio.get_running_loop(), self._feed
        if subscription.missed is None:
            number, history = feed.history()
            yield self._event("reset", number, history)
        else:
            for missed in subscription.missed:
                yield self._event(missed.kind, missed.number, missed.data)
        while not subscription.lost:
            yield self._present_status()
            due = loop.time() + STATUS_SECONDS
            while (event := await subscription.next(due)) is not None:
                yield self._event(event.kind, event.number, event.data)
            feed.want_text()

    def _present_status(self) -> bytes:
        """The status, computed at most once in half a period, however many readers there are."""
        now = asyncio.get_running_loop().time()
        if now - self._status_at > STATUS_SECONDS / 2:
            self._status_at = now
            self._status = f"event: status\ndata: {to_json(self._values())}\n\n".encode()
        return self._status

    def _event(self, kind: str, number: int, data: Mapping[str, Any]) -> bytes:
        return f"event: {kind}\nid: {self._incarnation}-{number}\ndata: {to_json(data)}\n\n".encode()


async def _send_stream(pieces: AsyncIterator[bytes], receive: Receive, send: Send, stop: asyncio.Event) -> None:
    """Send pieces until they end, the reader disconnects or `stop` is set."""
    headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def send_pieces() -> None:
        async for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    ends = [asyncio.create_task(each, name="page stream") for each in (send_pieces(), disconnected(), stop.wait())]
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in ends:
            each.cancel()
        await asyncio.wait(ends, timeout=1)
    farewell = b"event: gone\ndata: {}\n\n" if stop.is_set() else b""
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(FAREWELL_SECONDS):  # a stalled reader takes nothing
            await send({"type": "http.response.body", "body": farewell, "more_body": False})
