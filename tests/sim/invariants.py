"""The state of a simulated vote, and the invariants that it keeps under all faults."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from protocols.base import Member, PeerId, RoundKey
from protocols.consensus import messages as votes
from protocols.consensus import record as records
from protocols.consensus.paxos import PaxosInstance
from protocols.consensus.record import Kind
from protocols.consensus.vote_tally import Value, VoteTally, majority
from protocols.wire import PartDone

NOTHING = bytes(32)


class InvariantBroken(AssertionError):
    def __init__(self, rule: str, what: str) -> None:
        super().__init__(f"{rule}: {what}")
        self.rule = rule


@dataclass(frozen=True, slots=True)
class Seal:
    """Replaces signatures: the signer's name and a checksum of the message."""

    peer: PeerId

    def sign(self, message: bytes) -> bytes:
        return self.peer.encode() + zlib.crc32(message).to_bytes(4, "big")

    def verify(self, peer: PeerId, message: bytes, signature: bytes) -> bool:
        return signature == peer.encode() + zlib.crc32(message).to_bytes(4, "big")


class Remembering(VoteTally):
    """Decodes each record once for the whole run, because decoding takes most of the time."""

    read: dict[bytes, Value | None]

    def value(self, ballot: int, data: bytes) -> Value | None:
        if data not in self.read:
            self.read[data] = super().value(0, data)
        value = self.read[data]
        return value and Value(ballot, value.data, value.digest, value.record)


@dataclass(slots=True)
class Side:
    """A node's part in the vote on one lineage. A ghost wrongly believes that its incarnation is in the roster."""

    vote: PaxosInstance
    ghost: bool = False
    forked: bool = False
    certificate: votes.Certificate | None = None
    timer: tuple[int, int] | None = None
    choice: tuple[int, tuple[votes.Promise, ...]] | None = None
    wants: tuple[bytes, ...] = ()
    held: dict[bytes, PartDone] = field(default_factory=dict)
    voted: list[Value | None] = field(default_factory=lambda: [None, None])


