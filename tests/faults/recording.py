"""The recording of a play: all data from which the verdict is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tests.support.checkers import Report


@dataclass(frozen=True, slots=True)
class Event:
    """`time`: wall time after the action. `kind`: `start`, `fault`, `heal` or `end`."""

    time: float
    what: str
    peers: tuple[str, ...]
    kind: str


@dataclass(frozen=True, slots=True)
class Incarnation:
    """One process of a peer. `code`: its exit code, or minus the signal that ended it."""

    began: float
    ended: float
    code: int
    expected: int


@dataclass(frozen=True, slots=True)
class Limits:
    """A longer recovery is a violation; a missed aim is not, since it also depends on the machine's speed.

    `aims`: measure -> its highest desired value. `forks`: whether most of a roster may be gone long enough to fork.
    """

    recovery_seconds: float = 60.0
    aims: Mapping[str, float] = field(default_factory=dict)
    forks: bool = False

    def beside(self, calm: tuple[float, float]) -> Limits:
        """The limits of a slow swarm: the recovery may take at least as long as the calm did."""
        return replace(self, recovery_seconds=max(self.recovery_seconds, calm[1] - calm[0]))


@dataclass(frozen=True, slots=True)
class Recording:
    """A play of a scenario. Times are wall times; mappings are by a peer's name, or by a measure's.

    `should`: peers that must commit a round together after the faults. `histories`: the reports of all incarnations,
    oldest first. `left`: command lines of processes that outlived it. `samples`: (time, tokens so far); only with
    stages.
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
