"""What ranks need, computed, and the choice of how training is divided."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path

import pytest

from node.ranks.memory import activation_bytes, choice, choose, rank_bytes
from node.tasks.gpt import GptTask
from node.tasks.gpt_presets import GptConfig, Preset
from node.tasks.recipe import Recipe
from node.tasks.spec import GptValues, WorkerSpec
from node.tasks.text import load

GB = 10**9
RECIPE = Recipe(4, 1, 1e-3, 0.9, 0.5, batches=4)
SHAPE = GptConfig(layers=4, width=64, heads=4, context=32)


@pytest.mark.parametrize(
    ("shard", "ranks", "device", "on_cpu"),
    [("one", 1, 20, 12), ("zero1", 4, 11, 6), ("zero2", 4, 8, 3), ("zero3", 4, 5, 5), ("tensor", 2, 10, 10)],
)
def test_bytes_of_a_rank(shard: str, ranks: int, device: float, on_cpu: float) -> None:
    assert rank_bytes(shard, ranks).device == device
    assert rank_bytes(shard, ranks, is_shared=True).device == on_cpu


def test_offload_and_bfloat16_change_the_bytes() -> None:
    assert rank_bytes("zero2", 4, offload="optimizer").device == 6
    assert rank_bytes("zero3", 4, offload="parameters").device == 0
    assert rank_bytes("zero1", 4, bfloat16=True).rounded == 4
    assert rank_bytes("zero2", 4, bfloat16=True).rounded == 2


def test_zero3_over_four_takes_a_quarter() -> None:
    assert rank_bytes("zero3", 4).device <= 0.3 * rank_bytes("one", 1).device


NEEDS = {"zero1": 9_200_000_000, "zero2": 3_100_000_000, "zero3": 2_000_000_000}


def test_the_cheapest_that_fits_is_chosen() -> None:
    assert choose(NEEDS, 10 * GB).shard == "zero1"
    chosen = choose(NEEDS, 8 * GB)
    assert (chosen.shard, chosen.fits) == ("zero2", True)
    assert chosen.line == "zero2 needs about 3.1 GB on each device, 8.0 GB are free; zero1 would need 9.2 GB"
    assert choose(NEEDS, 3 * GB).shard == "zero3"


def test_nothing_fits_takes_the_least_and_advises() -> None:
    chosen = choose(NEEDS, GB, "try --checkpointing")
    assert (chosen.shard, chosen.fits) == ("zero3", False)
    assert chosen.line.startswith("zero3 needs about 2.0 GB on each device, but only 1.0 GB are free: try --checkpoint")


@pytest.fixture
def task(tmp_path: Path) -> GptTask:
    (tmp_path / "text").write_bytes(bytes(range(32, 127)) * 200)
    return GptTask(Preset(SHAPE, 2, RECIPE), load(tmp_path / "text"))


def test_activations_of_gpt_grow_with_its_rows(task: GptTask) -> None:
    before = activation_bytes(task, False, False)
    task.independent_rows = 4
    assert 1.9 * before < activation_bytes(task, False, False) <= 2 * before
    assert task.loss(*task.batch(0, 0)).isfinite()  # the task is as it was


def test_estimate_keeps_no_parameter(task: GptTask) -> None:
    kept = [weakref.ref(each) for each in task.module.parameters()]
    assert activation_bytes(task, False, False) > 0
    del task.module
    gc.collect()
    assert not any(each() is not None for each in kept)


def test_auto_of_a_device_depends_on_what_is_free(task: GptTask) -> None:
    spec = WorkerSpec(GptValues(SHAPE, 2), RECIPE, 0, devices=("cuda:0",) * 4, shard="auto")
    plenty = choice(task, spec, GB, is_shared=False, is_fresh=True)
    assert (plenty.shard, plenty.fits) == ("zero1", True)
    least = choice(task, spec, 1000, is_shared=False, is_fresh=True)
    assert (least.shard, least.fits) == ("zero3", False)
    assert "--checkpointing or --offload optimizer" in least.line
    given = choice(task, replace(spec, shard="zero1"), 1000, is_shared=False, is_fresh=True)
    assert given.shard == "zero1"
