"""The founder's plan of stages: the roots that joiners will draw, and what it is told to expect."""

from __future__ import annotations

import itertools
from dataclasses import replace

from node.config.manifest import layout_digest
from node.config.run_config import RunConfig
from node.config.task_tables import GptTable, PacedTable
from node.joining.stage_plan import StagePlan, plan_stages
from node.tasks.flat import flatten
from node.tasks.gpt_stage import GptStage
from node.tasks.recipe import Recipe

RECIPE = Recipe(10, 5, learning_rate=1e-2, outer_learning_rate=0.9, outer_momentum=0.5, batches=8)
GPT = GptTable(layers=3, width=16, heads=2, context=16, rows=1)
CONFIG = RunConfig(stages=3, seed=5, recipe=RECIPE, gpt=GPT)


def plan(config: RunConfig, bytes_per_second: float = 12.5e6) -> StagePlan:
    ticks = itertools.count()
    return plan_stages(config, bytes_per_second, lambda: float(next(ticks)))


def test_plan_describes_what_every_peer_of_a_stage_builds() -> None:
    made = plan(CONFIG)
    assert made.bounds[0] == 0 and made.bounds[-1] == GPT.layers + 2 and sum(made.elements) == GPT.elements
    assert made == plan(CONFIG) and len(made.lines) == 5
    for stage, entry in enumerate(made.entries):
        flat = flatten(GptStage(GPT.shape, made.bounds[stage], made.bounds[stage + 1], CONFIG.seed))
        assert len(flat.vector) == made.elements[stage] and layout_digest(flat.layout) == entry.layout
    costs = [entry.cost or 0.0 for entry in made.entries]
    assert sorted(costs)[0] >= 0.5 and max(costs) == 1.0, "blocks that each took as long, one or two in a stage"
    assert plan(replace(CONFIG, seed=6)).entries[0].state_root != made.entries[0].state_root


def test_paced_task_is_cut_evenly() -> None:
    made = plan(RunConfig(task="paced", stages=3, recipe=RECIPE, paced=PacedTable(elements=10)))
    assert made.elements == (3, 3, 4) and made.bounds == (0, 1, 2, 3)


def test_founder_expects_less_of_a_slower_line() -> None:
    fast, slow = (plan(CONFIG, rate).lines[-1] for rate in (12.5e6, 1e3))
    assert fast == (
        "a step is 8 microbatches: expect 6 machines like this one, with 12.5 MB/s and 50 ms between them, to compute "
        "about 69% of the time; more recipe.batches waste less"
    )
    assert "with 0.001 MB/s and 50 ms" in slow and "about 44%" in slow


def test_founder_is_warned_of_few_microbatches() -> None:
    few = plan(replace(CONFIG, recipe=replace(RECIPE, batches=4)))
    assert few.lines[-1].startswith(
        "warning: with 4 microbatches a step, 3 stages wait for each other most of the time"
    )
