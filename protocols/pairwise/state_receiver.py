"""Another peer's state on its way in: chunk by chunk into scratch, and checked as it comes."""

from __future__ import annotations

import math
from functools import partial

from protocols import wire
from protocols.allreduce.parts import ReducedPart
from protocols.base import BadPayload, Compute, Header, PeerSilent, Stream, Vector
from protocols.chunks import receive_chunk
from protocols.vectors import VectorView, norm

NORM_SPREAD = 16.0
"""Another's state counts if its norm is at most so many times ours; of a state of norm 0 nothing can be said."""


class StateReceiver:
    """Attributes:
    part: their state, encoded; at first room for it.
    begun: something of it has come.
    ours: the norm of the state that it is to be averaged with.
    """

    def __init__(self, part: ReducedPart, compute: Compute) -> None:
        self.part = part
        self.begun, self.ours = False, math.nan
        self._compute, self._squares, self._limit = compute, 0.0, 0.0

    @property
    def norm(self) -> float:
        """Of what has come."""
        return math.sqrt(self._squares)

    async def measure(self, stream: Stream, state: VectorView) -> None:
        """Look at our own state first: what theirs is judged by.

        Raises:
            PeerSilent: it is not finite, and not for others.
        """
        self.ours = await self._compute.run(partial(state_norm, state, self.part), 4 * state.size)
        if not math.isfinite(self.ours):
            raise PeerSilent(stream.peer, "our own state is not finite: it is not for others")
        self._limit = NORM_SPREAD * self.ours if self.ours > 0 else wire.MAX_NORM

    async def take(self, stream: Stream) -> None:
        """
        Raises:
            BadPayload: what came breaks the rules: its size, its order, NaN, a norm far off.
            PeerSilent: the stream broke off.
        """
        room = self.part.room()
        for index in range(self.part.chunks):
            data = self.part.chunk(index)
            await receive_chunk(stream, index, data, self._on_header)
            await self._compute.run(partial(self._check, index, room), 2 * len(data))

    def _on_header(self, header: Header) -> None:
        self.begun = True

    def _check(self, index: int, room: Vector) -> None:
        self.part.decode_chunk(index, None, room)
        low, high = self.part.elements(index)
        self._squares += norm([room[: high - low]]) ** 2
        if not self._squares <= self._limit * self._limit:
            raise BadPayload(f"a state of norm above {self._limit:.3g}, {NORM_SPREAD:g} times ours")


def state_norm(state: VectorView, part: ReducedPart) -> float:
    """Of a state that is cut as that part is; not finite if it is not."""
    room = part.room()
    pieces = (state.read(*part.elements(index), room) for index in range(part.chunks))
    return math.sqrt(math.fsum(norm([piece]) ** 2 for piece in pieces))
