"""A pipeline of stages computes what the whole model computes."""

from __future__ import annotations

import hashlib
import math
import random
from dataclasses import replace
from typing import Literal

import pytest
import torch

from node.tasks.base import Step
from node.tasks.gpt import Gpt, GptTask
from node.tasks.gpt_presets import GptConfig, Preset
from node.tasks.gpt_stage import GptStage, GptStageTask, block_names, measure
from node.tasks.partition import BlockCost, Partition, cut
from node.tasks.recipe import Recipe
from node.tasks.text import Text
from node.training import muon
from node.training.activations import ActivationCodec
from node.training.stage_learner import StageLearner
from node.training.task_learner import TaskLearner
from protocols.pipeline.job import JobKind, LeaseLost, StageJob
from tests.sim.inline_stage import accumulate
from tests.support.long import long
from tests.support.statedir_fixtures import assemble

RECIPE = Recipe(
    inner_steps=50,
    rounds=4,
    learning_rate=3e-3,
    outer_learning_rate=0.9,
    outer_momentum=0.5,
    batches=4,
    clip_norm=1e9,  # of each stage by itself in a pipeline: off, so that the whole model can be compared
)
PRESET = Preset(GptConfig(layers=4, width=32, heads=2, context=32), rows=2, recipe=RECIPE)
SEED, STREAM = 3, 11


def text() -> Text:
    """Words in random order."""
    rng = random.Random(1)
    words = ["gossip", "butterfly", "peer", "round", "stage", "lease", "the", "of", "and", "counts"]
    training, held_out = (" ".join(rng.choices(words, k=k)).encode() for k in (4000, 400))
    return Text(*(torch.frombuffer(bytearray(each), dtype=torch.uint8) for each in (training, held_out)))


def partition(stages: int, config: GptConfig = PRESET.shape) -> Partition:
    names = block_names(config)
    return cut([BlockCost(name, 1.0, 2.0, 4) for name in names], stages)


class Pipeline:
    """All stages in one process: one replica of each, one driver, no network."""

    def __init__(self, stages: int, codec: str = "fp32", preset: Preset = PRESET, data: Text | None = None) -> None:
        self.preset, cuts = preset, partition(stages, preset.shape)
        tasks = [GptStageTask(preset, cuts, 0, SEED, data or text())]
        tasks += [GptStageTask(preset, cuts, stage, SEED) for stage in range(1, stages)]
        self.stages = [StageLearner(t, preset.recipe, ActivationCodec(t.shape, codec), STREAM) for t in tasks]
        self.modules = [task.module for task in tasks]

    def accumulate(self) -> None:
        """All microbatches of one step, each through all stages and back."""
        for _ in range(self.preset.recipe.batches):
            accumulate(self.stages)

    def step(self, number: int) -> Step:
        self.accumulate()
        return [stage.step(0, number) for stage in self.stages][-1]

    def whole(self) -> Gpt:
        return assemble(self.preset.shape, self.modules)

    def gradients(self) -> dict[str, torch.Tensor]:
        """The mean gradient by the whole model's names."""
        return {
            name: parameter.grad / self.preset.recipe.batches
            for module in self.modules for name, parameter in module.named_parameters() if parameter.grad is not None
        }  # fmt: skip


def unpartitioned(pipeline: Pipeline, data: Text | None = None) -> tuple[GptTask, TaskLearner]:
    """The whole model with the same weights and the same data."""
    task = GptTask(pipeline.preset, data or text())
    task.module.load_state_dict(pipeline.whole().state_dict())
    return task, TaskLearner(task, pipeline.preset.recipe, seed=STREAM)


