"""What each Moshpit peer last announced: its round, its cell, and how far it has come. No I/O.

Announcements decide only this peer's own next step: its cell, when it stops training, which peers it waits for, and its
round number. Peers that have received different announcements meet in smaller groups.
"""

# ruff: noqa: RUF009 - a field's bound is its default

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from protocols.allreduce.plan import PATIENCE, call_after
from protocols.base import BadPayload, Deadline, Header, Member, PeerId, RoundKey
from protocols.butterfly.call import LEAVER_SECONDS
from protocols.moshpit.grid import MAX_AXES, MAX_PLACES, Cell, Grid, GridShape, line
from protocols.peers.estimates import MOSHPIT_ROUND
from protocols.wire import MAX_SECONDS, Offer, digest, flag, list_of, one, peer_id, real, register, text, uint

TRAINING, WAITING, DONE = 0, 1, 2
"""Stages along an axis: has not come yet; waits for the rest of its line; is in a group, or goes without one."""
MAX_GONE = 64  # how many peers out of sight are remembered, with their announcements and their reliability
MAX_MISSED = 16
MAX_WITHHELD = 5
UNHEARD_SECONDS = 2.0
"""A peer in sight for longer without an announcement is not counted: it may still be fetching the state."""


@dataclass(frozen=True, slots=True)
class PositionAnnouncement(Header):
    """The sender's position, sent to all peers in sight whenever it changes."""

    run: bytes = digest()
    scope: str = text(64)
    round: int = uint(1 << 40)
    sender: Member = one(Member)
    number: int = uint(1 << 40)  # counts the announcements of this incarnation
    since: int = uint(1 << 40)
    shape: tuple[int, ...] = list_of(uint(MAX_PLACES), MAX_AXES)
    index: tuple[int, ...] = list_of(uint(MAX_PLACES), MAX_AXES)  # only the first `holds` coordinates are settled
    holds: int = uint(MAX_AXES)
    axis: int = uint(MAX_AXES)
    stage: int = uint(DONE)  # along `axis`; `TRAINING` on axis 0 means that it trains
    complete: bool = flag()
    leaving: bool = flag()
    step_seconds: float = real(0, MAX_SECONDS)
    follows: str = peer_id()  # the peer whose plan it accepts; this and `offer` only while it waits
    offer: tuple[Offer, ...] = list_of(one(Offer), 1)

    @property
    def grid(self) -> Grid:
        return Grid(self.since, self.shape)

    @property
    def progress(self) -> tuple[int, int]:
        return self.axis, self.stage

    @property
    def next_group_key(self) -> RoundKey:
        """Key of the group along the last settled axis: where coordinates change, its current or next group."""
        return self.key(self.holds - 1)

    def key(self, axis: int) -> RoundKey:
        return group_key(self.run, self.scope, self.round, self.shape, axis, self.index)


register(144, (PositionAnnouncement,))


def group_key(run: bytes, scope: str, round: int, shape: GridShape, axis: int, index: Cell) -> RoundKey:
    """Key that the frames of one group carry. Its lineage hashes run, scope, round, shape, axis and line."""
    named = f"{scope}\n{round} {axis} {shape} {line(index, axis)}"
    return RoundKey(run, scope, hashlib.sha256(b"starling group" + run + named.encode()).digest(), round)


def check(announcement: PositionAnnouncement, peer: PeerId) -> None:
    """Raise BadPayload unless an announcement is consistent and about its own sender."""
    axes, index, shape = len(announcement.shape), announcement.index, announcement.shape
    if announcement.sender.peer != peer:
        raise BadPayload(f"says where {announcement.sender.peer} is")
    if not axes or any(places < 2 for places in shape) or math.prod(shape) > 1 << 20:
        raise BadPayload(f"stands on a grid of {shape}")
    cell = len(index) == axes and all(at < places for at, places in zip(index, shape, strict=True))
    if not cell or announcement.axis >= axes or not 0 < announcement.holds <= axes:
        raise BadPayload(f"stands at {index} of {shape}, axis {announcement.axis}")
    offers = announcement.offer
    if (announcement.stage == WAITING) != bool(offers) or any(offer.member != announcement.sender for offer in offers):
        raise BadPayload("waits for a group without an offer of its own, or offers without waiting")


