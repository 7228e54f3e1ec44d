"""The page's web application: static files, a stream of events, commands, and metrics."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
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
from node.page.stream import EventStream
from node.reporting.event_feed import EventFeed
from node.reporting.status import to_json
from node.ui.control import Command

STATIC = Path(__file__).with_name("static")
MAX_REQUEST_BYTES = 1024
REQUEST_SECONDS = 2.0
IDLE_SECONDS = 10.0
"""A connection is dropped that has no request under way at such an interval."""
STALLED_SECONDS = 20.0
"""A reader that takes nothing for so long is dropped."""
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
        """Everything of the present moment, ready for JSON."""

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
            routes.append(Route(path, _static(file.read_bytes(), _TYPES[file.suffix]), methods=["GET"]))
    return routes


def _static(content: bytes, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    async def serve(request: Request) -> Response:
        return Response(content, media_type=media_type)

    return serve


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
