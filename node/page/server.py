"""The page's server: uvicorn in the peer's event loop, on the loopback interface only.

`PageServer` is what the peer starts. It builds the rest: `keys` (token and port), `guard` (who is answered), `app`
(what is answered), `stream` (live events) and `prometheus` (metrics).
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from node.page.guard import AccessRules
from node.page.keys import PageKeys, last_port, load_token, note_port, page_link
from node.runtime.listening import listen
from node.runtime.program import typed

if TYPE_CHECKING:
    from uvicorn import Server

    from node.page.app import PageSources

log = logging.getLogger(__name__)

DEFAULT_PORT = 7717
PORTS_TRIED = 64
MAX_CONNECTIONS = 32
MAX_HEADER_BYTES = 16_384


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
        try:
            self._start()
        except (OSError, ValueError, ImportError) as error:
            self._say(f"web page unavailable; training continues: {getattr(error, 'strerror', None) or error}")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop.set()
        if self._server and self._serving:
            self._server.should_exit = True
            await asyncio.wait([self._serving], timeout=2.0)
            if not self._serving.done():
                self._serving.cancel()
                await asyncio.wait([self._serving], timeout=1.0)

    def _start(self) -> None:
        from uvicorn import Config

        from node.page.app import BoundedProtocol, PageOnlyServer, page_app

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
            http=BoundedProtocol,
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
        self._server = PageOnlyServer(settings)
        self._serving = asyncio.create_task(self._server.serve(sockets), name="page")
        shown = page_link(port, token) if self._show_token else f"`{typed('page')}` prints its link"
        self._say(f"page: {shown}")


def _listen(port: int, default: int) -> list[socket.socket]:
    """Listen on the loopback interface, at a port of both addresses or else one of the next free ones."""
    tried = [port, *range(default, min(default + PORTS_TRIED, 65_536)), 0]
    for number in tried:
        try:
            return listen(("127.0.0.1", "::1"), number, MAX_CONNECTIONS)
        except OSError as error:
            if number == 0:
                raise
            log.debug("port %d: %s", number, error)
    raise AssertionError("port 0 is always free, or raises")
