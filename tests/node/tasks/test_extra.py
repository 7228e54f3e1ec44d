"""Extra tensors: found by the try-out, averaged plainly by every outer step, exported, and never left half changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from node.outer.error_feedback import ErrorFeedback
from node.outer.noloco import NoLoCo
from node.outer.state import OuterSGD, pseudo_gradient
from node.tasks.base import Batch
from node.tasks.extra import extra_elements, named_tensors, packed, trained_elements, unpacked
from node.tasks.recipe import Recipe
from node.tasks.user_task import OwnTask
from node.training.task_learner import TaskLearner
from node.training.trainer import LocalTraining
from protocols.base import AveragingResult, Contribution, Outcome
from protocols.vectors.codec import CODECS
from tests.sim.host import SimCompute

RECIPE = Recipe(10, 4, 1e-2, 0.7, 0.9, batches=2, warmup_steps=0, mean="token")
STATISTICS = ["norm.running_mean", "norm.running_var"]


class Normed:
    """Rows of numbers through BatchNorm, with a teacher, a schedule in float64, a constant mask and a local counter."""

    def __init__(self, scale: float = 1.0) -> None:
        torch.manual_seed(1)
        self.module: Any = nn.Module()
        self.scale = scale
        self.module.first, self.module.norm = nn.Linear(3, 5), nn.BatchNorm1d(5)
        self.module.unused = nn.Linear(2, 2)
        self.module.teacher = copy.deepcopy(self.module.first).requires_grad_(False)
        self.module.register_buffer("mask", torch.full((5,), -torch.inf))
        self.module.register_buffer("exact", torch.zeros(1, dtype=torch.float64))
        self.module.register_buffer("seen", torch.zeros(1), persistent=False)

    def batch(self, seed: int, position: int) -> Batch:
        draw = torch.Generator().manual_seed(seed + position)
        return self.scale * torch.randn(8, 3, generator=draw), torch.zeros(8)

    def loss(self, *batch: torch.Tensor) -> torch.Tensor:
        for mine, other in zip(self.module.teacher.parameters(), self.module.first.parameters(), strict=True):
            mine.data.lerp_(other.data, 0.1)
        self.module.exact += 1
        self.module.seen = self.module.seen + 1
        return (self.module.norm(self.module.first(batch[0])) - 1).square().mean()

    def evaluate(self) -> float:
        self.module.zero_grad()
        return float(self.module.norm.running_var.sum())


def learner(task: Normed, seed: int = 1) -> tuple[TaskLearner, list[str]]:
    own = OwnTask("t", task)
    lines = own.try_out(seed)
    return TaskLearner(own, RECIPE, seed=seed), lines


def held(made: TaskLearner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in named_tensors(made.layout.fragments[0], made.vector)}


def test_try_out_finds_what_training_changes_and_undoes_it() -> None:
    task, fresh = Normed(), Normed()
    made, lines = learner(task)
    before = {name: tensor.clone() for name, tensor in task.module.state_dict().items()}
    assert all(torch.equal(tensor, before[name]) for name, tensor in fresh.module.state_dict().items())
    assert lines == [
        "task t: training changes norm.running_mean, norm.running_var, teacher.weight and 1 more: "
        "averaged with the parameters (4 tensors)",
        "task t: training changes exact, too precise to be averaged: each peer keeps its own",
        "task t: 2 trained parameters get no gradient from loss(): unused.weight, unused.bias; they are averaged, "
        "and not trained",
    ]
    names = [name for name, _ in made.layout.fragments[0]]
    assert names[6:] == [
        "padding:0",
        *("extra:norm.running_mean", "padding:2", "extra:norm.running_var", "padding:4", "extra:teacher.weight"),
        *("padding:6", "extra:teacher.bias"),
    ]
    starts = {
        name: sum(torch.Size(shape).numel() for _, shape in made.layout.fragments[0][:at])
        for at, (name, shape) in enumerate(made.layout.fragments[0])
    }
    assert [starts[name] for name in names if name.startswith("extra:")] == [4096, 4224, 4352, 4480]
    assert all(made.step(0, step).tokens == 16 for step in range(3))
    assert float(held(made)["norm.running_mean"].abs().sum()) and int(task.module.norm.num_batches_tracked) == 6


def test_constant_module_keeps_its_layout() -> None:
    task = Normed()
    task.loss = lambda *batch: task.module.first(batch[0]).square().mean()  # type: ignore[method-assign]
    made, _ = learner(task)
    assert trained_elements(made.layout) == len(made.vector) == 3 * 5 + 5 + 10 + 6 and not extra_elements(made.layout)


def test_evaluation_takes_the_outer_statistics() -> None:
    """And training then continues with the peer's own."""
    made, _ = learner(Normed())
    training = LocalTraining(made, 10)
    training.begin(0)
    outer = training.evaluate()
    assert outer == 5.0
    training.step()
    own = held(made)
    assert training.evaluate() == outer and made.evaluate() == float(own["norm.running_var"].sum()) != outer
    other, _ = learner(Normed())
    other.step(0, 0)
    made.step(0, 1)
    other.step(0, 1)
    assert torch.equal(made.vector, other.vector)


