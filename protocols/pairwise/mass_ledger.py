"""Push-sum's mass ledger: averaging over one-way links, under loss, duplication and reordering. No I/O.

Each peer holds a value x and a weight w, at first its own value and 1. A sender gives half of both away; the receiver
adds the share. x / w approaches Σx / Σw at every peer, whatever the order and the graph, as long as no mass is lost or
created (Kempe et al. 2003; Assran et al. 2019, section 3). The values are states (`protocols.pairwise.push_sum`).

- A share is outstanding until its receiver has answered for it. A receiver counts each number of a sender once.
- If the receiver's incarnation has ended, the share returns to the sender.
- If a receiver is only silent, the sender recalls the share. The receiver answers that it has counted the share, or
  that it never will; only the second answer returns the share.

Then Σw, over all ledgers and all outstanding shares, never changes, up to rounding, until a peer dies with its mass.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from protocols.base import BadPayload, Member
from protocols.peers.estimates import RecentDict

SHARE_WINDOW = 64
"""Limit of unacknowledged shares per receiver. The sender keeps their values, and gives that receiver no more."""
MAX_GIVERS = 256
"""Peer incarnations whose share numbers are remembered; the one that gave least recently is dropped first."""
MAX_RECEIVERS = 256  # peer incarnations whose next share number is remembered, besides those that owe an answer
LEAST_WEIGHT = 2.0**-900
"""A peer with less weight gives nothing. Far below what is reached in practice, even if one peer only takes."""


@dataclass(frozen=True, slots=True)
class Share:
    """Mass in transit. `sequence` counts the shares from this incarnation of the sender to this one of the receiver."""

    sender: Member
    to: Member
    sequence: int
    weight: float


class _Numbers:
    """The settled share numbers of one sender: those below `floor`, the counted ones, and those that will never be."""

    def __init__(self) -> None:
        self.floor = 0
        self.counted: set[int] = set()
        self.void: set[int] = set()

    def settled(self, number: int) -> bool:
        return number < self.floor or number in self.counted or number in self.void

    def settle(self, number: int, into: set[int]) -> None:
        """Settle a number; call this once per number. Numbers too far behind it to be outstanding never arrive."""
        into.add(number)
        self.floor = max(self.floor, number - SHARE_WINDOW + 1)
        self.counted = {each for each in self.counted if each >= self.floor}
        self.void = {each for each in self.void if each >= self.floor}


class MassLedger:
    def __init__(self, me: Member, weight: float = 1.0) -> None:
        self.me, self.weight = me, weight
        self._outstanding: dict[Member, dict[int, Share]] = {}
        self._next: OrderedDict[Member, int] = OrderedDict()
        self._unused = 0  # no forgotten receiver has been given this number, or a later one
        self._senders: RecentDict[Member, _Numbers] = RecentDict(MAX_GIVERS)

    @property
    def mass(self) -> float:
        """The weight that this peer holds or has given without acknowledgement: the most that it can hold again."""
        given = (share.weight for shares in self._outstanding.values() for share in shares.values())
        return self.weight + sum(given)

    # -- giving -------------------------------------------------------------------------------------------------------

    def give(self, to: Member) -> Share | None:
        """Give half of the mass. None if the receiver owes too many answers, or this peer has too little mass."""
        number = self._next.get(to, self._unused)
        first = min(self._outstanding.get(to, ()), default=number)
        if number >= first + SHARE_WINDOW or self.weight < LEAST_WEIGHT or to == self.me:
            return None
        self.weight /= 2
        share = Share(self.me, to, number, self.weight)
        self._outstanding.setdefault(to, {})[number] = share
        self._next[to] = number + 1
        self._next.move_to_end(to)
        if len(self._next) >= MAX_RECEIVERS + len(self._outstanding):
            oldest = next(each for each in self._next if each not in self._outstanding)
            self._unused = max(self._unused, self._next.pop(oldest))
        return share

    def answered(self, by: Member, sequence: int, counted: bool) -> None:
        waiting = self._outstanding.get(by, {})
        share = waiting.pop(sequence, None)
        if not waiting:
            self._outstanding.pop(by, None)
        if share is not None and not counted:
            self.weight += share.weight

    # -- taking -------------------------------------------------------------------------------------------------------

    def take(self, share: Share) -> bool:
        """Count a share, unless it is settled or for another incarnation; return whether it is counted."""
        if share.to != self.me:
            return False
        if not share.weight > 0:
            raise BadPayload(f"a share of weight {share.weight}")
        numbers = self._senders.put_newest(share.sender, _Numbers)
        if numbers.settled(share.sequence):
            return share.sequence in numbers.counted
        numbers.settle(share.sequence, numbers.counted)
        self.weight += share.weight
        return True

    def recalled(self, sender: Member, sequence: int) -> bool:
        """Whether that share is counted here; if not, it never will be."""
        numbers = self._senders.put_newest(sender, _Numbers)
        if numbers.settled(sequence):
            return sequence in numbers.counted
        numbers.settle(sequence, numbers.void)
        return False
