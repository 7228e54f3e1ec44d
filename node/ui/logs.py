"""Log set-up, and non-blocking output: a slow reader, or one that has left, must not delay or end a peer."""

from __future__ import annotations

import logging
import os
import select
from collections import deque
from collections.abc import Callable, MutableMapping
from types import SimpleNamespace
from typing import Any, Literal, TypeAlias

import structlog

from node.reporting.status import printable
from node.ui.encoding import ERRORS, encoding_of

OUTLET_BYTES = 1 << 20
_PIECE_BYTES = 512  # POSIX's PIPE_BUF: a pipe that polls as writable takes this much without blocking
MAX_EVENT = 4000  # Most characters of a log message, and of its traceback


class NonBlockingWriter:
    """Writes text to a file descriptor without blocking or raising. File-like, as far as rich and logging need it.

    Up to 1 MiB waits for a slow reader. Beyond that, new writes are dropped whole, and counted in `dropped`. Once the
    reader has left (`| head`), everything is dropped.
    """

    def __init__(self, fd: int) -> None:
        self._fd, self.encoding = fd, encoding_of(fd)
        self._target: int | None = None
        self._waiting: deque[memoryview] = deque()
        self._waiting_bytes = 0
        self.dropped = 0
        self.gone = False

    def write(self, text: str) -> int:
        data = memoryview(text.encode(self.encoding, ERRORS))
        if self.gone or self._waiting_bytes + len(data) > OUTLET_BYTES:
            self.dropped += 1
        else:
            self._waiting.append(data)
            self._waiting_bytes += len(data)
            self.flush()
        return len(text)

    def flush(self) -> None:
        """Write as much as the reader takes now."""
        self.drain(0.0)

    def drain(self, seconds: float) -> None:
        """Write what waits; give up once the reader has taken nothing for `seconds`. Blocks while it waits."""
        if self._target is None:
            self._target = _unblocked(self._fd)
        poll = select.poll()
        poll.register(self._target, select.POLLOUT)
        try:
            while self._waiting and poll.poll(1000 * seconds):
                self._write_piece(self._target)
        except BlockingIOError:
            pass
        except OSError:
            self.gone = True
            self._waiting.clear()
            self._waiting_bytes = 0

    def _write_piece(self, target: int) -> None:
        data = self._waiting[0]
        written = os.write(target, data[:_PIECE_BYTES])
        self._waiting_bytes -= written
        self._waiting.popleft()
        if written < len(data):
            self._waiting.appendleft(data[written:])

    @property
    def ready(self) -> bool:
        """Whether the reader has taken everything so far."""
        self.flush()
        return not self._waiting and not self.gone

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)


def _unblocked(fd: int) -> int:
    """A non-blocking descriptor of the same terminal; for anything else, `fd` itself.

    A terminal that polls as writable may still take less than a piece. It is opened again, because O_NONBLOCK on `fd`
    would also apply to the shell, which shares it.
    """
    try:
        return os.open(os.ttyname(fd), os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # not a terminal, or none that can be opened
        return fd


Event = MutableMapping[str, Any]
LogStyle: TypeAlias = Literal["coloured", "plain", "json"]
_TIMES = {"coloured": "%H:%M:%S", "plain": "%Y-%m-%d %H:%M:%S", "json": "iso"}


def set_up(level: str, write: Callable[[str], object], style: LogStyle) -> None:
    """Send all logs to `write`, one line at a time. Replaces an earlier set-up.

    `level` is for `node` and `protocols`; other modules log warnings and errors only.
    """
    shared: list[Any] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(_TIMES[style], utc=style == "json"),
        structlog.processors.format_exc_info,
        _bounded,
    ]
    renderer: Any = structlog.processors.JSONRenderer()
    if style != "json":
        renderer = structlog.dev.ConsoleRenderer(
            colors=style == "coloured", pad_event_to=0, exception_formatter=structlog.dev.plain_traceback
        )
    handler = logging.StreamHandler(SimpleNamespace(write=write))
    handler.terminator = ""
    handler.setFormatter(
        _Formatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    wrap = structlog.stdlib.ProcessorFormatter.wrap_for_formatter
    structlog.configure([*shared, wrap], logger_factory=structlog.stdlib.LoggerFactory())
    _set_levels(logging.getLevelNamesMapping()[level.upper()], handler)


def _set_levels(level: int, handler: logging.Handler) -> None:
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(level, logging.WARNING))
    for ours in ("node", "protocols"):
        logging.getLogger(ours).setLevel(level)
    # hivemind sets up a log handler of its own when it is imported; only this variable silences it.
    os.environ.setdefault("HIVEMIND_LOGLEVEL", "CRITICAL")
    logging.captureWarnings(True)


def _bounded(logger: object, method: str, event: Event) -> Event:
    event["event"] = printable(str(event["event"]), MAX_EVENT)
    if "exception" in event:
        event["exception"] = event["exception"][-MAX_EVENT:]  # the last lines matter most
    return event


class _Formatter(structlog.stdlib.ProcessorFormatter):
    """Shows records that are for people as plain lines (`node.runtime.notes`)."""

    def format(self, record: logging.LogRecord) -> str:
        if getattr(record, "plain", False):
            return printable(record.getMessage(), MAX_EVENT)
        return super().format(record)
