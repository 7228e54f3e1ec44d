"""The page's server: uvicorn in the peer's event loop, on the loopback interface only.

`PageServer` is what the peer starts. It builds the rest: `keys` (token and port), `guard` (who is answered), `app`
(what is answered), `stream` (live events) and `prometheus` (metrics).
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from node.page.guard import AccessRules
from node.page.keys import PageKeys, last_port, load_token, note_port, page_link
from node.runtime.extras import install

if TYPE_CHECKING:
    from uvicorn import Server

    from node.page.app import PageSources

log = logging.getLogger(__name__)

DEFAULT_PORT = 7717
PORTS_TRIED = 64
MAX_CONNECTIONS = 32
MAX_HEADER_BYTES = 16_384
IDLE_SECONDS = 10.0
"""A connection is dropped that has no request under way at such an interval."""
STALLED_SECONDS = 20.0
"""A reader that takes nothing for so long is dropped."""
INSTALL = f"the page needs three more packages: {install('page')}"


def has_page_packages() -> bool:
    """Whether the packages that only the page needs are installed."""
    return all(map(find_spec, ("starlette", "uvicorn", "prometheus_client")))


class PageServer:
    """The page of a running peer. An async context manager.

    If the page cannot be served, a line tells the user why, and the peer continues without it. The state directory
    holds the token and the port; `port` is the one to try first, unless the page had another one before. Without
    `show_token`, as for a log, the user's line does not hold the link.
    """

    def __init__(
        self,
        sources: PageSources,
        say: Callable[[str], None],
        *,
        state_dir: Path,
        port: int = DEFAULT_PORT,
        hosts: tuple[str, ...] = (),
        show_token: bool = True,
    ) -> None:
        self._sources, self._say = sources, say
        self._state_dir, self._port, self._hosts, self._show_token = state_dir, port, hosts, show_token
        self._stop = asyncio.Event()
        self._server: Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def __aenter__(self) -> PageServer:
        if not has_page_packages():
            self._say(INSTALL)
            return self
        try:
            self._start()
        except (OSError, ValueError) as error:
            self._say(f"web page unavailable; training continues: {getattr(error, 'strerror', None) or error}")
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._stop.set()
        if self._server and self._serving:
            self._server.should_exit = True
            await asyncio.wait([self._serving], timeout=2.0)
            if not self._serving.done():
                self._serving.cancel()
                await asyncio.wait([self._serving], timeout=1.0)

    def _start(self) -> None:
        from uvicorn import Config

        from node.page.app import page_app

        token = load_token(self._state_dir)
        sockets = _listen(last_port(self._state_dir) or self._port, self._port)
        port = sockets[0].getsockname()[1]
        try:
            note_port(self._state_dir, port)
            app = page_app(self._sources, AccessRules(port, self._hosts, PageKeys(token)), self._stop)
        except OSError:
            for each in sockets:
                each.close()
            raise
        settings = Config(
            app=cast(Any, app),
            http=_protocol(),
            ws="none",
            loop="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=MAX_CONNECTIONS,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            timeout_graceful_shutdown=1,
        )
        self._server = _server(settings)
        self._serving = asyncio.create_task(self._server.serve(sockets), name="page")
        shown = page_link(port, token) if self._show_token else "`python -m node page` prints its link"
        self._say(f"page: {shown}")


def _listen(port: int, default: int) -> list[socket.socket]:
    """Listen on the loopback interface, at a port or else one of the next free ones."""
    tried = [port, *range(default, min(default + PORTS_TRIED, 65_536)), 0]
    for number in tried:
        try:
            return _bind_both(number)
        except OSError as error:
            if number == 0:
                raise
            log.debug("port %d: %s", number, error)
    raise AssertionError("port 0 is always free, or raises")


def _bind_both(port: int) -> list[socket.socket]:
    """Listen at a port of both loopback addresses, where this machine has IPv6.

    Raises:
        OSError: the port is taken at one of them.
    """
    first = _bind(socket.AF_INET, "127.0.0.1", port)
    try:
        return [first, _bind(socket.AF_INET6, "::1", first.getsockname()[1])]
    except OSError as error:
        if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            return [first]
        first.close()
        raise


def _bind(family: socket.AddressFamily, host: str, port: int) -> socket.socket:
    listening = socket.socket(family)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(MAX_CONNECTIONS)
        listening.setblocking(False)
    except OSError:
        listening.close()
        raise
    return listening


def _server(config: Any) -> Server:
    from uvicorn import Server as UvicornServer

    class PageOnlyServer(UvicornServer):
        """uvicorn's server, without its signal handlers: the peer has its own."""

        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    return PageOnlyServer(config)


def _protocol() -> Any:
    from uvicorn.protocols.http.h11_impl import H11Protocol

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

    return BoundedProtocol
