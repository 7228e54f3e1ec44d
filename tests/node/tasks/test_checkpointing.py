"""Activation checkpointing: the same bits as without it, in each kind of task, with blocks that are computed twice."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from node.tasks.base import Batch
from node.tasks.checkpointing import checkpoint_blocks, repeated_blocks
from node.tasks.gpt_presets import GptConfig
from node.tasks.recipe import Recipe
from node.tasks.spec import GptValues, OwnValues, StageValues, WorkerSpec
from node.training.build import build
from node.training.stage_worker import build_stage
from node.training.task_learner import TaskLearner
from protocols.pipeline.job import JobKind, StageJob
from tests.node.training.test_task_learner import RECIPE


class Block(nn.Module):
    """With all that a second forward pass could change: dropout, the statistics of a normalisation, and a count."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.norm, self.drop = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3)
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0

    def forward(self, x: torch.Tensor, *, gain: float = 1.0) -> torch.Tensor:
        self.calls += 1
        self.seen = self.seen + x.detach().mean()
        out: torch.Tensor = x + gain * self.drop(self.norm(self.mix(x)).relu())
        return out


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 6), nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 1))
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, gain=0.5)
        out: torch.Tensor = self.last(x)
        return out


class BlocksTask:
    def __init__(self) -> None:
        torch.manual_seed(2)
        self.module: nn.Module = Blocks()

    def batch(self, seed: int, position: int) -> Batch:
        draw = torch.Generator().manual_seed(seed + position)
        return torch.randn(8, 3, generator=draw), torch.randn(8, 1, generator=draw)

    def loss(self, *batch: torch.Tensor) -> torch.Tensor:
        return (self.module(batch[0]) - batch[1]).square().mean()

    @torch.no_grad()
    def evaluate(self) -> float:
        return float(self.loss(*self.batch(99, 0)))


def make(given: Any) -> BlocksTask:
    return BlocksTask()


def without_blocks(given: Any) -> BlocksTask:
    task = BlocksTask()
    task.module = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 1))
    return task


def trained(checkpointing: bool, autocast: torch.dtype | None) -> TaskLearner:
    task = BlocksTask()
    if checkpointing:
        checkpoint_blocks(repeated_blocks(task.module))
    torch.manual_seed(7)
    learner = TaskLearner(task, replace(RECIPE, batches=2), seed=0, autocast=autocast)
    for step in range(3):
        assert learner.step(0, step).tokens
    return learner


@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
def test_own_task_trains_the_same_bits(autocast: torch.dtype | None) -> None:
    plain, less = (trained(checkpointing, autocast) for checkpointing in (False, True))
    assert torch.equal(plain.vector, less.vector) and torch.equal(plain._flat.gradient, less._flat.gradient)
    states = [each._task.module.state_dict() for each in (plain, less)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    calls = [[block.calls for block in each._task.module.blocks] for each in (plain, less)]  # type: ignore[union-attr]
    assert calls == [[6] * 3, [12] * 3], "each block is computed twice"
    assert less.evaluate() == plain.evaluate()
    assert calls[1][0] + 1 == less._task.module.blocks[0].calls, "once without a gradient"  # type: ignore[index, union-attr]


def test_copies_and_classes_of_blocks_stay() -> None:
    module = Blocks()
    checkpoint_blocks(repeated_blocks(module))
    twin = copy.deepcopy(module)
    with torch.no_grad():
        twin.first.weight.zero_()
        twin.blocks[0].mix.weight.zero_()  # type: ignore[union-attr, operator]
    assert all(isinstance(each, Block) and type(each).__name__ == "Block" for each in twin.blocks)
    x = torch.randn(8, 3)
    module.eval(), twin.eval()
    assert not torch.equal(module(x), twin(x))
    assert twin(x).grad_fn is not None


def layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(4, 1, 4)


@pytest.mark.parametrize(
    "made, found",
    [
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), 0),
        (lambda: nn.Sequential(nn.Linear(2, 2), layer(), layer(), nn.Linear(2, 2)), 2),
        (lambda: nn.ModuleDict({"encoder": nn.ModuleList([layer(), layer()]), "decoder": nn.Sequential(layer())}), 2),
        (lambda: nn.ModuleList([nn.Sequential(layer(), layer()), nn.Sequential(layer(), layer(), layer())]), 5),
        (lambda: nn.ModuleList([nn.TransformerEncoder(layer(), 4, enable_nested_tensor=False)]), 4),
        (lambda: nn.ModuleList([layer()] * 3), 0),
    ],
)
def test_blocks_are_found_by_their_repetition(made: Callable[[], nn.Module], found: int) -> None:
    blocks = repeated_blocks(made())
    assert len(blocks) == found and all(isinstance(each, nn.TransformerEncoderLayer) for each in blocks)


def test_setting_reaches_each_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "book.txt"
    text.write_bytes(bytes(n * n % 97 + 20 for n in range(4000)))
    recipe = Recipe(4, 5, learning_rate=1e-2, outer_learning_rate=0.9, outer_momentum=0.5, warmup_steps=0)
    gpt = GptValues(GptConfig(layers=2, width=16, heads=2, context=16), rows=2)
    own = OwnValues(f"{__name__}:make")
    for values in (gpt, own):
        spec = WorkerSpec(values, recipe, 3, 9, text, device="cpu")
        steps, vectors = [], []
        for each in (False, True):
            learner: Any = build(replace(spec, checkpointing=each), torch.empty, False).learner
            steps.append(learner.step(0, 0))
            vectors.append(learner.vector)
        assert steps[0] == steps[1] and torch.equal(*vectors)
    stage = StageValues(0, (0, 2, 4), "fp32", "fp32", 0, "")
    spec = WorkerSpec(gpt, recipe, 3, 9, text, device="cpu", stage=stage)
    gradients = []
    for each in (False, True):
        learner = build_stage(replace(spec, checkpointing=each), torch.empty, False).learner
        drawn = learner.run(StageJob(JobKind.DRAW, ()))
        learner.run(StageJob(JobKind.FINISH, (drawn.payloads[0],), drawn.number, 1.0))
        gradients.append(learner._optimizer._gradients[0].clone())
    assert torch.equal(*gradients) and gradients[0].any()
    assert "--checkpointing" not in capsys.readouterr().err
    build(replace(spec, values=OwnValues(f"{__name__}:without_blocks"), checkpointing=True), torch.empty, False)
    line = "--checkpointing has no effect, because the module has no list of blocks"
    assert capsys.readouterr().err == f"note: task {__name__}:without_blocks: {line}\n"
