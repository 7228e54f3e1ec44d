"""A learner with a known result of each step."""

from __future__ import annotations

import torch

from node.tasks.base import Step
from protocols.base import Layout, Vector

ELEMENTS, STEP, TOKENS = 10, 0.125, 100


class LinearLearner:
    """A `Learner` whose every step subtracts an eighth from each element, so that sums are exact."""

    def __init__(self) -> None:
        self.layout = Layout(((("slope", (ELEMENTS,)),),))
        self.vector: Vector = torch.ones(ELEMENTS)
        self.step_size = STEP

    def step(self, round_number: int, step: int) -> Step:
        self.vector.sub_(self.step_size)
        return Step(2.5, TOKENS)

    def moments(self, make: bool = False) -> dict[str, torch.Tensor]:
        return {}

    def evaluate(self) -> float:
        return 0.0
