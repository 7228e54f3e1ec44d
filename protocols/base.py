"""The contract between protocols and the node: what a protocol may use, and what it must provide.

A protocol reaches the outside world only through the `Host` that it is built with. So the same protocol code runs over
libp2p and in the simulator. The event loop is the clock: a `Deadline` is a value of the running loop's `time()`, for
`asyncio.timeout_at`. Errors:

    ProtocolError
      PeerError            something about one peer; carries `peer`
        PeerGone           definite: no byte reached the peer, or it refused; it has not counted our data
        PeerSilent         indefinite: the stream was reset, ended or timed out; the peer may have counted our data
          StoppedHere      the same, by a limit of our own: the peer is not to blame
      BadPayload           received data breaks the rules; the code that read it knows the sender, and reports it
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar, runtime_checkable

if TYPE_CHECKING:  # commands such as `status` read these values, and loading PyTorch takes seconds
    import torch

DISTRUST_SECONDS = 60.0  # a peer that broke a rule, or could not prove its claim, is not asked again for this time
REQUESTER_IDLE_SECONDS = 30.0
"""A stream is closed if its requester asks for nothing, or takes nothing of what it asked for, for this time."""
SLOWEST_BYTES_PER_SECOND = 65_536.0  # a peer waits for bulk data at most as long as the data takes at this rate

PeerId: TypeAlias = str  # a libp2p peer id in its text form (base58btc)

Vector: TypeAlias = "torch.Tensor"  # 1-D, float32, CPU, contiguous

Deadline: TypeAlias = float
"""An instant of the running loop's `time()`. Never sent to a peer: peers exchange remaining seconds."""

Buffer: TypeAlias = bytes | bytearray | memoryview

CHUNK_BYTES = 1 << 20
"""Bulk data is encoded, sent, received and reduced in pieces of at most this many bytes of float32."""

MAX_STAGES = 32
RUN_SCOPE = "run"
"""The scope of a whole model: which parameters a chain of rounds is about. A run without stages has no other scope."""


def stage_scope(stage: int, number: int = 0) -> str:
    """Of a stage's rounds. `number` is that of its seat if the stage has begun again: its rounds are others then."""
    return f"{RUN_SCOPE}/stage/{stage}" + (f"/{number}" if number else "")


ALL = slice(None)
"""The whole of a vector, where a part can be given."""


@dataclass(frozen=True, slots=True)
class RoundKey:
    """Identifies a round. Every frame of the round is bound to it."""

    run: bytes  # hash of the manifest, 32 bytes
    scope: str  # which parameters are averaged: peers of equal scope hold the same ones
    lineage: bytes  # hash of the record that this round extends, 32 bytes
    round: int
    fragment: int = 0  # index of the fragment of the parameters that this round averages


@dataclass(frozen=True, slots=True, order=True)
class Member:
    """One incarnation of a peer: each start of its process is a new one."""

    peer: PeerId
    incarnation: int = 0


@dataclass(frozen=True, slots=True, order=True)
class LinkFault:
    """A broken link between two members that both took part: neither reduces a part before round `until`."""

    first: PeerId
    second: PeerId
    until: int


@dataclass(frozen=True, slots=True)
class Head:
    """The tip of a peer's chain of records, which the next round extends."""

    key: RoundKey  # of the next round
    roster: tuple[Member, ...]  # members whose votes count in it
    state_root: bytes  # of the outer state after the last decided round, 32 bytes
    anchor: bytes  # lineage of the last record that changed the outer state; pseudo-gradients are measured from there
    complaints: tuple[LinkFault, ...] = ()  # links that are known to be broken
    # Larger rosters that the present one has shrunk from, the latest first. Derived from the chain: two heads of one
    # lineage never differ in it.
    former: tuple[tuple[Member, ...], ...] = field(default=(), compare=False)
    fragments: int = 1  # of the model; training rounds commit one after the other

    @property
    def next_fragment(self) -> int:
        """The fragment of the training round after the one that extends this head."""
        return (self.key.fragment + 1) % self.fragments


