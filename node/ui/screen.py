"""stdout and stderr of a process that a person may watch: data on the one, words and a live picture on the other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from node.reporting.status import printable
from node.ui.logs import NonBlockingWriter

log = logging.getLogger(__name__)

REFRESH_SECONDS = 0.25
LINE_SECONDS = 5.0
"""Between two lines about what takes long, where there is no picture."""
_PAPER_COLUMNS = 120

Picture = Callable[[int], RenderableType]
"""What there is to see now, at most so many columns wide."""


class Screen:
    """Never blocks, never raises.

    Attributes:
        is_terminal: stderr is one.
        is_live: pictures are shown.
    """

    def __init__(self, as_json: bool) -> None:
        """
        Args:
            as_json: JSON goes to stdout.
        """
        self._out, self._err = NonBlockingWriter(1), NonBlockingWriter(2)
        self.is_terminal = self._err.isatty()
        # Two views that share a terminal would write into each other.
        self.is_live = self.is_terminal and not (as_json and self._out.isatty())
        self._console = Console(
            file=self._err,  # type: ignore[arg-type]
            force_terminal=self.is_live,
            highlight=False,
            width=None if self.is_terminal else _PAPER_COLUMNS,
        )

    def say(self, line: str) -> None:
        """One line for a person; above the live picture."""
        self.log(printable(line, 4096))

    def log(self, text: str) -> None:
        """Text as it is, colours included; a newline is added."""
        if self.is_live:
            self._console.print(Text.from_ansi(text), soft_wrap=True)
        else:
            self._err.write(f"{text}\n")

    def print(self, picture: RenderableType) -> None:
        """Something that stays where it is, and needs no terminal."""
        self._console.print(picture)

    def data(self, line: str) -> None:
        """A line for stdout."""
        self._out.write(f"{line}\n")

    @asynccontextmanager
    async def showing(self, picture: Picture, line: Callable[[], str] = lambda: "") -> AsyncIterator[None]:
        """Show a live picture for as long as the context lasts; its last state stays.

        Args:
            line: what stands for it where there is none, now and then; empty: nothing.
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
        due, told = loop.time() + LINE_SECONDS, ""
        live = Live(console=self._console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        with live if self.is_live else nullcontext():
            try:
                while True:
                    if self.is_live and self._err.ready:
                        live.update(picture(self._console.width), refresh=True)
                    elif not self.is_live and loop.time() >= due:
                        due, before, told = loop.time() + LINE_SECONDS, told, line()
                        if told not in ("", before):
                            self.say(told)
                    self._out.flush()
                    await asyncio.sleep(REFRESH_SECONDS)
            finally:
                live.update(picture(self._console.width))

    def close(self) -> None:
        """Hand over what still waits, giving up after half a second of silence; the cursor is back."""
        if self.is_live:
            self._console.show_cursor()
        for outlet in (self._out, self._err):
            outlet.drain(0.5)
