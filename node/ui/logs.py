"""Logs, and the way out of the process: neither a slow reader nor one that has left may hold up or end a peer."""

from __future__ import annotations

import logging
import os
import select
from collections import deque
from collections.abc import Callable, MutableMapping
from typing import Any

import structlog

from node.reporting.status import printable

OUTLET_BYTES = 1 << 20
_PIECE_BYTES = 512  # a pipe that polls as writable takes so much without blocking: POSIX's PIPE_BUF
MAX_EVENT = 4000
"""Characters of what one log line says, and of its traceback."""


class NonBlockingWriter:
    """Text to a file descriptor: never blocks, never raises. File-like, as far as rich and logging need it.

    What the reader does not take waits, up to 1 MiB; beyond that whole writes are dropped, the newest first, and
    counted. Once the reader has left (`| head`), everything is dropped.
    """

    encoding = "utf-8"

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._target: int | None = None
        self._waiting: deque[memoryview] = deque()
        self._waiting_bytes = 0
        self.dropped = 0
        self.gone = False

    def write(self, text: str) -> int:
        data = memoryview(text.encode(errors="replace"))
        if self.gone or self._waiting_bytes + len(data) > OUTLET_BYTES:
            self.dropped += 1
        else:
            self._waiting.append(data)
            self._waiting_bytes += len(data)
            self.flush()
        return len(text)

    def flush(self) -> None:
        """Hand over what the reader takes now."""
        self.drain(0.0)

    def drain(self, seconds: float) -> None:
        """Hand over what waits; gives up once the reader has taken nothing for `seconds`, which may block so long."""
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
    """A descriptor of a terminal's that does not block: polled as writable, it may still take less than a piece.

    Opened anew, because the flag on the one that we have would be its other users', too: the shell's.
    """
    try:
        return os.open(os.ttyname(fd), os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # not a terminal, or none that can be opened
        return fd


Event = MutableMapping[str, Any]


def set_up(level: str, write: Callable[[str], object], human: bool) -> None:
    """Send all logs to `write`, a line at a time; replaces what was set up before.

    Args:
        level: debug, info, warning or error, of our own modules; of others, warnings and errors only.
        human: readable lines; else one JSON object a line.
    """
    shared: list[Any] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper("%H:%M:%S" if human else "iso", utc=not human),
        structlog.processors.format_exc_info,
        _bounded,
    ]
    renderer: Any = structlog.processors.JSONRenderer()
    if human:
        plain = structlog.dev.plain_traceback
        renderer = structlog.dev.ConsoleRenderer(colors=True, pad_event_to=0, exception_formatter=plain)
    handler = logging.StreamHandler(_Lines(write))
    handler.terminator = ""
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
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
    # It sets itself up when it is imported, with a handler of its own, and by this name only.
    os.environ.setdefault("HIVEMIND_LOGLEVEL", "CRITICAL")
    logging.captureWarnings(True)


def _bounded(logger: object, method: str, event: Event) -> Event:
    event["event"] = printable(str(event["event"]), MAX_EVENT)
    if "exception" in event:
        event["exception"] = event["exception"][-MAX_EVENT:]  # its last lines say most
    return event


class _Lines:
    """What logging takes for a stream."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write

    def write(self, text: str) -> None:
        self._write(text)

    def flush(self) -> None:
        pass
