"""Lines for the person at a peer, from processes that have only stderr: a worker, or a command on files."""

from __future__ import annotations

import logging
import sys

log = logging.getLogger(__name__)

_NOTE, _WARNING = "note: ", "warning: "
_is_quiet = False
PLAIN = {"plain": True}  # `extra` of a log record that is shown as a line of text, without time and level


def be_quiet() -> None:
    """From now on: this process does the same as another one, which says it, but for what is its own."""
    global _is_quiet
    _is_quiet = True


def note(line: str) -> None:
    if not _is_quiet:
        print(f"{_NOTE}{line}", file=sys.stderr, flush=True)


def warn(line: str, is_own: bool = False) -> None:
    """`is_own`: it happens in this process, and perhaps in no other."""
    if is_own or not _is_quiet:
        print(f"{_WARNING}{line}", file=sys.stderr, flush=True)


def relay(name: str, line: str) -> None:
    """Log a line that a child process has written. Notes are warnings, which `--log-level warning` still shows."""
    if line.startswith(_NOTE):
        log.warning("%s", line.removeprefix(_NOTE), extra=PLAIN)
    else:
        log.warning("%s: %s", name, line.removeprefix(_WARNING))
