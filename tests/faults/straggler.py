"""Slows down a worker."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress

_CYCLE_SECONDS = 0.5


class Straggler:
    """Lets a process run for a share of the time only, as cpulimit does, to imitate a slower machine.

    Attributes:
        signals: number of signals sent.
    """

    def __init__(self, pid: Callable[[], int | None], share: float) -> None:
        self.signals = 0
        self._pid, self._share = pid, share
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.is_set():
            pid = self._pid()  # it changes when the worker is restarted
            self._signal(pid, signal.SIGSTOP)
            self._over.wait((1 - self._share) * _CYCLE_SECONDS)
            self._signal(pid, signal.SIGCONT)
            self._over.wait(self._share * _CYCLE_SECONDS)

    def _signal(self, pid: int | None, number: int) -> None:
        if pid:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
                self.signals += 1

    def end(self) -> None:
        """Let the process run at full speed again."""
        self._over.set()
        self._thread.join(2 * _CYCLE_SECONDS)
