"""The contract: what a protocol may touch, and what it must give back.

A protocol reaches the world only through the `Host` that it is built with: streams to peers, hints from a directory,
the list of live members, a place for heavy work, wall time, signatures, seeded randomness. The same protocol code runs
over libp2p and in the simulated world. There is no clock for deadlines: a `Deadline` is a value of the running
loop's `time()`, used through `asyncio.timeout_at`, so the loop is the clock.

Errors:

    ProtocolError
      PeerError            something about one peer; carries `peer`
        PeerGone           definite: not a byte reached it, or it refused; it has not counted us
        PeerSilent         indefinite: a reset, an end or a deadline in mid stream; it may have counted us
      BadPayload           what was received breaks the rules; whoever reads knows the sender and names it
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, TypeAlias, TypeVar

import torch

T = TypeVar("T")

PeerId: TypeAlias = str
"""A libp2p peer id in its text form (base58btc)."""

Vector: TypeAlias = torch.Tensor
"""1-D, float32, CPU, contiguous."""

Deadline: TypeAlias = float
"""An instant of the running loop's `time()`. Never sent to a peer: peers exchange remaining seconds."""

Buffer: TypeAlias = bytes | bytearray | memoryview

CHUNK_BYTES = 1 << 20
"""Bulk data is encoded, sent, received and reduced in pieces of at most this many bytes of float32."""


class ProtocolError(Exception):
    """Root of all errors that cross the contract."""


class PeerError(ProtocolError):
    """An error about one peer.

    Attributes:
        peer: whom it is about.
        why: one line for a person.
    """

    def __init__(self, peer: PeerId, why: str) -> None:
        super().__init__(f"{peer}: {why}")
        self.peer = peer
        self.why = why


class PeerGone(PeerError):
    """Definite: not a byte reached the peer, or it refused explicitly."""


class PeerSilent(PeerError):
    """Indefinite: the peer may have received and counted what was sent before the stream ended."""


class BadPayload(ProtocolError):
    """Received bytes break the rules (schema, size, codec, finiteness, signature, binding to the round)."""


@dataclass(frozen=True, slots=True)
class RoundKey:
    """What every frame of a round is bound to.

    Attributes:
        run: hash of the manifest, 32 bytes.
        scope: which replicas average; equal scope means replicas of the same parameters.
        lineage: hash of the record that this round extends, 32 bytes.
        round: the number of the round, from 0.
        fragment: which fragment of the model this round commits.
    """

    run: bytes
    scope: str
    lineage: bytes
    round: int
    fragment: int = 0


@dataclass(frozen=True, slots=True, order=True)
class Member:
    """A peer in one of its lives: a restart is a new incarnation."""

    peer: PeerId
    incarnation: int = 0


@dataclass(frozen=True, slots=True, order=True)
class Complaint:
    """Between these two no contribution travelled, though both took part: neither reduces until that round."""

    first: PeerId
    second: PeerId
    until: int


@dataclass(frozen=True, slots=True)
class Head:
    """Where a peer stands on the chain of records: what the next round extends.

    Attributes:
        key: of the next round.
        roster: the members whose votes count in it.
        state_root: root of the outer state after the last decided round, 32 bytes.
        anchor: lineage of the last record that changed the outer state: what pseudo-gradients are measured from.
        complaints: links that are known not to carry contributions.
    """

    key: RoundKey
    roster: tuple[Member, ...]
    state_root: bytes
    anchor: bytes
    complaints: tuple[Complaint, ...] = ()


class Header:
    """The header of a message: one of the frozen dataclasses of `protocols.wire`."""

    __slots__ = ()


class Stream(Protocol):
    """An ordered, authenticated, flow-controlled stream to one peer, its deadline fixed when it was opened.

    After the deadline every call raises `PeerSilent`. Cancelling a call leaves the stream unusable: reset it.
    `bytes_sent` and `bytes_received` count everything that crossed it, headers included.
    """

    peer: PeerId
    deadline: Deadline
    bytes_sent: int
    bytes_received: int

    async def send(self, header: Header, payload: Buffer = b"") -> None:
        """Send a header and its raw payload; returns when flow control has taken them and `payload` may be reused.

        Raises:
            PeerSilent: the stream was reset, has ended or its deadline has passed.
        """

    async def receive(self, limit: int) -> Header:
        """Receive one header of at most `limit` bytes; the bound is checked before the header is read.

        Raises:
            BadPayload: too long, not decodable, or not a known message.
            PeerSilent: the stream was reset, has ended or its deadline has passed.
        """

    async def receive_into(self, buffer: memoryview) -> None:
        """Receive exactly `len(buffer)` payload bytes.

        Raises:
            PeerSilent: as for `receive`; the buffer's content is then undefined.
        """


Handler: TypeAlias = Callable[[PeerId, Stream], Awaitable[None]]
"""Serves one incoming stream. Returning closes the stream; raising resets it."""


