"""The chain of decided rounds as one peer sees it, and its head: what the next round extends. Pure.

A chain says nothing of whether a certificate is right: who adds one has judged it (`protocols.branches`), or has just
helped to decide it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from protocols import record as records
from protocols import wire
from protocols.base import Head, Member, RoundKey
from protocols.record import Record
from protocols.votes import Certificate

KEEP_CERTIFICATES = 4096
"""The oldest beyond these are forgotten. Whoever left our branch before them, newcomers among them, cannot be shown the
way by us any more, nor we by them: it needs a peer that keeps more."""
UNSETTLED = bytes(32)
"""State root of a head whose state nobody has vouched for yet."""

LOCATOR_RECENT = 8
"""So many lineages stand in a locator one by one; below them the steps double."""


def state_root(parameters_root: bytes, velocity_root: bytes, round_number: int) -> bytes:
    """One hash for the whole outer state: parameters, momentum and the round that comes next."""
    number = round_number.to_bytes(8, "big")
    return hashlib.sha256(b"starling state" + parameters_root + velocity_root + number).digest()


def genesis(run: bytes, scope: str, roster: tuple[Member, ...], root: bytes = UNSETTLED) -> Head:
    """The head of a chain without records.

    Args:
        run: hash of the manifest, 32 bytes.
        root: state root that the run starts from, 32 bytes.
    """
    lineage = records.genesis(run)
    return Head(RoundKey(run, scope, lineage, 0), roster, root, anchor=lineage)


@dataclass(frozen=True, slots=True)
class Link:
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


def follow(head: Head, certificate: Certificate) -> Link:
    """What a certificate leads to, whose votes are not looked at.

    Raises:
        BadPayload: it holds no record.
        ValueError: its record does not extend that head.
    """
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
    )
    return Link(certificate, after)


def certificate_in(head: Head, data: bytes) -> Certificate:
    """The certificate that an averager hands over, of the round after `head`.

    Raises:
        BadPayload: no certificate.
        ValueError: of another round.
    """
    certificate, key = wire.expect(wire.decode(data), Certificate), head.key
    if certificate.key != key:
        raise ValueError(f"certificate of round {certificate.key.round} does not extend the head at round {key.round}")
    return certificate


class Chain:
    """The head, and the rounds that led to it since the genesis, as far as they are kept.

    Attributes:
        head: its state root is this peer's own, as it was settled last; `UNSETTLED` before that.
    """

    def __init__(self, run: bytes, scope: str, roster: tuple[Member, ...], root: bytes = UNSETTLED) -> None:
        """A chain at its genesis; arguments as for `genesis`. Unsettled, the root is what the first record says."""
        self.head = self._oldest = genesis(run, scope, roster, root)
        self._links: list[Link] = []
        self._rounds = {self.head.key.lineage: 0}  # lineage -> the round that extends it

    def copy(self) -> Chain:
        """A chain of its own with the same rounds."""
        other = Chain.__new__(Chain)
        other.head, other._oldest = self.head, self._oldest
        other._links, other._rounds = self._links.copy(), self._rounds.copy()
        return other

    @property
    def records(self) -> tuple[bytes, ...]:
        """The encoded records that are kept, oldest first."""
        return tuple(link.certificate.record for link in self._links)

    # -- looking ------------------------------------------------------------------------------------------------------

    def __contains__(self, lineage: bytes) -> bool:
        return lineage in self._rounds

    def _place(self, lineage: bytes) -> int | None:
        """How many of the links that are kept come before this lineage's child."""
        number = self._rounds.get(lineage)
        return None if number is None else number - self._oldest.key.round

    def child(self, lineage: bytes) -> Link | None:
        """The round that extends this lineage, if we have it."""
        place = self._place(lineage)
        return self._links[place] if place is not None and place < len(self._links) else None

    def since(self, lineage: bytes, limit: int | None = None) -> tuple[Link, ...]:
        """The rounds after this lineage, oldest first, at most `limit`; none if it is not on this chain."""
        place = self._place(lineage)
        if place is None:
            return ()
        return tuple(self._links[place:] if limit is None else self._links[place : place + limit])

    def at(self, lineage: bytes) -> Head | None:
        """The head at a lineage of this chain; its state root as the certificates have it, not as we computed it."""
        place = self._place(lineage)
        if place is None:
            return None
        head = self._links[place - 1].head if place else self._oldest
        return replace(head, state_root=self._links[place].record.state_root) if place < len(self._links) else head

    def locator(self) -> tuple[bytes, ...]:
        """Lineages from the head down, ever farther apart, the last one the oldest kept: where do we part?"""
        found, place, step = [], len(self._links), 1
        while place > 0:
            found.append(self._links[place - 1].lineage)
            place -= step
            step = step if len(found) < LOCATOR_RECENT else 2 * step
        return (*found, self._oldest.key.lineage)

    def common(self, locator: Sequence[bytes]) -> bytes | None:
        """The first lineage of another peer's locator that is on this chain."""
        return next((lineage for lineage in locator if lineage in self), None)

    def members(self, limit: int) -> tuple[Member, ...]:
        """Who was in a roster, the latest first, one life of each peer, at most `limit`."""
        found: dict[str, Member] = {}
        for head in (*(link.head for link in reversed(self._links)), self._oldest):
            for member in head.roster:
                found.setdefault(member.peer, member)
            if len(found) >= limit:
                break
        return tuple(found.values())[:limit]

    # -- moving -------------------------------------------------------------------------------------------------------

    def extend(self, certificate: bytes) -> Record:
        """Move the head to a decided round, `wire.encode(certificate)`; its state root follows with `settle`.

        Raises:
            BadPayload: no certificate.
            ValueError: it does not extend the head: applying it would break the chain.
        """
        link = follow(self.head, certificate_in(self.head, certificate))
        self._append(link)
        self.head = link.head
        return link.record

    def settle(self, root: bytes) -> None:
        """The state that the head's record led to is computed, or the round in its root has changed (after a SKIP)."""
        self.head = replace(self.head, state_root=root)

    def switch(self, lineage: bytes, links: Sequence[Link]) -> tuple[Link, ...]:
        """Go over to another branch, which leaves this one at a lineage of it; the head's state is to be settled.

        Returns:
            The rounds that are given up, oldest first.

        Raises:
            ValueError: the lineage is not on this chain, or the links do not follow it; nothing has changed then.
        """
        place = self._place(lineage)
        parents = [lineage, *(link.lineage for link in links)]
        if place is None or any(link.certificate.key.lineage != parent for link, parent in zip(links, parents)):  # noqa: B905 - one parent more
            raise ValueError("a branch that does not leave this chain where it is said to")
        lost = self._links[place:]
        del self._links[place:]
        for link in lost:
            del self._rounds[link.lineage]
        for link in links:
            self._append(link)
        self.head = self._links[-1].head if self._links else self._oldest
        return tuple(lost)

    def _append(self, link: Link) -> None:
        self._links.append(link)
        self._rounds[link.lineage] = link.head.key.round
        if len(self._links) > KEEP_CERTIFICATES:
            forgotten = self._oldest.key.lineage
            self._oldest = self._links.pop(0).head
            del self._rounds[forgotten]
