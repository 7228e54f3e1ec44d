"""Training that continues while a round averages (docs/decisions/0055)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import torch

from node.outer.state import OuterState
from protocols.base import LocalProgress, RoundKey, Trainer, Vector


class Overlap:
    """The work of a peer between the cut of a round and the outer step, for the next round.

    The peer has handed in its pseudo-gradient Δ, measured from the anchor θ. Its parameters are x = θ - Δ + s, with the
    overlapped work s. When the outer step has moved the anchor to θ', the parameters become θ' + s, which is x plus the
    shift θ' - θ + Δ.
    """

    def __init__(self, trainer: Trainer, handed_in: LocalProgress) -> None:
        """`handed_in` is the trainer's progress at the cut. There is no such work until `run`."""
        self._trainer, self._resets = trainer, trainer.resets
        self._handed_in, self._work = handed_in, handed_in
        self.has_run = False
        self._restarted = False  # from the anchor instead of x, because a worker died

    @asynccontextmanager
    async def run(self, key: RoundKey, progress: Callable[[LocalProgress], None]) -> AsyncIterator[None]:
        """Train for the round of `key` until the context ends, and then to the end of the inner step."""
        arrived = asyncio.Event()
        training = asyncio.create_task(self._trainer.train(key, arrived, progress), name="overlap")
        try:
            yield
        finally:
            arrived.set()  # rather than to cancel it: a worker is killed if its command is cancelled
            self._work = await training
            progress(self._work)
            resets, self._resets = self._resets, self._trainer.resets
            self.has_run, self._restarted = True, self._resets != resets

    async def step(self, state: OuterState, trained: int, mean: Vector, delta: Vector, keeps: bool) -> bool:
        """Take the outer step along `mean`, and shift the local parameters; whether all outer parameters are finite.

        They keep the overlapped work; with `keeps`, also `delta`, what was handed in. Both vectors are overwritten.
        """
        anchor, shift, local, cost_bytes = state.anchor, delta, mean, 8 * len(state.anchor)
        stays = keeps or self._restarted
        before = (lambda: torch.neg(anchor, out=shift)) if stays else (lambda: shift.sub_(anchor))
        await state.compute.run(before, cost_bytes)  # now, because the outer step changes the anchor in place
        finite = await state.step(mean, trained)
        await self._trainer.read(local)
        tokens = self._work.tokens - (0 if stays else self._handed_in.tokens)
        if tokens <= 0 or self._trainer.resets != self._resets:  # no work, or a worker has died since
            await self._trainer.write(anchor)
            return finite
        await state.compute.run(lambda: local.add_(shift.add_(anchor)), 2 * cost_bytes)
        await self._trainer.write(local, anchor=anchor, tokens=tokens)
        return finite
