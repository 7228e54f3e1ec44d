"""Faults as data: what befalls a simulated swarm, and when. A value that can be printed, kept and played again.

    Faults().crash("p3", at_message=17).silence({"p1"}, {"p2"}, at=40, heal=90)

Times are virtual seconds since the start. `at_message=n` is the moment just before the peer's n-th message, sent or
received, takes effect: dead peers neither send nor see it, silent links hold it up. Links lose nothing: silence, stall
and partition all delay, and differ in whom they part and for how long.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from protocols.base import PeerId


@dataclass(frozen=True, slots=True)
class Message:
    """Just before this peer's message takes effect; messages count from 1, those sent and those received."""

    peer: PeerId
    number: int


Moment: TypeAlias = float | Message


@dataclass(frozen=True, slots=True)
class Crash:
    """A peer's process is killed; it restarts after `lasts` seconds, without memory, or not by itself."""

    peer: PeerId
    at: Moment
    lasts: float | None = None


@dataclass(frozen=True, slots=True)
class Restart:
    """A peer that is dead by then starts again, without memory."""

    peer: PeerId
    at: float


@dataclass(frozen=True, slots=True)
class Cut:
    """Nothing passes from sources to targets (`both`: nor back) for so long; None: until all is healed."""

    sources: tuple[PeerId, ...]
    targets: tuple[PeerId, ...]
    both: bool
    at: Moment
    lasts: float | None = None

    def links(self) -> list[tuple[PeerId, PeerId]]:
        pairs = [(source, target) for source in self.sources for target in self.targets if source != target]
        return pairs + [(target, source) for source, target in pairs] * self.both


@dataclass(frozen=True, slots=True)
class Reset:
    """All streams of a peer are reset, as the death of its daemon does."""

    peer: PeerId
    at: Moment


@dataclass(frozen=True, slots=True)
class Slow:
    """A peer's bandwidth is divided by `factor` for so long."""

    peer: PeerId
    factor: float
    at: float
    lasts: float | None = None


@dataclass(frozen=True, slots=True)
class Mislead:
    """The directory leaves entries out, tells old ones, tells false ones (`tests.sim.host.Hearsay`)."""

    forget_share: float
    lag_seconds: float
    lie_share: float
    at: float
    lasts: float | None = None


@dataclass(frozen=True, slots=True)
class Skew:
    """A peer's wall clock is off, in all its lives."""

    peer: PeerId
    seconds: float


@dataclass(frozen=True, slots=True)
class Lie:
    """A peer that lies to others (`tests.sim.byzantine.contributors`), from beginning to end."""

    peer: PeerId
    kind: str


Fault: TypeAlias = Crash | Restart | Cut | Reset | Slow | Mislead | Skew | Lie


@dataclass(frozen=True, slots=True)
class Faults:
    """Any number of faults, in any order. Every method returns a longer value."""

    events: tuple[Fault, ...] = ()

    def also(self, *events: Fault) -> Faults:
        return Faults((*self.events, *events))

    def __add__(self, other: Faults) -> Faults:
        return self.also(*other.events)

    def crash(
        self, peer: PeerId, at: float | None = None, at_message: int | None = None, lasts: float | None = None
    ) -> Faults:
        return self.also(Crash(peer, _moment(peer, at, at_message), lasts))

    def restart(self, peer: PeerId, at: float) -> Faults:
        return self.also(Restart(peer, at))

    def silence(
        self, some: Iterable[PeerId], others: Iterable[PeerId], at: float | Message, heal: float | None = None
    ) -> Faults:
        """Silence between two sets, both ways; a partition if they are everybody."""
        return self.also(Cut(tuple(sorted(some)), tuple(sorted(others)), True, at, _lasts(at, heal)))

    def silence_one_way(self, source: PeerId, target: PeerId, at: float | Message, heal: float | None = None) -> Faults:
        return self.also(Cut((source,), (target,), False, at, _lasts(at, heal)))

    def stall(self, source: PeerId, target: PeerId, at: float | Message, lasts: float) -> Faults:
        """One link delays everything for so long."""
        return self.also(Cut((source,), (target,), False, at, lasts))

    def reset(self, peer: PeerId, at: float | None = None, at_message: int | None = None) -> Faults:
        return self.also(Reset(peer, _moment(peer, at, at_message)))

    def slow(self, peer: PeerId, factor: float, at: float, heal: float | None = None) -> Faults:
        return self.also(Slow(peer, factor, at, _lasts(at, heal)))

    def mislead(
        self,
        at: float,
        heal: float | None = None,
        forget_share: float = 0.0,
        lag_seconds: float = 0.0,
        lie_share: float = 0.0,
    ) -> Faults:
        return self.also(Mislead(forget_share, lag_seconds, lie_share, at, _lasts(at, heal)))

    def skew(self, peer: PeerId, seconds: float) -> Faults:
        return self.also(Skew(peer, seconds))

    def lie(self, peer: PeerId, kind: str) -> Faults:
        return self.also(Lie(peer, kind))

    # -- what does not happen at a moment -----------------------------------------------------------------------------

    def skew_seconds(self, peer: PeerId) -> float:
        return sum(fault.seconds for fault in self.events if isinstance(fault, Skew) and fault.peer == peer)

    def lies(self) -> dict[PeerId, str]:
        """Who lies, and how."""
        return {fault.peer: fault.kind for fault in self.events if isinstance(fault, Lie)}

    def dated(self) -> list[Fault]:
        """Those that happen at a moment: after them there is something to heal."""
        return [fault for fault in self.events if not isinstance(fault, Skew | Lie)]

    def peers(self) -> set[PeerId]:
        """Everybody whom they name."""
        named: set[PeerId] = set()
        for fault in self.events:
            if isinstance(fault, Cut):
                named.update(fault.sources, fault.targets)
            elif not isinstance(fault, Mislead):
                named.add(fault.peer)
        return named


def _moment(peer: PeerId, at: float | None, at_message: int | None) -> Moment:
    if (at is None) == (at_message is None):
        raise ValueError("a fault happens either at a time or at a message")
    return Message(peer, at_message) if at_message is not None else float(at or 0.0)


def _lasts(at: Moment, heal: float | None) -> float | None:
    if heal is None:
        return None
    if isinstance(at, Message):
        raise ValueError("what begins at a message ends after so many seconds, not at a time")
    if heal <= at:
        raise ValueError(f"healed at {heal:g} s, before it begins at {at:g} s")
    return heal - at
