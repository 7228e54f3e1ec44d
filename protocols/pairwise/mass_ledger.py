"""Push-sum's book of mass: averaging over links that carry one way, under loss, duplication and reordering. Pure.

Everybody holds a value x and a weight w, at first its own value and 1. It gives half of both away and keeps the rest;
whoever takes a share adds it. x / w comes near Σx / Σw everywhere, whatever the order and the graph, as long as no mass
is lost or made (Kempe et al. 2003; Assran et al. 2019, SGP, section 3, for the states of trainers). So here:

- a share is outstanding until its receiver has acknowledged it; sent again it is the same share, under the same number;
- a receiver counts each number of a giver once, whatever comes twice or late;
- a share whose receiver's life is over comes home: if it had been counted, it died with its receiver;
- of a receiver that is only silent nobody knows what it counted: the share is recalled. The receiver says whether it
  had counted it, and if not, never will: only then is it home. Until then it is neither here nor there, and not lost.

Then Σx and Σw over everybody's book and all shares that are outstanding and not counted never change: to the last bit
for numbers that add exactly (`fractions.Fraction`), up to rounding for others. A giver that dies takes what it holds
along, and what it gave stays given.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from protocols.base import BadPayload, Member
from protocols.estimates import RecentDict

SHARE_WINDOW = 64
"""Shares that one receiver has not acknowledged: a giver keeps their values, and gives it no more."""
MAX_GIVERS = 256
"""Lives of peers whose numbers are known; the one that gave least recently goes first."""
MAX_RECEIVERS = 256
"""Lives of peers of which it is known which number comes next, besides those that owe an answer."""
LEAST_WEIGHT = 2.0**-900
"""Who has less gives nothing. Far below what is reached: one that only takes draws all weight to itself, and the others
go on with what is left to them."""


class Mass(Protocol):
    """A number or a vector: what can be added to its like, and divided by a number."""

    def __add__(self, other: Any, /) -> Any: ...

    def __truediv__(self, other: Any, /) -> Any: ...


V = TypeVar("V", bound=Mass)


@dataclass(frozen=True, slots=True)
class Share(Generic[V]):
    """Mass on its way: `sequence` counts what this giver, in this life, has given to this life of the receiver."""

    sender: Member
    to: Member
    sequence: int
    value: V
    weight: float


class _Numbers:
    """Which numbers of one giver are settled: those below `floor`, those that are counted, those that never will be."""

    def __init__(self) -> None:
        self.floor = 0
        self.counted: set[int] = set()
        self.void: set[int] = set()

    def settled(self, number: int) -> bool:
        return number < self.floor or number in self.counted or number in self.void

    def settle(self, number: int, into: set[int]) -> None:
        """Once for each number. What is so far behind it that no giver has it outstanding any more never comes."""
        into.add(number)
        self.floor = max(self.floor, number - SHARE_WINDOW + 1)
        self.counted = {each for each in self.counted if each >= self.floor}
        self.void = {each for each in self.void if each >= self.floor}


class MassLedger(Generic[V]):
    """One peer's mass, in one of its lives, and the shares that it has given and taken.

    Attributes:
        me: this life.
        value, weight: what is here.
    """

    def __init__(self, me: Member, value: V, weight: float = 1.0) -> None:
        self.me, self.value, self.weight = me, value, weight
        self._outstanding: dict[Member, dict[int, Share[V]]] = {}
        self._next: OrderedDict[Member, int] = OrderedDict()
        self._unused = 0  # no receiver that is forgotten has been given this number, or a later one
        self._senders: RecentDict[Member, _Numbers] = RecentDict(MAX_GIVERS)

    @property
    def mean(self) -> V:
        """x / w: what this peer takes the mean of all to be."""
        mean: V = self.value / self.weight
        return mean

    @property
    def mass(self) -> float:
        """What is here, and what is given and not acknowledged: at most so much can be here again."""
        given = (share.weight for shares in self._outstanding.values() for share in shares.values())
        return self.weight + sum(given)

    # -- giving -------------------------------------------------------------------------------------------------------

    def give(self, to: Member) -> Share[V] | None:
        """Half of what is here, for this receiver; None if it has too much unacknowledged, or too little is here."""
        number = self._next.get(to, self._unused)
        first = min(self._outstanding.get(to, ()), default=number)
        if number >= first + SHARE_WINDOW or self.weight < LEAST_WEIGHT or to == self.me:
            return None
        self.value, self.weight = self.value / 2, self.weight / 2
        share = Share(self.me, to, number, self.value, self.weight)
        self._outstanding.setdefault(to, {})[number] = share
        self._next[to] = number + 1
        self._next.move_to_end(to)
        self._forget()
        return share

    def _forget(self) -> None:
        """Whoever was given something longest ago and owes no answer."""
        if len(self._next) >= MAX_RECEIVERS + len(self._outstanding):
            oldest = next(each for each in self._next if each not in self._outstanding)
            self._unused = max(self._unused, self._next.pop(oldest))

    def outstanding(self, to: Member) -> tuple[Share[V], ...]:
        """What to send again: given, and neither acknowledged nor home."""
        return tuple(self._outstanding.get(to, {}).values())

    def acknowledged(self, by: Member, sequence: int) -> None:
        """It is the receiver's now. Of what is not outstanding: nothing changes."""
        self._answered(by, sequence)

    def answered(self, by: Member, sequence: int, counted: bool) -> None:
        """What the receiver says to a recall: it counted the share, or never will."""
        share = self._answered(by, sequence)
        if share is not None and not counted:
            self._home(share)

    def buried(self, member: Member) -> None:
        """This life of a peer is over for certain: what it never acknowledged comes home. A silent peer may live."""
        for share in self._outstanding.pop(member, {}).values():
            self._home(share)
        self._next.pop(member, None)

    def _answered(self, by: Member, sequence: int) -> Share[V] | None:
        waiting = self._outstanding.get(by, {})
        share = waiting.pop(sequence, None)
        if not waiting:
            self._outstanding.pop(by, None)
        return share

    def _home(self, share: Share[V]) -> None:
        self.value, self.weight = self.value + share.value, self.weight + share.weight

    # -- taking -------------------------------------------------------------------------------------------------------

    def take(self, share: Share[V]) -> bool:
        """Count a share, unless its number is settled; to be acknowledged either way, if it is for this life.

        Returns:
            Whether it is counted, now or earlier; False: it has been recalled, or is for another life of this peer.

        Raises:
            BadPayload: no positive weight.
        """
        if share.to != self.me:
            return False
        if not share.weight > 0:
            raise BadPayload(f"a share of weight {share.weight}")
        numbers = self._numbers(share.sender)
        if numbers.settled(share.sequence):
            return share.sequence in numbers.counted
        numbers.settle(share.sequence, numbers.counted)
        self._home(share)
        return True

    def recalled(self, sender: Member, sequence: int) -> bool:
        """Whether that share is counted here; if not, it never will be."""
        numbers = self._numbers(sender)
        if numbers.settled(sequence):
            return sequence in numbers.counted
        numbers.settle(sequence, numbers.void)
        return False

    def _numbers(self, sender: Member) -> _Numbers:
        return self._senders.renew(sender, _Numbers)