class Header:
    """One of the frozen dataclasses of `protocols.wire`."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class LocalProgress:
    tokens: int  # tokens (or samples) that the inner steps consumed
    loss: float  # mean training loss over them; nan before the first step
    seconds: float
    norm: float  # L2 norm of the pseudo-gradient, anchor - local
    step_seconds: float = 0.0  # duration of one inner step, so how long the peer may need to notice the cut
    complete: bool = False  # the round's inner steps are done; more may follow until the round is cut
    state_root: bytes = bytes(32)  # of the outer state after the last committed round, 32 bytes
    # the peer leaves the roster after this round; if the work is complete, the round is called at once
    leaving: bool = False
    # Tokens of earlier work that the parameters already held when they were written. Included in `tokens`, not in
    # `seconds` and `loss`.
    carried: int = 0
    resting: bool = False  # the peer takes no steps for now, so the round is called without it


class Outcome(StrEnum):
    """How a round ended: `SUPERSEDED` means that the peer switched to a better branch instead."""

    COMMITTED = "committed"
    SKIPPED = "skipped"
    UNDECIDED = "undecided"
    SUPERSEDED = "superseded"


@dataclass(frozen=True, slots=True)
class PeerFault:
    peer: PeerId
    why: str


@dataclass(frozen=True, slots=True)
class Contribution:
    chunks_counted: int
    chunks: int  # of a whole vector; both are 1 for a protocol that counts whole vectors
    # Protocols that send states name the messages that were counted, in at most 128 characters each. A name is never
    # used twice, so the checkers find a message that was counted twice.
    messages: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AveragingResult:
    outcome: Outcome  # `into` holds the mean only if this is COMMITTED
    record: Header | None = None  # a `protocols.consensus.record.Record`; None if none was decided
    certificate: Header | None = None  # a `protocols.consensus.messages.Certificate`: the votes that decided it
    # In the order of the plan. With independent state this peer itself may be named or not.
    contributions: Mapping[PeerId, Contribution] = field(default_factory=dict)
    # in the mean, after clamping; empty if this peer does not know the plan
    weights: Mapping[PeerId, float] = field(default_factory=dict)
    blamed: tuple[PeerFault, ...] = ()  # refused, lost or clamped
    bytes_sent: int = 0  # of this round, headers and control messages included
    bytes_received: int = 0
    capped: Mapping[PeerId, int] = field(default_factory=dict)  # members with less weight than tokens -> their tokens
    # of a mean of clusters: lead -> how much of its cluster's work counts, of all its members' chunks. `contributions`
    # names the members of this peer's own cluster only
    clusters: Mapping[PeerId, Contribution] = field(default_factory=dict)
    contributors: int = 0  # of a mean of clusters: members of all clusters with at least one chunk in the mean
    seconds_moving: float = math.nan  # in which data moved, of the time that `average` took; not known if NaN

    @property
    def peers(self) -> tuple[PeerId, ...]:
        """Peers with at least one chunk in the mean."""
        return tuple(peer for peer, part in self.contributions.items() if part.chunks_counted)


@dataclass(frozen=True, slots=True)
class SyncStatus:
    """Progress of a peer that catches up."""

    bytes_here: int  # of the state, received
    bytes_whole: int  # of the whole state; 0 if the peer has a state to start from
    donors: int  # peers that send the state now
    bytes_per_second: float  # recent rate of everything that is downloaded
    rounds_here: int  # rounds since that state which have been replayed
    rounds_whole: int  # all rounds since that state
    eta_seconds: float | None  # time left; null while nothing is received


MAX_WEIGHT = 3.0
"""`Settings.max_weight`, unless the run says otherwise."""


@dataclass(frozen=True, slots=True)
class Settings:
    codec: str  # of vectors on the wire; this and the next two are equal at all peers of a run
    elements: tuple[int, ...]  # length of each fragment of the flat vector; rounds average them in turn
    chunk_elements: int = CHUNK_BYTES // 4  # the unit in which vectors travel and are reduced
    bandwidth: float = 12.5e6  # upload of this peer, bytes/s; determines the size of the part that it reduces
    bandwidth_limit: Callable[[], float] = lambda: math.inf  # what this peer may send now, bytes/s; may change
    incarnation: int = 0
    keep_rounds: int = 4  # of each fragment, whose reduced parts are kept in memory for members that missed them
    quorum: Callable[[int], int] | None = None  # votes that decide, by the roster's size; None: a majority
    fork_peers: int = 1  # least number of members that may fork when the majority is gone; 0 forbids forks
    robust: str = "mean"  # how reducers average (`protocols.vectors.robust`); equal at all peers of a run
    max_weight: float = MAX_WEIGHT  # of a member, in weights of the median one; equal at all peers of a run
    overlaps: bool = False  # training continues while a round averages; equal at all peers of a run
    least_members: Callable[[], int] = lambda: 1  # a lone member that rests admits others once they are so many with it
    awaits_backup: Callable[[], bool] = lambda: False  # while true, peers without a vote do not fork
    voters: int = 32  # largest roster, at most 32; equal at all peers of a run
    clusters: bool = False  # whether work of peers outside the roster counts, through members; equal at all peers
    schedule: str = "random"  # of gossip and push-sum (`protocols.pairwise.matching`); equal at all peers

    def upload_bandwidth(self) -> float:
        """What this peer may declare as its upload now, bytes/s."""
        return min(self.bandwidth, self.bandwidth_limit())


@dataclass(frozen=True, slots=True)
class Layout:
    """The parameters as flat vectors: names and shapes of the tensors of each fragment, in order."""

    fragments: tuple[tuple[tuple[str, tuple[int, ...]], ...], ...]

    def sizes(self) -> tuple[int, ...]:
        return tuple(sum(math.prod(shape) for _, shape in fragment) for fragment in self.fragments)


class ProtocolError(Exception):
    """Base class of all errors that protocols raise."""


class PeerError(ProtocolError):
    """An error about one peer; `why` is a user-facing message of one line."""

    def __init__(self, peer: PeerId, why: str) -> None:
        super().__init__(f"{peer}: {why}")
        self.peer = peer
        self.why = why


class PeerGone(PeerError):
    """Definite: no byte reached the peer, or it refused explicitly."""


class NotAccepted(PeerGone):
    """The peer was reached, and did not accept the stream."""


class PeerSilent(PeerError):
    """Indefinite: the peer may have received and counted what was sent before the stream ended."""


class StoppedHere(PeerSilent):
    """The stream ended because of a limit of this peer's own: the other peer is not to blame."""