class Transport(Protocol):
    """Streams to peers. Handlers survive a restart of the daemon underneath."""

    me: PeerId

    def serve(self, method: str, handler: Handler) -> None:
        """Answer the streams that peers open for `method`. One handler a method."""

    def open(self, peer: PeerId, method: str, deadline: Deadline) -> AbstractAsyncContextManager[Stream]:
        """Open a stream; leaving the context normally closes it after what was sent, by an exception resets it.

        Raises:
            PeerGone: the peer could not be reached, or does not serve `method`.
            PeerSilent: no answer before the deadline.
        """


class Directory(Protocol):
    """What a protocol sees of the DHT: hints, never decisions."""

    async def announce(self, scope: str, value: bytes, ttl_seconds: float, deadline: Deadline) -> None: ...

    async def find(self, scope: str, limit: int, deadline: Deadline) -> Sequence[tuple[PeerId, bytes]]: ...


class Members(Protocol):
    """Peers that completed a handshake and are believed alive. Deaths are pushed, not polled."""

    version: int

    def live(self) -> tuple[Member, ...]:
        """The live members, this peer included, in the order of their ids."""

    async def changed(self, since: int, deadline: Deadline) -> int:
        """Wait until `version` exceeds `since`; returns the version then, or at the deadline."""


class Signer(Protocol):
    """Signatures bound to peer ids: Ed25519 in a node, a seeded stand-in in the simulator."""

    def sign(self, message: bytes) -> bytes: ...

    def verify(self, peer: PeerId, message: bytes, signature: bytes) -> bool: ...


class Clock(Protocol):
    """Wall time, for record expiry and log stamps only."""

    def wall(self) -> float: ...


class Compute(Protocol):
    """Runs work that would hold up the loop: on threads in a node, inline for virtual seconds in the simulator."""

    async def run(self, work: Callable[[], T], cost_bytes: int) -> T: ...


@dataclass(frozen=True, slots=True)
class Host:
    """Everything that a protocol may touch."""

    transport: Transport
    directory: Directory
    members: Members
    compute: Compute
    clock: Clock
    signer: Signer
    seed: int

    @property
    def me(self) -> PeerId:
        return self.transport.me

    def rng(self, purpose: str) -> random.Random:
        """A generator of its own for each purpose, so that draws for one never shift those of another."""
        return random.Random(f"{self.seed}/{self.me}/{purpose}")


@dataclass(frozen=True, slots=True)
class Work:
    """What a peer has trained since its anchor.

    Attributes:
        tokens: tokens (or samples) that the inner steps consumed.
        loss: mean training loss over them; nan before the first step.
        seconds: time spent training.
        step_seconds: what one inner step takes: how long a cut may have to wait.
        norm: L2 norm of the pseudo-gradient, anchor - local.
        complete: the inner steps of the round are done; more may follow until the round is cut.
        state_root: root of the outer state after the last committed round, 32 bytes.
        leaving: the last that it brings: it will be gone when the round is over, which is called at once.
        carried: of the tokens, those that the parameters held when they were written: `seconds` and `loss` are not of
            them.
    """

    tokens: int
    loss: float
    seconds: float
    norm: float
    step_seconds: float = 0.0
    complete: bool = False
    state_root: bytes = bytes(32)
    leaving: bool = False
    carried: int = 0


class Outcome(StrEnum):
    COMMITTED = "committed"
    SKIPPED = "skipped"
    UNDECIDED = "undecided"
    SUPERSEDED = "superseded"


@dataclass(frozen=True, slots=True)
class Blame:
    """A peer that was left out or clamped, and why, in one line."""

    peer: PeerId
    why: str


@dataclass(frozen=True, slots=True)
class Contribution:
    """How much the mean holds of what a peer brought, its pseudo-gradient or its state.

    Attributes:
        messages: where states travel, the names of those that were counted, of at most 128 characters: never given
            twice, so that whoever counts one twice can be told.
    """

    chunks_counted: int
    chunks: int
    messages: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Mean:
    """What became of a round's averaging.

    Attributes:
        outcome: `into` holds the mean only if committed.
        record: encoded record of the round (`protocols.record`), empty unless decided.
        certificate: the record with the votes that decided it, as a frame's header; empty unless decided.
        contributions: peer -> chunks of it that the mean holds, in the order of the plan.
        weights: peer -> its weight in the mean, after clamping; empty where this peer does not know the plan.
        blamed: who was refused, lost or clamped, and why.
        bytes_sent, bytes_received: of this round, headers and control messages included.
    """

    outcome: Outcome
    record: bytes = b""
    certificate: bytes = b""
    contributions: Mapping[PeerId, Contribution] = field(default_factory=dict)
    weights: Mapping[PeerId, float] = field(default_factory=dict)
    blamed: tuple[Blame, ...] = ()
    bytes_sent: int = 0
    bytes_received: int = 0

    @property
    def peers(self) -> tuple[PeerId, ...]:
        """Peers of which the mean holds at least one chunk."""
        return tuple(peer for peer, part in self.contributions.items() if part.chunks_counted)


