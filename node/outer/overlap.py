"""Training that continues while a round averages (docs/decisions/0055)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import torch

from node.outer.fragments import Fragments
from node.outer.state import OuterState
from protocols.base import Head, LocalProgress, RoundKey, Trainer, Vector


class Overlap:
    """The work of a peer between the cut of a round and the outer step, for the next round.

    The peer has handed in its pseudo-gradient Δ, measured from the anchor θ. Its parameters are x = θ - Δ + s, with the
    overlapped work s. When the outer step has moved the anchor to θ', the parameters become θ' + s, which is x plus the
    shift θ' - θ + Δ. All this is of the fragment that the round averages; the others are not changed.
    """

    def __init__(self, trainer: Trainer, fragments: Fragments, head: Head, handed_in: LocalProgress) -> None:
        """`handed_in` is the progress at the cut of the round after `head`. There is no overlapped work until `run`."""
        self._trainer, self._resets = trainer, trainer.resets
        self._fragments, self._head = fragments, head
        self._handed_in, self._work = handed_in, handed_in
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
            self._restarted = self._resets != resets

    async def step(self, state: OuterState, trained: int, mean: Vector, delta: Vector, keeps: bool) -> bool:
        """Take the outer step along `mean`, and shift the local parameters; whether all outer parameters are finite.

        They keep the overlapped work; with `keeps`, also `delta`, what was handed in. Both vectors are overwritten.
        """
        index, trainer = self._head.key.fragment, self._trainer
        part, stays = self._fragments.part(index), keeps or self._restarted
        anchor, shift, local, cost_bytes = state.anchor[part], delta, mean, 8 * len(delta)
        before = (lambda: torch.neg(anchor, out=shift)) if stays else (lambda: shift.sub_(anchor))
        await state.compute.run(before, cost_bytes)  # now, because the outer step changes the anchor in place
        finite = await state.step(mean, trained, part)
        left = None if stays else self._work.tokens - self._handed_in.tokens
        if left != 0 or self._fragments.count > 1:
            await trainer.read(local, part)
        if trainer.resets != self._resets:  # a worker has died since
            await trainer.write(state.anchor)
            self._fragments.forget()
            return finite
        left, tokens = self._fragments.averaged(self._head, self._work, left)
        if left:
            await state.compute.run(lambda: local.add_(shift.add_(anchor)), 2 * cost_bytes)
        await trainer.write(local if left else anchor, anchor=anchor, tokens=tokens, part=part)
        return finite
