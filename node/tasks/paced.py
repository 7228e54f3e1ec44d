"""The paced task: real vectors, and inner steps that take a set time without using the processor.

On a small machine real trainers share the cores: killing one speeds up the others, which hides the interference between
them. A paced step costs microseconds at any size: it changes one slice, by integer arithmetic that gives the same bits
on every CPU. Its caller sleeps between steps.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from node.tasks.base import Step
from protocols.base import Layout, Vector

SLICE = 1 << 14
_PIECE = 1 << 20
_MASK = (1 << 31) - 1
_PRIME = 1_000_003


class Paced:
    """A `Learner` whose vector of `elements` float32 follows a bounded pseudo-random walk.

    Two learners with the same seed take the same steps. The start is the same for all seeds. Elements stay in [-1, 1].
    """

    def __init__(
        self,
        elements: int,
        seed: int,
        tokens_per_step: int = 1024,
        allocate: Callable[[int], Vector] = torch.empty,
        resume: bool = False,
    ) -> None:
        if elements < 1 or tokens_per_step < 1:
            raise ValueError(f"a paced task needs elements and tokens, not {elements} and {tokens_per_step}")
        self.layout = Layout(((("paced", (elements,)),),))
        self.vector: Vector = allocate(elements)
        self.position = 0
        self._seed, self._tokens = seed, tokens_per_step
        for low in range(0, 0 if resume else elements, _PIECE):
            piece = self.vector[low : low + _PIECE]
            piece.copy_(_noise(low, len(piece), 0))

    def step(self, round_number: int, step: int) -> Step:
        """Move the next slice halfway to noise that depends on (seed, round, step). Loss: the slice's mean square."""
        vector = self.vector
        self.position += 1
        key = (self._seed * _PRIME + round_number) * _PRIME + step
        low = key % -(-len(vector) // SLICE) * SLICE  # the next slice, step by step
        place = vector[low : low + SLICE]
        place.mul_(0.5).add_(_noise(low, len(place), key) * 0.5)
        return Step(float(place.square().mean()), self._tokens)

    def moments(self, make: bool = False) -> dict[str, torch.Tensor]:
        return {}

    def evaluate(self) -> float:
        return float(self.vector[:SLICE].square().mean())


def _noise(low: int, count: int, key: int) -> Vector:
    """float32 (count) in [-1, 1): a multiplicative hash of (index, key), exact in 24 bits."""
    x = torch.arange(low, low + count, dtype=torch.int64)
    x = ((x + (key & _MASK)) * 0x2545F491) & _MASK
    x = ((x ^ (x >> 13)) * 0x5BD1E995) & _MASK
    return ((x >> 7) - (1 << 23)).float() / (1 << 23)