class BadPayload(ProtocolError):
    """Received bytes break the rules (schema, size, codec, finiteness, signature, binding to the round)."""


T = TypeVar("T")


class Stream(Protocol):
    """An ordered, authenticated, flow-controlled stream to one peer, its deadline fixed when it was opened.

    Every call raises `PeerSilent` after the deadline, and when the stream was reset or has ended. Cancelling a call
    leaves the stream unusable. Byte counts include headers. `moved_bytes` grows while a long message is under way, too.
    """

    peer: PeerId
    deadline: Deadline
    bytes_sent: int
    bytes_received: int

    @property
    def moved_bytes(self) -> int: ...

    async def send(self, header: Header, payload: Buffer = b"") -> None:
        """Send a header and its raw payload. Returns when flow control has taken both and `payload` may be reused."""

    async def receive(self, limit: int) -> Header:
        """Receive one header of at most `limit` bytes, which are checked before it is read, or raise `BadPayload`."""

    async def receive_into(self, buffer: memoryview) -> None:
        """Receive exactly `len(buffer)` payload bytes. After an error the buffer's content is undefined."""


Handler: TypeAlias = Callable[[PeerId, Stream], Awaitable[None]]
"""Serves one incoming stream. Returning closes the stream; raising resets it."""


class Transport(Protocol):
    """Streams to peers. Handlers survive a restart of the daemon underneath."""

    me: PeerId

    def serve(self, method: str, handler: Handler) -> None:
        """Register the handler of the streams that peers open for `method`. Each method has one handler."""

    def open(self, peer: PeerId, method: str, deadline: Deadline) -> AbstractAsyncContextManager[Stream]:
        """Open a stream. A normal exit of the context closes it after everything was sent; an exception resets it.

        `PeerGone` if the peer could not be reached or does not serve `method`, `PeerSilent` after the deadline.
        """


