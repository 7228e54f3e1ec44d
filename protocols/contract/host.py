"""What a protocol may use of the outside world: streams, directory, members, compute, clock, signatures, randomness."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

from protocols.contract.values import Buffer, Deadline, Header, Member, PeerId

T = TypeVar("T")


class Stream(Protocol):
    """An ordered, authenticated, flow-controlled stream to one peer, its deadline fixed when it was opened.

    After the deadline every call raises `PeerSilent`. Cancelling a call leaves the stream unusable: reset it.
    `bytes_sent` and `bytes_received` count everything that crossed it, headers included. `moved_bytes` grows while a
    long message is under way, too: it tells a slow peer from a silent one.
    """

    peer: PeerId
    deadline: Deadline
    bytes_sent: int
    bytes_received: int

    @property
    def moved_bytes(self) -> int: ...

    async def send(self, header: Header, payload: Buffer = b"") -> None:
        """Send a header and its raw payload. Returns when flow control has taken both and `payload` may be reused.

        Raises:
            PeerSilent: the stream was reset, has ended or its deadline has passed.
        """

    async def receive(self, limit: int) -> Header:
        """Receive one header of at most `limit` bytes. The size is checked before the header is read.

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
        """Register the handler of the streams that peers open for `method`. Each method has one handler."""

    def open(self, peer: PeerId, method: str, deadline: Deadline) -> AbstractAsyncContextManager[Stream]:
        """Open a stream. A normal exit of the context closes it after everything was sent; an exception resets it.

        Raises:
            PeerGone: the peer could not be reached, or does not serve `method`.
            PeerSilent: no answer before the deadline.
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

    async def changed(self, since: int, deadline: Deadline) -> int:
        """Wait until `version` exceeds `since` or the deadline has come, and return the version."""


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
    """Everything that a protocol may use of the outside world."""

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
        """A separate generator for each purpose, so that draws for one purpose never shift those of another."""
        return random.Random(f"{self.seed}/{self.me}/{purpose}")