@pytest.mark.parametrize(
    ("stages", "optimizer", "tolerance"), ((2, "adamw", 1e-4), (4, "adamw", 1e-4), (6, "muon", 1e-2))
)
def test_one_step_equals_the_unpartitioned_one(
    stages: int, optimizer: Literal["adamw", "muon"], tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of six stages, the first and the last have no hidden matrix: AdamW trains them. Muon enlarges rounding errors."""
    monkeypatch.setattr(muon, "fast_dtype", lambda _: torch.float32)
    pipeline = Pipeline(stages, preset=replace(PRESET, recipe=replace(RECIPE, inner_optimizer=optimizer)))
    task, learner = unpartitioned(pipeline)
    before = {name: parameter.detach().clone() for name, parameter in task.module.named_parameters()}
    pipeline.accumulate()
    gradients = pipeline.gradients()
    gradients = {name: gradient.clone() for name, gradient in gradients.items()}
    losses = [stage.step(0, 0).loss for stage in pipeline.stages]
    done = learner.step(0, 0)
    assert losses[0] == pytest.approx(done.loss, rel=1e-6) and losses[-1] == pytest.approx(done.loss, rel=1e-6)
    assert all(math.isnan(loss) for loss in losses[1:-1])
    after = dict(pipeline.whole().named_parameters())
    for name, parameter in task.module.named_parameters():
        assert parameter.grad is not None
        difference = (gradients[name] - parameter.grad).norm() / parameter.grad.norm()
        assert difference < 1e-6, f"{name}: gradients differ by {difference:.1e}"
        moved = (parameter - before[name]).norm()
        assert (after[name] - parameter).norm() < tolerance * moved, f"{name}: parameters differ"


@pytest.mark.parametrize("stages", (4, *long(2)))
def test_fifty_steps_keep_the_unpartitioned_loss(stages: int) -> None:
    pipeline = Pipeline(stages)
    _, learner = unpartitioned(pipeline)
    for number in range(50):
        mine, whole = pipeline.step(number), learner.step(0, number)
    assert mine.tokens == whole.tokens == 4 * 2 * 32
    assert mine.loss == pytest.approx(whole.loss, abs=1e-4) and whole.loss < 4.0


@pytest.mark.long
@pytest.mark.parametrize("codec", ("bf16", "int8"))
def test_coarse_activations_cost_little_loss(codec: str) -> None:
    """Mean of the last twenty of 200 steps: within .02 nats of the unpartitioned learner's."""
    shape = GptConfig(layers=2, width=32, heads=2, context=32)
    pipeline = Pipeline(3, codec, replace(PRESET, shape=shape, recipe=replace(RECIPE, batches=1)))
    _, learner = unpartitioned(pipeline)
    pairs = [(pipeline.step(number).loss, learner.step(0, number).loss) for number in range(200)]
    mine, whole = (sum(each) / 20 for each in zip(*pairs[-20:], strict=True))
    assert abs(mine - whole) < 0.02, f"{mine:.4f} against {whole:.4f} nats"


def test_stale_backward_is_that_of_the_weights_before_the_step() -> None:
    """Bit for bit; the weights stay those after the step. Once they are replaced, such a backward is refused."""
    first, middle = (
        StageLearner(task, replace(RECIPE, lookahead=2), ActivationCodec(task.shape, "fp32"), STREAM)
        for task in (
            GptStageTask(PRESET, partition(3), stage, SEED, text() if stage == 0 else None) for stage in (0, 1)
        )
    )
    drawn = first.run(StageJob(JobKind.DRAW))
    gradient = torch.randn(2 * 32 * 32, generator=torch.Generator().manual_seed(1)).numpy().tobytes()
    finish = StageJob(JobKind.FINISH, (gradient,), drawn.number, 1.0)
    backward = StageJob(JobKind.BACKWARD, (drawn.payloads[0], gradient))
    forward = StageJob(JobKind.FORWARD, (drawn.payloads[0],))
    for stage, job in ((first, finish), (middle, backward)):
        given = stage.run(job)
        due = stage._optimizer._gradients[0].clone()
        stage.step(0, 0)
        after = stage.vector.clone()
        if stage is middle:
            stage.run(forward)  # of an equal input in the present weights, whose graph is kept
        assert stage.run(replace(job, stale=True)) == given and torch.equal(stage._optimizer._gradients[0], due)
        assert torch.equal(stage.vector, after)
        stage.run(job)
        both = stage._optimizer._gradients[0].clone()
        stage._optimizer.clear()
        stage.run(job)
        assert torch.equal(stage._optimizer._gradients[0].add(due), both), "the next is of the present weights"
        assert stage.step(0, 1).tokens == 3 * 2 * 32
        assert not torch.equal(stage.vector, after), "the optimiser still trains the weights"
        stage.discard()
        with pytest.raises(RuntimeError, match="none are kept"):
            stage.run(replace(job, stale=True))


def test_weights_do_not_depend_on_the_cut() -> None:
    whole = GptStage(PRESET.shape, 0, 6, SEED).state_dict()
    parts = [module.state_dict() for module in Pipeline(4).modules]
    found = {name: tensor for part in parts for name, tensor in part.items()}
    assert found.keys() == whole.keys() == Gpt(PRESET.shape).state_dict().keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())


