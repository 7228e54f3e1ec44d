"""An append-only log of decided rounds, of any length, at fifty bytes of memory a round. No I/O of its own.

The latest rounds are decoded in memory; all are in an archive as bytes.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, overload

from protocols import wire
from protocols.base import BadPayload, Head, Member, RoundKey
from protocols.consensus import record as records
from protocols.consensus.messages import Certificate
from protocols.consensus.record import Kind, Record

UNSETTLED = bytes(32)  # state root of a head whose state is not known yet
RECENT = 128  # Latest rounds that are kept decoded. With a roster of 32 a certificate takes about 20 KB.
LOCATOR_RECENT = 8  # Lineages that a locator lists one by one; below them the steps double.
PIECE = 64  # rounds read from an archive at once
MAX_ROSTERS = 1024  # roster changes that are remembered, the latest ones
LINEAGE_BYTES = 32


class Archive(Protocol):
    """Encoded certificates in order. Its methods never raise: an archive handles disk errors itself."""

    def __len__(self) -> int: ...

    def extend(self, certificates: Sequence[bytes]) -> None: ...

    def read(self, place: int, count: int) -> Sequence[bytes]:
        """Return `count` certificates from `place` on: fewer at the end, or where one cannot be read any more."""

    def truncate(self, length: int) -> None:
        """Remove all but the first `length`."""


class ListArchive:
    def __init__(self) -> None:
        self._kept: list[bytes] = []

    def __len__(self) -> int:
        return len(self._kept)

    def extend(self, certificates: Sequence[bytes]) -> None:
        self._kept += certificates

    def read(self, place: int, count: int) -> Sequence[bytes]:
        return self._kept[place : place + count]

    def truncate(self, length: int) -> None:
        del self._kept[length:]


class LineageIndex:
    """Lineages in order. Each takes 40 bytes, a quarter of what a dictionary takes."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._sorted = array("Q")  # the first four bytes of a lineage, and its place

    def __len__(self) -> int:
        return len(self._bytes) // LINEAGE_BYTES

    def __getitem__(self, place: int) -> bytes:
        return bytes(self._bytes[place * LINEAGE_BYTES : (place + 1) * LINEAGE_BYTES])

    def append(self, lineage: bytes) -> None:
        key = _sort_key(lineage, len(self))
        self._bytes += lineage
        self._sorted.insert(bisect_left(self._sorted, key), key)

    def find(self, lineage: bytes) -> int | None:
        low = _sort_key(lineage, 0)
        for at in range(bisect_left(self._sorted, low), len(self._sorted)):
            place = self._sorted[at] - low
            if place >> 32:
                break
            if self[place] == lineage:
                return place
        return None

    def cut(self, length: int) -> None:
        if length < len(self):
            del self._bytes[length * LINEAGE_BYTES :]
            self._sorted = array("Q", (each for each in self._sorted if each & 0xFFFFFFFF < length))


def _sort_key(lineage: bytes, place: int) -> int:
    return int.from_bytes(lineage[:4], "big") << 32 | place


class _Roster(NamedTuple):
    since: int
    members: tuple[Member, ...]
    former: tuple[tuple[Member, ...], ...]


@dataclass(frozen=True, slots=True)
class DecidedRound:
    """One decided round: its votes, the head after it, whose state root is `UNSETTLED`, and its record, decoded."""

    certificate: Certificate
    head: Head
    record: Record

    @property
    def lineage(self) -> bytes:
        return self.head.key.lineage


def follow(head: Head, certificate: Certificate, record: Record | None = None) -> DecidedRound:
    """The round that a certificate decides after `head`, its votes not verified. `record` is its decoded record.

    Raises BadPayload if the certificate holds no record, ValueError if its record does not extend `head`.
    """
    record, key = record or records.decode(certificate.record), head.key
    if (record.parent, record.round) != (key.lineage, key.round):
        raise ValueError(f"record of round {record.round} does not extend the head at round {key.round}")
    lineage = records.lineage(certificate.record)
    fragment = key.fragment if record.idle else head.next_fragment
    after = Head(
        key=replace(key, lineage=lineage, round=key.round + 1, fragment=fragment),
        roster=record.roster,
        state_root=UNSETTLED,
        anchor=lineage if record.averaged else head.anchor,
        complaints=record.complaints,
        former=shrunk_from((head.roster, *head.former), record.roster),
        fragments=head.fragments,
    )
    return DecidedRound(certificate, after, record)


def shrunk_from(rosters: Sequence[tuple[Member, ...]], roster: tuple[Member, ...]) -> tuple[tuple[Member, ...], ...]:
    """Earlier rosters, latest first, each larger than `roster` and than all after it: at most 31."""
    found: list[tuple[Member, ...]] = []
    for each in rosters:
        if len(each) > len(found[-1] if found else roster):
            found.append(each)
    return tuple(found)


