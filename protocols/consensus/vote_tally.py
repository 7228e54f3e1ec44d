"""Who votes on a lineage's child, which records may be put to the vote, which votes are in, and what they decide. Pure.

A roster's members vote, each in its life of then. A later life of one is its heir: it has no part in the members' vote,
whose promises it does not remember, but that life is over, for certain. Heirs may FORK, all of them heirs.

A roster shrinks as members leave, and the last of them may be gone for good. Peers of the larger rosters before it are
its former members. A majority of one of those rosters may FORK, heirs among them, if they outnumber the members that
they replace.

Signatures are checked here and nowhere else: votes come by three ways (accepts, certificates, answers), and all are
counted in one place. `Signer.verify` is a function of its arguments, so the poll stays pure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from protocols.base import BadPayload, Member, PeerId, RoundKey, Signer
from protocols.consensus import record as records
from protocols.consensus.messages import Certificate, Signed
from protocols.consensus.record import Kind, Record
from protocols.wire import body

SMALL_ROSTER = 4
"""Up to so many, any number is admitted at once: a founder and those who came first are a roster after one round."""
ONLOOKER = 1 << 40
"""The life in whose name a peer looks on where it may not vote; no incarnation comes so far."""
MAX_TALLIES = 1 << 10
"""(ballot, record) pairs whose votes are kept; above it those of the lowest ballot are forgotten."""


def majority(members: int, liars: bool = False) -> int:
    """Votes that decide, of a roster of so many; more of them where voters may lie."""
    return 2 * members // 3 + 1 if liars else members // 2 + 1


def max_admitted(members: int) -> int:
    """How many one record may admit to a roster of so many."""
    return max(1, members // 2, SMALL_ROSTER - members)


def min_retained(members: int, quorum: int) -> int:
    """So many of a roster that one of them is in every quorum, and holds what was decided."""
    return members - quorum + 1


@dataclass(frozen=True, slots=True)
class Value:
    """A record in a ballot: encoded, the lineage that it names, decoded."""

    ballot: int
    data: bytes
    digest: bytes
    record: Record

    @property
    def is_fork(self) -> bool:
        return self.record.kind == Kind.FORK


class VoteTally:
    """The votes of one roster on the child of one lineage.

    Args:
        key: of the round; `key.lineage` is what the record extends.
        roster: the members whose votes count, each in its life.
        signer: signs our votes, checks those of others.
        quorum: votes that decide, by the size of a roster; None: `majority`.
        fork_peers: so many members at least may fork; 0: none may.
        former: rosters that this one has shrunk from, the latest first.
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
        self.quorum = self._quorum(len(self.roster))
        self._signed = b"starling accept" + body(key)
        self._order = records.coordinators(key.lineage, self.roster)
        self._lives = {member.peer: member.incarnation for member in self.roster}
        self._votes: dict[tuple[int, bytes], dict[Member, bytes]] = {}

    def counts(self, member: Member) -> bool:
        """Whether this member, in this life, votes."""
        return member in self.roster

    def is_successor(self, member: Member) -> bool:
        """Whether this is a later life of one of the roster."""
        return self._lives.get(member.peer, ONLOOKER) < member.incarnation < ONLOOKER

    def was_member(self, member: Member) -> bool:
        """Whether this is a former member that is in the roster in no life."""
        lives = [each.incarnation for some in self._former for each in some if each.peer == member.peer]
        return member.peer not in self._lives and bool(lives) and min(lives) <= member.incarnation < ONLOOKER

    def forks_only(self, member: Member) -> bool:
        """Whether this one has no vote, and may FORK with others like it: an heir or a former member."""
        return self.is_successor(member) or self.was_member(member)

    def coordinator(self, ballot: int) -> PeerId:
        """Who owns a ballot of the roster."""
        return self._order[ballot % len(self._order)]

    def owns(self, ballot: int, peer: PeerId) -> bool:
        """Whether a ballot is this peer's: the roster's, or one in which former members fork."""
        if peer == self.coordinator(ballot) or peer in self._lives:
            return peer == self.coordinator(ballot)
        former = records.coordinators(self.key.lineage, sorted({each for some in self._former for each in some}))
        gone = [each for each in dict.fromkeys(former) if each not in self._lives]
        return bool(gone) and peer == gone[ballot % len(gone)]

    def first(self, members: Sequence[Member]) -> PeerId:
        """Who coordinates the fork of these members."""
        return records.coordinators(self.key.lineage, members)[0]

    def value(self, ballot: int, data: bytes) -> Value | None:
        """The record in these bytes; None if it may not be put to the vote."""
        try:
            record = records.decode(data)
        except BadPayload:
            return None
        return Value(ballot, data, records.lineage(data), record) if self._allows(record) else None

    def _allows(self, record: Record) -> bool:
        """It extends this lineage; its roster keeps the rules for admissions or, in a fork, for those who are left."""
        members = len(record.roster)
        if (record.parent, record.round) != (self.key.lineage, self.key.round):
            return False
        if members == 0 or members != len({member.peer for member in record.roster}):
            return False
        admitted = sum(not self.counts(member) for member in record.roster)
        if record.kind == Kind.FORK:
            return self.may_fork(record.roster)
        return admitted <= max_admitted(len(self.roster)) and members > admitted

    def may_fork(self, left: Sequence[Member]) -> bool:
        """Whether these may go on without the others: members that are too few to decide, or heirs, or former members.

        They are as many as it takes; heirs of a whole roster are enough, however small it was.
        """
        if left and all(map(self.is_successor, left)):
            return self.fork_peers > 0 and min(self.fork_peers, len(self.roster)) <= len(left)
        if left and all(map(self.forks_only, left)):
            return 0 < self.fork_peers <= len(left) and any(self._majority_of(each, left) for each in self._former)
        return all(map(self.counts, left)) and 0 < self.fork_peers <= len(left) < self.quorum

    def former_majority(self, here: Collection[Member]) -> tuple[Member, ...]:
        """Those of these that are a majority of one former roster: of the latest that has one; nobody, if none has."""
        for each in self._former:
            peers = {member.peer for member in each}
            left = tuple(sorted(member for member in here if member.peer in peers and self.forks_only(member)))
            if self._majority_of(each, left):
                return left
        return ()

    def _majority_of(self, roster: Sequence[Member], left: Sequence[Member]) -> bool:
        """Whether these are a majority of a former roster, and more than the members whom they would replace."""
        within = {member.peer for member in left} <= {member.peer for member in roster}
        return within and len(left) >= self._quorum(len(roster)) and len(left) > len(self.roster)

    def message(self, ballot: int, digest: bytes, voter: Member) -> bytes:
        """What a voter signs."""
        return self._signed + body(voter) + ballot.to_bytes(4, "big") + digest

    def sign(self, value: Value, voter: Member) -> bytes:
        """The signature of this member's vote: ours."""
        return self.signer.sign(self.message(value.ballot, value.digest, voter))

    def add(self, ballot: int, digest: bytes, voter: Member, signature: bytes) -> bool:
        """Count a vote, once; False if it is a stranger's or forged."""
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
        """Whose votes for this record in this ballot are in; each of them holds all of its parts."""
        return tuple(self._votes.get((ballot, digest), ()))

    def decides(self, value: Value) -> bool:
        """Whether the votes that are in decide for it: a majority's of the members or, for a fork, its whole roster's.

        One of the majority is of the next roster: where many leave, somebody must hold the mean who stays.
        """
        entitled, roster = self.entitled(value), set(value.record.roster)
        voters = {voter for voter in self.voters(value.ballot, value.digest) if voter in entitled}
        if value.is_fork:
            return roster <= voters
        return len(voters) >= self.quorum and not roster.isdisjoint(voters)

    def certificate(self, value: Value, sender: Member) -> Certificate:
        """The record with the votes that are in."""
        entitled = self.entitled(value)
        votes = sorted(self._votes.get((value.ballot, value.digest), {}).items())
        signed = tuple(Signed(*vote) for vote in votes if vote[0] in entitled)
        return Certificate(self.key, sender, value.ballot, value.data, signed)

    def entitled(self, value: Value) -> tuple[Member, ...]:
        """Whose votes count for it."""
        return value.record.roster if value.is_fork else self.roster
