"""The inner loop: its schedule, its optimiser against torch's, its counts, and when it reports progress."""

import asyncio
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks.laboratory import replicated, runs
from benchmarks.laboratory.through_protocol import through_the_protocol
from node.tasks.base import Batch, Step
from node.tasks.gpt_presets import GptConfig, Preset
from node.tasks.paced import Paced
from node.tasks.recipe import Recipe
from node.tasks.text import Text
from node.training.task_learner import TaskLearner
from node.training.trainer import LocalTraining
from protocols.base import Layout, LocalProgress, RoundKey, Trainer, Vector
from tests.support.inline_trainer import InlineTrainer, PlainLearner
from tests.support.simulated import on_virtual_time

RECIPE = Recipe(10, 5, learning_rate=1e-2, outer_learning_rate=0.9, outer_momentum=0.5, warmup_steps=4)


class Line:
    """A user's task in a few lines: two layers, four samples a batch, squared error."""

    def __init__(self, scale: float = 1.0) -> None:
        torch.manual_seed(0)
        self.module: nn.Module = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2))
        self.scale = scale

    def batch(self, seed: int, position: int) -> Batch:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1000 * seed + position))
        return x, x[:, :2] * 3

    def loss(self, *batch: torch.Tensor) -> torch.Tensor:
        x, y = batch
        return self.scale * ((self.module(x) - y) ** 2).mean()

    def evaluate(self) -> float:
        return float(self.loss(*self.batch(99, 0)).detach())


class Count(PlainLearner):
    """Adds 1 to both elements a step; the loss is the step's number."""

    def __init__(self) -> None:
        self.layout = Layout(((("w", (2,)),),))
        self.vector: Vector = torch.zeros(2)
        self.steps: list[tuple[int, int]] = []
        self.left_out = 0

    def step(self, round_number: int, step: int) -> Step:
        self.steps.append((round_number, step))
        if self.left_out:
            self.left_out -= 1
            return Step(math.nan, 0)
        self.vector.add_(1)
        return Step(float(step), 10)

    def evaluate(self) -> float:
        return float(self.vector.sum())


def key(number: int) -> RoundKey:
    return RoundKey(bytes(32), "run", bytes(32), number)


def counting(inner_steps: int, steps: int = 0, seconds: float = 0.0) -> LocalTraining:
    """Training of a `Count` that has done `steps` steps of round 0."""
    training = LocalTraining(Count(), inner_steps)
    training.begin(0)
    do_steps(training, steps, seconds)
    return training


def do_steps(training: LocalTraining, steps: int, seconds: float = 0.0) -> None:
    for _ in range(steps):
        training.step()
        training.spend(seconds)


def test_costly_reports_are_of_the_first_and_the_last_step() -> None:
    training = counting(inner_steps=30)
    training.begin(0)
    due = []
    for step in range(1, 41):
        training.step()
        due += [step] * training.due(soon=step != 35)
    assert due == [1, 30, 35]


def test_learning_rate_at_known_steps() -> None:
    recipe = Recipe(50, 16, 2e-3, 0.9, 0.5)
    assert recipe.rate(0) == pytest.approx(2e-3 / 21)
    assert recipe.rate(9) == pytest.approx(2e-3 * 10 / 21)
    assert recipe.rate(20) == pytest.approx(2e-3)
    assert recipe.rate(20 + 390) == pytest.approx(2e-3 * 0.55)
    assert recipe.rate(800) == recipe.rate(10**9) == pytest.approx(2e-4)
    rates = [recipe.rate(step) for step in range(801)]
    assert rates[:21] == sorted(rates[:21]) and rates[20:] == sorted(rates[20:], reverse=True)


def test_late_joiner_uses_the_rounds_learning_rate() -> None:
    learner = TaskLearner(Line(), RECIPE, seed=1)
    rates = []
    for number, step in [(0, 0), (3, 2), (3, 9), (3, 500), (4, 0)]:
        learner.step(number, step)
        rates.append(learner._optimizer._optimizers[0].param_groups[0]["lr"])
    assert rates == [RECIPE.rate(global_step) for global_step in (0, 32, 39, 39, 40)]


