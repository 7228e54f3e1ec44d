"""Serves requests outside of rounds. The streams, the requests on each, and the time for each are limited."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from protocols import wire
from protocols.aio import peer_timeout
from protocols.base import BadPayload, Header, Host, PeerId, Stream
from protocols.control_channel import RoundAccounting
from protocols.limits import REQUESTER_IDLE_SECONDS
from protocols.stream_limiter import StreamLimiter
from protocols.sync.requests import SYNC, WantSnapshot
from protocols.sync.snapshot_server import SnapshotServer

SERVE_SECONDS = 30.0
MAX_REQUESTS = 64
"""Limit of requests on one stream."""


class SyncServer:
    """Passes requests for a snapshot to the snapshot server, and all others to `answer`.

    Args:
        answer: sends the answer to a request; raises `BadPayload` if the request is not valid.
    """

    def __init__(
        self,
        host: Host,
        accounting: RoundAccounting,
        donor: SnapshotServer,
        answer: Callable[[Stream, Header], Awaitable[None]],
    ) -> None:
        self._accounting, self._donor, self._answer = accounting, donor, answer
        self._limiter = StreamLimiter()
        host.transport.serve(SYNC, self._serve)

    async def _serve(self, peer: PeerId, stream: Stream) -> None:
        with self._limiter.one_for(peer) as served:
            if served:
                async with self._accounting.counting(stream):
                    await self._requests(peer, stream)

    async def _requests(self, peer: PeerId, stream: Stream) -> None:
        for _ in range(MAX_REQUESTS):
            async with peer_timeout(REQUESTER_IDLE_SECONDS, peer, "it sends a request"):
                request = await stream.receive(wire.MAX_HEADER_BYTES)
            if isinstance(request, WantSnapshot):
                return await self._donor.serve(stream, request)
            async with peer_timeout(SERVE_SECONDS, peer, "it receives an answer"):
                await self._answer(stream, request)
        raise BadPayload(f"{MAX_REQUESTS} requests on one stream")
