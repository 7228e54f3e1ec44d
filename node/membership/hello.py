"""Messages between peers outside the protocols: handshake, heartbeats, and requests for the run and the status."""

# ruff: noqa: RUF009 - a field's bound is its default

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from protocols.base import MAX_STAGES, Header, Member
from protocols.wire import (
    MAX_ROSTER,
    blob,
    canonical_bytes,
    digest,
    flag,
    last,
    list_of,
    one,
    optional,
    peer_id,
    real,
    register,
    text,
    uint,
)

HELLO = "starling/hello/7"
BOOTSTRAP_METHOD = "starling/entry/1"
PASS_METHOD = "starling/pass/1"  # the only one that a private run serves to strangers
SEAT_METHOD = "starling/seat/1"

VERSION = 10
"""Version of the messages, beside the version of the frames. Peers of different versions do not train together. The
method's name changes with it, so that a greeting of another version is never decoded."""
ANY_STAGE = MAX_STAGES  # in `WantStage`: the joiner leaves the choice to the others
NO_STAGE = MAX_STAGES + 1
"""In `WantStage`: the sender wants to know the seats only. It gets no stage, and the answer changes nothing."""
STAYS = MAX_STAGES  # in `Placement`: the sender moves to no other stage
MAX_ADDRESSES = 16
MAX_ADDRESS_CHARACTERS = 256
MAX_INTRODUCED = 32
MAX_NICKNAME_CHARACTERS = 32
MAX_RUN_BYTES = 1 << 16
MAX_SKETCH_BYTES = 256
MAX_SAMPLE_BYTES = 1 << 18
MAX_STATUS_BYTES = 1 << 16
MAX_SUMMARY_BYTES = 1 << 13
MAX_WALL_SECONDS = 1e11
MAX_RATE = 1e9
MAX_TEAM = 2 * MAX_ROSTER
MAX_SEATS = 1 << 20
MAX_ELECTORS = 31
MAX_ENDORSEMENTS = 20  # more than their majority: not each peer knows all of them
SHOWN_BYTES = 8
MAX_PROBED_PORTS = 4
MAX_PROBE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class PeerAddress:
    peer: str = peer_id()
    addresses: tuple[str, ...] = list_of(text(MAX_ADDRESS_CHARACTERS), MAX_ADDRESSES)


@dataclass(frozen=True, slots=True)
class SeatBase:
    """The state from which a stage begins again after all its members were lost: a backup.

    The outer state has the same roots before and after; only the number of its round changes to 0.
    """

    trained: int = uint(1 << 40)  # training rounds of the run when it begins again
    base_trained: int = uint(1 << 40)  # those that have trained the state; the difference is lost
    parameters_root: bytes = digest()
    velocity_root: bytes = digest()


@dataclass(frozen=True, slots=True)
class Endorsement:
    """A peer's signature of a seat with a base: it has seen no member of the stage for long."""

    peer: str = peer_id()
    signature: bytes = blob(128)


@dataclass(frozen=True, slots=True)
class StageSeat:
    """Makes a member the first one of a stage: the genesis of the stage's chain has it alone in the roster."""

    stage: int = uint(MAX_STAGES - 1)
    member: Member = one(Member)
    number: int = uint(MAX_SEATS)  # seats of the stage given before, to peers that never came; only the last is valid
    by: bytes = blob(32)  # digest of the signer's own seat (`node.joining.seats`); empty if the run's founder signs
    signature: bytes = blob(128)
    used: bytes = blob(128)  # the member's signature once its stage has decided a round; empty until then
    base: tuple[SeatBase, ...] = optional(one(SeatBase), 1)  # of a stage that begins again; its member signs the seat
    endorsed: tuple[Endorsement, ...] = optional(one(Endorsement), MAX_ENDORSEMENTS)


@dataclass(frozen=True, slots=True)
class Hello(Header):
    """Opens the stream on which one peer watches another; answered with `Welcome` or `HelloRejected`."""

    version: int = uint(1 << 16)
    run: bytes = digest()
    member: Member = one(Member)
    nonce: int = uint((1 << 63) - 1)  # drawn when the process started: two processes with one identity differ in it
    nickname: str = text(MAX_NICKNAME_CHARACTERS)
    addresses: tuple[str, ...] = list_of(text(MAX_ADDRESS_CHARACTERS), MAX_ADDRESSES)
    stage: int = uint(MAX_STAGES - 1)
    # of the sender's stage, then those of its signers up to one that the founder signed; none in a run without stages
    seats: tuple[StageSeat, ...] = list_of(one(StageSeat), MAX_STAGES)
    signature: bytes = blob(128)  # over all other fields: proves to a peer that another process has its identity