@pytest.mark.parametrize("threads", (1, 4))
def test_drawn_weights_are_the_same_bits_everywhere(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        state = GptStage(PRESET.shape, 0, 6, SEED).state_dict()
    finally:
        torch.set_num_threads(before)
    digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in state.values())).hexdigest()
    assert digest[:16] == "2176d18fd547a18b"
    weight = state["model.embed_tokens.weight"]
    assert abs(float(weight.mean())) < 0.05 and float(weight.std()) == pytest.approx(1.0, abs=0.02)


def test_step_that_is_not_finite_changes_nothing() -> None:
    stage = Pipeline(2).stages[0]
    before = stage.vector.clone()
    stage.run(StageJob(JobKind.DRAW))
    stage._optimizer._gradients[0].fill_(math.nan)
    assert stage.step(0, 0).tokens == 0 and torch.equal(stage.vector, before)
    assert not stage._optimizer._gradients[0].any(), "the gradient is cleared"


@pytest.mark.parametrize("codec", ("bf16", "int8"))
def test_result_that_is_not_finite_leaves_out_its_step(codec: str) -> None:
    """The replica says so itself: whoever passed finite numbers on is not to blame. What it added is dropped."""
    _, stage, _ = Pipeline(3, codec).stages
    before, large = stage.vector.clone(), stage._codec.encode(torch.full((2, 32, 32), 3e36))
    for parameter in stage._task.module.parameters():
        parameter.data.fill_(1e3)
    x = stage._codec.encode(torch.randn(2, 32, 32))
    with pytest.raises(LeaseLost, match="not finite"):
        stage.run(StageJob(JobKind.BACKWARD, (x, large)))
    stage.vector.copy_(before)
    assert stage.step(0, 0).tokens == 0 and torch.equal(stage.vector, before)
    stage.run(StageJob(JobKind.BACKWARD, (x, x)))
    assert stage.step(0, 1).tokens == 64, "the next step counts again"


def test_measured_costs_name_every_block() -> None:
    ticks = iter(range(1000))
    costs = measure(replace(PRESET, shape=GptConfig(2, 32, 2, 16)), lambda: float(next(ticks)))
    assert [cost.name for cost in costs] == ["embedding", "layer 0", "layer 1", "norm and head"]
    assert all(cost.forward_seconds == cost.backward_seconds == 1.0 and cost.parameter_bytes for cost in costs)


def test_kept_graphs_give_the_bits_of_recomputation() -> None:
    """Also where an evaluation comes between a forward and its backward, and where the oldest graphs have gone."""
    vectors: list[list[torch.Tensor]] = []
    for most_bytes, left in ((1 << 26, 1), (0, 0), (800_000, 1)):
        pipeline = Pipeline(3)
        for stage in pipeline.stages[:2]:
            stage.keep_graphs(most_bytes)
        for number in range(2):
            interleaved(pipeline, 4)
            assert [len(stage._graphs._kept) for stage in pipeline.stages[:2]] == [left, left]
            for stage in pipeline.stages:
                stage.step(0, number)
            assert not any(stage._graphs._kept for stage in pipeline.stages), "a step changes the weights"
        vectors.append([stage.vector for stage in pipeline.stages])
    assert all(torch.equal(*pair) for others in vectors[1:] for pair in zip(vectors[0], others, strict=True))


def interleaved(pipeline: Pipeline, count: int) -> None:
    """All forwards of some microbatches and one more, an evaluation, then their backwards in the same order."""
    first, middle, last = pipeline.stages
    begun = []
    for _ in range(count + 1):
        drawn = first.run(StageJob(JobKind.DRAW))
        x, targets = drawn.payloads
        (y,) = middle.run(StageJob(JobKind.FORWARD, (x,))).payloads
        begun.append((drawn.number, x, last.run(StageJob(JobKind.LOSS, (y, targets)))))
    first.run(StageJob(JobKind.OUTER_SAMPLE), torch.zeros_like(first.vector))
    middle.run(StageJob(JobKind.OUTER_FORWARD, (begun[0][1],)), torch.zeros_like(middle.vector))
    for number, x, done in begun[:count]:
        gradient = middle.run(StageJob(JobKind.BACKWARD, (x, *done.payloads))).payloads
        first.run(StageJob(JobKind.FINISH, gradient, number, done.loss))
