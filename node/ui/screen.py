"""The output of a command: data on stdout; messages, logs and a live view on stderr."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from node.reporting.status import printable
from node.ui.logs import LogStyle, NonBlockingWriter

log = logging.getLogger(__name__)

REFRESH_SECONDS = 0.25
LINE_SECONDS = 5.0  # Pause between two progress lines, where there is no live view
_PAPER_COLUMNS = 120

Picture = Callable[[int], RenderableType]  # Renders the current view, for a width in columns


class Screen:
    """Writes to stdout and stderr. Never blocks, never raises."""

    def __init__(self, as_json: bool) -> None:
        self._out, self._err = NonBlockingWriter(1), NonBlockingWriter(2)
        is_terminal = self._err.isatty()
        self.log_style: LogStyle = "coloured" if is_terminal else "json" if as_json else "plain"
        # On one terminal, JSON lines and a live view would mix. A live view needs to know how wide its text becomes.
        draws = self._err.encoding.lower().startswith("utf")
        self.is_live = is_terminal and draws and not (as_json and self._out.isatty())
        self._console = Console(
            file=self._err,  # type: ignore[arg-type]
            force_terminal=self.is_live,
            highlight=False,
            width=None if is_terminal else _PAPER_COLUMNS,
        )

    def say(self, line: str) -> None:
        """Print a user-facing line, above the live view."""
        self.log(printable(line, 4096))

    def log(self, text: str) -> None:
        """Print text unchanged, with its colours and a newline."""
        if self.is_live:
            self._console.print(Text.from_ansi(text), soft_wrap=True)
        else:
            self._err.write(f"{text}\n")

    def print(self, picture: RenderableType) -> None:
        """Print a renderable once; it needs no terminal."""
        self._console.print(picture)

    def data(self, line: str) -> None:
        self._out.write(f"{line}\n")

    @asynccontextmanager
    async def showing(self, picture: Picture, line: Callable[[], str] = lambda: "") -> AsyncIterator[None]:
        """Show a live view until the context ends; its last state stays on the screen.

        `line` returns a progress line, printed now and then where there is no live view; empty for none.
        """
        watching = asyncio.create_task(self._watch(picture, line), name="screen")
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.wait([watching], timeout=1)
            if not watching.cancelled() and (error := watching.exception()):
                log.error("the view ended early: %r", error)

    async def _watch(self, picture: Picture, line: Callable[[], str]) -> None:
        loop = asyncio.get_running_loop()
        due, printed = loop.time() + LINE_SECONDS, ""
        live = Live(console=self._console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        with live if self.is_live else nullcontext():
            try:
                while True:
                    if self.is_live and self._err.ready:
                        live.update(picture(self._console.width), refresh=True)
                    elif not self.is_live and loop.time() >= due:
                        due, before, printed = loop.time() + LINE_SECONDS, printed, line()
                        if printed not in ("", before):
                            self.say(printed)
                    self._out.flush()
                    await asyncio.sleep(REFRESH_SECONDS)
            finally:
                live.update(picture(self._console.width))

    def close(self) -> None:
        """Write what still waits, and show the cursor again. Gives up once a reader has taken nothing for 0.5 s."""
        if self.is_live:
            self._console.show_cursor()
        for outlet in (self._out, self._err):
            outlet.drain(0.5)
