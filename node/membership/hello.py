"""Messages between peers outside the protocols: handshake, heartbeats, and requests for the run and the status."""

# ruff: noqa: RUF009 - a field's bound is its default

from __future__ import annotations

from dataclasses import dataclass, replace

from protocols.base import Header, Member
from protocols.scopes import MAX_STAGES
from protocols.wire import blob, body, digest, flag, many, one, peer_id, real, register, some, text, uint

HELLO = "starling/hello/3"
ENTRY = "starling/entry/1"

VERSION = 3
"""Version of the messages, beside the version of the frames. Peers of different versions do not train together. The
method's name changes with it, so that a greeting of another version is never decoded."""
ANY_STAGE = MAX_STAGES
"""In `WantStage`: the joiner leaves the choice to the others."""
NO_STAGE = MAX_STAGES + 1
"""In `WantStage`: the sender wants to know the seats only. It gets no stage, and the answer changes nothing."""
MAX_ADDRESSES = 16
MAX_ADDRESS_CHARACTERS = 256
MAX_INTRODUCED = 32
MAX_NICKNAME_CHARACTERS = 32
MAX_RUN_BYTES = 1 << 16
MAX_SKETCH_BYTES = 256
MAX_SAMPLE_BYTES = 1 << 18
MAX_STATUS_BYTES = 1 << 16
MAX_WALL_SECONDS = 1e11
MAX_RATE = 1e9
MAX_SEATS = 1 << 20


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """A peer and multiaddrs at which it may be reachable."""

    peer: str = peer_id()
    addresses: tuple[str, ...] = many(text(MAX_ADDRESS_CHARACTERS), MAX_ADDRESSES)


@dataclass(frozen=True, slots=True)
class StageSeat:
    """Makes a member the first one of a stage: the genesis of the stage's chain has it alone in the roster.

    Attributes:
        number: how many seats of the stage were given before, to peers that never came. Only the last one is valid.
        signature: the founder's, see `node.joining.stages`.
    """

    stage: int = uint(MAX_STAGES - 1)
    member: Member = one(Member)
    number: int = uint(MAX_SEATS)
    signature: bytes = blob(128)


@dataclass(frozen=True, slots=True)
class Hello(Header):
    """Opens the stream on which one peer watches another; answered with `Welcome` or `HelloRejected`.

    Attributes:
        version: the sender's `VERSION`.
        run: hash of the sender's manifest.
        member: the sender in its present incarnation.
        nonce: random number drawn when the process started. It distinguishes two processes with one identity.
        addresses: multiaddrs at which the sender can be dialled.
        stage: of the sender; 0 in a run without stages.
        seats: the first member of the sender's stage; none in a run without stages.
        signature: the sender's, over all other fields. It proves to a peer that another process has its identity.
    """

    version: int = uint(1 << 16)
    run: bytes = digest()
    member: Member = one(Member)
    nonce: int = uint((1 << 63) - 1)
    nickname: str = text(MAX_NICKNAME_CHARACTERS)
    addresses: tuple[str, ...] = many(text(MAX_ADDRESS_CHARACTERS), MAX_ADDRESSES)
    stage: int = uint(MAX_STAGES - 1)
    seats: tuple[StageSeat, ...] = many(one(StageSeat), 1)
    signature: bytes = blob(128)


def signed_part(hello: Hello) -> bytes:
    """The bytes that the sender of a `Hello` signs."""
    return b"starling hello" + body(replace(hello, signature=b""))


@dataclass(frozen=True, slots=True)
class Welcome(Header):
    """The answer to a `Hello`: the answering peer's own `Hello`, and other peers that it knows."""

    hello: Hello = one(Hello)
    known: tuple[PeerAddress, ...] = many(one(PeerAddress), MAX_INTRODUCED)


@dataclass(frozen=True, slots=True)
class HelloRejected(Header):
    """The sender refuses the receiver.

    Attributes:
        other: if the reason is another process with the receiver's identity, the signed greeting of that process.
    """

    why: str = text(200)
    other: tuple[Hello, ...] = some(one(Hello), 1)


@dataclass(frozen=True, slots=True)
class Heartbeat(Header):
    """Shows that the sender is alive. The receiver answers at once with a heartbeat of the same number.

    Attributes:
        wall: the sender's wall clock, seconds since the epoch.
        round: number of the sender's current round.
        leaving: the sender is about to leave of its own accord.
        sketch: of the sender's parameters, with independent state (`node.outer.sketch`); empty if there is none yet.
        rounds: of a peer of stage 0, training rounds that have ended at it; 0 otherwise.
        rate: microbatches/s that the sender can compute for its stage; 0 if it is not known yet, or without stages.
        idle: 0 if the sender works, 1 if it rests, 2 if it is away (`node.outer.activity.Activity`).
    """

    number: int = uint(1 << 53)
    wall: float = real(0, MAX_WALL_SECONDS)
    round: int = uint(1 << 40)
    leaving: bool = flag()
    sketch: bytes = blob(MAX_SKETCH_BYTES)
    rounds: int = uint(1 << 40)
    rate: float = real(0, MAX_RATE)
    idle: int = uint(2)


@dataclass(frozen=True, slots=True)
class WantRun(Header):
    """A joiner's request for the run's description; answered with `RunReply`."""


@dataclass(frozen=True, slots=True)
class RunReply(Header):
    """Announces the sealed manifest, then the sample that all peers evaluate on, with their sizes in bytes."""

    manifest_bytes: int = uint(MAX_RUN_BYTES)
    sample_bytes: int = uint(MAX_SAMPLE_BYTES)


@dataclass(frozen=True, slots=True)
class WantStatus(Header):
    """A request for this peer's status, from any peer; answered with `StatusReply`."""


@dataclass(frozen=True, slots=True)
class StatusReply(Header):
    """Announces the status: `size` bytes of JSON follow."""

    size: int = uint(MAX_STATUS_BYTES)


@dataclass(frozen=True, slots=True)
class WantStage(Header):
    """Asks for a stage to work in; answered with `StageReply` or `StageRejected`. A peer may pass it on to the founder.

    Attributes:
        sender: the joiner, or a stranger that asks for the seats.
        wanted: the stage that it wants, `ANY_STAGE` or `NO_STAGE`.
    """

    sender: Member = one(Member)
    wanted: int = uint(NO_STAGE)


@dataclass(frozen=True, slots=True)
class StageReply(Header):
    """The stage for the joiner, and the seats that the sender knows: at least that stage's.

    If the request was for `NO_STAGE`, the stage is the sender's own.
    """

    stage: int = uint(MAX_STAGES - 1)
    seats: tuple[StageSeat, ...] = many(one(StageSeat), MAX_STAGES)


@dataclass(frozen=True, slots=True)
class StageRejected(Header):
    """The joiner gets no stage now."""

    why: str = text(200)


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
register(189, (WantStage, StageReply, StageRejected))
