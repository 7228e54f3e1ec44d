"""The recording of a play: all data from which the verdict is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tests.support.checkers import Report


@dataclass(frozen=True, slots=True)
class Event:
    """An action on the peers.

    Attributes:
        time: wall time after the action.
        what: in words: `SIGKILL at send Chunk`, `cut off`, `healed`, `started`, `asked to finish`.
        peers: names of the affected peers.
        kind: `start`, `fault`, `heal` or `end`.
    """

    time: float
    what: str
    peers: tuple[str, ...]
    kind: str


@dataclass(frozen=True, slots=True)
class Incarnation:
    """One process of a peer.

    Attributes:
        began, ended: wall times of its start and end.
        code: its exit code, or minus the signal that ended it.
        expected: the code with which it should have ended.
    """

    began: float
    ended: float
    code: int
    expected: int


@dataclass(frozen=True, slots=True)
class Limits:
    """The recovery limit and the aims of a scenario.

    Attributes:
        recovery_seconds: from the end of the faults until all expected peers have committed a round together. A longer
            recovery is a violation (no progress).
        aims: measure -> its highest desired value. A higher one is reported as missed, and is no violation, because it
            also depends on the speed of the machine.
        forks: whether most of a roster may be gone, or seem gone, for long enough that peers fork.
    """

    recovery_seconds: float = 60.0
    aims: Mapping[str, float] = field(default_factory=dict)
    forks: bool = False

    def beside(self, calm: tuple[float, float]) -> Limits:
        """The limits of a slow swarm: the recovery may take at least as long as the calm did."""
        return replace(self, recovery_seconds=max(self.recovery_seconds, calm[1] - calm[0]))


@dataclass(frozen=True, slots=True)
class Recording:
    """A play of a scenario.

    Attributes:
        calm: wall times of the beginning and end of the calm, in which all peers ran without faults.
        healed: wall time of the end of the faults, when the recovery begins.
        ended: wall time at which the peers were asked to finish.
        should: names of the expected peers, which must commit a round together after the faults.
        ids: name -> peer id.
        histories: name -> the round reports of all its incarnations, oldest first.
        logs: name -> its stderr.
        incarnations: name -> its processes, oldest first.
        left: name -> command lines of its processes that outlived it.
        measures: name -> the value of each measurement of the nemesis.
        stuck: steps that failed or timed out, in words.
        stages: number of stages of the run.
        samples: driver -> (wall time, tokens so far) once a second; only with stages.
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
    incarnations: Mapping[str, Sequence[Incarnation]]
    left: Mapping[str, Sequence[str]]
    measures: Mapping[str, Sequence[float]] = field(default_factory=dict)
    stuck: Sequence[str] = ()
    stages: int = 1
    samples: Mapping[str, Sequence[tuple[float, int]]] = field(default_factory=dict)
