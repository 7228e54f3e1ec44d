"""The vote's messages between members, and its instructions to the host (`protocols.consensus.paxos`). Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from protocols.base import Header, Member, PeerId, RoundKey
from protocols.wire import MAX_ROSTER, PartDone, blob, digest, list_of, one, register, uint

MAX_BALLOT = 1 << 20
MAX_RECORD_BYTES = 3 << 14
"""A record travels inside a header, beside a vote of each member or the parts that the sender holds."""


@dataclass(frozen=True, slots=True)
class VoteMessage(Header):
    """A message of the vote on the record that extends `key.lineage`: its sender, and the ballot it is about."""

    key: RoundKey = one(RoundKey)
    sender: Member = one(Member)
    ballot: int = uint(MAX_BALLOT)


@dataclass(frozen=True, slots=True)
class StartBallot(VoteMessage):
    """Asks the ballot's coordinator to begin it. With `fork`, asks the fork's first member to begin that fork."""

    fork: tuple[Member, ...] = list_of(one(Member), MAX_ROSTER)


@dataclass(frozen=True, slots=True)
class Prepare(VoteMessage):
    """The coordinator asks for promises: of a quorum or, with `fork`, of all members of the fork."""

    fork: tuple[Member, ...] = list_of(one(Member), MAX_ROSTER)


@dataclass(frozen=True, slots=True)
class Promise(VoteMessage):
    """The sender promises to accept nothing in an earlier ballot, and names the record that it accepted last. If there
    is none, `record` is empty, and it names the parts of a plan that it holds, as their reducers signed them.
    """

    accepted: int = uint(MAX_BALLOT)
    record: bytes = blob(MAX_RECORD_BYTES)
    plan: bytes = digest()
    held: tuple[PartDone, ...] = list_of(one(PartDone), MAX_ROSTER)


@dataclass(frozen=True, slots=True)
class BallotNack(VoteMessage):
    """The sender has promised this ballot, which is higher than the one that it was asked for."""


@dataclass(frozen=True, slots=True)
class Propose(VoteMessage):
    record: bytes = blob(MAX_RECORD_BYTES)


@dataclass(frozen=True, slots=True)
class Accept(VoteMessage):
    """The sender's signed vote for the record with this digest, which is the record hash."""

    digest: bytes = digest()
    signature: bytes = blob(128)


@dataclass(frozen=True, slots=True)
class RecordRequest(VoteMessage):
    """Asks for a record that the sender does not know, but for which it saw a quorum of votes in this ballot."""

    digest: bytes = digest()


@dataclass(frozen=True, slots=True)
class Signed:
    voter: Member = one(Member)
    signature: bytes = blob(128)


@dataclass(frozen=True, slots=True)
class Certificate(VoteMessage):
    """A record and the votes for it in this ballot. If they are too few to decide, it only reports them."""

    record: bytes = blob(MAX_RECORD_BYTES)
    votes: tuple[Signed, ...] = list_of(one(Signed), MAX_ROSTER)


@dataclass(frozen=True, slots=True)
class MeanDecided(Header):
    """A `Certificate` for a peer that holds the mean and its plan: it can make the record with this digest itself."""

    key: RoundKey = one(RoundKey)
    ballot: int = uint(MAX_BALLOT)
    digest: bytes = digest()
    voters: int = uint((1 << MAX_ROSTER) - 1)  # a bit for each member of the roster
    signatures: tuple[bytes, ...] = list_of(blob(128), MAX_ROSTER)  # of the voters, in the same order


MESSAGES: tuple[type[VoteMessage], ...] = (
    StartBallot,
    Prepare,
    Promise,
    BallotNack,
    Propose,
    Accept,
    RecordRequest,
    Certificate,
)
register(16, MESSAGES)
register(229, (MeanDecided,))


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to each of these peers. If it is lost, repeated or reordered, that only costs time."""

    to: tuple[PeerId, ...]
    message: VoteMessage


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Call `timeout(ballot)` after `factor` times the time that one ballot needs. Replaces the previous timer."""

    ballot: int
    factor: int


@dataclass(frozen=True, slots=True)
class ProposalNeeded:
    """This member coordinates a ballot and may choose its record: repair the plan, draw a new one or skip."""

    ballot: int
    promises: tuple[Promise, ...]


@dataclass(frozen=True, slots=True)
class Fetch:
    """This member's vote for a record waits for the parts with these digests: get and report them."""

    record: bytes
    parts: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Decided:
    """The record that extends the lineage is decided. Comes once; the vote needs no timer, choice or fetch after it."""

    certificate: Certificate


@dataclass(frozen=True, slots=True)
class ConflictingCertificate:
    """A valid certificate of a fork without this member, or of another record than was decided here."""

    certificate: Certificate


@dataclass(frozen=True, slots=True)
class ReportFault:
    """A peer sent forged votes, or votes on a record that may not be decided."""

    peer: PeerId
    why: str


Instruction: TypeAlias = Send | SetTimer | ProposalNeeded | Fetch | Decided | ConflictingCertificate | ReportFault
