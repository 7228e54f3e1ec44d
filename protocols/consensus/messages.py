"""What the vote says: messages to members, instructions to the host (`protocols.consensus.paxos` is the machine).
Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from protocols.base import Header, Member, PeerId, RoundKey
from protocols.wire import MAX_ROSTER, PartDone, blob, digest, many, one, register, uint

MAX_BALLOT = 1 << 20
MAX_RECORD_BYTES = 3 << 14
"""A record travels inside a header, with a vote of each member or with what its sender holds."""


@dataclass(frozen=True, slots=True)
class VoteMessage(Header):
    """What every message of the vote says.

    Attributes:
        key: of the round; `key.lineage` is what the vote extends.
        sender: in this life.
        ballot: what the message speaks of.
    """

    key: RoundKey = one(RoundKey)
    sender: Member = one(Member)
    ballot: int = uint(MAX_BALLOT)


@dataclass(frozen=True, slots=True)
class StartBallot(VoteMessage):
    """To its coordinator: begin this ballot. With fork, to the first of those who are left: begin that fork."""

    fork: tuple[Member, ...] = many(one(Member), MAX_ROSTER)


@dataclass(frozen=True, slots=True)
class Prepare(VoteMessage):
    """The coordinator asks for promises: of a majority or, with `fork`, of all its members."""

    fork: tuple[Member, ...] = many(one(Member), MAX_ROSTER)


@dataclass(frozen=True, slots=True)
class Promise(VoteMessage):
    """The sender accepts nothing below this ballot any more.

    Attributes:
        accepted, record: what it has accepted in the highest ballot, and in which; an empty record if nothing.
        plan, held: the parts that it holds of this plan, as their reducers signed them; only if it accepted nothing.
    """

    accepted: int = uint(MAX_BALLOT)
    record: bytes = blob(MAX_RECORD_BYTES)
    plan: bytes = digest()
    held: tuple[PartDone, ...] = many(one(PartDone), MAX_ROSTER)


@dataclass(frozen=True, slots=True)
class BallotNack(VoteMessage):
    """The sender has promised this ballot, which is above the one that it was asked about."""


@dataclass(frozen=True, slots=True)
class Propose(VoteMessage):
    """The coordinator's only record in this ballot, encoded."""

    record: bytes = blob(MAX_RECORD_BYTES)


@dataclass(frozen=True, slots=True)
class Accept(VoteMessage):
    """The sender's signed vote for the record with this digest (the lineage that it names)."""

    digest: bytes = digest()
    signature: bytes = blob(128)


@dataclass(frozen=True, slots=True)
class RecordRequest(VoteMessage):
    """The sender saw a majority in this ballot for a record that it does not know."""

    digest: bytes = digest()


@dataclass(frozen=True, slots=True)
class Signed:
    """A vote, as a certificate holds it."""

    voter: Member = one(Member)
    signature: bytes = blob(128)


@dataclass(frozen=True, slots=True)
class Certificate(VoteMessage):
    """A record and the votes for it in this ballot. With too few to decide it is no more than news of them."""

    record: bytes = blob(MAX_RECORD_BYTES)
    votes: tuple[Signed, ...] = many(one(Signed), MAX_ROSTER)


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


@dataclass(frozen=True, slots=True)
class Send:
    """Send to each of these peers. To lose, repeat or reorder it costs time and nothing else."""

    to: tuple[PeerId, ...]
    message: VoteMessage


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Call `timeout(ballot)` after `factor` times what one ballot needs. Replaces the timer before."""

    ballot: int
    factor: int


@dataclass(frozen=True, slots=True)
class ProposalNeeded:
    """We coordinate and are free: repair, plan anew or skip, then call `chosen`. The promises say who holds what."""

    ballot: int
    promises: tuple[Promise, ...]


@dataclass(frozen=True, slots=True)
class Fetch:
    """Our vote for this record waits for parts with these digests: get them, then call `holds`."""

    record: bytes
    parts: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Decided:
    """The lineage has its child. Comes once; timers, choices and fetches for the vote are over."""

    certificate: Certificate


@dataclass(frozen=True, slots=True)
class ConflictingCertificate:
    """A valid certificate that does not decide here: of a fork without us, or of another child than ours: heal."""

    certificate: Certificate


@dataclass(frozen=True, slots=True)
class ReportFault:
    """A peer sent votes that nobody cast, or on what may not be decided."""

    peer: PeerId
    why: str


Instruction: TypeAlias = Send | SetTimer | ProposalNeeded | Fetch | Decided | ConflictingCertificate | ReportFault
