"""Control of lying peers: which peer tells which lie, and whether an honest peer has named it."""

from __future__ import annotations

import time
from pathlib import Path

from tests.faults.event_log import EventLog
from tests.faults.peer import LIE
from tests.faults.steps import Step
from tests.support.real_swarm import RealPeer, RealSwarm, wait

ACCUSED_SECONDS = 30.0


def can_lie(peer: RealPeer) -> None:
    peer.environment |= {LIE: str(lie_file(peer))}


def lie_file(peer: RealPeer) -> Path:
    """It is missing while the peer is honest."""
    return peer.directory.with_suffix(".lie")


class LiarControl:
    def __init__(self, notes: EventLog, swarm: RealSwarm) -> None:
        self._notes, self._swarm = notes, swarm
        self._lying: dict[str, float] = {}  # name -> since when

    def heal(self) -> None:
        for name in self._lying:
            lie_file(self._swarm[name]).unlink(missing_ok=True)
        self._lying.clear()

    def lie(self, targets: tuple[str, ...], step: Step) -> None:
        for name in targets:
            file = lie_file(self._swarm[name])
            file.with_suffix(".new").write_text(step.role)
            file.with_suffix(".new").replace(file)
        self._lying |= dict.fromkeys(targets, self._notes.tell(f"it lies: {step.role}", targets, "fault"))

    def accused(self, targets: tuple[str, ...], step: Step) -> None:
        for name in targets:
            words = wait(f"an honest peer names {name}", lambda name=name: self._named(name), ACCUSED_SECONDS)  # type: ignore[misc]
            self._notes.measure("named_seconds", time.time() - self._lying[name])
            self._notes.tell(f"named: {words}", targets, "heal")

    def _named(self, name: str) -> str:
        """Why an honest peer has named the liar since it lies; empty if none has."""
        liar = self._swarm[name]
        for peer in self._notes.running(tuple(self._lying)):
            for report in reversed(peer.reports()):
                if report["time"] > self._lying[name] and (why := report["blamed"].get(liar.id)):
                    return f"{why} ({peer.name})"
        return ""