def signed_part(hello: Hello) -> bytes:
    return b"starling hello" + canonical_bytes(replace(hello, signature=b""))


def sound(said: Iterable[object]) -> tuple[str, ...]:
    """Filter a list from another peer: at most `MAX_ADDRESSES` short, printable ASCII addresses.

    Peers reject a greeting that contains anything else, and with it the sender that only passed an address on.
    """
    texts = (each for each in said if isinstance(each, str) and len(each) <= MAX_ADDRESS_CHARACTERS)
    return tuple(dict.fromkeys(each for each in texts if each.isascii() and each.isprintable()))[:MAX_ADDRESSES]


@dataclass(frozen=True, slots=True)
class Welcome(Header):
    """The answer to a `Hello`: the answering peer's own `Hello`, and other peers that it knows."""

    hello: Hello = one(Hello)
    known: tuple[PeerAddress, ...] = list_of(one(PeerAddress), MAX_INTRODUCED)


@dataclass(frozen=True, slots=True)
class ShownSeat:
    """A seat with a base that counts for the sender."""

    stage: int = uint(MAX_STAGES - 1)
    digest: bytes = blob(SHOWN_BYTES)  # the first bytes


@dataclass(frozen=True, slots=True)
class SeatsView:
    """The seats that count for the sender, as its heartbeats show them to peers that it does not refuse."""

    stage: int = uint(MAX_STAGES - 1)  # the sender's
    seats: tuple[ShownSeat, ...] = optional(one(ShownSeat), MAX_STAGES)


@dataclass(frozen=True, slots=True)
class HelloRejected(Header):
    """The sender refuses the receiver. `other`: the signed greeting of another process with the receiver's identity.

    `seats`: that of the receiver's stage which the sender knows, and those of its signers.
    """

    why: str = text(200)
    other: tuple[Hello, ...] = optional(one(Hello), 1)
    seats: tuple[StageSeat, ...] = optional(one(StageSeat), MAX_STAGES)
    view: tuple[SeatsView, ...] = last(list_of(one(SeatsView), 1), ())  # in a run with stages


@dataclass(frozen=True, slots=True)
class Crowded(Header):
    """Answers a heartbeat: the sender is watched by as many peers as it answers. It may be watched later."""


@dataclass(frozen=True, slots=True)
class Placement:
    """What a peer of a run with stages says of its place: the rule that moves peers reads it."""

    pinned: bool = flag()  # its user has chosen the stage
    moving: int = uint(STAYS)  # the stage that it will move to
    holds: int = uint((1 << MAX_STAGES) - 1)  # bit k: it has a backup of stage k
    arrived: int = uint(1 << 40)  # training rounds of the run when it moved to its stage; 0: it has not moved
    member: bool = flag()  # whether it is in the roster of its stage
    held: tuple[int, ...] = optional(uint(1 << 40), MAX_STAGES)  # rounds in each backup of `holds`, lowest stage first


@dataclass(frozen=True, slots=True)
class StageTeam:
    """What works in the sender's stage, as it sees it: it watches all of the stage's roster."""

    peers: int = uint(MAX_TEAM)
    rate: float = real(0, MAX_RATE)  # microbatches/s, of all of them


UNPLACED = Placement(False, STAYS, 0, 0, False)


@dataclass(frozen=True, slots=True)
class Heartbeat(Header):
    """Shows that the sender is alive. The receiver answers at once with a heartbeat of the same number."""

    number: int = uint(1 << 53)
    wall: float = real(0, MAX_WALL_SECONDS)  # the sender's clock, seconds since the epoch
    round: int = uint(1 << 40)
    leaving: bool = flag()
    sketch: bytes = blob(MAX_SKETCH_BYTES)  # of the parameters, with independent state: `node.outer.sketch`
    rounds: int = uint(1 << 40)  # training rounds that have ended at a sender of stage 0
    rate: float = real(0, MAX_RATE)  # microbatches/s that the sender can compute for its stage; 0: not known
    idle: int = uint(2)  # `node.outer.activity.Activity`
    placement: tuple[Placement, ...] = optional(one(Placement), 1)  # empty in a run without stages
    seats: tuple[ShownSeat, ...] = optional(one(ShownSeat), MAX_STAGES)
    team: tuple[StageTeam, ...] = last(list_of(one(StageTeam), 1), ())  # in a run whose peers do not watch all others


