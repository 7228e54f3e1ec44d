"""Training that goes on while a round averages (docs/decisions/0055)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from protocols.base import LocalProgress, RoundKey, Trainer


class Flight:
    """The work that a peer does between the cut of a round and the outer step, for the next round.

    The peer has handed in its pseudo-gradient Δ, measured from the anchor θ. Its parameters are x = θ - Δ + s, with the
    work s of the flight. When the outer step has moved the anchor to θ', the parameters become θ' + s, which is x plus
    the shift θ' - θ + Δ.
    """

    def __init__(self, trainer: Trainer, handed_in: LocalProgress) -> None:
        """`handed_in` is the trainer's progress at the cut. Nothing flies until `run`."""
        self._trainer, self._resets = trainer, trainer.resets
        self._handed_in, self._work = handed_in, handed_in
        self.has_flown = False
        self.restarted = False  # from the anchor instead of x, because a worker died

    @asynccontextmanager
    async def run(self, key: RoundKey, progress: Callable[[LocalProgress], None]) -> AsyncIterator[None]:
        """Train for the round of `key` until the context ends, and then to the end of the inner step."""
        arrived = asyncio.Event()
        training = asyncio.create_task(self._trainer.train(key, arrived, progress), name="flight")
        try:
            yield
        finally:
            arrived.set()  # rather than to cancel it: a worker is killed if its command is cancelled
            self._work = await training
            progress(self._work)
            resets, self._resets = self._resets, self._trainer.resets
            self.has_flown, self.restarted = True, self._resets != resets

    def holds(self) -> bool:
        """Whether the trainer's parameters are still those that the flight ended with."""
        return self._trainer.resets == self._resets

    def tokens(self, counted: bool) -> int:
        """Tokens of the work that stays in the parameters, if what was handed in is `counted` or dropped, or not."""
        return self._work.tokens - (self._handed_in.tokens if counted and not self.restarted else 0)
