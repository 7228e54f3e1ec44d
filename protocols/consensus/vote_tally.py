"""The votes on the record that extends a lineage: which members vote, on which records, and what decides. Pure.

The members of a roster vote, each in the incarnation that the roster names. A later incarnation, its successor, has no
vote, because it does not remember what the member promised. But the earlier one is certainly over, so successors may
FORK with other successors. A roster shrinks as members leave, and the last of them may be lost for good. A majority of
one of the larger rosters before it may FORK, successors included, if they outnumber the members that they replace. If
all members of a roster were removed from the run for good, any of the members before it may.

Signatures of votes are checked here and nowhere else. `Signer.verify` is a function of its arguments: the tally is
pure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from protocols.base import BadPayload, Member, PeerId, RoundKey, Signer
from protocols.consensus import record as records
from protocols.consensus.messages import Certificate, MeanDecided, Signed
from protocols.consensus.record import Kind, Record
from protocols.wire import MAX_ROSTER, canonical_bytes

SMALL_ROSTER = 4
"""One record may admit members up to this size: the founder and the first joiners are a roster after one round."""
OBSERVER = 1 << 40
"""Incarnation under which a peer observes a vote in which it may not take part. No real incarnation is as high."""
MAX_DECODED = 8  # Records of one vote that stay decoded. Honest members propose one, or one a ballot.
MAX_TALLIES = 1 << 10
"""Number of (ballot, record) pairs whose votes are kept. Beyond it, those of the lowest ballot are dropped."""


def majority(members: int, liars: bool = False) -> int:
    """More than two thirds if voters may be `liars`."""
    return 2 * members // 3 + 1 if liars else members // 2 + 1


def max_admitted(members: int) -> int:
    return max(1, members // 2, SMALL_ROSTER - members)


def min_retained(members: int, quorum: int) -> int:
    """Least number of members to keep so that one of them is in every quorum, and holds what was decided."""
    return members - quorum + 1


@dataclass(frozen=True, slots=True)
class Value:
    """A record in a ballot: encoded, its hash, and decoded."""

    ballot: int
    data: bytes
    digest: bytes
    record: Record

    @property
    def is_fork(self) -> bool:
        return self.record.kind == Kind.FORK


class VoteTally:
    """The votes of one roster on the record that extends `key.lineage`; `former` as in `Head`.

    `quorum` is the number of votes that decide, as a function of the roster's size; None means `majority`. At least
    `fork_peers` members may fork; 0 forbids forks.
    """

    def __init__(
        self,
        key: RoundKey,
        roster: Sequence[Member],
        signer: Signer,
        quorum: Callable[[int], int] | None = None,
        fork_peers: int = 1,
        former: Sequence[Sequence[Member]] = (),
    ) -> None:
        self.key, self.roster, self.signer, self.fork_peers = key, tuple(roster), signer, fork_peers
        self._former, self._quorum = former, quorum or majority
        self.removed: Callable[[PeerId], bool] = lambda peer: False  # as in `Host`
        self.most_voters = MAX_ROSTER  # `Settings.voters`
        self.quorum = self._quorum(len(self.roster))
        self._signed = b"starling accept" + canonical_bytes(key)
        self._order = records.coordinators(key.lineage, self.roster)
        self._incarnations = {member.peer: member.incarnation for member in self.roster}
        self._votes: dict[tuple[int, bytes], dict[Member, bytes]] = {}
        self._decoded: dict[bytes, tuple[bytes, Record]] = {}  # record -> its hash, and decoded

    def counts(self, member: Member) -> bool:
        return member in self.roster

    def is_successor(self, member: Member) -> bool:
        return self._incarnations.get(member.peer, OBSERVER) < member.incarnation < OBSERVER

    def was_member(self, member: Member) -> bool:
        """Whether this is a former member, and its peer is in the roster in no incarnation."""
        known = [each.incarnation for some in self._former for each in some if each.peer == member.peer]
        return member.peer not in self._incarnations and bool(known) and min(known) <= member.incarnation < OBSERVER

    def forks_only(self, member: Member) -> bool:
        return self.is_successor(member) or self.was_member(member)

    def coordinator(self, ballot: int) -> PeerId:
        return self._order[ballot % len(self._order)]

    def owns(self, ballot: int, peer: PeerId) -> bool:
        """Whether a peer coordinates a ballot of the roster, or one in which former members fork."""
        if peer == self.coordinator(ballot) or peer in self._incarnations:
            return peer == self.coordinator(ballot)
        former = records.coordinators(self.key.lineage, sorted({each for some in self._former for each in some}))
        gone = [each for each in dict.fromkeys(former) if each not in self._incarnations]
        return bool(gone) and peer == gone[ballot % len(gone)]

    def first(self, members: Sequence[Member]) -> PeerId:
        return records.coordinators(self.key.lineage, members)[0]

    def value(self, ballot: int, data: bytes) -> Value | None:
        """The record in these bytes, decoded once while it is known; None if it may not be put to the vote."""
        if data not in self._decoded:
            try:
                record = records.decode(data)
            except BadPayload:
                return None
            if not self._allows(record):
                return None
            while len(self._decoded) >= MAX_DECODED:
                del self._decoded[next(iter(self._decoded))]
            self._decoded[data] = records.lineage(data), record
        return Value(ballot, data, *self._decoded[data])

    def _allows(self, record: Record) -> bool:
        """Whether a record extends this lineage, and its next roster keeps the rules for admissions or for forks."""
        members = len(record.roster)
        if (record.parent, record.round) != (self.key.lineage, self.key.round):
            return False
        if not 0 < members <= self.most_voters or members != len({member.peer for member in record.roster}):
            return False
        if record.clusters and len(record.clusters) != len(record.peers):
            return False
        admitted = sum(not self.counts(member) for member in record.roster)
        if record.kind == Kind.FORK:
            return self.may_fork(record.roster)
        return admitted <= max_admitted(len(self.roster)) and members > admitted

    def may_fork(self, left: Sequence[Member]) -> bool:
        """Whether these members may continue without the others. They must be at least `fork_peers`, and one of:

        - members of the roster that are too few to decide;
        - successors; those of a whole roster are enough even if it had fewer than `fork_peers` members;
        - successors and former members that are a majority of a former roster and outnumber the present one;
        - former members, if the whole roster was removed. They may be removed later, and their fork still stands.
        """
        if left and all(map(self.is_successor, left)):
            return self.fork_peers > 0 and min(self.fork_peers, len(self.roster)) <= len(left)
        if left and all(map(self.forks_only, left)):
            entitled = self.is_former_majority(left) or (self._is_removed() and all(map(self.was_member, left)))
            return 0 < self.fork_peers <= len(left) and entitled
        return all(map(self.counts, left)) and 0 < self.fork_peers <= len(left) < self.quorum

    def _is_removed(self) -> bool:
        """Whether all members were removed, so that none of them comes back."""
        return all(self.removed(member.peer) for member in self.roster)

    def is_former_majority(self, left: Sequence[Member]) -> bool:
        """Whether these members may replace the roster because of their number."""
        return any(self._majority_of(each, left) for each in self._former)

    def former_members(self, here: Collection[Member]) -> tuple[Member, ...]:
        """Those of `here` that may replace the roster: all former members if it was removed. Else those that are a
        majority of a former roster: the latest one that has a majority. Else none. Never more than a roster holds.
        """
        if self._is_removed():
            staying = sorted(each for each in here if self.was_member(each) and not self.removed(each.peer))
            return tuple(staying[: self.most_voters])
        for each in self._former:
            peers = {member.peer for member in each}
            left = tuple(sorted(member for member in here if member.peer in peers and self.forks_only(member)))
            if self._majority_of(each, left):
                return left
        return ()

    def _majority_of(self, roster: Sequence[Member], left: Sequence[Member]) -> bool:
        """Whether `left` is a majority of a former roster, and outnumbers the members that it would replace."""
        within = {member.peer for member in left} <= {member.peer for member in roster}
        return within and len(left) >= self._quorum(len(roster)) and len(left) > len(self.roster)

    def message(self, ballot: int, digest: bytes, voter: Member) -> bytes:
        return self._signed + canonical_bytes(voter) + ballot.to_bytes(4, "big") + digest

    def sign(self, value: Value, voter: Member) -> bytes:
        return self.signer.sign(self.message(value.ballot, value.digest, voter))

    def add(self, ballot: int, digest: bytes, voter: Member, signature: bytes) -> bool:
        """Count a vote, once. Returns False if it is forged or its voter may neither vote nor fork."""
        if voter in self._votes.get((ballot, digest), ()):
            return True
        message = self.message(ballot, digest, voter)
        votes = self.counts(voter) or self.forks_only(voter)
        if not votes or not self.signer.verify(voter.peer, message, signature):
            return False
        self._votes.setdefault((ballot, digest), {})[voter] = signature
        if len(self._votes) > MAX_TALLIES:
            del self._votes[min(self._votes)]
        return True

    def voters(self, ballot: int, digest: bytes) -> tuple[Member, ...]:
        """Members whose votes for this record in this ballot have arrived. Each of them holds all of its parts."""
        return tuple(self._votes.get((ballot, digest), ()))

    def decides(self, value: Value) -> bool:
        """Whether a record has enough votes: those of a quorum or, for a fork, of its whole roster.

        One voter of the quorum must be in the next roster: if many members leave, one that stays must hold the mean.
        """
        entitled, roster = self.entitled(value), set(value.record.roster)
        voters = {voter for voter in self.voters(value.ballot, value.digest) if voter in entitled}
        if value.is_fork:
            return roster <= voters
        return len(voters) >= self.quorum and not roster.isdisjoint(voters)

    def certificate(self, value: Value, sender: Member) -> Certificate:
        entitled = self.entitled(value)
        votes = sorted(self._votes.get((value.ballot, value.digest), {}).items())
        signed = tuple(Signed(*vote) for vote in votes if vote[0] in entitled)
        return Certificate(self.key, sender, value.ballot, value.data, signed)

    def abridged(self, certificate: Certificate) -> MeanDecided:
        """A certificate of members' votes, without the record and their names."""
        by_voter = {vote.voter: vote.signature for vote in certificate.votes}
        return MeanDecided(
            key=certificate.key,
            ballot=certificate.ballot,
            digest=records.lineage(certificate.record),
            voters=sum(1 << bit for bit, member in enumerate(self.roster) if member in by_voter),
            signatures=tuple(by_voter[member] for member in self.roster if member in by_voter),
        )

    def whole(self, message: MeanDecided, sender: Member) -> Certificate:
        """What was `abridged`, without the record. Raises BadPayload if it has not one vote of each member it names."""
        voters = [member for bit, member in enumerate(self.roster) if message.voters >> bit & 1]
        if len(voters) != len(message.signatures) or message.voters >> len(self.roster):
            raise BadPayload("votes of others than the members, or not one of each")
        votes = tuple(map(Signed, voters, message.signatures))
        return Certificate(self.key, sender, message.ballot, b"", votes)

    def entitled(self, value: Value) -> tuple[Member, ...]:
        return value.record.roster if value.is_fork else self.roster