@dataclass(frozen=True, slots=True)
class WantRun(Header):
    """Answered with `RunReply`."""


@dataclass(frozen=True, slots=True)
class RunReply(Header):
    """Announces the sealed manifest, then the sample that all peers evaluate on, with their sizes in bytes."""

    manifest_bytes: int = uint(MAX_RUN_BYTES)
    sample_bytes: int = uint(MAX_SAMPLE_BYTES)


@dataclass(frozen=True, slots=True)
class WantStatus(Header):
    """From any peer; answered with `StatusReply`."""


@dataclass(frozen=True, slots=True)
class WantSummary(Header):
    """From any peer; answered with `StatusReply`: a status of at most `MAX_SUMMARY_BYTES`, without other peers."""


@dataclass(frozen=True, slots=True)
class StatusReply(Header):
    """Announces the status: `size` bytes of JSON follow."""

    size: int = uint(MAX_STATUS_BYTES)


@dataclass(frozen=True, slots=True)
class WantStageBefore(Header):
    """The `WantStage` of protocol 4 and before: answered with a `StageRejected` that says to update."""

    sender: Member = one(Member)
    wanted: int = uint(NO_STAGE)


@dataclass(frozen=True, slots=True)
class WantStage(Header):
    """Asks for a stage to work in; answered with `StageReply` or `StageRejected`. A peer may pass it on to another."""

    version: int = uint(1 << 16)
    sender: Member = one(Member)
    wanted: int = uint(NO_STAGE)


@dataclass(frozen=True, slots=True)
class StageReply(Header):
    """The stage for the joiner (for `NO_STAGE`: the sender's own), and the seats that the sender knows, with those of
    their signers.
    """

    stage: int = uint(MAX_STAGES - 1)
    seats: tuple[StageSeat, ...] = list_of(one(StageSeat), 2 * MAX_STAGES)


@dataclass(frozen=True, slots=True)
class StageRejected(Header):
    why: str = text(200)


@dataclass(frozen=True, slots=True)
class ReseatRequest(Header):
    """Asks the receiver to endorse a seat for the sender, in a stage that has lost all its members.

    Answered with `Endorsed` or `ReseatRefused`.
    """

    run: bytes = digest()
    seat: StageSeat = one(StageSeat)


@dataclass(frozen=True, slots=True)
class Endorsed(Header):
    signature: bytes = blob(128)


@dataclass(frozen=True, slots=True)
class ReseatRefused(Header):
    why: str = text(200)
    number: int = uint(MAX_SEATS)  # the highest of a seat in that stage that the sender knows or has endorsed


class PortResult(StrEnum):
    """What a dial of a port has shown."""

    LIBP2P = "libp2p"  # it accepts, and speaks first as libp2p does
    OPEN = "open"  # it accepts
    REFUSED = "refused"
    SILENT = "silent"
    UNREACHABLE = "unreachable"


@dataclass(frozen=True, slots=True)
class ProbedPort:
    port: int = uint((1 << 16) - 1)
    result: str = text(16)  # a `PortResult`
    seconds: float = real(0, MAX_PROBE_SECONDS)


@dataclass(frozen=True, slots=True)
class ProbePorts(Header):
    """Asks the receiver to dial these TCP ports at the sender's host; answered with `PortsProbed`."""

    ports: tuple[int, ...] = list_of(uint((1 << 16) - 1), MAX_PROBED_PORTS)


@dataclass(frozen=True, slots=True)
class PortsProbed(Header):
    """The host that was dialled, that of the libp2p connection, and what each port did; or why nothing was dialled."""

    host: str = text(64)
    why: str = text(120)
    ports: tuple[ProbedPort, ...] = list_of(one(ProbedPort), MAX_PROBED_PORTS)


MESSAGES: tuple[type[Header], ...] = (
    Hello,
    Welcome,
    HelloRejected,
    Heartbeat,
    WantRun,
    RunReply,
    WantStatus,
    StatusReply,
)
register(48, MESSAGES)
register(63, (WantSummary,))
register(188, (WantStage, WantStageBefore, StageReply, StageRejected))
register(193, (ReseatRequest, Endorsed, ReseatRefused))
register(200, (ProbePorts, PortsProbed))
register(239, (Crowded,))