@dataclass(frozen=True, slots=True)
class Settings:
    """What an averager is built with, next to its host.

    Attributes:
        codec: name of the codec in which vectors travel; the same for all peers of a run, as are the next two.
        elements: length of each fragment's flat vector.
        chunk_elements: vectors travel and are reduced in chunks of so many.
        bandwidth: this peer's upload, bytes/s; decides how much it reduces.
        incarnation: this life of the peer.
        keep_rounds: decided bytes are kept for so many rounds, for members that missed one.
        quorum: votes that decide, by the size of the roster; None: a majority.
        fork_peers: members that may go on alone, at least, where the majority is gone; 0: none may.
        robust: name of the rule by which reducers average (`protocols.robust`); the same for all peers of a run.
        schedule: whom a peer asks in gossip, or gives to (`protocols.matching`); the same for all peers of a run.
    """

    codec: str
    elements: tuple[int, ...]
    chunk_elements: int = CHUNK_BYTES // 4
    bandwidth: float = 12.5e6
    incarnation: int = 0
    keep_rounds: int = 8
    quorum: Callable[[int], int] | None = None
    fork_peers: int = 1
    robust: str = "mean"
    schedule: str = "random"


class Session(Protocol):
    """One peer's side of one round of averaging."""

    cut: asyncio.Event
    """Set when the round is called, or has reached its deadline: start no further step, hand in."""

    def ready(self, work: Work) -> None:
        """Tell the others what there is to hand in; again as the work grows."""

    def awaited(self) -> tuple[PeerId, ...]:
        """Whom the round waits for, as far as this peer can tell: what a person who wonders is shown."""

    async def mean(self, mine: Sequence[Vector], work: Work, into: Sequence[Vector]) -> Mean:
        """Average `mine` with the others into `into` (same shapes). `mine` is lent, and unchanged until return.

        Never raises for a peer's failure: the outcome says what became of the round.
        """


class Averager(Protocol):
    """How replicas agree."""

    me: Member

    def enter(self, head: Head, deadline: Deadline) -> AbstractAsyncContextManager[Session]:
        """Take part in the round that extends `head`, from its first moment: peers may call from then on.

        Who is not in the roster looks on, asks to be admitted, and learns what was decided.
        """


class LooseSession(Session, Protocol):
    """A session of a protocol without a shared anchor: what travels is a peer's state, its parameters and momentum.

    `mean` is given the state after this peer's own outer step. Committed, `into` holds the state to go on from;
    skipped, nobody averaged with us, and `into` is undefined. Others may average with a peer that still trains, too.

    Attributes:
        round: that this session ended in: a later one than it was entered for if others were ahead.
        group: names the last group that this peer completed in it: all who name it hold the same bits. Empty: none,
            or there are no groups.
        half_exchanges: that this peer began or answered and does not know to be over at both ends: one end may have
            moved alone.
        mass_drift: by how much these may have moved the mean of all, at most: the sum over them of
            ‖what this end moved, or would have moved‖ / ‖its state‖.
    """

    round: int
    group: str
    half_exchanges: int
    mass_drift: float

    def lend(self, state: Sequence[Vector]) -> None:
        """Let others average with this state, in place, until it is taken back: all of it at once, or nothing."""

    async def take_back(self) -> Mapping[PeerId, Contribution]:
        """From now on the state is the caller's alone; waits for an exchange under way, which has its own deadline.

        Returns:
            Of whom the state holds something, since it was lent; empty: it is as it was.
        """


class LooseAverager(Protocol):
    """How replicas that share no anchor come near each other.

    `enter` is given the number of this peer's own round, and as lineage the root of its own last state. The class says
    `shares_anchor = False`.
    """

    me: Member
    shares_anchor: bool

    def enter(self, head: Head, deadline: Deadline) -> AbstractAsyncContextManager[LooseSession]:
        """Take part in a round: peers may call from then on, for this one or for an exchange with what was lent."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The parameters as flat vectors: tensor names and shapes, in order, for each fragment."""

    fragments: tuple[tuple[tuple[str, tuple[int, ...]], ...], ...]

    def sizes(self) -> tuple[int, ...]:
        """Elements of each fragment's flat vector."""
        return tuple(sum(torch.Size(shape).numel() for _, shape in fragment) for fragment in self.fragments)


class Trainer(Protocol):
    """Who computes: the inner steps between two rounds, behind a process boundary in a node."""

    layout: Layout

    async def train(
        self, key: RoundKey, cut: asyncio.Event, progress: Callable[[Work], None], surplus: bool = True
    ) -> Work:
        """Train from where the parameters stand until `cut` is set; the cut is seen at every inner step.

        `progress` is called at once, with what earlier rounds left over, after the first inner step, when the round's
        inner steps are complete, and whenever the work has grown by a tenth since the last call.

        Args:
            surplus: go on when the round's inner steps are complete; else wait for the cut.
        """

    async def read(self, into: Vector, fragment: int = 0) -> None:
        """Copy the local parameters out, at a step boundary."""

    async def write(self, source: Vector, fragment: int = 0, anchor: Vector | None = None, tokens: int = 0) -> None:
        """Replace the local parameters; the inner optimiser's state stays, the account of work starts again.

        Args:
            anchor: what the pseudo-gradient is measured from, if not `source`: where work is kept that no round has
                counted, `source` is the new anchor less that work.
            tokens: how many tokens that work is worth.
        """
