"""The trace of a simulated run, to compare two runs and to read one."""

from __future__ import annotations

import hashlib
from collections import deque


class Trace:
    """A hash of all events, and the last of them as lines."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self.lines: deque[str] = deque(maxlen=400)

    def __call__(self, time: float, what: str) -> None:
        line = f"{time:.6f} {what}"
        self._hash.update(line.encode())
        self.lines.append(line)

    def digest(self) -> str:
        return self._hash.hexdigest()
