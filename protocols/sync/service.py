"""What sync with and without a chain share: announcements, and requests of other peers, which are limited."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from protocols import wire
from protocols.aio import loop_time, peer_timeout, task_group
from protocols.base import (
    REQUESTER_IDLE_SECONDS,
    BadPayload,
    Deadline,
    Header,
    PeerError,
    PeerId,
    PeerSilent,
    RoundKey,
    Stream,
)
from protocols.blobs.serving import BlobServer
from protocols.streams.endpoint import StreamLimiter
from protocols.sync.context import SyncContext
from protocols.sync.requests import SYNC, HeadAnnouncement, StateAdvert

ANNOUNCE_SECONDS = 5.0  # time for a peer to answer an announcement
SERVE_SECONDS = 30.0  # time to answer one request
MAX_REQUESTS = 64  # limit of requests on one stream

A = TypeVar("A", HeadAnnouncement, StateAdvert)


class SyncServiceBase(ABC, Generic[A]):
    """Exchanges requests with other peers outside of rounds. `A` is the type of a peer's announcement."""

    def __init__(
        self, context: SyncContext, announcement: type[A], key: Callable[[], RoundKey], blobs: BlobServer
    ) -> None:
        """Serve requests, and this peer's snapshots as blobs. `key` is that of its next round."""
        self.accounting, self.sync_progress = context.accounting, context.sync_progress
        self._context, self._key, self._blobs = context, key, blobs
        self._announcement_type: type[A] = announcement
        self._limiter = StreamLimiter()
        blobs.accounting = self.accounting
        blobs.add(lambda name: context.snapshots.blob(name, context.host.compute))
        context.host.transport.serve(SYNC, self._serve)

    async def run(self) -> None:
        """Run until cancelled: release snapshots that no peer downloads any more, and call `_look_around`."""
        while True:
            self._context.snapshots.tidy()
            await self._look_around()

    @property
    def joiners(self) -> int:
        return self._blobs.fetching

    def complain_to(self, say: Callable[[str], None]) -> None:
        self._context.say = say

    def take_bytes(self) -> int:
        """Bytes of snapshots fetched since the last call."""
        taken, self._context.snapshot_bytes = self._context.snapshot_bytes, 0
        return taken

    @abstractmethod
    def _announcement(self) -> A:
        """This peer's own announcement."""

    @abstractmethod
    async def _look_around(self) -> None:
        """The service's own part of a pass of `run`, including the wait until the next pass."""

    @abstractmethod
    async def _answer(self, stream: Stream, request: Header) -> None:
        """Answer a request; raises `BadPayload` if it is another kind of message, or breaks a rule."""

    def _admit(self, peer: PeerId, announcement: A) -> None:
        """Check and record a peer's announcement."""
        ours, theirs = self._key(), announcement.key
        if theirs.run != ours.run:
            raise BadPayload(f"{type(announcement).__name__} of another run")
        if theirs.scope != ours.scope:
            raise PeerSilent(peer, "it is in another stage: one of the two has moved")
        if announcement.sender.peer != peer:
            raise BadPayload(f"{type(announcement).__name__} in the name of {announcement.sender.peer}")

    async def _serve(self, peer: PeerId, stream: Stream) -> None:
        with self._limiter.one_for(peer) as served:
            if served:
                async with self.accounting.counting(stream):
                    await self._requests(peer, stream)

    async def _requests(self, peer: PeerId, stream: Stream) -> None:
        for _ in range(MAX_REQUESTS):
            async with peer_timeout(REQUESTER_IDLE_SECONDS, peer, "it sends a request"):
                request = await stream.receive(wire.MAX_HEADER_BYTES)
            async with peer_timeout(SERVE_SECONDS, peer, "it receives an answer"):
                await self._answer(stream, request)
        raise BadPayload(f"{MAX_REQUESTS} requests on one stream")

    async def _exchange(self, peers: Sequence[PeerId], deadline: Deadline) -> dict[PeerId, A]:
        """Exchange announcements. A peer that breaks a rule is reported, and not asked for a while."""
        deadline = min(deadline, loop_time() + ANNOUNCE_SECONDS)
        found: dict[PeerId, A] = {}

        async def one(peer: PeerId) -> None:
            try:
                async with self._context.open(peer, SYNC, deadline) as stream:
                    await stream.send(self._announcement())
                    answer = wire.expect(await stream.receive(wire.MAX_HEADER_BYTES), self._announcement_type)
                    self._admit(peer, answer)
                    found[peer] = answer
            except BadPayload:
                self._context.peers.distrust(peer)
            except PeerError:
                pass

        async with task_group() as group:
            for peer in peers:
                group.create_task(one(peer))
        return {peer: found[peer] for peer in peers if peer in found}
