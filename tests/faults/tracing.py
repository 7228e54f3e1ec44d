"""The harness's side of `tests.faults.failpoints`: it learns of every point that traced peers pass, and acts there.

A peer that has reported a point waits for an answer. The action of a trap happens before the answer: a killed peer dies
exactly at the point; a peer whose worker or p2pd is killed notices it right afterwards.
"""

from __future__ import annotations

import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self

from tests.faults.peer import TRACE

MAX_RECORDS = 200_000
END_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Passed:
    """`round`: the last that the peer has begun; -1 before its first."""

    time: float
    peer: str
    point: str
    round: int


@dataclass(eq=False, slots=True)
class Trap:
    """Waits for a point, and acts once. `fired` is set when its action is over."""

    point: str
    minimum_round: int
    strike: Callable[[str], object]
    peers: frozenset[str] | None
    fired: threading.Event = field(default_factory=threading.Event)
    struck: Passed | None = None

    def catches(self, passed: Passed) -> bool:
        return (
            passed.point == self.point
            and passed.round >= self.minimum_round
            and (self.peers is None or passed.peer in self.peers)
        )


class Watch:
    """Listens to traced peers, with a thread for each. A context manager.

    Peers are started with `environment(name)`. All are answered at once, except a peer in a trap.
    """

    def __init__(self, max_records: int = MAX_RECORDS) -> None:
        self._records: deque[Passed] = deque(maxlen=max_records)
        self._traps: list[Trap] = []
        self._lock = threading.Lock()
        self._sockets: dict[str, socket.socket] = {}  # name -> where we listen
        self._lines: set[socket.socket] = set()
        self._over = False
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        self._directory = tempfile.TemporaryDirectory(prefix="trace-", dir="/tmp")  # paths of sockets are short
        return self

    def __exit__(self, *_: object) -> None:
        """Traced peers that still run continue untraced."""
        with self._lock:
            self._over = True
            for each in (*self._sockets.values(), *self._lines):
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(END_SECONDS)
        for listening in self._sockets.values():
            listening.close()
        self._directory.cleanup()

    def environment(self, name: str) -> dict[str, str]:
        if name not in self._sockets:
            listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listening.bind(f"{self._directory.name}/{len(self._sockets)}")
            listening.listen()
            self._sockets[name] = listening
            self._threads.append(threading.Thread(target=self._listen, args=(name, listening), daemon=True))
            self._threads[-1].start()
        return {TRACE: self._sockets[name].getsockname()}

    def arm(
        self, point: str, minimum_round: int, strike: Callable[[str], object], peers: Collection[str] | None = None
    ) -> Trap:
        """Set a trap for the first peer, of all or of `peers`, that reaches the point in `minimum_round` or later.

        `strike` is called with the peer's name in the listening thread, while the peer waits. Several may be armed.
        """
        trap = Trap(point, minimum_round, strike, None if peers is None else frozenset(peers))
        with self._lock:
            self._traps.append(trap)
        return trap

    def disarm(self, trap: Trap) -> None:
        with self._lock, suppress(ValueError):
            self._traps.remove(trap)

    def records(self, peer: str | None = None) -> list[Passed]:
        """The last points that all peers, or one, have passed, as the harness learned of them."""
        with self._lock:
            return [each for each in self._records if peer in (None, each.peer)]

    # -- a peer's thread ----------------------------------------------------------------------------------------------

    def _listen(self, name: str, listening: socket.socket) -> None:
        while True:
            try:
                line, _ = listening.accept()
            except OSError:
                return
            with line:
                with self._lock:
                    if self._over:
                        return
                    self._lines.add(line)
                with suppress(OSError):  # it was killed
                    self._hear(name, line)
                with self._lock:
                    self._lines.discard(line)

    def _hear(self, name: str, line: socket.socket) -> None:
        with line.makefile("r") as lines:
            for each in lines:
                number, _, point = each.rstrip("\n").partition(" ")
                self._pass(Passed(time.time(), name, point, int(number)))
                line.sendall(b"\n")

    def _pass(self, passed: Passed) -> None:
        with self._lock:
            self._records.append(passed)
            sprung = [trap for trap in self._traps if trap.catches(passed)]
            for trap in sprung:
                trap.struck = passed
                self._traps.remove(trap)
        for trap in sprung:
            try:
                trap.strike(passed.peer)
            finally:
                trap.fired.set()
