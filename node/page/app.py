"""The page's web application: static files, a stream of events, commands, and metrics."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from node.page.guard import SECURITY_HEADERS, AccessRules
from node.reporting.event_feed import EventFeed
from node.reporting.status import to_json
from node.ui.control import Command

STATIC = Path(__file__).with_name("static")
MAX_REQUEST_BYTES = 1024
REQUEST_SECONDS = 2.0
IDLE_SECONDS = 10.0  # A connection is dropped that has no request under way at such an interval
STALLED_SECONDS = 20.0  # A reader that takes nothing for so long is dropped
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


class PageSources(Protocol):
    """What the page shows and does."""

    incarnation: int  # of the peer
    feed: EventFeed
    command: Command

    def values(self) -> Mapping[str, Any]:
        """Everything of the present moment, ready for JSON, in parts by name: the page is sent those that changed."""

    def metrics(self) -> bytes:
        """In Prometheus's text format."""


def page_app(sources: PageSources, rules: AccessRules, stop: asyncio.Event) -> ASGIApp:
    """Build the application, which ends all streams once `stop` is set. Raises OSError without its static files."""

    async def metrics(request: Request) -> Response:
        return Response(sources.metrics(), media_type="text/plain; version=0.0.4")

    async def session(request: Request) -> Response:
        opened = rules.keys.open_session(request.headers["host"].lower(), request.headers.get("x-nonce", ""))
        if opened is None:
            return PlainTextResponse("send a nonce\n", 400)
        return Response(to_json(opened), media_type="application/json")

    async def do(request: Request) -> Response:
        answer = await _command(request, sources.command)
        status = 400 if "error" in answer else 200
        return Response(to_json(answer), status, media_type="application/json")

    stream = EventStream(sources.incarnation, sources.values, sources.feed, stop)
    routes = [
        *_static_routes(),
        Route("/session", session, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
        Route("/api/stream", stream, methods=["GET"]),
        Route("/api/do", do, methods=["POST"]),
    ]
    return _Guarded(Starlette(routes=routes), rules)


def _static_routes() -> list[Route]:
    routes = []
    for file in sorted(STATIC.rglob("*")):
        if file.suffix in _TYPES:
            name = file.relative_to(STATIC).as_posix()
            path = "/" if name == "index.html" else f"/{name}"
            answer = Response(file.read_bytes(), media_type=_TYPES[file.suffix])
            routes.append(Route(path, answer, methods=["GET"]))
    return routes


async def _command(request: Request, command: Command) -> Mapping[str, object]:
    """Read a small JSON object, in time, and carry it out."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        return {"error": "send application/json"}
    body = b""
    try:
        async with asyncio.timeout(REQUEST_SECONDS):
            async for piece in request.stream():
                body += piece
                if len(body) > MAX_REQUEST_BYTES:
                    return {"error": f"a request has at most {MAX_REQUEST_BYTES} bytes"}
        wanted = json.loads(body)
    except (TimeoutError, ClientDisconnect, ValueError, RecursionError):
        wanted = None
    if not isinstance(wanted, dict):
        return {"error": "send one JSON object"}
    return await command(wanted)


class _Guarded:
    """Answers only what the rules allow, and adds the security headers to each answer."""

    def __init__(self, app: ASGIApp, rules: AccessRules) -> None:
        self._app, self._rules = app, rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_secured(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *SECURITY_HEADERS]
            await send(message)

        refusal = self._rules.refusal(scope["path"], scope["headers"])
        app: ASGIApp = PlainTextResponse(f"{refusal[1]}\n", refusal[0]) if refusal else self._app
        await app(scope, receive, send_secured)


class PageOnlyServer(uvicorn.Server):
    """uvicorn's server, without its signal handlers: the peer has its own."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class BoundedProtocol(H11Protocol):
    """uvicorn's protocol, which also drops connections that never send a whole request, or never read."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._stalled: asyncio.TimerHandle | None = None
        self._watch()

    def _watch(self) -> None:
        self._timer = self.loop.call_later(IDLE_SECONDS, self._drop_if_idle)

    def _drop_if_idle(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()
        else:
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self.resume_writing()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(STALLED_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalled:
            self._stalled.cancel()
            self._stalled = None


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
        self._status: dict[str, str] = {}  # part -> itself as a member of a JSON object
        self._status_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        after = self._after(Request(scope).headers.get("last-event-id", ""))
        if self._streams >= MAX_STREAMS or self._stop.is_set():
            await PlainTextResponse("too many pages are open: close some\n", 503)(scope, receive, send)
            return
        self._streams += 1
        try:
            await _send_stream(self._pieces(after), receive, send, self._stop)
        finally:
            self._streams -= 1

    def _after(self, last_id: str) -> int | None:
        """Number of the last event that the reader has; None if it has none of this incarnation."""
        found = _ID.fullmatch(last_id)
        return int(found[2]) if found and int(found[1]) == self._incarnation else None

    async def _pieces(self, after: int | None) -> AsyncIterator[bytes]:
        """The stream's content: first what the reader lacks, then events as they come and the status each second."""
        loop, feed = asyncio.get_running_loop(), self._feed
        pieces, number = self._news(after)
        shown: Mapping[str, str] = {}
        while True:
            status = self._present_status()
            changed = [part for name, part in status.items() if part != shown.get(name)]
            shown = status
            yield b"".join((*pieces, f"event: status\ndata: {{{','.join(changed)}}}\n\n".encode()))
            due = loop.time() + STATUS_SECONDS
            while await feed.changed(number, due):
                pieces, number = self._news(number)
                yield b"".join(pieces)
            pieces = []
            feed.want_text()

    def _news(self, after: int | None) -> tuple[list[bytes], int]:
        """What a reader lacks that has the events up to this one, and the number of the latest."""
        if (events := self._feed.since(after)) is None:
            number, history = self._feed.history()
            return [self._event("reset", number, history)], number
        pieces = [self._event(each.kind, each.number, each.data) for each in events]
        return pieces, events[-1].number if events else after or 0

    def _present_status(self) -> Mapping[str, str]:
        """The parts of the status, computed at most once in half a period, however many readers there are."""
        now = asyncio.get_running_loop().time()
        if now - self._status_at > STATUS_SECONDS / 2:
            self._status_at = now
            self._status = {name: to_json({name: value})[1:-1] for name, value in self._values().items()}
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
