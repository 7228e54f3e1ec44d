"""Shapes of the language model `node.tasks.gpt`, and presets of runs that train it. Without PyTorch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from node.tasks.recipe import InnerOptimizerName, Recipe, require

VOCABULARY = 256


@dataclass(frozen=True, slots=True)
class GptConfig:
    """The model's size. The heads divide the width into even parts."""

    layers: int
    width: int
    heads: int
    context: int

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "context"):
            require(self, name, lambda value: value >= 1, "at least 1")
        if self.width % (2 * self.heads):
            raise ValueError(f"{self.heads} heads do not divide width {self.width} into even parts")

    @property
    def hidden(self) -> int:
        """Width of the SwiGLU layer: 8/3 of the width, rounded up to a multiple of 32."""
        return 32 * math.ceil(8 * self.width / 3 / 32)


USUAL_OUTER_STEP, PLAIN_OUTER_STEP = (0.9, 0.5), (1.0, 0.0)  # learning rate and momentum
MANY_ROUNDS, SHORT_ROUND = 40, 50
"""A run of at least `MANY_ROUNDS`, each of at most `SHORT_ROUND` inner steps, has an outer step with more momentum."""
MUON_RATES: Mapping[int, float] = {64: 1.2e-2, 96: 1e-2, 128: 8e-3, 192: 6e-3, 256: 4e-3}
"""Width -> inner learning rate with Muon. Measured are w64 in many rounds and w128 in few."""
ADAMW_RATES: Mapping[int, tuple[float, float]] = {
    64: (6e-3, 1.2e-2), 96: (5e-3, 8e-3), 128: (4e-3, 6e-3), 192: (3e-3, 4e-3), 256: (2e-3, 3e-3)
}  # fmt: skip
"""Width -> that with AdamW, and that beside the outer step of many rounds. Measured are w64's and the first of w128."""


@dataclass(frozen=True, slots=True)
class Preset:
    """All settings of a run of this task: the model's shape, the rows of a batch, the inner and outer steps."""

    shape: GptConfig
    rows: int
    recipe: Recipe

    def __post_init__(self) -> None:
        require(self, "rows", lambda value: value >= 1, "at least 1")


def recipe_for(
    width: int,
    rounds: int,
    inner_steps: int,
    optimizer: InnerOptimizerName = "muon",
    outer_step: tuple[float, float] | None = None,
) -> Recipe:
    """The values that several peers learn best with; docs/learning.md has the figures."""
    many = outer_step is None and rounds >= MANY_ROUNDS and inner_steps <= SHORT_ROUND
    rate = MUON_RATES[width] if optimizer == "muon" else ADAMW_RATES[width][many]
    if many:
        return Recipe(inner_steps, rounds, rate, 0.7, 0.8, inner_optimizer=optimizer, outer_decay=1 / 16)
    return Recipe(inner_steps, rounds, rate, *(outer_step or USUAL_OUTER_STEP), inner_optimizer=optimizer)


def _preset(width: int, rounds: int, inner_steps: int) -> Preset:
    shape = GptConfig(layers=4, width=width, heads=4, context=128)
    return Preset(shape, rows=8, recipe=recipe_for(width, rounds, inner_steps))


PRESETS: Mapping[str, Preset] = {
    "w64": _preset(64, 12, 100),
    **{f"w{width}": _preset(width, 16, 50) for width in (96, 128, 192, 256)},
}
DEFAULT_PRESET = "w128"


def preset(name: str) -> Preset:
    if name not in PRESETS:
        raise ValueError(f"no preset {name!r}: one of {', '.join(PRESETS)}")
    return PRESETS[name]
