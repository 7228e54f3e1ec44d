"""Faults as data: what happens to a simulated swarm, and when. The value can be printed, stored and simulated again.

    Faults().crash("p3", at_message=17).silence({"p1"}, {"p2"}, at=40, heal=90)

Times are virtual seconds since the start. `at_message=n` is the moment just before the peer's n-th message, sent or
received, takes effect: a killed peer neither sends nor receives it, and a blocked link delays it. Links lose nothing:
silence, stall and partition all delay messages; they differ in the links that they block, and for how long.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from protocols.base import PeerId


@dataclass(frozen=True, slots=True)
class Message:
    """The moment just before a peer's message takes effect; sent and received messages are counted together, from 1."""

    peer: PeerId
    number: int


Moment: TypeAlias = float | Message


@dataclass(frozen=True, slots=True)
class Crash:
    """A peer's process is killed; it restarts after `lasts` seconds without its state. None: not before the healing."""

    peer: PeerId
    at: Moment
    lasts: float | None = None


@dataclass(frozen=True, slots=True)
class Restart:
    peer: PeerId
    at: float


@dataclass(frozen=True, slots=True)
class Cut:
    """Nothing passes from sources to targets (`both`: nor back) for `lasts` seconds; None: until the healing."""

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
    peer: PeerId
    at: Moment


@dataclass(frozen=True, slots=True)
class Slow:
    peer: PeerId
    factor: float
    at: float
    lasts: float | None = None


@dataclass(frozen=True, slots=True)
class Mislead:
    """The directory omits entries, or returns old or false ones (`tests.sim.host.DirectoryFaults`)."""

    forget_share: float
    lag_seconds: float
    lie_share: float
    at: float
    lasts: float | None = None


@dataclass(frozen=True, slots=True)
class Skew:
    peer: PeerId
    seconds: float


@dataclass(frozen=True, slots=True)
class Lie:
    """A peer lies (`tests.sim.byzantine`) for the whole run."""

    peer: PeerId
    kind: str


@dataclass(frozen=True, slots=True)
class Pause:
    """A peer is asked to rest or to be away, in all its incarnations, for `lasts` seconds; None: until the healing."""

    peer: PeerId
    at: Moment
    lasts: float | None = None
    away: bool = False


@dataclass(frozen=True, slots=True)
class Apart:
    """Neither of two peers can open a stream to the other, for `lasts` seconds; None: until the healing.

    Streams that are open stay so: the two reach each other through routers that let no new connection through.
    """

    peer: PeerId
    other: PeerId
    at: Moment
    lasts: float | None = None


Fault: TypeAlias = Crash | Restart | Cut | Reset | Slow | Mislead | Pause | Apart | Skew | Lie


@dataclass(frozen=True, slots=True)
class Faults:
    """Any number of faults, in any order. Each builder method returns a new value with one fault more."""

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
        return self.also(Cut(tuple(sorted(some)), tuple(sorted(others)), True, at, _lasts(at, heal)))

    def silence_one_way(self, source: PeerId, target: PeerId, at: float | Message, heal: float | None = None) -> Faults:
        return self.also(Cut((source,), (target,), False, at, _lasts(at, heal)))

    def stall(self, source: PeerId, target: PeerId, at: float | Message, lasts: float) -> Faults:
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

    def pause(
        self,
        peer: PeerId,
        at: float | None = None,
        at_message: int | None = None,
        lasts: float | None = None,
        away: bool = False,
    ) -> Faults:
        return self.also(Pause(peer, _moment(peer, at, at_message), lasts, away))

    def apart(self, peer: PeerId, other: PeerId, at: float, lasts: float | None = None) -> Faults:
        return self.also(Apart(peer, other, at, lasts))

    def skew(self, peer: PeerId, seconds: float) -> Faults:
        return self.also(Skew(peer, seconds))

    def lie(self, peer: PeerId, kind: str) -> Faults:
        return self.also(Lie(peer, kind))

    # -- queries ------------------------------------------------------------------------------------------------------

    def skew_seconds(self, peer: PeerId) -> float:
        return sum(fault.seconds for fault in self.events if isinstance(fault, Skew) and fault.peer == peer)

    def lies(self) -> dict[PeerId, str]:
        return {fault.peer: fault.kind for fault in self.events if isinstance(fault, Lie)}

    def dated(self) -> list[Fault]:
        """The faults that happen at a moment, and have to be healed."""
        return [fault for fault in self.events if not isinstance(fault, Skew | Lie)]

    def peers(self) -> set[PeerId]:
        named: set[PeerId] = set()
        for fault in self.events:
            if isinstance(fault, Cut):
                named.update(fault.sources, fault.targets)
            elif isinstance(fault, Apart):
                named.update((fault.peer, fault.other))
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
        raise ValueError("a fault that begins at a message lasts a number of seconds; it has no end time")
    if heal <= at:
        raise ValueError(f"healed at {heal:g} s, before it begins at {at:g} s")
    return heal - at
