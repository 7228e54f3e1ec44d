"""The chain of decided rounds as one peer sees it, and its head, which the next round extends. No I/O of its own.

The caller has verified the votes (`protocols.history.fork_choice`) or has just taken part in the decision.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from weakref import WeakSet

from protocols.base import Head, Member, RoundKey
from protocols.consensus import record as records
from protocols.consensus.messages import Certificate
from protocols.consensus.record import Record
from protocols.history.round_log import UNSETTLED, Archive, DecidedRound, RoundLog, RoundPruned, follow, steps

__all__ = ["UNSETTLED", "Archive", "Chain", "DecidedRound", "follow", "genesis", "state_root"]

PIECE = 16  # certificates looked up at once: few enough not to block the event loop


def state_root(parameters_root: bytes, velocity_root: bytes, round_number: int) -> bytes:
    """One hash of the whole outer state: parameters, momentum and the number of the next round."""
    number = round_number.to_bytes(8, "big")
    return hashlib.sha256(b"starling state" + parameters_root + velocity_root + number).digest()


def genesis(run: bytes, scope: str, roster: tuple[Member, ...], root: bytes = UNSETTLED, fragments: int = 1) -> Head:
    """The head of a chain without records. `root` is the state root at the start of the run."""
    lineage = records.genesis(run, scope)
    return Head(RoundKey(run, scope, lineage, 0), roster, root, anchor=lineage, fragments=fragments)


class Chain:
    """The head and the rounds that lead to it from the genesis, as far as they can be read.

    A chain shares the rounds of a common trunk with its copies. A copy stores only its own rounds.
    """

    def __init__(
        self,
        run: bytes,
        scope: str,
        roster: tuple[Member, ...],
        root: bytes = UNSETTLED,
        archive: Archive | None = None,
        *,
        fragments: int = 1,
    ) -> None:
        """Start at the genesis, or after the rounds in `archive`, whose votes have been verified; those that do not
        follow are removed. Without a root, the first record defines it.

        Training rounds average the `fragments` of the parameters in turn, whatever their outcome (Douillard et al.
        2025, Streaming DiLoCo).
        """
        self.trained_before = 0  # training rounds that count as done before the genesis
        self._trunk = RoundLog(genesis(run, scope, roster, root, fragments), archive)
        self._shared = len(self._trunk)  # number of rounds of the trunk that belong to this chain
        self._own: RoundLog | None = None  # the rounds after them; None if this chain owns the trunk
        self._own_is_shared = False  # whether another chain uses `_own`, too
        self._copies: WeakSet[Chain] = WeakSet()  # chains that share the trunk
        self.head = self._head(len(self))

    def copy(self) -> Chain:
        """An independent chain with the same rounds. It never writes to the archive."""
        other = Chain.__new__(Chain)
        other._trunk, other._shared, other._copies = self._trunk, self._shared, self._copies
        other.trained_before = self.trained_before
        other._own, other._own_is_shared = RoundLog(self._trunk.head(self._shared)), False
        other._own.extend(self._own or ())
        other.head = self.head
        self._copies.add(other)
        return other

    def __len__(self) -> int:
        return self._shared + len(self._own or ())

    def __bool__(self) -> bool:
        return True  # also without rounds

    @property
    def trained(self) -> int:
        """Number of training rounds up to the head, whatever their outcome: all but those of `Record.idle`.

        The length of a run and its learning-rate schedule count these: a fork after a restart costs no training.
        """
        return self._trained(len(self))

    def trained_at(self, lineage: bytes) -> int:
        """The same number up to a lineage of this chain; that of its genesis if it is on another one."""
        return self._trained(self._place(lineage) or 0)

    def _trained(self, place: int) -> int:
        own = self._own.idle(place - self._shared) if self._own and place > self._shared else 0
        return self.trained_before + place - self._trunk.idle(min(place, self._shared)) - own

    @property
    def records(self) -> tuple[bytes, ...]:
        return tuple(link.certificate.record for link in self._read(self._trunk.floor, len(self)))

    # -- reading ------------------------------------------------------------------------------------------------------

    def __contains__(self, lineage: bytes) -> bool:
        return self._place(lineage) is not None

    def _place(self, lineage: bytes) -> int | None:
        """Number of rounds before the child of this lineage."""
        place = self._trunk.place(lineage)
        if place is not None and place <= self._shared:
            return place
        own = self._own.place(lineage) if self._own else None
        return None if own is None else self._shared + own

    def _read(self, place: int, count: int) -> list[DecidedRound]:
        shared = self._trunk.read(place, min(count, self._shared - place)) if place < self._shared else []
        if self._own is None or len(shared) == count:
            return shared
        return shared + self._own.read(max(0, place - self._shared), count - len(shared))

    def _head(self, place: int) -> Head:
        return self._read(place - 1, 1)[0].head if place else self._trunk.start

    def _lineage(self, place: int) -> bytes:
        if place <= self._shared or self._own is None:
            return self._trunk.lineage(place)
        return self._own.lineage(place - self._shared)

    def child(self, lineage: bytes) -> DecidedRound | None:
        return next(iter(self.since(lineage, 1)), None)

    def since(self, lineage: bytes, limit: int | None = None) -> tuple[DecidedRound, ...]:
        """The rounds after this lineage, oldest first, at most `limit`; empty if it is not on this chain."""
        place = self._place(lineage)
        if place is None:
            return ()
        try:
            return tuple(self._read(place, len(self) - place if limit is None else limit))
        except RoundPruned:
            return ()

    def count_since(self, lineage: bytes) -> int:
        place = self._place(lineage)
        return 0 if place is None else len(self) - place

    def certificates(self, lineage: bytes) -> list[Certificate]:
        """Certificates of a few rounds after this lineage, at least one if there is one."""
        place = self._place(lineage)
        if place is None or place == len(self):
            return []
        try:
            if place < self._shared:
                return self._trunk.certificates(place, min(PIECE, self._shared - place))
            return self._own.certificates(place - self._shared, PIECE) if self._own else []
        except RoundPruned:
            return []

    def at(self, lineage: bytes) -> Head | None:
        """Head at a lineage of this chain. Its state root comes from the next record, not from this peer's state."""
        place = self._place(lineage)
        if place is None:
            return None
        try:
            head, after = self._head(place), self._read(place, 1)
        except RoundPruned:
            return None
        return replace(head, state_root=after[0].record.state_root) if after else head

    def lineage_of(self, round: int) -> bytes | None:
        """The lineage that a round of this chain extends; None if it is not there yet."""
        return self._lineage(round) if 0 <= round <= len(self) else None

    def locator(self) -> tuple[bytes, ...]:
        """Lineages from the head to the oldest one, at growing distances. Lets a peer find where two chains part."""
        return tuple(self._lineage(place) for place in steps(len(self), self._trunk.floor))

    def common(self, locator: Sequence[bytes]) -> bytes | None:
        return next((lineage for lineage in locator if lineage in self), None)

    def rosters_after(self, lineage: bytes) -> list[tuple[Member, ...]]:
        """The rosters after this lineage, the latest `MAX_ROSTERS` or more; none if it is not on this chain."""
        place = self._place(lineage)
        if place is None:
            return []
        trunk = self._trunk.rosters_after(place, self._shared) if place < self._shared else []
        return trunk + (self._own.rosters_after(max(0, place - self._shared), len(self._own)) if self._own else [])

    def members(self, limit: int) -> tuple[Member, ...]:
        """At most `limit` members of the last `MAX_ROSTERS` rosters, latest first, one incarnation of each peer."""
        found: dict[str, Member] = {}
        own = () if self._own is None else self._own.rosters(len(self._own))
        for roster in chain(own, self._trunk.rosters(self._shared)):
            for member in roster:
                found.setdefault(member.peer, member)
            if len(found) >= limit:
                break
        return tuple(found.values())[:limit]

    # -- changing -----------------------------------------------------------------------------------------------------

    def extend(self, certificate: Certificate, record: Record | None = None) -> None:
        """Append a decided round, whose root `settle` sets later. `record` is the certificate's, if it is decoded.

        Raises ValueError if the certificate does not extend the head, BadPayload if it holds no record.
        """
        key = self.head.key
        if certificate.key != key:
            number = certificate.key.round
            raise ValueError(f"certificate of round {number} does not extend the head at round {key.round}")
        link = follow(self.head, certificate, record)
        if self._own is None:
            self._trunk.append(link)
            self._shared += 1
        else:
            self._unshare()
            self._own.append(link)
        self.head = link.head

    @property
    def lacks_state(self) -> bool:
        """Whether this peer is known not to hold the head's state, as a joiner before it has caught up."""
        head = self.at(self.head.key.lineage)
        return head is not None and head.state_root not in (UNSETTLED, self.head.state_root)

    def settle(self, root: bytes) -> None:
        """Set the head's state root: once its state is computed, or after a SKIP, which changes the round in it."""
        self.head = replace(self.head, state_root=root)

    def switch(self, lineage: bytes, links: Sequence[DecidedRound]) -> tuple[DecidedRound, ...]:
        """Switch to another branch that leaves this chain at `lineage`, and return the rounds dropped, oldest first.

        Raises ValueError, with nothing changed, if the lineage is not on this chain, or the rounds do not follow it.
        """
        place = self._place(lineage)
        if place is None or not _follows(lineage, links):
            raise ValueError("a branch that does not leave this chain at the given lineage")
        try:
            lost = self._cut(place)
        except RoundPruned:
            raise ValueError("a branch that leaves this chain where it cannot be read any more") from None
        try:
            self._extend(links)
        except RoundPruned:
            if lost and lost[0].certificate.key.lineage == lineage:
                self._extend(lost)
            raise ValueError("a branch that cannot be read any more") from None
        finally:
            self.head = self._head(len(self))
        return lost

    def _extend(self, links: Sequence[DecidedRound]) -> None:
        """Append rounds to the log that holds this chain's last ones, or raise RoundPruned."""
        if self._own is None:
            self._trunk.extend(links)
            self._shared = len(self._trunk)
        elif isinstance(links, RoundLog) and not self._own:
            self._own, self._own_is_shared = links, True  # copies serve for judging and are rarely extended
        else:
            self._unshare()
            self._own.extend(links)

    def _unshare(self) -> None:
        if self._own_is_shared and self._own is not None:
            before, self._own, self._own_is_shared = self._own, RoundLog(self._own.start), False
            self._own.extend(before)

    def _cut(self, place: int) -> tuple[DecidedRound, ...]:
        """Drop all rounds after the first `place`, or raise RoundPruned with nothing changed."""
        if self._own is not None and place >= self._shared:
            self._unshare()
            return self._own.cut(place - self._shared)
        if self._own is not None:
            head, given_up = self._trunk.head(place), self._read(place, len(self) - place)
            self._shared, self._own, self._own_is_shared = place, RoundLog(head), False
            return tuple(given_up)
        head, lost = self._trunk.head(place), self._trunk.cut(place)
        for each in self._copies:
            each._part(head, place, lost)
        self._shared = place
        return lost

    def _part(self, head: Head, place: int, lost: tuple[DecidedRound, ...]) -> None:
        """Keep the rounds of the trunk that its owner drops from `place` on, if this chain has them."""
        if place < self._shared and self._own is not None:
            before, self._own, self._own_is_shared = self._own, RoundLog(head), False
            self._own.extend((*lost[: self._shared - place], *before))
            self._shared = place


def _follows(lineage: bytes, links: Sequence[DecidedRound]) -> bool:
    if isinstance(links, RoundLog):
        return links.start.key.lineage == lineage
    parents = [lineage, *(link.lineage for link in links)]
    return all(link.certificate.key.lineage == parent for link, parent in zip(links, parents, strict=False))
