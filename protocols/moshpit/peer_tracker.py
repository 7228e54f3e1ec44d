"""Where the peers of a swarm without a shared anchor stand, as each of them says: round, cell, how far it is. Pure.

A word of this replaces the sender's word before. Nothing is decided by it but this peer's own next step: where to sit,
when to stop training, whom to wait for, which round it is. Two who have heard different things meet in smaller groups.
"""

# ruff: noqa: RUF009 - a field's bound is its default

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from protocols.allreduce.plan import PATIENCE, call_after
from protocols.base import BadPayload, Deadline, Header, Member, PeerId, RoundKey
from protocols.butterfly.round_call import LEAVER_SECONDS
from protocols.moshpit.grid import MAX_AXES, MAX_PLACES, Cell, Grid, GridShape, line
from protocols.round_estimator import MOSHPIT_ROUND
from protocols.wire import MAX_SECONDS, Offer, digest, flag, many, one, peer_id, real, register, text, uint

TRAINING, WAITING, DONE = 0, 1, 2
"""Along an axis: not there yet; waiting for the others of the line; in a group, or without one for good."""
MAX_GONE = 64
"""Of so many of those who are out of sight it is kept what they said, and what they did to others."""
MAX_MISSED = 16
MAX_WITHHELD = 5
UNHEARD_SECONDS = 2.0
"""Who has been in sight for longer and said nothing is not counted: it fetches the state, or does something else."""


@dataclass(frozen=True, slots=True)
class PositionAnnouncement(Header):
    """Where its sender stands, told to everybody in sight when that changes.

    Attributes:
        number: counts what its sender says in this life.
        since, shape: the grid that it stands on.
        index: its cell, for so many axes as `holds` says: the coordinates of the others may change on the way.
        stage: along `axis`; before the first it is training.
        complete, leaving: as in `protocols.base.Work`.
        follows: the one by whom it lets itself be called; waiting only.
        offer: what it brings to its group, one; waiting only.
    """

    run: bytes = digest()
    scope: str = text(64)
    round: int = uint(1 << 40)
    sender: Member = one(Member)
    number: int = uint(1 << 40)
    since: int = uint(1 << 40)
    shape: tuple[int, ...] = many(uint(MAX_PLACES), MAX_AXES)
    index: tuple[int, ...] = many(uint(MAX_PLACES), MAX_AXES)
    holds: int = uint(MAX_AXES)
    axis: int = uint(MAX_AXES)
    stage: int = uint(DONE)
    complete: bool = flag()
    leaving: bool = flag()
    step_seconds: float = real(0, MAX_SECONDS)
    follows: str = peer_id()
    offer: tuple[Offer, ...] = many(one(Offer), 1)

    @property
    def grid(self) -> Grid:
        return Grid(self.since, self.shape)

    @property
    def progress(self) -> tuple[int, int]:
        return self.axis, self.stage

    @property
    def coming(self) -> RoundKey:
        """Of the group that it is in, or comes to next, where coordinates change on the way."""
        return self.key(self.holds - 1)

    def key(self, axis: int) -> RoundKey:
        """What the frames of its group along an axis are bound to."""
        return group_key(self.run, self.scope, self.round, self.shape, axis, self.index)


register(144, (PositionAnnouncement,))


def group_key(run: bytes, scope: str, round: int, shape: GridShape, axis: int, index: Cell) -> RoundKey:
    """What the frames of one group are bound to: its lineage names run, scope, round, shape, axis and line."""
    named = f"{scope}\n{round} {axis} {shape} {line(index, axis)}"
    return RoundKey(run, scope, hashlib.sha256(b"starling group" + run + named.encode()).digest(), round)


def check(here: PositionAnnouncement, peer: PeerId) -> None:
    """Refuse what no peer says of itself.

    Raises:
        BadPayload: it speaks for another, or stands on no grid, or brings an offer where it cannot.
    """
    axes = len(here.shape)
    if here.sender.peer != peer:
        raise BadPayload(f"says where {here.sender.peer} is")
    if not axes or any(places < 2 for places in here.shape) or math.prod(here.shape) > 1 << 20:
        raise BadPayload(f"stands on a grid of {here.shape}")
    cell = len(here.index) == axes and all(at < places for at, places in zip(here.index, here.shape, strict=True))
    if not cell or here.axis >= axes or not 0 < here.holds <= axes:
        raise BadPayload(f"stands at {here.index} of {here.shape}, axis {here.axis}")
    if (here.stage == WAITING) != bool(here.offer) or any(offer.member != here.sender for offer in here.offer):
        raise BadPayload("waits for a group without an offer of its own, or offers without waiting")