def test_skipped_step_leaves_no_trace_in_statistics() -> None:
    task = Normed()
    made, _ = learner(task)
    made.step(0, 0)
    before = made.vector.clone()
    task.scale = float("nan")
    assert made.step(0, 1).tokens == 0 and torch.equal(made.vector, before)
    task.scale = 1.0
    assert made.step(0, 2).tokens == 16 and bool(made.vector.isfinite().all())


def test_extra_method_names_what_is_averaged() -> None:
    task = Normed()
    task.extra = lambda: STATISTICS[:1]  # type: ignore[attr-defined]
    made, lines = learner(task)
    assert [name for name, _ in made.layout.fragments[0] if name.startswith("extra:")] == [f"extra:{STATISTICS[0]}"]
    assert "training changes norm.running_var, teacher.weight, teacher.bias, which extra() leaves out" in lines[1]
    for name, words in [("absent", "the module has no buffer"), ("exact", "is torch.float64"), ("first.bias", "takes")]:
        task.extra = lambda name=name: [name]  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match=words):
            learner(task)


def test_changes_that_begin_late_are_told_once(capfd: pytest.CaptureFixture[str]) -> None:
    task = Normed()
    made, _ = learner(task)
    made.step(0, 0)
    assert capfd.readouterr().err == ""
    task.module.mask[0] = 1.0
    task.module.first.bias.requires_grad_(False)
    task.module.late = nn.Linear(1, 1)
    for number in (1, 2):
        made.step(number, 0)
    assert [line.partition(":")[2] for line in capfd.readouterr().err.splitlines()] == [
        " mask: changes in training, but not in its first batch: each peer keeps its own",
        " late.weight, late.bias: takes gradients since the start, but is not trained: it is not in the layout",
        " first.bias: takes no gradient any more: it is still averaged and, by the recipe, decayed",
    ]


@pytest.mark.parametrize(
    "step",
    [
        lambda *state: OuterSGD(0.7, 0.9, extra=3).step(*state),
        lambda *state: OuterSGD(0.7, 0.9, 10, 1.0, extra=3).at(5).step(*state),
    ],
)
def test_outer_step_is_the_plain_mean_of_extra_elements(step: Callable[..., bool]) -> None:
    locals_ = torch.rand(4, 7).mul_(1e-3)
    anchor, velocity = torch.full((7,), 0.5), torch.ones(7)
    for _ in range(3):  # momentum would make them negative
        deltas = torch.empty_like(locals_)
        for local, delta in zip(locals_, deltas, strict=True):
            pseudo_gradient(anchor, local, delta)
        assert step(anchor, velocity, deltas.mean(0))
    torch.testing.assert_close(anchor[4:], locals_.mean(0)[4:], rtol=1e-4, atol=1e-7)
    assert torch.equal(velocity[4:], torch.ones(3)) and not torch.equal(velocity[:4], torch.ones(4))
    assert not step(anchor, velocity, torch.tensor([0.0] * 6 + [torch.inf]))


def test_noloco_gives_a_pair_the_plain_mean_of_extra_elements() -> None:
    rule = NoLoCo(0.5, 0.7, 0.9, extra=3)
    phis, velocities, locals_ = torch.rand(2, 7), torch.rand(2, 7), torch.rand(2, 7)
    brought = torch.empty(2, 7)
    for phi, local, into in zip(phis, locals_, brought, strict=True):
        rule.offer(phi, phi - local, into)
    late = brought[0].clone()
    assert rule.step(phis[0], velocities[0], late)  # its partner's vector arrives later
    torch.testing.assert_close(phis[0, 4:], locals_[0, 4:])
    rule.amend(phis[0], velocities[0], brought.mean(0) - late)
    assert rule.step(phis[1], velocities[1], brought.mean(0))
    for phi in phis:
        torch.testing.assert_close(phi[4:], locals_.mean(0)[4:])


async def test_extra_elements_have_no_error_feedback() -> None:
    codec = CODECS["topk"]
    feedback = ErrorFeedback(codec, 8192, SimCompute(), extra=4096)
    delta = torch.randn(8192)
    await feedback.outgoing(delta)
    mean = AveragingResult(Outcome.COMMITTED, weights={"me": 1.0}, contributions={"me": Contribution(1, 1)})
    await feedback.conclude("me", mean, delta)
    assert bool(feedback.residual[:4096].any()) and not bool(feedback.residual[4096:].any())


def test_tensors_of_a_vector_have_the_modules_names() -> None:
    fragment = (("w", (2,)), ("padding:0", (1,)), ("extra:a.running_var", (2,)), ("extra:variable", (1,)))
    found = dict(named_tensors(fragment, torch.tensor([-1.0, 2, 3, -0.25, 0.3125, -0.375])))
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        "w": [-1, 2],
        "a.running_var": [0, 5],
        "variable": [-6],
    }


def test_packed_values_are_moderate_and_settle() -> None:
    """And small ones are held exactly, so that their mean is the plain one."""
    sizes = torch.cat([torch.logspace(-30, 38.5, 9000), torch.linspace(0, 20, 1000), torch.tensor([16.0])])
    before = torch.cat([sizes, -sizes])
    held = packed(before)
    there = unpacked(held)
    assert float(held.abs().max()) < 90 and torch.equal(packed(there), held)
    torch.testing.assert_close(there, before, rtol=1e-5, atol=0)
    small = before.abs() <= 16
    assert torch.equal(there[small], before[small]) and torch.equal(held[small], before[small] / 16)
