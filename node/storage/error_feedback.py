"""Error feedback: what of a peer's work its codec has not sent yet, owed to the rounds to come.
`protocols.codecs.sparse`.

It advances only where a round has counted what was sent. Work that a round did not count is dropped with the round
(docs/decisions/0006); what was owed before it stays owed. Who goes over to a state that others brought it to starts
with nothing owed: nobody knows then which of what it sent is in that state already.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import torch

from node.storage import tensors
from protocols.base import AveragingResult, Compute, LocalProgress, PeerId, Vector
from protocols.codec import Codec
from protocols.codecs.sparse import sent, settle
from protocols.vectors import norm
from protocols.wire import MAX_NORM

log = logging.getLogger(__name__)

_NAME = "error_feedback"
_ABOUT = {"format": "starling error feedback 1"}


class ErrorFeedback:
    """Attributes:
    owed: float32 (n).
    """

    def __init__(self, codec: Codec, elements: int, compute: Compute) -> None:
        self.residual, self._gone = torch.zeros(elements), torch.zeros(elements)
        self._codec, self._compute = codec, compute
        self._norm = 0.0

    def offered(self, work: LocalProgress) -> LocalProgress:
        """Work with the most that the norm of what is sent can be."""
        if not work.tokens:
            return work
        return replace(work, norm=min(MAX_NORM, work.norm + self._codec.decay * self._norm))

    async def outgoing(self, delta: Vector) -> Vector:
        """What travels of a pseudo-gradient, float32 (n), and of what is owed: lent until this is called again."""
        await self._compute.run(lambda: sent(self._codec, self.residual, delta, self._gone), 16 * len(delta))
        return self._gone

    async def conclude(self, me: PeerId, mean: AveragingResult, delta: Vector) -> None:
        """A mean was decided on, for which `outgoing` was called with this pseudo-gradient.

        One that counts what was sent for a plan before, and not what is at hand, leaves nothing owed.
        """
        if me not in mean.peers:
            return
        if mean.weights.get(me):
            await self._compute.run(lambda: settle(self._codec, self.residual, delta, self._gone), 16 * len(delta))
            self._norm = await self._compute.run(lambda: norm([self.residual]), 4 * len(delta))
        else:
            self.forget()

    def forget(self) -> None:
        """Owe nothing."""
        self.residual.zero_()
        self._norm = 0.0

    # -- in a checkpoint ----------------------------------------------------------------------------------------------

    @property
    def bytes(self) -> int:
        """About what `save` writes."""
        return 4 * len(self.residual)

    async def save(self, path: Path) -> None:
        """
        Raises:
            OSError: it cannot be written.
        """
        await self._compute.run(lambda: tensors.write(path, {_NAME: self.residual}, _ABOUT), 2 * self.bytes)

    async def load(self, path: Path | None) -> None:
        """Take up what a former life owed; nothing where that was not kept, or cannot be read."""
        self.forget()
        if path is None:
            return
        try:
            await self._compute.run(lambda: tensors.read(path, {_NAME: self.residual}), 2 * self.bytes)
        except (OSError, tensors.Unreadable) as error:
            log.warning("what was not sent yet of former rounds is lost: %s", getattr(error, "strerror", None) or error)
            self.forget()
        self._norm = await self._compute.run(lambda: norm([self.residual]), self.bytes)


def feedback(codec: Codec, elements: int, compute: Compute) -> ErrorFeedback | None:
    """For vectors of so many elements; None where a codec sends all of them."""
    return ErrorFeedback(codec, elements, compute) if codec.decay else None