@dataclass(slots=True)
class LatestAnnouncement:
    """A peer's last word.

    Attributes:
        complete_at: when it was first known to have done its inner steps of that round; infinite: not yet.
    """

    here: PositionAnnouncement
    complete_at: float


@dataclass(slots=True)
class Lateness:
    """Attributes:
    seconds: how long after this peer it came to a group, the last time that it came.
    missed: how often it has not come since, though it was waited for.
    """

    seconds: float = 0.0
    missed: int = 0


@dataclass(slots=True)
class PeerReliability:
    """What is remembered of a peer in this life.

    Attributes:
        seen: since when it is in sight, or was.
        hurried: the round of ours that it has cut short because it left.
        kept: how often its part of a group has not come, though it was in sight, less how often it has come since.
        until: the round before which it is in no group of ours.
    """

    seen: float
    hurried: int | None = None
    kept: int = 0
    until: int = 0


class PeerTracker:
    """What the others said last, and how they did in groups.

    Attributes:
        sight: who is counted at all: the live members, and those that were found otherwise.
    """

    def __init__(self, me: Member) -> None:
        self.me = me
        self.sight: dict[PeerId, Member] = {}
        self._late: dict[PeerId, Lateness] = {}
        self._heard: dict[PeerId, LatestAnnouncement] = {}
        self._past: dict[Member, PeerReliability] = {}

    def take(self, here: PositionAnnouncement, now: float) -> bool:
        """A peer's word; False if it said something later already."""
        peer, known = here.sender.peer, self._heard.get(here.sender.peer)
        if known:
            last = known.here
            if (here.sender.incarnation, here.number) <= (last.sender.incarnation, last.number):
                return False
        was = known.complete_at if known and known.here.round == here.round else math.inf
        done = here.complete or here.stage != TRAINING
        self._heard[peer] = LatestAnnouncement(here, min(was, now) if done else math.inf)
        return True

    def look(self, live: Iterable[Member], found: Iterable[PeerId], now: float) -> None:
        """Who is in sight now; of the others some words are kept: nobody says the same again to who has lost sight of
        it for a moment."""
        before = set(self.sight.values())
        self.sight = {peer: self._life(peer) for peer in found} | {member.peer: member for member in live}
        self.sight.pop(self.me.peer, None)
        gone = [peer for peer in self._heard if peer not in self.sight]
        for peer in gone[: max(0, len(gone) - MAX_GONE)]:
            del self._heard[peer]
            self._late.pop(peer, None)
        here = set(self.sight.values())
        for member in here - before:
            self._past.setdefault(member, PeerReliability(now)).seen = now
        lost = [member for member in self._past if member not in here]
        for member in lost[: max(0, len(lost) - MAX_GONE)]:
            del self._past[member]

    def _life(self, peer: PeerId) -> Member:
        heard = self._heard.get(peer)
        return heard.here.sender if heard else Member(peer)

    def here(self, peer: PeerId) -> PositionAnnouncement | None:
        """A peer's last word, in the life in which it is in sight."""
        heard, member = self._heard.get(peer), self.sight.get(peer)
        return heard.here if heard and member and heard.here.sender == member else None

    def words(self) -> list[PositionAnnouncement]:
        """The last words of all in sight, in the order of their ids."""
        return [here for peer in sorted(self.sight) if (here := self.here(peer))]

    # -- what follows from it -----------------------------------------------------------------------------------------

    def present(self, round: int, now: float) -> list[PeerId]:
        """Who takes part in a round as far as can be told, this peer included: who is there or was in the one before,
        and who has only just come into sight."""
        found = [self.me.peer]
        for peer, member in self.sight.items():
            here = self.here(peer)
            new = now < self._past[member].seen + UNHEARD_SECONDS
            if (here and here.round + 1 >= round) or (not here and new):
                found.append(peer)
        return sorted(found)

    def ahead(self, round: int) -> int:
        """The round that it is: that of this peer, or the latest one that enough others have reached.

        Enough of those in sight, heard or not: where most have not spoken yet, who speaks first is not enough.
        """
        latest = MOSHPIT_ROUND.latest((here.round for here in self.words()), len(self.sight))
        return round if latest is None else max(round, latest)

    def leads(self, round: int) -> bool:
        """Whether this peer is in a round to which those behind will not jump: too few are there, it included."""
        rounds = [here.round for here in self.words()]
        return 1 + sum(each >= round for each in rounds) < MOSHPIT_ROUND.quorum(len(rounds), len(rounds))

    def due(
        self, mine: PositionAnnouncement, complete_at: float, began: float, worked: bool, now: float
    ) -> Deadline | None:
        """When to stop training: as a coordinator calls a round (`protocols.allreduce.plan.call_after`), each by its
        own view.

        Args:
            complete_at: when this peer had done its inner steps; infinite: not yet.
            began: when its round began.
            worked: whether it has done a step.
        """
        others = [self._heard[here.sender.peer] for here in self.words() if here.round >= mine.round]
        # A leaver in a later round than ours waits for nobody, and will be gone.
        leavers = [heard.here.sender for heard in others if heard.here.leaving and heard.here.round == mine.round]
        if mine.leaving or any([self._hurries(leaver, mine.round) for leaver in leavers]):
            return began if worked else began + LEAVER_SECONDS
        if self.leads(mine.round):  # by itself or nearly, after a split: the others have to come here round by round
            return None
        times = [complete_at, *(heard.complete_at for heard in others)]
        after = call_after([max(0.0, at - began) for at in times if at < math.inf], len(self.present(mine.round, now)))
        return None if after is None else began + after

    def _hurries(self, leaver: Member, round: int) -> bool:
        """Whether a round is cut short for its sake. Nobody leaves twice: who says so in every round would have each of
        them end with its first step."""
        past = self._past[leaver]
        past.hurried = round if past.hurried is None else past.hurried
        return past.hurried == round

    def line(self, mine: PositionAnnouncement, axis: int) -> dict[PeerId, PositionAnnouncement]:
        """Who may still come to our group along an axis, or is there; not this peer, nor who kept its part lately."""
        ours = line(mine.index, axis)
        return {
            here.sender.peer: here
            for here in self.words()
            if here.round == mine.round and here.holds > axis and here.progress <= (axis, WAITING)
            and here.shape == mine.shape and line(here.index, axis) == ours
            and self._past[here.sender].until <= mine.round
        }  # fmt: skip

    def kept(self, member: Member, round: int) -> None:
        """Its part of a group did not come. It is in no group of ours in the next round, and in twice as many each
        time: a single peer that lives and gives nothing would have all of its groups fail, for good."""
        if past := self._past.get(member):
            past.kept = min(past.kept + 1, MAX_WITHHELD)
            past.until = round + 1 + 2 ** (past.kept - 1)

    def gave(self, member: Member) -> None:
        """Its part of a group came."""
        if past := self._past.get(member):
            past.kept = max(0, past.kept - 1)

    def came(self, peer: PeerId, seconds: float) -> None:
        """It has come to a group that this peer is waiting in, or was, so long after it."""
        self._late[peer] = Lateness(seconds)

    def missed(self, peers: Iterable[PeerId]) -> None:
        """They were waited for, and did not come."""
        for peer in peers:
            late = self._late.setdefault(peer, Lateness())
            late.missed = min(late.missed + 1, MAX_MISSED)

    def patience_seconds(
        self, missing: Collection[PositionAnnouncement], spent_seconds: float, most_seconds: float
    ) -> float:
        """How long to wait for those who have not come to our group: half as long again as what lies before the group
        took here, as each was late the last time, or until its step has ended; half of that for each time in vain.

        Args:
            most_seconds: what no word of theirs can exceed.
        """
        longest = spent_seconds
        for here in missing:
            late = self._late.get(here.sender.peer, Lateness())
            step_seconds = here.step_seconds if here.progress == (0, TRAINING) else 0.0
            longest = max(longest, min(most_seconds, max(late.seconds, step_seconds)) / 2**late.missed)
        return PATIENCE * longest
