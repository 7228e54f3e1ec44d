"""What was played: everything that a verdict is made from, written while the peers ran."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tests.support.checkers import Report


@dataclass(frozen=True, slots=True)
class Event:
    """Something that was done to the peers.

    Attributes:
        time: wall time, when it had been done.
        what: in words, for people: `SIGKILL at send Chunk`, `cut off`, `healed`, `started`, `asked to finish`.
        whom: names of the peers that it was done to.
        kind: `start`, `fault`, `heal` or `end`.
    """

    time: float
    what: str
    whom: tuple[str, ...]
    kind: str


@dataclass(frozen=True, slots=True)
class Life:
    """One process of a peer.

    Attributes:
        began, ended: wall times of its start and end.
        code: how it ended: its exit code, or minus the signal.
        expected: the code that it should have ended with.
    """

    began: float
    ended: float
    code: int
    expected: int


@dataclass(frozen=True, slots=True)
class Limits:
    """Within what a scenario must recover, and what it aims at.

    Attributes:
        recovery_seconds: from the end of the faults until the first round that all who should have committed; more is
            a violation: no progress.
        aims: measure -> the most that it should be. More is a miss, which is told, and no violation: how fast this
            machine is decides with.
        forks: whether most of a roster may be gone, or seem so, for long enough to go on without it.
    """

    recovery_seconds: float = 60.0
    aims: Mapping[str, float] = field(default_factory=dict)
    forks: bool = False

    def beside(self, calm: tuple[float, float]) -> Limits:
        """The same for a swarm whose first rounds took so long: it may take as long again, where that is longer."""
        return replace(self, recovery_seconds=max(self.recovery_seconds, calm[1] - calm[0]))


@dataclass(frozen=True, slots=True)
class Recording:
    """A scenario as it was played.

    Attributes:
        protocol, task, seed: what was played with.
        calm: wall times from when to when all peers were there and nothing was done to them.
        healed: wall time of the end of the faults; what happens after it is recovery.
        ended: wall time at which the peers were asked to finish.
        should: names of the peers that must have committed a round together after the faults.
        ids: name -> peer id.
        histories: name -> its round reports, oldest first, of all its lives.
        logs: name -> all that it wrote to stderr.
        lives: name -> its processes, oldest first.
        left: name -> command lines of processes that were left of it when all was over.
        measures: what the scenario measured by itself: name -> the value of each time that it was tried.
        stuck: steps that waited in vain, in words: the scenario was not played as it was written.
    """

    scenario: str
    seed: int
    protocol: str
    task: str
    limits: Limits
    calm: tuple[float, float]
    healed: float
    ended: float
    should: tuple[str, ...]
    ids: Mapping[str, str]
    events: Sequence[Event]
    histories: Mapping[str, Sequence[Report]]
    logs: Mapping[str, str]
    lives: Mapping[str, Sequence[Life]]
    left: Mapping[str, Sequence[str]]
    measures: Mapping[str, Sequence[float]] = field(default_factory=dict)
    stuck: Sequence[str] = ()
