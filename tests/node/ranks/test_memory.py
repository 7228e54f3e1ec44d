"""What ranks need, computed, and the choice of how training is divided."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from node.ranks.memory import activation_bytes, choice, choose, rank_bytes
from node.ranks.zero import ZeroLearner
from node.tasks.checkpointing import checkpoint_blocks
from node.tasks.flat import flatten
from node.tasks.gpt import GptTask
from node.tasks.gpt_presets import GptConfig, Preset
from node.tasks.recipe import Recipe
from node.tasks.spec import GptValues, WorkerSpec
from node.tasks.text import load
from node.tasks.user_task import OwnTask

GB = 10**9
RECIPE = Recipe(4, 1, 1e-3, 0.9, 0.5, batches=4)
ELEMENTS = 1 << 16
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


class Group(SimpleNamespace):
    """Rank 1 of four, whose device is torch's meta device: its tensors have a size and no content."""

    def __init__(self, elements: int) -> None:
        self.vectors = torch.zeros(elements), torch.zeros(elements)
        shared = SimpleNamespace(local=self.vectors[0], anchor=self.vectors[1])
        super().__init__(rank=1, size=4, device=torch.device("meta"), far=None, founds=False)
        self.allocate, self.shared = lambda _: self.vectors[0], lambda _: shared


def new_storages(known: set[int]) -> Iterator[torch.UntypedStorage]:
    with warnings.catch_warnings(action="ignore"):
        tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    yield from {
        each._cdata: each for each in map(torch.Tensor.untyped_storage, tensors) if each._cdata not in known
    }.values()


@pytest.mark.parametrize("shard", ["zero1", "zero2"])
@pytest.mark.parametrize("offload", ["", "optimizer"])
def test_tensors_lie_on_the_computed_side(shard: str, offload: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "autocast", lambda *_, **named: nullcontext())  # refuses the meta device
    gc.collect()
    group = Group(ELEMENTS)
    known = {each._cdata for each in new_storages(set())}
    module = nn.ParameterList([torch.empty(ELEMENTS // 4, device="meta") for _ in range(4)])
    task = SimpleNamespace(module=module, loss=None)
    keeps = shard == "zero1"
    learner = ZeroLearner(task, RECIPE, seed=0, group=group, keeps_gradients=keeps, offload=bool(offload), resume=False)  # type: ignore[arg-type]
    learner.take()
    learner.placed_moments(make=True)
    found = Counter[str]()
    for each in new_storages(known):
        found[each.device.type] += each.nbytes()
    expected = rank_bytes(shard, 4, offload=offload)
    assert [found[each] / ELEMENTS for each in ("meta", "cpu")] == pytest.approx(
        [expected.device, expected.host], abs=1e-3
    )


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


class Peak(TorchDispatchMode):
    """Counts the bytes of the storages that are alive, made inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.highest = 0
        self._alive = set[int]()

    def __torch_dispatch__(self, operation: Any, _: Any, given: Any = (), named: Any = None) -> Any:
        found = operation(*given, **(named or {}))
        old = {each.untyped_storage()._cdata for each in tree_leaves(given) if isinstance(each, torch.Tensor)}
        for each in tree_leaves(found):
            storage = each.untyped_storage() if isinstance(each, torch.Tensor) else None
            if storage is not None and storage._cdata not in self._alive | old:
                self._alive.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._end, storage._cdata, storage.nbytes())
        self.highest = max(self.highest, self.now)
        return found

    def _end(self, number: int, size: int) -> None:
        self._alive.discard(number)
        self.now -= size


@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_are_the_peak_of_a_step(task: GptTask, checkpointing: bool) -> None:
    if checkpointing:
        checkpoint_blocks(task.module.model.layers.values())
    flatten(task.module)  # the gradients are there
    with Peak() as peak:
        task.loss(*task.batch(0, 0)).backward()
    assert activation_bytes(task, checkpointing, False) == pytest.approx(peak.highest, rel=0.15)


def test_activations_of_an_own_task_are_counted_in_a_loss() -> None:
    class Own:
        module = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Tanh())

        def batch(self, seed: int, position: int) -> tuple[torch.Tensor, ...]:
            return (torch.ones(256, 8),)

        def loss(self, x: torch.Tensor) -> torch.Tensor:
            assert self.module.training
            return self.module(x).sum()

    Own.module.eval()
    own = OwnTask("own", Own())  # type: ignore[arg-type]
    statistics = Own.module.state_dict()["1.running_mean"].clone()
    assert activation_bytes(own, False, False) == pytest.approx(4 * 256 * (8 + 64 + 64), rel=0.01)
    assert torch.equal(Own.module.state_dict()["1.running_mean"], statistics) and not Own.module.training


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
