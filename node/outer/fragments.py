"""The parts of the parameters that rounds average in turn, and how much of a peer's work each of them still has.

Streaming DiLoCo (Douillard et al. 2025): a round averages one fragment, so each has work of its own number of rounds.
A trainer counts tokens of one of them, the one that is averaged next (`protocols.base.Trainer.write`).
"""

from __future__ import annotations

from dataclasses import replace

from protocols.base import ALL, Head, LocalProgress, Trainer
from protocols.vectors.views import fragment


class Fragments:
    """Tokens of each fragment that no round has counted, relative to the trainer's count."""

    def __init__(self, trainer: Trainer, elements: int, count: int) -> None:
        self._trainer, self._elements, self.count = trainer, elements, count
        self._resets, self._beyond = trainer.resets, [0] * count

    def part(self, index: int) -> slice:
        return fragment(self._elements, self.count, index) if self.count > 1 else ALL

    @property
    def largest(self) -> int:
        """Elements of the largest fragment."""
        return -(-self._elements // self.count)

    def forget(self) -> None:
        """The trainer's parameters are the anchor: it counts the tokens of all fragments."""
        self._resets, self._beyond = self._trainer.resets, [0] * self.count

    def work(self, index: int, work: LocalProgress) -> LocalProgress:
        """The trainer's progress as that of one fragment."""
        return replace(work, tokens=self._tokens(index, work))

    def _tokens(self, index: int, work: LocalProgress) -> int:
        if self._resets != self._trainer.resets:
            self.forget()
        return max(0, work.tokens + self._beyond[index]) if work.tokens else 0

    def averaged(self, head: Head, work: LocalProgress, left: int | None) -> tuple[int, int]:
        """The round after `head` has averaged its fragment, which has `left` tokens of `work` left, by default all.

        Returns them, and what to tell the trainer: the tokens of the fragment that is averaged next.
        """
        found = [self._tokens(each, work) for each in range(self.count)]
        if left is not None:
            found[head.key.fragment] = max(0, left)
        told = found[head.next_fragment]
        self._beyond = [tokens - told for tokens in found]
        return found[head.key.fragment], told
