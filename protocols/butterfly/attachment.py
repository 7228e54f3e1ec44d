"""Places in clusters: what an associate asks of voters, a voter's book of its places, an associate's search. Pure.

A voter has a place for up to 31 associates in its own cluster, and stands by for associates of other leads: it tells
them what was decided if their lead is lost. An associate asks the first two voters of its order at once
(`protocols.butterfly.clusters`), joins the emptier cluster, and names the other voter as its standby. It asks anew when
its lead is lost, refuses or leaves the roster, and at the end of its epoch.

Times are passed in, and what is to be sent is returned: `protocols.butterfly.attaching` sends it.
"""

# ruff: noqa: RUF009 - a field's bound is its default

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from protocols.allreduce.clustered_messages import MAX_CLUSTER
from protocols.base import Deadline, Header, Member, PeerId, RoundKey
from protocols.butterfly import clusters
from protocols.butterfly.clusters import CLUSTER_ROOM, MAX_RESTING
from protocols.peers.estimates import RecentDict
from protocols.wire import flag, one, peer_id, register, uint

MAX_STANDBY = 2 * CLUSTER_ROOM  # associates of other leads that a voter stands by for
MAX_MET = 2048  # peers of which a voter remembers when it met them
GRACE_ROUNDS = 2  # a place outlives its epoch by so many rounds: the associate asks anew when it begins the next one
RETRY_SECONDS, RETRY_LIMIT_SECONDS = 1.0, 30.0
"""Pause after all voters have refused. It doubles each time."""
IDLE_ROUNDS = 4
"""A place ends if its associate offers nothing for so many rounds: it may have moved, and its word been lost."""
MEETING_ROUNDS = 4
"""A peer agrees to have met the voters so many rounds later: a lying voter cannot put it off for long."""
LEFT_OUT_ROUNDS = 2
"""A peer attaches while the roster is not full, too, after so many records that did not admit it."""

UNCOUNTED_ROUNDS = 3
"""Rounds in a row in which most of a peer's own work did not count. Then an associate leaves its lead, and a lead bars
the associates that aggregated its work.
"""
BARRED_ROUNDS = 64
"""A lead gives an associate that it has barred no place before this many rounds have passed."""

LineageOf = Callable[[int], bytes | None]
"""Round -> the lineage that it extends on this peer's branch; None if this peer does not know it."""


@dataclass(frozen=True, slots=True)
class Attach(Header):
    """Asks a voter for a place. `lead` is the receiver if the place is in its cluster, and another voter if the
    receiver is to stand by for an associate of that one; empty if the sender gives its place up.
    """

    key: RoundKey = one(RoundKey)  # of the round that the sender is in
    sender: Member = one(Member)
    lead: PeerId = peer_id()
    known_since: int = uint(1 << 40)  # the round in which the sender met the voters, as `clusters.seed_round` takes it
    rests: bool = flag()


@dataclass(frozen=True, slots=True)
class AttachReply(Header):
    """The answer. A lead sends it unasked, not `accepted`, to a peer that offers work and has no place with it."""

    key: RoundKey = one(RoundKey)
    accepted: bool = flag()
    fill: int = uint(MAX_CLUSTER)  # associates of the sender's cluster
    known_since: int = uint(1 << 40)  # the earliest that the sender believes


register(226, (Attach, AttachReply))


@dataclass(frozen=True, slots=True)
class _Place:
    member: Member
    lead: PeerId  # empty in the voter's own cluster
    seed: int
    until: int  # the first round without it
    rests: bool
    used: int  # the last round in which its associate offered anything


