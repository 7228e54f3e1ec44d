"""The log of a play: faults, processes that ended, measures, and steps that failed."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence

import psutil

from tests.faults.recording import Event, Incarnation
from tests.support.real_swarm import ORPHAN_SECONDS, RealPeer, RealSwarm

DEATH_SECONDS = 3.0


class EventLog:
    """What happens during a play: by peer or by measure; `stuck` holds steps that failed or timed out, in words."""

    def __init__(self, swarm: RealSwarm) -> None:
        self.events: list[Event] = []
        self.measures: dict[str, list[float]] = {}
        self.incarnations: dict[str, list[Incarnation]] = {}
        self.left: dict[str, list[str]] = {}
        self.stuck: list[str] = []
        self.last = time.time()
        self._swarm = swarm
        self._began: dict[str, float] = {}

    def tell(self, what: str, peers: Sequence[str], kind: str) -> float:
        """Note an event; returns its wall time. Recovery is measured from the last one."""
        self.events.append(Event(time.time(), what, tuple(peers), kind))
        self.last = self.events[-1].time
        return self.last

    def began(self, name: str) -> None:
        self._began[name] = time.time()

    def over(self, name: str, expected: int, seconds: float) -> None:
        """Wait for the end of a peer's process and of its children; after `seconds`, kill them and note that."""
        peer = self._swarm[name]
        try:
            peer.ends(seconds)
        except subprocess.TimeoutExpired:
            self.stuck.append(f"{name} did not end within {seconds:g} s")
            peer.strike()
            peer.ends(DEATH_SECONDS)
        self.ended(name, expected)
        until = time.monotonic() + ORPHAN_SECONDS
        while (left := peer.left()) and time.monotonic() < until:
            time.sleep(0.05)
        if left:
            self.left[name] = [_command(each) for each in left]
            peer.clear()

    def ended(self, name: str, expected: int) -> None:
        code = self._swarm[name].code
        assert code is not None
        self.incarnations.setdefault(name, []).append(Incarnation(self._began.pop(name), time.time(), code, expected))

    def unseen(self) -> None:
        """Note the peers whose processes have ended unasked."""
        for name in [name for name in self._began if name in self._swarm.peers]:
            if not self._swarm[name].running:
                self.stuck.append(f"{name} ended without being asked to")
                self.ended(name, 0)

    def running(self, but: Sequence[str] = ()) -> list[RealPeer]:
        return [peer for peer in self._swarm.running if peer.name not in but]

    def measure(self, what: str, value: float) -> None:
        self.measures.setdefault(what, []).append(value)


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()) or str(process.pid)
    except psutil.Error:
        return str(process.pid)
