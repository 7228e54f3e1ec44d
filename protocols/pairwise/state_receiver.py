"""Receive another peer's state, chunk by chunk, and check each chunk as it comes in."""

from __future__ import annotations

import math
from functools import partial

from protocols import wire
from protocols.allreduce.parts import ReducedPart
from protocols.base import BadPayload, Compute, Header, PeerSilent, Stream, Vector
from protocols.streams.chunks import receive_chunk
from protocols.vectors.views import VectorView, norm

PAIR_NORM_SPREAD = 16.0
"""A state is refused if its norm is more than this many times ours. If ours is 0, only `wire.MAX_NORM` limits it."""


class StateReceiver:
    """One peer's encoded state while it is received, compared with our own state.

    Attributes:
        part: the peer's state, encoded; empty memory at first.
        begun: whether a first header has arrived.
        ours: L2 norm of our state; NaN before `measure`.
    """

    def __init__(self, part: ReducedPart, compute: Compute) -> None:
        self.part = part
        self.begun, self.ours = False, math.nan
        self._compute, self._squares, self._limit = compute, 0.0, 0.0

    @property
    def norm(self) -> float:
        """L2 norm of the chunks that have come."""
        return math.sqrt(self._squares)

    async def measure(self, stream: Stream, state: VectorView) -> None:
        """Compute the norm of our own state, which limits that of the peer's.

        Raises:
            PeerSilent: our state is not finite, so others must not get it.
        """
        self.ours = await self._compute.run(partial(state_norm, state, self.part), 4 * state.size)
        if not math.isfinite(self.ours):
            raise PeerSilent(stream.peer, "our own state is not finite: it is not for others")
        self._limit = PAIR_NORM_SPREAD * self.ours if self.ours > 0 else wire.MAX_NORM

    async def take(self, stream: Stream) -> None:
        """Receive all chunks into `part`.

        Raises:
            BadPayload: a chunk has the wrong size or comes out of order, an element is not finite, or the norm is too
                large.
            PeerSilent: the stream broke off.
        """
        scratch = self.part.scratch_vector()
        for index in range(self.part.chunks):
            data = self.part.chunk(index)
            await receive_chunk(stream, index, data, self._on_header)
            await self._compute.run(partial(self._check, index, scratch), 2 * len(data))

    def _on_header(self, header: Header) -> None:
        self.begun = True

    def _check(self, index: int, scratch: Vector) -> None:
        self._squares += norm([self.part.decoded(index, scratch)]) ** 2
        if not self._squares <= self._limit * self._limit:
            raise BadPayload(f"a state of norm above {self._limit:.3g}, {PAIR_NORM_SPREAD:g} times ours")


def state_norm(state: VectorView, part: ReducedPart) -> float:
    """L2 norm of a state, read in the chunks of `part`. Not finite if an element is not."""
    pieces = (state.read(low, high, scratch) for _, low, high, (scratch,) in part.pieces(1))
    return math.sqrt(math.fsum(norm([piece]) ** 2 for piece in pieces))