class ClusterBook:
    """A voter's places: its associates, and the associates of other leads for which it stands by."""

    def __init__(self, me: Member) -> None:
        self.me = me
        self._key: RoundKey | None = None  # None until this peer votes
        self._voters: frozenset[PeerId] = frozenset()
        self._places: dict[PeerId, _Place] = {}
        # A peer that was here when this voter began may have met the voters at any time.
        self._met: RecentDict[PeerId, int] = RecentDict(MAX_MET)
        self._began = math.inf
        self._uncounted = 0  # rounds in a row
        self._suspects: set[PeerId] = set()  # they aggregated this voter's work in each of these
        self._barred: RecentDict[PeerId, int] = RecentDict(MAX_MET)  # the first round in which a place is given again

    def begin(self, key: RoundKey, roster: Collection[Member], met: Iterable[PeerId]) -> None:
        """Begin a round. Places end with their epoch, and when the associate, its lead or this voter changes sides.
        `met`: see `Members`.
        """
        self._began = min(self._began, key.round)
        self.meet(met, key.round)
        self._key = key if self.me in roster else None
        self._voters = frozenset(member.peer for member in roster)
        self._places = {peer: place for peer, place in self._places.items() if self._stays(peer, place)}

    def _stays(self, peer: PeerId, place: _Place) -> bool:
        if self._key is None or self._key.round >= place.until or peer in self._voters:
            return False
        return place.lead in self._voters if place.lead else self._key.round <= place.used + IDLE_ROUNDS

    def meet(self, met: Iterable[PeerId], round: int) -> None:
        for peer in met:
            self._met.put_newest(peer, lambda: round)

    def lose(self, live: Collection[Member]) -> bool:
        """Free the places of peers of which no such incarnation is live. Returns whether there were any."""
        gone = [peer for peer, place in self._places.items() if place.member not in live]
        for peer in gone:
            del self._places[peer]
        return bool(gone)

    def associates(self) -> tuple[Member, ...]:
        return tuple(sorted(place.member for place in self._places.values() if not place.lead))

    def stands_by(self) -> dict[Member, PeerId]:
        """The associates of other leads for which this voter stands by, and these leads."""
        return {place.member: place.lead for place in self._places.values() if place.lead}

    def offered(self, member: Member) -> bool:
        """Note that an associate offers something. Returns whether it has a place in this voter's cluster."""
        place = self._places.get(member.peer)
        if place is None or place.member != member or place.lead or self._key is None:
            return False
        self._places[member.peer] = replace(place, used=self._key.round)
        return True

    def count(self, counted: bool, aggregators: Collection[PeerId]) -> None:
        """Note whether this voter's own work counted in a round, and which peers aggregated it. After
        `UNCOUNTED_ROUNDS` without it, bar those that did so in all of them, also one that has given up its place.
        """
        self._suspects = self._suspects & {*aggregators} if self._uncounted else {*aggregators}
        self._uncounted = 0 if counted else self._uncounted + 1
        if self._key is None or self._uncounted < UNCOUNTED_ROUNDS:
            return
        self._uncounted = 0
        for peer in self._suspects:
            self._barred[peer] = self._key.round + BARRED_ROUNDS
            if (place := self._places.get(peer)) and not place.lead:
                del self._places[peer]

    def take(self, attach: Attach, lineage_of: LineageOf) -> AttachReply:
        """Give a place, take one back, or refuse. The stream's end has been checked to be the sender.

        A peer that is refused keeps the place that it has from its last epoch, until that ends.
        """
        peer = attach.sender.peer
        known = self._places.pop(peer, None)
        place = self._place(attach, known, lineage_of) if attach.lead else None
        if place:
            self._places[peer] = place
        elif known and attach.lead and (known.member, known.rests) == (attach.sender, attach.rests):
            self._places[peer] = known
        return self.reply(attach.key, peer, place is not None)

    def reply(self, key: RoundKey, peer: PeerId, accepted: bool) -> AttachReply:
        met = self._met.get(peer, key.round)
        return AttachReply(key, accepted, len(self.associates()), 0 if met <= self._began else met)

    def _place(self, attach: Attach, known: _Place | None, lineage_of: LineageOf) -> _Place | None:
        """The place that a peer gets; None if there is none for it. `known`: the one that it had."""
        key, member, here = attach.key, attach.sender, self._key
        if here is None or not self._is_near(key, lineage_of) or member.peer in self._voters:
            return None
        if attach.lead == self.me.peer and here.round < self._barred.get(member.peer, 0):
            return None
        met = self._met.put_newest(member.peer, lambda: here.round)
        seed = clusters.seed_round(member.peer, key.round, attach.known_since)
        if seed is None or not (seed > met or met <= self._began):
            return None
        lead = "" if attach.lead == self.me.peer else attach.lead
        until = clusters.epoch_end(member.peer, key.round) + GRACE_ROUNDS
        place = _Place(member, lead, seed, until, attach.rests, here.round)
        is_renewed = known is not None and (known.lead, known.seed) == (lead, seed)
        return place if self._has_room(place, is_renewed, lineage_of) else None

    def _is_near(self, key: RoundKey, lineage_of: LineageOf) -> bool:
        """Whether a peer in this round is on this voter's branch, as far as it knows, and at most a round away."""
        assert self._key is not None
        ahead = key.round - self._key.round
        return ahead == 1 or (ahead in (0, -1) and lineage_of(key.round) == key.lineage)

    def _has_room(self, place: _Place, is_renewed: bool, lineage_of: LineageOf) -> bool:
        if place.lead:
            return place.lead in self._voters and len(self.stands_by()) < MAX_STANDBY
        mine = [each for each in self._places.values() if not each.lead]
        resting = sum(each.rests for each in mine) if place.rests else None
        if is_renewed:  # it was judged by its order before
            return resting is None or resting < MAX_RESTING
        lineage = lineage_of(place.seed)
        order = clusters.lead_order(lineage, place.member.peer, self._voters) if lineage else ()
        return clusters.takes(self.me.peer, order, len(mine), resting)


