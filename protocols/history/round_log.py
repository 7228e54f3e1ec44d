"""Decided rounds one after the other, however many: the last ones at hand, all of them as bytes in an archive. Pure.

Of each round some fifty bytes stay in memory: its lineage, where to find that, and which state it is measured from.
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
from protocols.history.lineage_index import LineageIndex

UNSETTLED = bytes(32)
"""State root of a head whose state nobody has vouched for yet."""
RECENT = 128
"""So many of the last rounds are at hand decoded; a certificate takes some 20 KB so, for a roster of 32."""
LOCATOR_RECENT = 8
"""So many lineages stand in a locator one by one; below them the steps double."""
PIECE = 64
"""Rounds that are read from an archive at once."""
MAX_ROSTERS = 1024
"""Of the rosters that followed each other so many are known, the latest."""


class Archive(Protocol):
    """Encoded certificates one after the other. Never raises: what a disk does to them is its own business."""

    def __len__(self) -> int: ...

    def extend(self, certificates: Sequence[bytes]) -> None: ...

    def read(self, place: int, count: int) -> Sequence[bytes]:
        """So many from this place on, fewer at the end; fewer, too, where one cannot be read any more."""

    def truncate(self, length: int) -> None:
        """Forget all but the first `length`."""


class ListArchive:
    """`Archive` in memory."""

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


class _Roster(NamedTuple):
    """A roster, from which place on it is the one of the heads, and those that it has shrunk from."""

    since: int
    members: tuple[Member, ...]
    former: tuple[tuple[Member, ...], ...]


@dataclass(frozen=True, slots=True)
class DecidedRound:
    """One decided round.

    Attributes:
        certificate: its record and votes.
        head: what it led to; the state root is unsettled: only the next record says it.
    """

    certificate: Certificate
    head: Head

    @property
    def record(self) -> Record:
        return records.decode(self.certificate.record)

    @property
    def lineage(self) -> bytes:
        """The lineage that its record names."""
        return self.head.key.lineage


def follow(head: Head, certificate: Certificate) -> DecidedRound:
    """What a certificate leads to, whose votes are not looked at.

    Raises:
        BadPayload: it holds no record.
        ValueError: its record does not extend that head.
    """
    return _followed(head, certificate)[0]


def _followed(head: Head, certificate: Certificate) -> tuple[DecidedRound, Record]:
    record, key = records.decode(certificate.record), head.key
    if (record.parent, record.round) != (key.lineage, key.round):
        raise ValueError(f"record of round {record.round} does not extend the head at round {key.round}")
    lineage = records.lineage(certificate.record)
    after = Head(
        key=replace(key, lineage=lineage, round=key.round + 1),
        roster=record.roster,
        state_root=UNSETTLED,
        anchor=lineage if record.averaged else head.anchor,
        complaints=record.complaints,
        former=shrunk_from((head.roster, *head.former), record.roster),
    )
    return DecidedRound(certificate, after), record


def shrunk_from(rosters: Sequence[tuple[Member, ...]], roster: tuple[Member, ...]) -> tuple[tuple[Member, ...], ...]:
    """Those of some earlier rosters, the latest first, that are larger than this one and all after it: at most 31."""
    found: list[tuple[Member, ...]] = []
    for each in rosters:
        if len(each) > len(found[-1] if found else roster):
            found.append(each)
    return tuple(found)


def steps(last: int, first: int) -> Iterator[int]:
    """Places from the last one down to the first: one by one, then each twice as far apart as the one before."""
    place, step, count = last, 1, 0
    while place > first:
        yield place
        count += 1
        place, step = place - step, step if count < LOCATOR_RECENT else 2 * step
    yield first


class RoundPruned(LookupError):
    """That round cannot be read any more."""


class RoundLog(Sequence[DecidedRound]):
    """Rounds that follow each other from `start`. A place counts the rounds before it.

    What an archive cannot bring any more is forgotten, with all that was before it.

    Attributes:
        floor: the first place that is not forgotten.
        forks: places of the rounds that were decided by a FORK.
        refused: certificates that the archive held and that did not follow each other: they are cut off.
    """

    def __init__(self, start: Head, archive: Archive | None = None) -> None:
        """
        Args:
            archive: what it holds already is followed, its votes are not looked at; None: a new one, in memory.
        """
        self.start, self._archive = start, ListArchive() if archive is None else archive
        self.forks, self.floor = array("Q"), 0
        self._lineages = LineageIndex()
        self._lineages.append(start.key.lineage)
        self._anchors = array("Q", [0])  # place -> that of the lineage which the state there is measured from
        self._rosters = [_Roster(0, start.roster, start.former)]
        self._recent: list[DecidedRound] = []
        self.refused = self._restore()

    def _restore(self) -> int:
        held = len(self._archive)
        try:
            while len(self) < held:
                for certificate in self._decoded(len(self), PIECE):
                    if certificate.key != self._last.key:
                        raise ValueError("of another chain")
                    self._take(*_followed(self._last, certificate))
        except (RoundPruned, BadPayload, ValueError):
            self._archive.truncate(len(self))
            self.floor = 0
        return held - len(self)

    # -- looking ------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._lineages) - 1

    @property
    def _last(self) -> Head:
        return self._recent[-1].head if self._recent else self.start

    def place(self, lineage: bytes) -> int | None:
        """How many rounds there are up to this lineage; None if it is not here."""
        found = self._lineages.find(lineage)
        return None if found is None or found < self.floor else found

    def lineage(self, place: int) -> bytes:
        """What so many rounds lead to."""
        return self._lineages[place]

    def head(self, place: int) -> Head:
        """What so many rounds lead to, its state root unsettled.

        Raises:
            Forgotten: it cannot be told.
        """
        return self.read(place - 1, 1)[0].head if place else self.start

    def idle(self, place: int) -> int:
        """How many of the first so many rounds were no rounds of training: FORKs that took no mean over."""
        return sum(self._anchors[at + 1] != at + 1 for at in self.forks if at < place)

    def rosters(self, place: int) -> Iterator[tuple[Member, ...]]:
        """Those of the heads up to a place, the latest first, each that differs from the one after it."""
        return (each.members for each in reversed(self._rosters) if each.since <= place)

    def largest(self, place: int, stop: int) -> int:
        """Members of the largest roster of the heads after one place, up to another."""
        first = max(1, bisect_right(self._rosters, place + 1, key=lambda each: each.since))
        last = bisect_right(self._rosters, stop, key=lambda each: each.since)
        return max((len(each.members) for each in self._rosters[first - 1 : last]), default=0)

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
        """Lineages from the last one down, ever farther apart, down to the oldest."""
        return tuple(self.lineage(place) for place in steps(len(self), self.floor))

    def read(self, place: int, count: int) -> list[DecidedRound]:
        """So many rounds from this place on, fewer at the end.

        Raises:
            Forgotten: one of them is not to be had.
        """
        at_hand = len(self) - len(self._recent)
        end = min(place + count, len(self))
        found: list[DecidedRound] = []
        while (at := place + len(found)) < min(end, at_hand):
            decoded = self._decoded(at, min(end, at_hand) - at)
            found += [self._link(at + number, each) for number, each in enumerate(decoded)]
        return found + self._recent[max(place - at_hand, 0) : max(end - at_hand, 0)]

    def certificates(self, place: int, count: int) -> list[Certificate]:
        """Of the rounds from this place on; perhaps fewer than that, but at least one where there is one.

        Raises:
            Forgotten: the first of them is not to be had.
        """
        at_hand = len(self) - len(self._recent)
        if place < at_hand:
            return self._decoded(place, min(count, at_hand - place))
        return [link.certificate for link in self._recent[place - at_hand : place - at_hand + count]]

    def _decoded(self, place: int, count: int) -> list[Certificate]:
        """What the archive holds there, at least one certificate.

        Raises:
            Forgotten: the first of them is not to be had.
        """
        found: list[Certificate] = []
        try:
            for each in self._archive.read(place, min(count, PIECE)) if place + 1 >= self.floor else ():
                found.append(wire.expect(wire.decode(each), Certificate))
        except BadPayload:
            pass  # those before it are as good as ever
        if not found:
            raise self._forget(place)
        return found

    def _link(self, place: int, certificate: Certificate) -> DecidedRound:
        key = replace(self.start.key, lineage=self.lineage(place), round=self.start.key.round + place)
        try:
            link = follow(self._before(key, place), certificate)
        except (BadPayload, ValueError):
            raise self._forget(place) from None
        if link.lineage != self.lineage(place + 1):
            raise self._forget(place)
        return link

    def _before(self, key: RoundKey, place: int) -> Head:
        """What a round at this place extends, as far as that says what it leads to."""
        known = bisect_right(self._rosters, place, key=lambda each: each.since)
        roster, former = self._rosters[known - 1][1:] if known else ((), ())
        anchor = self._anchors[place]
        at = self.lineage(anchor) if anchor else self.start.anchor
        return Head(key, roster, UNSETTLED, at, former=former)

    def _forget(self, place: int) -> RoundPruned:
        self.floor = max(self.floor, place + 2)  # neither what it follows nor what it leads to can be told
        return RoundPruned(f"round {place} of {len(self)} cannot be read any more")

    # -- moving -------------------------------------------------------------------------------------------------------

    def append(self, link: DecidedRound, encoded: bytes | None = None) -> None:
        """Add the round after the last.

        Args:
            encoded: its certificate, where somebody has that already.
        """
        self._archive.extend([wire.encode(link.certificate) if encoded is None else encoded])
        self._take(link, link.record)

    def extend(self, links: Iterable[DecidedRound]) -> None:
        """Add the rounds after the last.

        Raises:
            Forgotten: some of them cannot be read any more; nothing has changed.
        """
        if isinstance(links, RoundLog):
            self.adopt(links, 0, len(links))
        else:
            for link in links:
                self.append(link)

    def adopt(self, other: RoundLog, start: int, stop: int) -> None:
        """Add what `other` has between two places, where this one ends at the first; no certificate is decoded for it.

        Raises:
            Forgotten: some of them cannot be read any more; nothing has changed.
        """
        before, end, forks = len(self), start, set(other.forks)
        last = other.read(max(start, stop - RECENT), min(RECENT, stop - start))
        while end < stop and (piece := other._archive.read(end, min(PIECE, stop - end))):
            self._archive.extend(piece)
            for at in range(end, end + len(piece)):
                self._note(other.lineage(at + 1), other._anchors[at + 1] == at + 1, at in forks)
            end += len(piece)
        if end < stop:
            self._shrink(before)
            raise other._forget(end)
        for each in other._rosters:
            if start < each.since <= stop:
                self._meet(before + each.since - start, each.members)
        self._recent = [*self._recent, *last][-RECENT:]

    def _take(self, link: DecidedRound, record: Record) -> None:
        self._note(link.lineage, record.averaged, record.kind == Kind.FORK)
        self._meet(len(self), link.head.roster)
        self._recent.append(link)
        if len(self._recent) > 2 * RECENT:
            del self._recent[:RECENT]

    def _note(self, lineage: bytes, is_anchor: bool, is_fork: bool) -> None:
        place = len(self)
        if is_fork:
            self.forks.append(place)
        self._anchors.append(place + 1 if is_anchor else self._anchors[place])
        self._lineages.append(lineage)

    def _meet(self, place: int, roster: tuple[Member, ...]) -> None:
        before = self._rosters[-1]
        if roster != before.members:
            known = {each: each for each in before.members}  # a member is held once, however many rosters it is in
            former = shrunk_from((before.members, *before.former), roster)
            self._rosters.append(_Roster(place, tuple(known.get(member, member) for member in roster), former))
            del self._rosters[:-MAX_ROSTERS]

    def cut(self, length: int) -> tuple[DecidedRound, ...]:
        """Give up all but the first so many; returns those that are given up, as far as they can be read.

        Raises:
            Forgotten: what they follow cannot be; nothing has changed.
        """
        floor, lost = self.floor, self._readable(length)
        self.floor = floor  # what could not be read is given up
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

    def _readable(self, place: int) -> tuple[DecidedRound, ...]:
        """What can be read of the rounds from there on."""
        while True:
            try:
                return tuple(self.read(place, len(self) - place))
            except RoundPruned:
                place = min(self.floor, len(self))

    def _at_hand(self, length: int) -> list[DecidedRound]:
        """Some of the last of the first so many rounds, decoded: where there are any, the last one has to be."""
        try:
            return self.read(max(0, length - RECENT), min(length, RECENT))
        except RoundPruned:
            return self.read(length - 1, 1)
