"""Error feedback: the part of a peer's pseudo-gradients that its codec has not sent yet (`protocols.vectors.sparse`).

The residual changes only if a round has counted what the peer sent. Work that a round did not count is dropped with
the round (docs/decisions/0006), and the residual from before it stays. A peer that adopts other peers' state starts
with a residual of zero, because it cannot know how much of what it sent is already in that state.

Extra tensors (`node.tasks.extra`) have no residual: a running statistic approaches its value again in each round, so
what was not sent of it would be sent twice.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import torch

from node.runtime import tensors
from protocols.base import ALL, AveragingResult, Compute, LocalProgress, PeerId, Vector
from protocols.vectors.codec import Codec
from protocols.vectors.sparse import sent, settle
from protocols.vectors.views import norm
from protocols.wire import MAX_NORM

log = logging.getLogger(__name__)

_NAME = "error_feedback"
_ABOUT = {"format": "starling error feedback 1"}


class ErrorFeedback:
    """The residual of one peer, float32 (n), which is added to the next pseudo-gradient.

    A pseudo-gradient and what is sent of it are those of a part of the vector: of the fragment that a round averages.
    """

    def __init__(self, codec: Codec, elements: int, compute: Compute, extra: int = 0) -> None:
        self._extra = slice(elements - extra, elements)
        self.residual, self._outgoing = torch.zeros(elements), torch.zeros(elements)
        self._codec, self._compute = codec, compute
        self._norms: dict[tuple[int, int], float] = {}  # of the parts that were sent since it was loaded
        self._whole = 0.0  # norm of all that was loaded

    def offered(self, work: LocalProgress, part: slice = ALL) -> LocalProgress:
        """The peer's progress, with an upper bound of the norm of what it will send."""
        if not work.tokens:
            return work
        left = self._norms.get(self._bounds(part), self._whole)
        return replace(work, norm=min(MAX_NORM, work.norm + self._codec.decay * left))

    def _bounds(self, part: slice) -> tuple[int, int]:
        return part.indices(len(self.residual))[:2]

    async def outgoing(self, delta: Vector, part: slice = ALL) -> Vector:
        """What to send of a pseudo-gradient and of the residual. Valid until the next call."""
        residual, outgoing = self.residual[part], self._outgoing[part]
        await self._compute.run(lambda: sent(self._codec, residual, delta, outgoing), 16 * len(delta))
        return outgoing

    async def conclude(self, me: PeerId, mean: AveragingResult, delta: Vector, part: slice = ALL) -> None:
        """Update the residual after a decided mean, for which `outgoing` was called with this pseudo-gradient.

        If the mean counts what the peer sent for an earlier plan instead, the residual becomes zero.
        """
        if me not in mean.peers:
            return
        residual, outgoing = self.residual[part], self._outgoing[part]
        if mean.weights.get(me):
            await self._compute.run(lambda: settle(self._codec, residual, delta, outgoing), 16 * len(delta))
            self.residual[self._extra] = 0.0
        else:
            residual.zero_()
        self._norms[self._bounds(part)] = await self._compute.run(lambda: norm([residual]), 4 * len(delta))

    def forget(self, part: slice = ALL) -> None:
        self.residual[part].zero_()
        self._norms[self._bounds(part)] = 0.0
        if part == ALL:
            self._norms.clear()
            self._whole = 0.0

    # -- in a checkpoint ----------------------------------------------------------------------------------------------

    @property
    def bytes(self) -> int:
        """Approximate size of the file."""
        return 4 * len(self.residual)

    async def save(self, path: Path) -> None:
        await self._compute.run(lambda: tensors.write(path, {_NAME: self.residual}, _ABOUT), 2 * self.bytes)

    async def load(self, path: Path | None) -> None:
        """Load the residual of an earlier incarnation; zero if that cannot be read."""
        self.forget()
        if path is None:
            return
        try:
            await self._compute.run(lambda: tensors.read(path, {_NAME: self.residual}), 2 * self.bytes)
        except (OSError, tensors.Unreadable) as error:
            log.warning("the error feedback is lost, starting from zero: %s", getattr(error, "strerror", None) or error)
            self.forget()
        self._whole = await self._compute.run(lambda: norm([self.residual]), self.bytes)


def feedback(codec: Codec, elements: int, compute: Compute, extra: int = 0) -> ErrorFeedback | None:
    """Error feedback for vectors of this many elements, the last ones `extra`; None if the codec sends all of them."""
    return ErrorFeedback(codec, elements, compute, extra) if codec.decay else None