@dataclass(slots=True)
class Node:
    me: Member
    alive: bool = True
    sides: dict[tuple[bytes, bool], Side] = field(default_factory=dict)
    parked: list[tuple[PeerId, votes.VoteMessage]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class VoteChecker:
    """The facts about a lineage: its voters, the larger rosters before it, what was accepted and decided."""

    key: RoundKey
    roster: tuple[Member, ...]
    former: tuple[tuple[Member, ...], ...] = ()
    parent: bytes = NOTHING
    is_fork: bool = False
    accepted: dict[tuple[Member, int], Value] = field(default_factory=dict)
    proposed: dict[int, bytes] = field(default_factory=dict)
    chosen: dict[bytes, int] = field(default_factory=dict)
    children: dict[bytes, Value] = field(default_factory=dict)
    read: dict[bytes, Value | None] = field(default_factory=dict)


def short(value: object) -> str:
    if isinstance(value, votes.Send):
        return f"-> {' '.join(value.to)}: {short(value.message)}"
    if isinstance(value, votes.VoteMessage):
        names = [name for name in ("ballot", "accepted", "fork") if getattr(value, name, ())]
        data = getattr(value, "record", b"")
        digest = getattr(value, "digest", records.lineage(data) if data else b"")
        said = " ".join(f"{name}={getattr(value, name)}" for name in names)
        return f"[{value.key.lineage.hex()[:4]}] {type(value).__name__} {said} {digest.hex()[:6]}"
    return f"{type(value).__name__} {getattr(value, 'ballot', '')}"


def judge_votes(line: VoteChecker, me: Member, side: Side) -> None:
    """Check that a member votes only for parts that it holds, and whether its vote completes a majority."""
    for index, value in enumerate((side.vote.accepted, side.vote.forked)):
        if value is None or value is side.voted[index]:
            continue
        side.voted[index] = value
        if not all(part.digest in side.held for part in value.record.parts):
            raise InvariantBroken("held", f"{me} voted in ballot {value.ballot} for parts that it does not hold")
        line.accepted[me, value.ballot] = value
        if not value.is_fork:
            _judge_choice(line, value)


def judge_proposal(line: VoteChecker, message: votes.Propose) -> None:
    """Check that a ballot has one proposed record; forks do not count."""
    value = records.decode(message.record)
    digest = records.lineage(message.record)
    if message.sender not in line.roster and value.kind != Kind.FORK:
        raise InvariantBroken("proposal", f"{message.sender} has no vote, and proposes another record than a FORK")
    if message.sender not in line.roster:
        return _judge_successors(line, value.roster)
    if line.proposed.setdefault(message.ballot, digest) != digest:
        raise InvariantBroken("proposal", f"two in ballot {message.ballot}")
    if value.kind == Kind.FORK:
        del line.proposed[message.ballot]
    _judge_proposals(line)


def judge_child(line: VoteChecker, certificate: votes.Certificate) -> Value:
    """Check that a lineage has at most one child besides forks, and that the certificate is a valid proof."""
    digest = records.lineage(certificate.record)
    value = Value(certificate.ballot, certificate.record, digest, records.decode(certificate.record))
    line.children.setdefault(digest, value)
    if len([child for child in line.children.values() if not child.is_fork]) > 1:
        raise InvariantBroken("one child", f"two were decided, the second in ballot {value.ballot}")
    voters = {vote.voter for vote in certificate.votes}
    for voter in voters:
        cast = line.accepted.get((voter, value.ballot))
        entitled = value.record.roster if value.is_fork else line.roster
        if voter not in entitled or cast is None or cast.digest != digest:
            raise InvariantBroken("proof", f"a certificate with a vote of {voter}, who cast none")
    if value.is_fork:
        _judge_fork(line, value, voters)
    elif len(voters) < majority(len(line.roster)):
        raise InvariantBroken("proof", f"{len(voters)} of {len(line.roster)} decided")
    return value


def _judge_choice(line: VoteChecker, value: Value) -> None:
    """Check that one record at most is chosen, and that higher ballots propose only that one."""
    cast = [line.accepted.get((member, value.ballot)) for member in line.roster]
    if sum(each is not None and each.digest == value.digest for each in cast) < majority(len(line.roster)):
        return
    line.chosen.setdefault(value.digest, value.ballot)
    if len(line.chosen) > 1:
        raise InvariantBroken("one child", f"two were chosen, in ballots {sorted(line.chosen.values())}")
    _judge_proposals(line)


def _judge_proposals(line: VoteChecker) -> None:
    for chosen, lowest in line.chosen.items():
        for ballot, digest in line.proposed.items():
            if ballot > lowest and digest != chosen:
                raise InvariantBroken("proposal", f"another in ballot {ballot} than was chosen in {lowest}")


def _judge_successors(line: VoteChecker, members: Sequence[Member]) -> None:
    """Check that non-members fork only as successors, or as most of a larger former roster and more than this one."""
    incarnations = {member.peer: member.incarnation for member in line.roster}
    if all(incarnations.get(member.peer, member.incarnation) < member.incarnation for member in members):
        return
    peers = {member.peer for member in members}
    if any(member in line.roster for member in members) or len(members) <= len(line.roster):
        raise InvariantBroken("fork", f"{len(members)} fork, for a roster of {len(line.roster)}")
    if not any(peers <= {each.peer for each in former} and 2 * len(peers) > len(former) for former in line.former):
        raise InvariantBroken("fork", f"{len(members)} fork, and are most of no former roster")


def _judge_fork(line: VoteChecker, fork: Value, voters: set[Member]) -> None:
    """Check that a fork has the votes of its whole roster, no majority, and what its members accepted last."""
    members = fork.record.roster
    if not set(members) <= set(line.roster):
        _judge_successors(line, members)
    elif len(members) >= majority(len(line.roster)):
        raise InvariantBroken("fork", f"{len(members)} of {len(line.roster)} fork, who could decide")
    if voters != set(members):
        raise InvariantBroken("fork", f"{len(voters)} voted for a fork of {len(members)} from {len(line.roster)}")
    before = [v for (voter, ballot), v in line.accepted.items() if voter in voters and ballot < fork.ballot]
    newest = max(before, key=lambda value: value.ballot, default=fork)
    if (newest.record.plan, newest.record.parts) != (fork.record.plan, fork.record.parts):
        raise InvariantBroken("fork", f"it forgets what was accepted in ballot {newest.ballot}")
