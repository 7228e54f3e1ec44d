"""Answering those who ask outside of rounds: a few streams at a time, a few requests on each, every one in time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable

from protocols import wire
from protocols.base import BadPayload, Header, Host, PeerId, Stream
from protocols.catchup.donor import IDLE_SECONDS, Donor
from protocols.catchup.requests import SYNC, WantSnapshot
from protocols.post import Ledger
from protocols.tasks import within

SERVE_SECONDS = 30.0
MAX_REQUESTS = 64
"""On one stream."""
MAX_STREAMS = 64
"""Served at a time; whoever comes then finds the stream closed."""
MAX_STREAMS_OF_ONE = 32
"""Of these, for one peer: nobody keeps all others out by itself. Who was cut off for a while comes on many at once."""


class Reception:
    """Hands the requests of others to who answers them; who asks for a snapshot goes to the donor.

    Args:
        answer: sends what belongs to a request; raises `BadPayload` if it is none.
    """

    def __init__(
        self, host: Host, ledger: Ledger, donor: Donor, answer: Callable[[Stream, Header], Awaitable[None]]
    ) -> None:
        self._ledger, self._donor, self._answer = ledger, donor, answer
        self._serving = Counter[PeerId]()
        host.transport.serve(SYNC, self._serve)

    async def _serve(self, peer: PeerId, stream: Stream) -> None:
        if self._serving.total() >= MAX_STREAMS or self._serving[peer] >= MAX_STREAMS_OF_ONE:
            return
        self._serving[peer] += 1
        try:
            async with self._ledger.counting(stream):
                await self._requests(peer, stream)
        finally:
            self._serving -= Counter((peer,))  # forgets the peer at zero

    async def _requests(self, peer: PeerId, stream: Stream) -> None:
        for _ in range(MAX_REQUESTS):
            async with within(IDLE_SECONDS, peer, "it asks"):
                request = await stream.receive(wire.MAX_HEADER_BYTES)
            if isinstance(request, WantSnapshot):
                return await self._donor.serve(stream, request)
            async with within(SERVE_SECONDS, peer, "it takes an answer"):
                await self._answer(stream, request)
        raise BadPayload(f"{MAX_REQUESTS} requests on one stream")
