"""Training that continues while a round averages (docs/decisions/0055)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import torch

from node.outer.fragments import Fragments
from node.outer.state import OuterState
from protocols.base import Head, LocalProgress, Trainer, Vector

Meanwhile: TypeAlias = Callable[[asyncio.Event], Coroutine[Any, Any, LocalProgress | None]]
"""Trains until the event is set; returns the progress, or None if it took no step."""


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
        self._end: Callable[[], Awaitable[None]] | None = None

    @asynccontextmanager
    async def run(self, train: Meanwhile, progress: Callable[[LocalProgress], None]) -> AsyncIterator[None]:
        """Train until `step` shifts the parameters or the context ends."""
        arrived = asyncio.Event()
        training = asyncio.create_task(train(arrived), name="overlap")

        async def end() -> None:
            arrived.set()  # rather than to cancel it: a worker is killed if its command is cancelled
            self._end = None
            if work := await training:
                self._work = work
                progress(work)

        self._end = end
        try:
            yield
        finally:
            await self._stop()

    async def _stop(self) -> None:
        """Train no further than to the end of the inner step."""
        if self._end:
            await self._end()

    async def step(self, state: OuterState, trained: int, mean: Vector, delta: Vector, keeps: bool) -> bool:
        """Take the outer step along `mean`, and shift the local parameters; whether all outer parameters are finite.

        They keep the overlapped work; with `keeps`, also `delta`, what was handed in. Both vectors are overwritten.
        Training stops only for the shift.
        """
        index, trainer = self._head.key.fragment, self._trainer
        before, self._resets = self._resets, trainer.resets
        stays = keeps or before != self._resets  # a worker that died has started again from the anchor instead of x
        part = self._fragments.part(index)
        anchor, shift, local, cost_bytes = state.anchor[part], delta, mean, 8 * len(delta)
        begin = (lambda: torch.neg(anchor, out=shift)) if stays else (lambda: shift.sub_(anchor))
        await state.compute.run(begin, cost_bytes)  # now, because the outer step changes the anchor in place
        finite = await state.step(mean, trained, part)
        await self._stop()
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
