"""The founder's plan of a run with stages: where the model is cut, and the state in which each stage starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from node.config.manifest import StageEntry, layout_digest
from node.config.run_config import RunConfig
from node.planning.machines import Machine, PlannedSwarm
from node.planning.outlook import busy_share
from node.tasks.flat import flatten
from node.tasks.gpt_stage import GptStage, measure
from node.tasks.paced import Paced
from node.tasks.partition import BlockCost, cut
from protocols.base import Layout, Vector
from protocols.sync.snapshot import SnapshotIndex

LEAST_BATCHES = 8
"""Fewer microbatches of a step leave the stages idle for most of the time, while the pipeline fills and drains."""
EXPECTED_REPLICAS = 2
"""In each stage, of the swarm for which the founder is told what to expect."""


@dataclass(frozen=True, slots=True)
class StagePlan:
    entries: tuple[StageEntry, ...]
    elements: tuple[int, ...]
    lines: tuple[str, ...] = ()
    """For the founder: the stages as a table, and what its microbatches are expected to give."""

    @property
    def bounds(self) -> tuple[int, ...]:
        """First block of each stage, and the number of blocks."""
        return (0, *(entry.end for entry in self.entries))


def plan_stages(config: RunConfig, bytes_per_second: float, timer: Callable[[], float]) -> StagePlan:
    """Measure the model's blocks on this machine, cut it, and compute each stage's initial state root.

    `bytes_per_second` is what this machine declares as its line. One stage at a time is in memory. Blocks for seconds:
    call it outside the event loop.
    """
    assert config.stages > 1
    if config.gpt is None:
        assert config.paced is not None
        sizes = [config.paced.elements * (k + 1) // config.stages for k in range(config.stages)]
        elements = [high - low for low, high in zip([0, *sizes], sizes, strict=False)]
        paced = (Paced(count, 0) for count in elements)
        entries = [_entry(number + 1, each.layout, each.vector) for number, each in enumerate(paced)]
        return StagePlan(tuple(entries), tuple(elements), _advice(config, bytes_per_second))
    partition = cut(measure(config.preset(), timer), config.stages)
    found, elements = [], []
    most = max(partition.seconds(stage) for stage in range(config.stages))
    for stage in range(config.stages):
        low, high = partition.bounds[stage], partition.bounds[stage + 1]
        flat = flatten(GptStage(config.gpt.shape, low, high, config.seed))
        cost = round(partition.seconds(stage) / most, 4) if most else 1.0
        found.append(_entry(high, flat.layout, flat.vector, max(cost, 1e-3)))
        elements.append(len(flat.vector))
    lines = (*partition.table().splitlines(), *_advice(config, bytes_per_second, partition.blocks))
    return StagePlan(tuple(found), tuple(elements), lines)


def _advice(config: RunConfig, bytes_per_second: float, blocks: tuple[BlockCost, ...] = ()) -> tuple[str, ...]:
    """What the microbatches of a step are expected to give, if the model's blocks were measured, or a warning."""
    stages, batches = config.stages, config.recipe.batches
    if batches < LEAST_BATCHES:
        return (
            f"warning: with {batches} microbatches a step, {stages} stages wait for each other most of the time: "
            f"set recipe.batches to {LEAST_BATCHES} or more",
        )
    if not blocks:
        return ()
    machine = Machine(upload=bytes_per_second, download=bytes_per_second)
    swarm = PlannedSwarm((machine,) * (EXPECTED_REPLICAS * stages))
    between = f"{bytes_per_second / 1e6:.3g} MB/s and {1e3 * swarm.latency_seconds:.0f} ms"
    return (
        f"a step is {batches} microbatches: expect {len(swarm.peers)} machines like this one, with {between} between "
        f"them, to compute about {busy_share(config, blocks, swarm):.0%} of the time; more recipe.batches waste less",
    )


def _entry(end: int, layout: Layout, vector: Vector, cost: float | None = None) -> StageEntry:
    root = SnapshotIndex.of(vector, torch.zeros_like(vector)).state_root(0)
    return StageEntry(end=end, state_root=root, layout=layout_digest(layout), cost=cost)