@dataclass(frozen=True, slots=True)
class PlaceRequest:
    """Ask a voter for a place with this lead; tell it that the place is given up if there is none."""

    voter: PeerId
    lead: PeerId


class LeadSearch:
    """An associate's search for its lead and its standby. While it asks for another lead, it keeps the one it has."""

    def __init__(self, me: Member) -> None:
        self.lead: Member | None = None
        self.standby: Member | None = None
        # the round in which this peer met the voters, as it claims; the one in which it first asked; as voters say
        self.known_since = self._entered = self._met_by = -1
        self.me = me
        self._round, self._left_out = -1, 0
        self._seed: int | None = None  # of the order; None: this peer does not attach
        self._order: tuple[PeerId, ...] = ()
        self._seeks = False  # a lead, for the order that it has now
        self._until = 0  # the first round without the lead's place
        self._uncounted = 0  # rounds in a row
        self._asked: dict[PlaceRequest, None] = {}  # not yet answered
        self._willing: dict[Member, int] = {}  # voters that gave a place in this search, and their fills
        self._refused: set[PeerId] = set()
        self._slow: set[PeerId] = set()  # a round ended before their answer
        self._given_up: list[PeerId] = []  # voters whose places this peer needs no more
        self._seen: frozenset[Member] = frozenset()
        self._pause_seconds, self._not_before = RETRY_SECONDS, 0.0

    # -- events -------------------------------------------------------------------------------------------------------

    def begin(self, key: RoundKey, roster: Sequence[Member], full: int, lineage_of: LineageOf) -> None:
        """Begin a round, or another attempt at it. `full`: size of a roster that admits nobody. What was asked and not
        answered in the last one is asked again, after the other voters: rounds may be shorter than the time for it.
        """
        self._slow |= {ask.voter for ask in self._asked}
        self._given_up += [ask.voter for ask in self._asked]
        self._asked.clear()
        if self._entered < 0:
            self.known_since = self._entered = key.round
        if self.lead is None and key.round > self._round:  # another order: not while this peer asks by the present one
            self.known_since = max(self.known_since, self._met_by)
        if key.round > self._round:
            self._left_out = 0 if self.me in roster else self._left_out + 1
        self._round, voters = key.round, {member.peer for member in roster}
        attaches = len(roster) >= full or self._left_out > LEFT_OUT_ROUNDS
        if self.me.peer in voters or not (attaches or self.lead):
            return self._stop()
        for held in (self.lead, self.standby):
            if held and held not in roster:
                self._drop(held)
        if self.lead and key.round >= self._until:
            self._drop(self.lead)
        seed = clusters.seed_round(self.me.peer, key.round, self.known_since)
        lineage = lineage_of(seed) if seed is not None else None
        if lineage is None:
            return
        order = clusters.lead_order(lineage, self.me.peer, voters)
        if (seed, order) != (self._seed, self._order):
            self._restart(seed, order)

    def answered(self, ask: PlaceRequest, voter: Member, reply: AttachReply) -> None:
        """Take a voter's answer. Each incarnation has its own places: `voter` is the one that was live when asked."""
        is_due = ask in self._asked
        self._asked.pop(ask, None)
        self._slow.discard(ask.voter)
        if not reply.accepted:
            self._hear_refusal(ask, reply)
        elif is_due and ask.lead == ask.voter and self._seeks:
            self._willing[voter] = reply.fill
        elif is_due and self.lead and ask.lead == self.lead.peer:
            self.standby = voter
        else:  # of an earlier search
            self._given_up.append(voter.peer)
        self._choose()

    def failed(self, ask: PlaceRequest) -> None:
        """A voter could not be asked, or did not answer in time. It may have given a place all the same."""
        if ask in self._asked:
            del self._asked[ask]
            self._refused.add(ask.voter)
            self._given_up.append(ask.voter)
            self._choose()

    def refused_by(self, peer: PeerId) -> None:
        """A voter says unasked that this peer has no place in its cluster."""
        if self.lead and self.lead.peer == peer:
            self._drop(self.lead)

    def count(self, counted: bool) -> None:
        """Note whether most of this peer's work counted in a round. A lead may be alive and tell it nothing, or lie."""
        self._uncounted = 0 if counted else self._uncounted + 1
        if self.lead and self._uncounted >= UNCOUNTED_ROUNDS:
            self._uncounted = 0
            self._drop(self.lead)

    def see(self, live: Collection[Member]) -> bool:
        """Look for another lead or standby if one is not live any more, and without a pause if a voter has come.

        Returns whether anything changed.
        """
        gone = [held for held in (self.lead, self.standby) if held and held not in live]
        for held in gone:
            self._drop(held)
        came = {member.peer for member in live if member not in self._seen and member.peer in self._order}
        self._seen = frozenset(live)
        if came and self._lacks():
            self._pause_seconds, self._not_before = RETRY_SECONDS, 0.0
        return bool(gone or came)

    # -- what to do ---------------------------------------------------------------------------------------------------

    def due(self, now: float) -> list[PlaceRequest]:
        """What to ask now. Each is to be `answered`, or `failed`, unless it gives a place up."""
        asks: list[PlaceRequest] = []
        if self._lacks() and not self._asked and now >= self._not_before:
            asks = [
                PlaceRequest(voter, self.lead.peer if self.lead and not self._seeks else voter)
                for voter in self._next()
            ]
            self._asked = dict.fromkeys(asks)
            if not asks:  # all have refused
                self._refused.clear()
                self._not_before = now + self._pause_seconds
                self._pause_seconds = min(2 * self._pause_seconds, RETRY_LIMIT_SECONDS)
        kept = {*self._held(), *(ask.voter for ask in self._asked)}  # what is asked replaces a place
        asks += [PlaceRequest(voter, "") for voter in dict.fromkeys(self._given_up) if voter not in kept]
        self._given_up.clear()
        return asks

    def wakes_at(self) -> Deadline:
        """When to look again for what is due, if nothing happens before; never if no voter is to be asked."""
        return self._not_before if self._lacks() and not self._asked else math.inf

    def wanted(self) -> tuple[PeerId, ...]:
        """The voters that this peer has to see: its lead and its standby, and those that it asks next."""
        following = self._next() if self._lacks() else ()
        return tuple(dict.fromkeys((*self._held(), *(ask.voter for ask in self._asked), *following)))

    # -- its state ----------------------------------------------------------------------------------------------------

    def _held(self) -> tuple[PeerId, ...]:
        return tuple(held.peer for held in (self.lead, self.standby) if held)

    def _lacks(self) -> bool:
        return self._seed is not None and (self._seeks or not self.standby)

    def _next(self) -> tuple[PeerId, ...]:
        """The voters to ask next: for a lead by the order's rule, for a standby one after the other."""
        return self._first_but(self._refused | self._slow) or self._first_but(self._refused)

    def _first_but(self, others: Collection[PeerId]) -> tuple[PeerId, ...]:
        if self._seeks or self.lead is None:
            return clusters.next_leads(self._order, others)
        return tuple(each for each in self._order if each not in (*others, self.lead.peer))[:1]

    def _restart(self, seed: int | None, order: tuple[PeerId, ...]) -> None:
        """Search anew, by another order: an epoch has begun, or the roster has changed.

        If only the roster has changed, this peer stays with its lead.
        """
        is_new = seed != self._seed
        self._given_up += [ask.voter for ask in self._asked] + [member.peer for member in self._willing]
        self._asked, self._willing, self._refused, self._slow = {}, {}, set(), set()
        self._seed, self._order = seed, order
        self._seeks = is_new or self.lead is None
        self._pause_seconds, self._not_before = RETRY_SECONDS, 0.0

    def _stop(self) -> None:
        self._given_up += self._held()
        self.lead = self.standby = None
        self._restart(None, ())
        self._seeks = False

    def _drop(self, held: Member) -> None:
        """Do without a lead or standby. Its place is given up, in case it is still there."""
        self._refused.add(held.peer)
        self._given_up.append(held.peer)
        if held == self.lead:
            self.lead, self._seeks = None, True
            self._pause_seconds, self._not_before = RETRY_SECONDS, 0.0  # of a search for a standby
        if held == self.standby:
            self.standby = None

    def _hear_refusal(self, ask: PlaceRequest, reply: AttachReply) -> None:
        self._refused.add(ask.voter)
        if reply.known_since <= min(self._round, self._entered + MEETING_ROUNDS):
            self._met_by = max(self._met_by, reply.known_since)

    def _choose(self) -> None:
        """Join the emptiest cluster of those that have a place, once all that were asked have answered."""
        if self._asked or not self._willing:
            return
        fills = {member.peer: fill for member, fill in self._willing.items()}
        chosen = clusters.emptiest(fills, self._order)
        before = self._held()
        self.lead = next(member for member in self._willing if member.peer == chosen)
        self.standby = None
        self._until = clusters.epoch_end(self.me.peer, self._round) + GRACE_ROUNDS
        self._given_up += [peer for peer in (*before, *fills) if peer != chosen]
        self._seeks, self._willing, self._refused, self._uncounted = False, {}, set(), 0
        self._pause_seconds, self._not_before = RETRY_SECONDS, 0.0
