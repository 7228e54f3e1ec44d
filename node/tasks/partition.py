"""Cutting a model's blocks into contiguous stages so that the costliest stage costs least. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, slots=True)
class BlockCost:
    """What one block of a model costs for a microbatch, embeddings and head included."""

    name: str
    forward_seconds: float
    backward_seconds: float  # includes computing the forward again
    parameter_bytes: int  # in float32

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds


@dataclass(frozen=True, slots=True)
class Partition:
    """A model's blocks in stages: of S + 1 bounds, stage k holds blocks [bounds[k], bounds[k+1])."""

    blocks: tuple[BlockCost, ...]
    bounds: tuple[int, ...]

    @property
    def stages(self) -> int:
        return len(self.bounds) - 1

    def of(self, stage: int) -> tuple[BlockCost, ...]:
        return self.blocks[self.bounds[stage] : self.bounds[stage + 1]]

    def seconds(self, stage: int) -> float:
        return sum(block.seconds for block in self.of(stage))

    def table(self) -> str:
        """The stages as text, one line each: blocks, milliseconds, share of the costliest, MB of parameters."""
        most = max(self.seconds(stage) for stage in range(self.stages))
        lines = ["stage  blocks                         ms a microbatch   share of the costliest   parameters, MB"]
        for stage in range(self.stages):
            blocks, seconds = self.of(stage), self.seconds(stage)
            names = blocks[0].name if len(blocks) == 1 else f"{blocks[0].name} .. {blocks[-1].name}"
            megabytes = sum(block.parameter_bytes for block in blocks) / 1e6
            share = seconds / most if most else 1.0
            lines.append(f"{stage:5}  {names:29}  {1e3 * seconds:15.2f}  {share:22.0%}  {megabytes:15.2f}")
        return "\n".join(lines)


def cut(blocks: Sequence[BlockCost], stages: int, limit_bytes: int | None = None) -> Partition:
    """The best cut into `stages` stages, none of them empty.

    It minimises the costliest stage's seconds; of equal cuts, the largest stage's bytes; of these, the earliest bounds.
    A dynamic programme over (stage, first block): S · L² steps.
    """
    blocks = tuple(blocks)
    if not 1 <= stages <= len(blocks):
        raise ValueError(f"{len(blocks)} blocks cannot be cut into {stages} stages: take 1 to {len(blocks)}")
    worst = (float("inf"), float("inf"))

    def cost(low: int, high: int) -> tuple[float, float]:
        size = sum(block.parameter_bytes for block in blocks[low:high])
        if limit_bytes is not None and size > limit_bytes:
            return worst
        return sum(block.seconds for block in blocks[low:high]), size

    @cache
    def best(low: int, left: int) -> tuple[tuple[float, float], tuple[int, ...]]:
        if left == 1:
            return cost(low, len(blocks)), (low, len(blocks))
        found: list[tuple[tuple[float, float], tuple[int, ...]]] = []
        for high in range(low + 1, len(blocks) - left + 2):
            (seconds, size), rest = best(high, left - 1)
            mine = cost(low, high)
            found.append(((max(mine[0], seconds), max(mine[1], size)), (low, *rest)))
        return min(found)

    found, bounds = best(0, stages)
    if found == worst:
        raise ValueError(f"no cut into {stages} stages keeps each within {limit_bytes} bytes of parameters")
    return Partition(blocks, bounds)