@pytest.mark.parametrize("clip_norm", [0.1, 5.5, 1e9])  # always, at some steps, never
def test_steps_equal_torchs_adamw(clip_norm: float) -> None:
    recipe = Recipe(10, 5, 1e-2, 0.9, 0.5, batches=2, clip_norm=clip_norm, warmup_steps=4, weight_decay=0.3)
    learner, twin = TaskLearner(Line(), recipe, seed=7), Line()
    plain = torch.optim.AdamW(twin.module.parameters(), 1e-2, (0.9, 0.95), weight_decay=0.3, foreach=False)
    for step in range(12):
        result = learner.step(step // 10, step % 10)
        plain.zero_grad()
        parts = [twin.batch(7, 2 * step), twin.batch(7, 2 * step + 1)]
        x, y = (torch.cat([part[index] for part in parts]) for index in (0, 1))
        loss = twin.loss(x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(twin.module.parameters(), clip_norm)
        plain.param_groups[0]["lr"] = recipe.rate(step)
        plain.step()
        assert result.loss == pytest.approx(float(loss.detach()), rel=1e-5) and result.tokens == 16
    expected = torch.cat([parameter.detach().flatten() for parameter in twin.module.parameters()])
    torch.testing.assert_close(learner.vector, expected, rtol=1e-4, atol=1e-6)


def test_progress_counts_since_the_last_write() -> None:
    training = counting(inner_steps=4)
    work = training.work()
    assert work.tokens == 0 and math.isnan(work.loss) and not work.complete
    do_steps(training, 4, seconds=0.5)
    assert training.work() == LocalProgress(
        tokens=40, loss=1.5, seconds=2.0, step_seconds=0.5, norm=math.sqrt(32), complete=True
    )
    training.begin(1)  # round 0 was skipped: the longer delta is offered
    do_steps(training, 1, seconds=0.25)
    assert training.work() == LocalProgress(tokens=50, loss=1.2, seconds=2.25, step_seconds=0.25, norm=math.sqrt(50))
    training.write(torch.tensor([3.0, 4.0]))
    work = training.work()
    assert work.tokens == 0 and work.norm == 0 and work.seconds == 0
    training.write(torch.tensor([3.0, 4.0]), anchor=torch.zeros(2), tokens=20)
    work = training.work()
    assert (work.tokens, work.carried, work.seconds, work.norm) == (20, 20, 0.0, 5.0)
    training.begin(2)
    training.step()
    work = training.work()
    assert (work.tokens, work.loss, work.norm) == (30, 0.0, math.sqrt(41))


def test_steps_are_numbered_within_each_round() -> None:
    learner = Count()
    local_training = LocalTraining(learner, inner_steps=4)
    for number in (3, 3, 4):
        local_training.begin(number)
        local_training.step()
        local_training.step()
    assert learner.steps == [(3, 0), (3, 1), (3, 2), (3, 3), (4, 0), (4, 1)]
    with pytest.raises(ValueError, match="inner_steps must be at least 1, not 0"):
        LocalTraining(learner, 0)


def test_excluded_tokens_do_not_count() -> None:
    learner = Count()
    learner.left_out = 2
    training = LocalTraining(learner, inner_steps=3)
    training.begin(0)
    do_steps(training, 3)
    work = training.work()
    assert (work.tokens, work.loss, work.complete) == (10, 2.0, True)


def test_anchor_may_be_a_given_vector() -> None:
    learner, anchor = Count(), torch.tensor([3.0, 4.0])
    local_training = LocalTraining(learner, 4, anchor)
    local_training.reset(70)
    assert (local_training.work().tokens, local_training.work().norm) == (70, 5.0) and local_training.evaluate() == 7.0
    with pytest.raises(ZeroDivisionError), local_training.outer():
        raise ZeroDivisionError
    assert learner.vector.tolist() == [0.0, 0.0]
    local_training.write(torch.ones(2))
    assert anchor.tolist() == [1.0, 1.0]


def test_norm_covers_many_pieces() -> None:
    task = Paced(600_001, seed=0)
    local_training = LocalTraining(task, inner_steps=1)
    anchor = task.vector.clone()
    task.vector.add_(torch.linspace(-1, 1, 600_001))
    assert local_training.work().norm == 0  # nothing was trained
    local_training.begin(0)
    local_training.step()
    expected = float((task.vector.double() - anchor.double()).square().sum().sqrt())
    assert local_training.work().norm == pytest.approx(expected, rel=1e-6)


async def _train(
    trainer: InlineTrainer, number: int, cut_after: float
) -> tuple[LocalProgress, list[tuple[float, LocalProgress]]]:
    cut, progress = asyncio.Event(), list[tuple[float, LocalProgress]]()
    loop = asyncio.get_running_loop()
    began = loop.time()
    loop.call_later(cut_after, cut.set)
    work = await trainer.train(key(number), cut, lambda work: progress.append((loop.time() - began, work)))
    assert cut.is_set()
    return work, progress


@on_virtual_time
async def test_progress_is_reported_in_virtual_time() -> None:
    trainer: Trainer = InlineTrainer(Count(), inner_steps=30, step_seconds=2.0)
    assert isinstance(trainer, InlineTrainer)
    work, progress = await _train(trainer, 0, cut_after=79.0)
    assert (work.tokens, work.seconds, work.complete) == (400, 80.0, True)  # beyond the 30 steps, until the cut
    assert [seconds / 2 for seconds, _ in progress] == [*range(12), 13, 15, 17, 19, 21, 24, 27, 30, 33, 37]
    assert [offer.tokens for _, offer in progress] == [seconds * 5 for seconds, _ in progress]
    assert [offer.complete for _, offer in progress] == [False] * 19 + [True] * 3


@on_virtual_time
async def test_completion_is_reported_at_once() -> None:
    trainer = InlineTrainer(Count(), inner_steps=29, step_seconds=1.0)
    _, progress = await _train(trainer, 0, cut_after=29.5)
    assert [work.complete for _, work in progress][-2:] == [False, True] and progress[-1][0] == 29.0
    _, progress = await _train(trainer, 1, cut_after=1.5)  # nothing was written: the work goes on growing
    assert [work.tokens for _, work in progress] == [300, 310]  # at once, then after the first step
    assert not progress[0][1].complete and progress[0][1].norm == math.sqrt(2 * 30**2)


@on_virtual_time
async def test_without_surplus_completed_steps_wait_for_the_cut() -> None:
    learner, loop, cut = Count(), asyncio.get_running_loop(), asyncio.Event()
    trainer = InlineTrainer(learner, inner_steps=3, step_seconds=1.0)
    for _ in range(2):  # the work of an undecided round goes on
        cut.clear()
        loop.call_later(10.0, cut.set)
        work = await trainer.train(key(0), cut, lambda work: None, surplus=False)
        assert work.complete and len(learner.steps) == 3 and cut.is_set()
    assert loop.time() == 20.0


@pytest.mark.long
def test_lab_trains_through_the_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = Preset(GptConfig(layers=1, width=16, heads=2, context=16), rows=2, recipe=RECIPE)
    data = torch.arange(5000).mul(7).remainder(97).to(torch.uint8)
    monkeypatch.setattr(runs, "preset", lambda name: tiny)
    monkeypatch.setattr(replicated, "text", lambda: Text(data, data[:600]))
    for drop in (0.0, 0.5):
        run = runs.Run(4, 3, inner_steps=10, preset="tiny", seed=1, drop=drop, decay=0.5, evaluation_steps=10)
        history, weights = through_the_protocol(run)
        assert [steps for steps, _ in history] == [10, 20, 30]
        assert [loss for _, loss in history] == pytest.approx(
            [loss for _, loss in replicated.train_replicated(run, weights)], 1e-3
        )
        lost = [[index for index, weight in enumerate(row) if weight == 0] for row in weights]
        assert lost == [sorted(run.lost(number)) for number in range(3)]
        assert [len(row) for row in lost] == [4 * drop] * 3
        assert history[-1][1] < history[0][1] < 5
    few = replace(run, drop=0.0, decay=0.0, codec="topk", outer=(1.0, 0.0))
    assert few.name().endswith(" 1 topk outer=1,0") and run.name().endswith(" drop=0.5 1 decay=0.5")
    history, weights = through_the_protocol(few)
    assert history[-1][1] < history[0][1] < 6
    assert [loss for _, loss in history] == pytest.approx(
        [loss for _, loss in replicated.train_replicated(few, weights)], 1e-3
    )
    assert replicated.train_alone(run)[-1][0] == 30
