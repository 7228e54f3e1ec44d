"""What peers say to each other about themselves: greetings, pulses, and what a newcomer asks for."""

# ruff: noqa: RUF009 - a field's bound is its default

from __future__ import annotations

from dataclasses import dataclass, replace

from protocols.base import Header, Member
from protocols.wire import blob, body, digest, flag, many, one, peer_id, real, register, some, text, uint

HELLO = "starling/hello/1"
ENTRY = "starling/entry/1"

VERSION = 1
"""Of what peers say to each other beside the frames' own version: peers of different ones do not train together."""
MAX_ADDRESSES = 16
MAX_ADDRESS_CHARACTERS = 256
MAX_INTRODUCED = 32
MAX_NICKNAME_CHARACTERS = 32
MAX_RUN_BYTES = 1 << 16
MAX_SKETCH_BYTES = 256
MAX_SAMPLE_BYTES = 1 << 18
MAX_STATUS_BYTES = 1 << 16
MAX_WALL_SECONDS = 1e11


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """A peer, and multiaddrs where it may be found."""

    peer: str = peer_id()
    addresses: tuple[str, ...] = many(text(MAX_ADDRESS_CHARACTERS), MAX_ADDRESSES)


@dataclass(frozen=True, slots=True)
class Hello(Header):
    """Opens the stream on which one peer watches another; answered with `Welcome` or `HelloRejected`.

    Attributes:
        version: what the sender speaks.
        run: hash of its manifest.
        member: the sender in this life.
        life: drawn at random when the process started: two processes with one identity are told apart by it.
        addresses: where the sender can be dialled.
        signature: of the sender, over all of it but that: what proves one life of a peer to another.
    """

    version: int = uint(1 << 16)
    run: bytes = digest()
    member: Member = one(Member)
    life: int = uint((1 << 63) - 1)
    nickname: str = text(MAX_NICKNAME_CHARACTERS)
    addresses: tuple[str, ...] = many(text(MAX_ADDRESS_CHARACTERS), MAX_ADDRESSES)
    signature: bytes = blob(128)


def signed_part(hello: Hello) -> bytes:
    """What its sender signs."""
    return b"starling hello" + body(replace(hello, signature=b""))


@dataclass(frozen=True, slots=True)
class Welcome(Header):
    """The answer to a `Hello`: the same about its sender, and whom it knows."""

    hello: Hello = one(Hello)
    known: tuple[PeerAddress, ...] = many(one(PeerAddress), MAX_INTRODUCED)


@dataclass(frozen=True, slots=True)
class HelloRejected(Header):
    """The sender will have nothing to do with the receiver.

    Attributes:
        other: another life of the receiver, by its own signature, for which it is refused.
    """

    why: str = text(200)
    other: tuple[Hello, ...] = some(one(Hello), 1)


@dataclass(frozen=True, slots=True)
class Heartbeat(Header):
    """A sign of life, answered at once by one of the same number.

    Attributes:
        wall: the sender's wall clock, seconds since the epoch.
        round: the one it is in.
        leaving: it is about to go, of its own will.
        sketch: of its parameters, where no anchor is shared (`node.outer.sketch`); empty: of none yet.
    """

    number: int = uint(1 << 53)
    wall: float = real(0, MAX_WALL_SECONDS)
    round: int = uint(1 << 40)
    leaving: bool = flag()
    sketch: bytes = blob(MAX_SKETCH_BYTES)


@dataclass(frozen=True, slots=True)
class WantRun(Header):
    """A newcomer asks which run this is; answered with `RunReply`."""


@dataclass(frozen=True, slots=True)
class RunReply(Header):
    """The sealed manifest follows, and then the sample that everybody evaluates on, so many bytes of each."""

    manifest_bytes: int = uint(MAX_RUN_BYTES)
    sample_bytes: int = uint(MAX_SAMPLE_BYTES)


@dataclass(frozen=True, slots=True)
class WantStatus(Header):
    """Anybody asks how this peer is doing; answered with `StatusReply`."""


@dataclass(frozen=True, slots=True)
class StatusReply(Header):
    """So many bytes of JSON follow."""

    size: int = uint(MAX_STATUS_BYTES)


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