def steps(last: int, first: int) -> Iterator[int]:
    """Places from `last` down to `first`: one by one at the beginning, then in steps that double."""
    place, step, count = last, 1, 0
    while place > first:
        yield place
        count += 1
        place, step = place - step, step if count < LOCATOR_RECENT else 2 * step
    yield first


class RoundPruned(LookupError):
    """A round that cannot be read any more."""


class RoundLog(Sequence[DecidedRound]):
    """Decided rounds, each extending the one before it. The place of a round is the number of rounds before it.

    If the archive cannot read a round any more, that round and all before it are pruned (`RoundPruned`).
    """

    def __init__(self, start: Head, archive: Archive | None = None) -> None:
        """Start with the certificates in an archive, whose votes are not verified; None for a new one in memory."""
        self.start, self._archive = start, ListArchive() if archive is None else archive
        self.forks, self.floor = array("Q"), 0
        self._idle = array("Q")  # places of the rounds for which nothing was trained
        self._lineages = LineageIndex()
        self._lineages.append(start.key.lineage)
        self._anchors = array("Q", [0])  # place -> place of the lineage that pseudo-gradients are measured from
        self._rosters = [_Roster(0, start.roster, start.former)]
        self._recent: list[DecidedRound] = []
        self._restore()

    def _restore(self) -> None:
        held = len(self._archive)
        try:
            while len(self) < held:
                for certificate in self._decoded(len(self), PIECE):
                    if certificate.key != self._last.key:
                        raise ValueError("of another chain")
                    self._take(follow(self._last, certificate))
        except (RoundPruned, BadPayload, ValueError):
            self._archive.truncate(len(self))
            self.floor = 0

    # -- reading ------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._lineages) - 1

    @property
    def _last(self) -> Head:
        return self._recent[-1].head if self._recent else self.start

    def place(self, lineage: bytes) -> int | None:
        found = self._lineages.find(lineage)
        return None if found is None or found < self.floor else found

    def lineage(self, place: int) -> bytes:
        return self._lineages[place]

    def head(self, place: int) -> Head:
        return self.read(place - 1, 1)[0].head if place else self.start

    def idle(self, place: int) -> int:
        """Number of rounds among the first `place` for which nothing was trained (`Record.idle`)."""
        return bisect_left(self._idle, place)

    def rosters(self, place: int) -> Iterator[tuple[Member, ...]]:
        return (each.members for each in reversed(self._rosters) if each.since <= place)

    def rosters_after(self, place: int, stop: int) -> list[tuple[Member, ...]]:
        """Those after the rounds from `place` on, before `stop`."""
        first = max(1, bisect_right(self._rosters, place + 1, key=lambda each: each.since))
        last = bisect_right(self._rosters, stop, key=lambda each: each.since)
        return [each.members for each in self._rosters[first - 1 : last]]

    @overload
    def __getitem__(self, place: int) -> DecidedRound: ...

    @overload
    def __getitem__(self, place: slice) -> tuple[DecidedRound, ...]: ...

    def __getitem__(self, place: int | slice) -> DecidedRound | tuple[DecidedRound, ...]:
        if isinstance(place, int):
            return self.read(range(len(self))[place], 1)[0]
        places = range(len(self))[place]
        return tuple(self.read(places.start, len(places)))

    def __iter__(self) -> Iterator[DecidedRound]:
        for place in range(0, len(self), PIECE):
            yield from self.read(place, PIECE)

    def locator(self) -> tuple[bytes, ...]:
        return tuple(self.lineage(place) for place in steps(len(self), self.floor))

    def read(self, place: int, count: int) -> list[DecidedRound]:
        """Return `count` rounds from `place` on, fewer at the end. Raises RoundPruned if one of them cannot be read."""
        at_hand = len(self) - len(self._recent)
        end = min(place + count, len(self))
        found: list[DecidedRound] = []
        while (at := place + len(found)) < min(end, at_hand):
            decoded = self._decoded(at, min(end, at_hand) - at)
            found += [self._link(at + number, each) for number, each in enumerate(decoded)]
        return found + self._recent[max(place - at_hand, 0) : max(end - at_hand, 0)]

    def certificates(self, place: int, count: int) -> list[Certificate]:
        """At most `count` certificates from `place` on, and at least one if there is one. May raise RoundPruned."""
        at_hand = len(self) - len(self._recent)
        if place < at_hand:
            return self._decoded(place, min(count, at_hand - place))
        return [link.certificate for link in self._recent[place - at_hand : place - at_hand + count]]

    def _decoded(self, place: int, count: int) -> list[Certificate]:
        found: list[Certificate] = []
        try:
            for each in self._archive.read(place, min(count, PIECE)) if place + 1 >= self.floor else ():
                found.append(wire.expect(wire.decode(each), Certificate))
        except BadPayload:
            pass  # the certificates before it are good
        if not found:
            raise self._forget(place)
        return found

    def _link(self, place: int, certificate: Certificate) -> DecidedRound:
        start = self.start.key
        fragment = (start.fragment + place - self.idle(place)) % self.start.fragments
        key = replace(start, lineage=self.lineage(place), round=start.round + place, fragment=fragment)
        try:
            link = follow(self._before(key, place), certificate)
        except (BadPayload, ValueError):
            raise self._forget(place) from None
        if link.lineage != self.lineage(place + 1):
            raise self._forget(place)
        return link

    def _before(self, key: RoundKey, place: int) -> Head:
        """The head that the round at this place extends, as far as `follow` needs it."""
        known = bisect_right(self._rosters, place, key=lambda each: each.since)
        roster, former = self._rosters[known - 1][1:] if known else ((), ())
        anchor = self._anchors[place]
        at = self.lineage(anchor) if anchor else self.start.anchor
        return Head(key, roster, UNSETTLED, at, former=former, fragments=self.start.fragments)

    def _forget(self, place: int) -> RoundPruned:
        self.floor = max(self.floor, place + 2)  # neither the head before it nor the one after it is known
        return RoundPruned(f"round {place} of {len(self)} cannot be read any more")

    # -- changing -----------------------------------------------------------------------------------------------------

    def append(self, link: DecidedRound) -> None:
        self._archive.extend([wire.encode(link.certificate)])
        self._take(link)

    def extend(self, links: Iterable[DecidedRound]) -> None:
        """Add the rounds after the last. Raises RoundPruned, with nothing changed, if some cannot be read any more."""
        if isinstance(links, RoundLog):
            self.adopt(links, 0, len(links))
        else:
            for link in links:
                self.append(link)

    def adopt(self, other: RoundLog, start: int, stop: int) -> None:
        """Append the rounds of `other` between two places; this log ends at the first. Raises as `extend`."""
        before, end, forks, idle = len(self), start, set(other.forks), set(other._idle)
        last = other.read(max(start, stop - RECENT), min(RECENT, stop - start))
        while end < stop and (piece := other._archive.read(end, min(PIECE, stop - end))):
            self._archive.extend(piece)
            for at in range(end, end + len(piece)):
                self._note(other.lineage(at + 1), other._anchors[at + 1] == at + 1, at in forks, at in idle)
            end += len(piece)
        if end < stop:
            self._shrink(before)
            raise other._forget(end)
        for each in other._rosters:
            if start < each.since <= stop:
                self._meet(before + each.since - start, each.members)
        self._recent = [*self._recent, *last][-RECENT:]

    def _take(self, link: DecidedRound) -> None:
        record = link.record
        self._note(link.lineage, record.averaged, record.kind == Kind.FORK, record.idle)
        self._meet(len(self), link.head.roster)
        self._recent.append(link)
        if len(self._recent) > 2 * RECENT:
            del self._recent[:RECENT]

    def _note(self, lineage: bytes, is_anchor: bool, is_fork: bool, is_idle: bool) -> None:
        place = len(self)
        if is_idle:
            self._idle.append(place)
        if is_fork:
            self.forks.append(place)
        self._anchors.append(place + 1 if is_anchor else self._anchors[place])
        self._lineages.append(lineage)

    def _meet(self, place: int, roster: tuple[Member, ...]) -> None:
        before = self._rosters[-1]
        if roster != before.members:
            known = {each: each for each in before.members}  # one object for a member of many rosters
            former = shrunk_from((before.members, *before.former), roster)
            self._rosters.append(_Roster(place, tuple(known.get(member, member) for member in roster), former))
            del self._rosters[:-MAX_ROSTERS]

    def cut(self, length: int) -> tuple[DecidedRound, ...]:
        """Remove all but the first `length` rounds, and return the removed ones, as far as they can be read.
        Raises RoundPruned, with nothing changed, if the round before them cannot be read.
        """
        floor, lost = self.floor, self._readable(length)
        self.floor = floor  # what could not be read is removed
        at_hand = len(self) - len(self._recent)
        self._recent = self._recent[: max(0, length - at_hand)] or self._at_hand(length)
        self._shrink(length)
        kept = [each for each in self._rosters if each.since <= length]
        self._rosters = kept or [_Roster(length, self._last.roster, self._last.former)]
        return lost

    def _shrink(self, length: int) -> None:
        self._archive.truncate(length)
        self._lineages.cut(length + 1)
        del self._anchors[length + 1 :]
        del self.forks[bisect_left(self.forks, length) :]
        del self._idle[bisect_left(self._idle, length) :]

    def _readable(self, place: int) -> tuple[DecidedRound, ...]:
        while True:
            try:
                return tuple(self.read(place, len(self) - place))
            except RoundPruned:
                place = min(self.floor, len(self))

    def _at_hand(self, length: int) -> list[DecidedRound]:
        """The latest of the first `length` rounds, decoded; at least the last one, or RoundPruned."""
        try:
            return self.read(max(0, length - RECENT), min(length, RECENT))
        except RoundPruned:
            return self.read(length - 1, 1)
