"""The founder's plan of a run with stages: where the model is cut, and the state in which each stage starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from node.config.manifest import StageEntry, layout_digest
from node.config.run_config import RunConfig
from node.tasks.flat import flatten
from node.tasks.gpt_stage import GptStage, measure
from node.tasks.paced import Paced
from node.tasks.partition import cut
from protocols.base import Layout, Vector
from protocols.sync.snapshot import SnapshotIndex

LEAST_BATCHES = 8
"""Fewer microbatches of a step leave the stages idle for most of the time, while the pipeline fills and drains."""


EXPECTED: Mapping[tuple[int, int], float] = MappingProxyType(
    {
        **{(2, 8): 0.95, (2, 16): 0.94, (2, 32): 0.98},
        **{(3, 8): 0.78, (3, 16): 0.87, (3, 32): 0.93},
        **{(4, 8): 0.59, (4, 16): 0.73, (4, 32): 0.86},
        **{(6, 8): 0.33, (6, 16): 0.52, (6, 32): 0.73},
    }
)
"""(stages, microbatches of a step) -> share of the capacity, simulated: `benchmarks.pipeline microbatches`."""


@dataclass(frozen=True, slots=True)
class StagePlan:
    entries: tuple[StageEntry, ...]
    elements: tuple[int, ...]
    table: str = ""

    @property
    def bounds(self) -> tuple[int, ...]:
        """First block of each stage, and the number of blocks."""
        return (0, *(entry.end for entry in self.entries))

    def advice(self, config: RunConfig) -> tuple[str, ...]:
        """Lines for the founder about its microbatches: the expected share of the capacity, or a warning."""
        stages, batches = len(self.entries), config.recipe.batches
        if batches < LEAST_BATCHES:
            return (
                f"warning: with {batches} microbatches a step, {stages} stages wait for each other most of the time: "
                f"set recipe.batches to {LEAST_BATCHES} or more",
            )
        share = expected_share(stages, batches)
        about = "at least" if config.recipe.lookahead else "about"  # measured without
        expected = f": expect {about} {share:.0%} of the capacity with {stages} stages" if share else ""
        return (f"a step is {batches} microbatches{expected}; more recipe.batches waste less",)


def expected_share(stages: int, batches: int) -> float | None:
    """Share of the capacity that a pipeline of equal replicas reaches; None if nothing like it was measured."""
    known = [(s, b) for s, b in EXPECTED if s >= stages and b <= batches]
    return EXPECTED[min(known, key=lambda each: (each[0], -each[1]))] if known else None


def plan_stages(config: RunConfig, timer: Callable[[], float]) -> StagePlan:
    """Measure the model's blocks on this machine, cut it, and compute each stage's initial state root.

    One stage at a time is in memory. Blocks for seconds: call it outside the event loop.
    """
    assert config.stages > 1
    if config.gpt is None:
        assert config.paced is not None
        sizes = [config.paced.elements * (k + 1) // config.stages for k in range(config.stages)]
        elements = [high - low for low, high in zip([0, *sizes], sizes, strict=False)]
        paced = (Paced(count, 0) for count in elements)
        entries = [_entry(number + 1, each.layout, each.vector) for number, each in enumerate(paced)]
        return StagePlan(tuple(entries), tuple(elements))
    partition = cut(measure(config.preset(), timer), config.stages)
    found, elements = [], []
    most = max(partition.seconds(stage) for stage in range(config.stages))
    for stage in range(config.stages):
        low, high = partition.bounds[stage], partition.bounds[stage + 1]
        flat = flatten(GptStage(config.gpt.shape, low, high, config.seed))
        cost = round(partition.seconds(stage) / most, 4) if most else 1.0
        found.append(_entry(high, flat.layout, flat.vector, max(cost, 1e-3)))
        elements.append(len(flat.vector))
    return StagePlan(tuple(found), tuple(elements), partition.table())


def _entry(end: int, layout: Layout, vector: Vector, cost: float | None = None) -> StageEntry:
    root = SnapshotIndex.of(vector, torch.zeros_like(vector)).state_root(0)
    return StageEntry(end=end, state_root=root, layout=layout_digest(layout), cost=cost)