@dataclass(slots=True)
class LatestAnnouncement:
    announcement: PositionAnnouncement
    complete_at: float  # when this peer learned that the inner steps of that round were done; infinite: not yet
    late_seconds: float = 0.0  # how long after this peer it came to a group, the last time that it came
    missed: int = 0  # how often this peer has waited for it in vain since


@dataclass(slots=True)
class PeerReliability:
    """What is remembered of one incarnation of a peer."""

    seen: float  # when it last came into sight
    hurried: int | None = None  # the round of this peer that it cut short by leaving
    withheld: int = 0  # how often its part did not come although it was in sight, less how often it has come since
    until: int = 0  # the first round in which it may be in a group with this peer again


class PeerTracker:
    """The other peers' latest announcements, lateness and reliability. `sight` are the peers that count."""

    def __init__(self, me: Member) -> None:
        self.me = me
        self.sight: dict[PeerId, Member] = {}
        self._latest: dict[PeerId, LatestAnnouncement] = {}
        self._reliability: dict[Member, PeerReliability] = {}

    def take(self, announcement: PositionAnnouncement, now: float) -> bool:
        """Store an announcement. Returns False if a later one is known already."""
        peer, known = announcement.sender.peer, self._latest.get(announcement.sender.peer)
        if known:
            last = known.announcement
            if (announcement.sender.incarnation, announcement.number) <= (last.sender.incarnation, last.number):
                return False
        was = known.complete_at if known and known.announcement.round == announcement.round else math.inf
        done = announcement.complete or announcement.stage != TRAINING
        complete_at = min(was, now) if done else math.inf
        self._latest[peer] = (
            replace(known, announcement=announcement, complete_at=complete_at)
            if known
            else LatestAnnouncement(announcement, complete_at)
        )
        return True

    def set_sight(self, live: Iterable[Member], found: Iterable[PeerId], now: float) -> None:
        """Set the peers in sight. Others stay remembered, since a peer that was out of sight repeats nothing."""
        before = set(self.sight.values())
        self.sight = {peer: self._member_of(peer) for peer in found} | {member.peer: member for member in live}
        self.sight.pop(self.me.peer, None)
        gone = [peer for peer in self._latest if peer not in self.sight]
        for peer in gone[: max(0, len(gone) - MAX_GONE)]:
            del self._latest[peer]
        after = set(self.sight.values())
        for member in after - before:
            self._reliability.setdefault(member, PeerReliability(now)).seen = now
        lost = [member for member in self._reliability if member not in after]
        for member in lost[: max(0, len(lost) - MAX_GONE)]:
            del self._reliability[member]

    def _member_of(self, peer: PeerId) -> Member:
        heard = self._latest.get(peer)
        return heard.announcement.sender if heard else Member(peer)

    def announcement_of(self, peer: PeerId) -> PositionAnnouncement | None:
        """The latest announcement of the incarnation that is in sight; None if it has made none."""
        heard, member = self._latest.get(peer), self.sight.get(peer)
        return heard.announcement if heard and member and heard.announcement.sender == member else None

    def announcements(self) -> list[PositionAnnouncement]:
        return [latest for peer in sorted(self.sight) if (latest := self.announcement_of(peer))]

    # -- what follows from it -----------------------------------------------------------------------------------------

    def present(self, round: int, now: float) -> list[PeerId]:
        """The peers, this one included, probably in a round: also those of the one before, or just in sight."""
        found = [self.me.peer]
        for peer, member in self.sight.items():
            announcement = self.announcement_of(peer)
            new = now < self._reliability[member].seen + UNHEARD_SECONDS
            if (announcement and announcement.round + 1 >= round) or (not announcement and new):
                found.append(peer)
        return sorted(found)

    def ahead(self, round: int) -> int:
        """The current round: this peer's, or the latest one that enough others have reached, if that is later.

        "Enough" counts all peers in sight, so the first few announcements cannot decide it alone.
        """
        latest = MOSHPIT_ROUND.latest((each.round for each in self.announcements()), len(self.sight))
        return round if latest is None else max(round, latest)

    def leads(self, round: int) -> bool:
        """Whether so few peers are in this peer's round or a later one that those behind will not jump to it."""
        rounds = [each.round for each in self.announcements()]
        return 1 + sum(number >= round for number in rounds) < MOSHPIT_ROUND.quorum(len(rounds), len(rounds))

    def due(
        self, mine: PositionAnnouncement, complete_at: float, began: float, worked: bool, now: float
    ) -> Deadline | None:
        """When to stop training; None: not known yet. `complete_at` is infinite until this peer's inner steps are done.

        Each peer applies a coordinator's rule (`protocols.allreduce.plan.call_after`) to its own view.
        """
        others = [self._latest[each.sender.peer] for each in self.announcements() if each.round >= mine.round]
        # A leaver in a later round does not wait for this peer.
        leaving = [each.announcement for each in others if each.announcement.leaving]
        leavers = [each.sender for each in leaving if each.round == mine.round]
        if mine.leaving or any([self._hurries(leaver, mine.round) for leaver in leavers]):
            return began if worked else began + LEAVER_SECONDS
        if self.leads(mine.round):  # (nearly) alone after a split: the others have to catch up round by round
            return None
        times = [complete_at, *(heard.complete_at for heard in others)]
        after = call_after([max(0.0, at - began) for at in times if at < math.inf], len(self.present(mine.round, now)))
        return None if after is None else began + after

    def _hurries(self, leaver: Member, round: int) -> bool:
        """Whether a leaver cuts this round short. Each incarnation may do so for one round only.

        Otherwise a peer that announced its leaving in every round would end each of them after its first step.
        """
        reliability = self._reliability[leaver]
        reliability.hurried = round if reliability.hurried is None else reliability.hurried
        return reliability.hurried == round

    def line(self, mine: PositionAnnouncement, axis: int) -> dict[PeerId, PositionAnnouncement]:
        """The others in this peer's group along an axis, or that may still come, if they do not withhold parts."""
        ours = line(mine.index, axis)
        return {
            each.sender.peer: each
            for each in self.announcements()
            if each.round == mine.round and each.holds > axis and each.progress <= (axis, WAITING)
            and each.shape == mine.shape and line(each.index, axis) == ours
            and self._reliability[each.sender].until <= mine.round
        }  # fmt: skip

    def withheld(self, member: Member, round: int) -> None:
        """Note that a member's part did not come, and keep it out of this peer's groups.

        It is left out for one round, then for twice as many each time. Otherwise a single live peer that sends nothing
        would make all of its groups fail for good.
        """
        if reliability := self._reliability.get(member):
            reliability.withheld = min(reliability.withheld + 1, MAX_WITHHELD)
            reliability.until = round + 1 + 2 ** (reliability.withheld - 1)

    def delivered(self, member: Member) -> None:
        if reliability := self._reliability.get(member):
            reliability.withheld = max(0, reliability.withheld - 1)

    def came(self, peer: PeerId, seconds: float) -> None:
        """Note that a peer came to this peer's group `seconds` after this peer."""
        if heard := self._latest.get(peer):
            heard.late_seconds, heard.missed = seconds, 0

    def missed(self, peers: Iterable[PeerId]) -> None:
        for heard in [self._latest[peer] for peer in peers if peer in self._latest]:
            heard.missed = min(heard.missed + 1, MAX_MISSED)

    def patience_seconds(
        self, missing: Collection[PositionAnnouncement], spent_seconds: float, most_seconds: float
    ) -> float:
        """How long to wait for the peers that have not come to the group: `PATIENCE` times the longest of

        - the time that the work before the group took at this peer,
        - for each missing peer, its last lateness or the length of its step, at most `most_seconds` and halved for each
          wait in vain.
        """
        longest = spent_seconds
        for announcement in missing:
            heard = self._latest[announcement.sender.peer]
            step_seconds = announcement.step_seconds if announcement.progress == (0, TRAINING) else 0.0
            longest = max(longest, min(most_seconds, max(heard.late_seconds, step_seconds)) / 2**heard.missed)
        return PATIENCE * longest
