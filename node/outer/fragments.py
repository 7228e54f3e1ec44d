"""The parts of the parameters that rounds average in turn, and how much of a peer's work each of them still has.

Streaming DiLoCo (Douillard et al. 2025): a round averages one fragment, so each has work of its own number of rounds.
A trainer counts tokens of one of them, the one that is averaged next (`protocols.base.Trainer.write`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from node.outer.state import OuterState
from protocols.base import ALL, Head, LocalProgress, Trainer, Vector
from protocols.vectors.views import fragment


class Fragments:
    """Tokens of each fragment that no round has counted, relative to the trainer's count."""

    def __init__(self, trainer: Trainer, elements: int, count: int) -> None:
        self._trainer, self._elements, self.count = trainer, elements, count
        self._resets, self._beyond = trainer.resets, [0] * count
        self._heard = LocalProgress(0, 0.0, 0.0, 0.0)

    def part(self, index: int) -> slice:
        return fragment(self._elements, self.count, index) if self.count > 1 else ALL

    @property
    def largest(self) -> int:
        """Elements of the largest fragment."""
        return -(-self._elements // self.count)

    def forget(self) -> None:
        """The trainer's parameters are the anchor, so it counts the tokens of all fragments."""
        self._resets, self._beyond = self._trainer.resets, [0] * self.count
        self._heard = replace(self._heard, tokens=0)

    def hear(self, work: LocalProgress) -> None:
        """Take in the trainer's progress, from which `restart` goes out."""
        self._heard = work

    def work(self, index: int, work: LocalProgress) -> LocalProgress:
        """The trainer's progress as that of one fragment."""
        return replace(work, tokens=self._tokens(index, work))

    def _tokens(self, index: int, work: LocalProgress) -> int:
        if self._resets != self._trainer.resets:  # a worker died, and left the anchor
            self._resets, self._beyond = self._trainer.resets, [0] * self.count
        return max(0, work.tokens + self._beyond[index]) if work.tokens else 0

    def averaged(self, head: Head, work: LocalProgress, left: int | None) -> tuple[int, int]:
        """The round after `head` has averaged its fragment, which has `left` tokens of `work` left, by default all.

        Returns them, and what to tell the trainer: the tokens of the fragment that is averaged next.
        """
        found = [self._tokens(each, work) for each in range(self.count)]
        if left is not None:
            found[head.key.fragment] = max(0, left)
        told = found[head.next_fragment]
        self._count_from(found, head.next_fragment)
        return found[head.key.fragment], told

    def _count_from(self, found: Sequence[int], following: int) -> None:
        """The trainer counts from the tokens of the fragment that is averaged next."""
        self._beyond = [tokens - found[following] for tokens in found]
        self._heard = replace(self._heard, tokens=found[following])

    async def changed(self, before: OuterState, after: OuterState) -> list[slice]:
        """The parts in which two states differ."""
        parts = [self.part(index) for index in range(self.count)]
        if self.count == 1:
            return parts

        def compare() -> list[slice]:
            return [part for part in parts if not torch.equal(before.anchor[part], after.anchor[part])]

        return await before.compute.run(compare, 8 * self._elements)

    async def restart(self, changed: Sequence[slice], anchor: Vector, following: int) -> None:
        """Start again from the anchor in the parts that have changed; fragment `following` is averaged next."""
        if len(changed) == self.count:
            await self._trainer.write(anchor)
            return self.forget()
        if not changed:
            return None
        kept = [self.part(index) not in changed for index in range(self.count)]
        found = [kept[index] * self._tokens(index, self._heard) for index in range(self.count)]
        for part in changed:
            await self._trainer.write(anchor[part], tokens=found[following], part=part)
        if self._resets != self._trainer.resets:  # a worker died, and left the anchor
            return self.forget()
        return self._count_from(found, following)