class Directory(Protocol):
    """The DHT as a protocol sees it. Its content is unverified: a hint, never the basis of a decision."""

    async def announce(self, scope: str, value: bytes, ttl_seconds: float, deadline: Deadline) -> None: ...

    async def find(self, scope: str, limit: int, deadline: Deadline) -> Sequence[tuple[PeerId, bytes]]: ...


class Members(Protocol):
    """Peers that completed a handshake and are believed alive. A death notifies the waiters of `changed`."""

    @property
    def version(self) -> int:
        """Grows with every change in the set of live members."""

    def live(self) -> tuple[Member, ...]:
        """The live members, this peer included, ordered by id."""

    def met(self) -> Collection[PeerId]:
        """Peers that have greeted this one, live or not, as far as it keeps them in mind. In a run too large for each
        to watch all, those that are live are a few of them.
        """

    async def changed(self, since: int, deadline: Deadline) -> int:
        """Wait until `version` exceeds `since` or the deadline has come, and return the version."""

    async def answers(self, peer: PeerId, within_seconds: float) -> bool:
        """Ask a peer at once whether it is there. True if it answers within this time and twice its latest round
        trip, or cannot be asked. No answer says less than the loss of a member: one may wait behind vectors.
        """


class StaticMembers:
    """Members that always count as live. Only a broken stream shows that one has died."""

    version = 0

    def __init__(self, members: Iterable[Member]) -> None:
        self._members = tuple(sorted(members))

    def live(self) -> tuple[Member, ...]:
        return self._members

    def met(self) -> Collection[PeerId]:
        return [member.peer for member in self._members]

    async def changed(self, since: int, deadline: Deadline) -> int:
        await asyncio.sleep(max(0.0, deadline - asyncio.get_running_loop().time()))
        return self.version

    async def answers(self, peer: PeerId, within_seconds: float) -> bool:
        return True


class Signer(Protocol):
    """Signatures bound to peer ids: Ed25519 in a node, a seeded stand-in in the simulator."""

    def sign(self, message: bytes) -> bytes: ...

    def verify(self, peer: PeerId, message: bytes, signature: bytes) -> bool: ...


class Clock(Protocol):
    """Wall time in seconds since the epoch, for record expiry and log stamps only."""

    def wall(self) -> float: ...


class Compute(Protocol):
    """Runs work that would block the event loop: on threads in a node, on virtual time in the simulator."""

    async def run(self, work: Callable[[], T], cost_bytes: int) -> T: ...


@dataclass(frozen=True, slots=True)
class Host:
    transport: Transport
    directory: Directory
    members: Members
    compute: Compute
    clock: Clock
    signer: Signer
    seed: int
    removed: Callable[[PeerId], bool] = lambda peer: False
    """Whether a peer was removed from the run for good. Peers may learn it at different times; it never ends."""

    @property
    def me(self) -> PeerId:
        return self.transport.me

    def rng(self, purpose: str) -> random.Random:
        """A separate generator for each purpose, so that draws for one purpose never shift those of another."""
        return random.Random(f"{self.seed}/{self.me}/{purpose}")


class AveragingSession(Protocol):
    cut: asyncio.Event
    """Set when the coordinator calls the round or its deadline has come. Then finish the step and call `average`."""

    def offer(self, work: LocalProgress) -> None:
        """Announce this peer's progress to the others. Call it again as the work grows."""

    def waiting_for(self) -> tuple[PeerId, ...]:
        """Peers that the round is waiting for, as far as this peer knows. Shown in the status."""

    async def average(self, mine: Sequence[Vector], work: LocalProgress, into: Sequence[Vector]) -> AveragingResult:
        """Average `mine`, which does not change meanwhile, with the others' vectors into `into`, of the same shapes.

        With replicated state these are the fragments of the pseudo-gradient; with independent state parameters and
        momentum or, in a run with `outer_pull`, the pseudo-gradient alone. A failure of another peer never raises.
        """


class Averager(Protocol):
    me: Member

    def enter(
        self, head: Head, deadline: Deadline, since: float | None = None
    ) -> AbstractAsyncContextManager[AveragingSession]:
        """Take part in the round that extends `head`. Other peers may call the round as soon as this is entered. A
        peer outside the roster asks for admission and learns what the roster decides, but does not vote. `since` is
        when it began to train for the round, by default now.
        """


class IndependentSession(AveragingSession, Protocol):
    """One round of a protocol in which each peer owns its state, which `average` takes at the end of the round.

    If the outcome is COMMITTED, the result names at least one contribution. If it is SKIPPED, no peer averaged with
    this one and `into` is undefined. Others do not occur.
    """

    # In which the session ended: higher than at entry if other peers were ahead, unless peers do not follow each
    # other's rounds in this protocol.
    round: int
    # Name of the last group that this peer completed: all peers that report the same name hold the same bits. Empty if
    # there was none, or the protocol has no groups.
    group: str
    half_exchanges: int  # exchanges that may have been committed at one end only
    # Upper bound of how far these moved the mean of all peers: the sum over them of ‖the change, made or not, of this
    # peer's state‖ / ‖this peer's state‖.
    mass_drift: float

    def share(self, state: Sequence[Vector]) -> None:
        """Let other peers average with this state, in place, until `reclaim`. An exchange changes all or nothing."""

    async def reclaim(self) -> Mapping[PeerId, Contribution]:
        """Stop sharing the state, after an exchange that is under way. Returns what it has been averaged with."""


class ClosingSession(IndependentSession, Protocol):
    closing_exchanges: int  # how many succeeded

    async def close(self, mine: Sequence[Vector], into: Sequence[Vector], here: Collection[PeerId]) -> AveragingResult:
        """Average `mine` into `into`, as `average` does, with the peers that have reached the end of the run (`here`).

        Takes at most ⌈log₂ n⌉ + 1 exchanges among n peers, this one included. The result is the mean of all only if all
        of them pass the same set.
        """


class IndependentAverager(Protocol):
    """How peers with independent state bring their states near each other. The head passed to `enter` has this peer's
    own round number, and as lineage the root of its own last state.
    """

    me: Member

    def enter(self, head: Head, deadline: Deadline) -> AbstractAsyncContextManager[IndependentSession]:
        """Take part in a round. From then on other peers may open the round, or an exchange with a shared state."""


@runtime_checkable
class ClosingAverager(IndependentAverager, Protocol):
    """An averager that ends a run with closing exchanges."""

    closes: bool

    def enter(self, head: Head, deadline: Deadline) -> AbstractAsyncContextManager[ClosingSession]: ...


class Trainer(Protocol):
    """Computes the inner steps between two rounds. In a node it is a worker process."""

    layout: Layout
    resets: int
    """How often the local parameters were set back to the anchor because what computed them died."""

    async def train(
        self, key: RoundKey, cut: asyncio.Event, progress: Callable[[LocalProgress], None], surplus: bool = True
    ) -> LocalProgress:
        """Train from the present parameters until `cut` is set, which is checked after every inner step.

        The round before the one that was trained for last is complete: its mean was on its way when that began. The
        norm of the progress is that of the key's fragment, and of no use while the anchor is changing.

        `progress` is called at once (with work left over from earlier rounds), after the first inner step, when the
        round's inner steps are complete, and at each growth by a tenth. Without `surplus`, no step follows the complete
        ones.
        """

    def rest(self, resting: bool) -> None:
        """Take no step until called again with False; report the work, marked `resting`. `train` ends at its cut."""

    async def release(self) -> None:
        """Free what computing needs, between two rounds. The next command gets it back."""

    async def read(self, into: Vector, part: slice = ALL) -> None:
        """Copy the local parameters, or a part of them, into `into`, between two inner steps."""

    async def write(self, source: Vector, anchor: Vector | None = None, tokens: int = 0, part: slice = ALL) -> None:
        """Replace the local parameters and reset the progress. The inner optimiser keeps its state.

        The pseudo-gradient is measured from `anchor`, by default `source`. A peer that keeps work of `tokens` that no
        round has counted passes the new anchor minus that work as `source`. With `part`, the vectors are those of a
        fragment, and all else stays as it is; `tokens` are those of the fragment that is averaged next.
        """
