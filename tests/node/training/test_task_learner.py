"""A task's learner: exact means over targets, what is decayed, what Muon trains, bfloat16 copies."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from node.tasks.base import Batch
from node.tasks.flat import flatten
from node.tasks.recipe import Recipe
from node.training import muon as muon_module
from node.training.inner_optimizer import is_decayed, is_hidden_matrix, spans
from node.training.task_learner import TaskLearner

RECIPE = Recipe(10, 5, 1e-2, 0.9, 0.5, warmup_steps=0, mean="token", decay="matrices", weight_decay=0.3)
WORDS = 11


class Masked:
    """Rows of words, of whose targets some are masked; the rows of a step are divided into microbatches."""

    def __init__(self, split: list[int], masked: list[int], dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(3)
        self.module: nn.Module = nn.Sequential(nn.Embedding(WORDS, 8), nn.LayerNorm(8), nn.Linear(8, WORDS)).to(dtype)
        draw = torch.Generator().manual_seed(5)
        self.words = torch.randint(WORDS, (sum(split), 13), generator=draw)
        self.labels = torch.randint(WORDS, self.words.shape, generator=draw)
        for row, count in enumerate(masked):
            self.labels[row, :count] = -100
        self.bounds = [sum(split[:index]) for index in range(len(split) + 1)]

    def batch(self, seed: int, position: int) -> Batch:
        low, high = self.bounds[position], self.bounds[position + 1]
        return self.words[low:high], self.labels[low:high]

    def targets(self, batch: Batch) -> int:
        return int((batch[1] != -100).sum())

    def loss(self, *batch: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.module(batch[0]).flatten(0, 1).float(), batch[1].flatten())

    def evaluate(self) -> float:
        return float(self.module.training)


class Layered(Masked):
    """The same on named layers, of which two are hidden matrices, one of them with a bias."""

    def __init__(self) -> None:
        super().__init__([8], [0] * 8)
        torch.manual_seed(4)
        names = ("embed", "middle", "norm", "wide", "lm_head")
        layers = (
            nn.Embedding(WORDS, 8),
            nn.Linear(8, 8),
            nn.LayerNorm(8),
            nn.Linear(8, 12, False),
            nn.Linear(12, WORDS),
        )
        self.module = nn.Sequential(OrderedDict(zip(names, layers, strict=True)))


@given(
    split=st.permutations([1, 1, 2, 4]) | st.just([8]) | st.just([1] * 8),
    rows=st.permutations([13, 13, 12, 0, 0, 5, 1, 9]),
)
def test_any_split_gives_the_same_gradient(split: list[int], rows: list[int]) -> None:
    gradients = []
    for parts in ([8], split):
        learner = TaskLearner(Masked(parts, rows), replace(RECIPE, batches=len(parts)), seed=0)
        learner._accumulate()
        count = 8 * 13 - sum(rows)
        gradients.append(learner._flat.gradient / count)
        learner.position = 0
        assert learner.step(0, 0).tokens == count
    whole, divided = gradients
    assert float((whole - divided).norm() / whole.norm()) < 1e-6


def test_step_without_targets_is_skipped() -> None:
    learner = TaskLearner(Masked([1, 1], [13, 13]), replace(RECIPE, batches=2), seed=0)
    before = learner.vector.clone()
    assert learner.step(0, 0).tokens == 0 and learner.position == 2
    assert torch.equal(before, learner.vector)


def test_decay_spares_norms_biases_and_adapters() -> None:
    module = nn.Module()
    module.first = nn.Linear(2, 3)
    module.norm = nn.LayerNorm(3)
    module.lora_A = nn.Linear(3, 2, bias=False)
    module.last = nn.Linear(3, 1, bias=False)
    flat = flatten(module)
    for low, high in spans(flat.layout, is_decayed):
        flat.vector[low:high] = 7.0
    touched = {name for name, parameter in module.named_parameters() if bool((parameter == 7).all())}
    assert touched == {"first.weight", "last.weight"}


@pytest.mark.parametrize("decay", ["matrices", "all"])
def test_decay_equals_torchs_groups(decay: Literal["matrices", "all"]) -> None:
    recipe = replace(RECIPE, decay=decay, clip_norm=1e9)
    task, twin = Masked([8], [0] * 8), Masked([8], [0] * 8)
    learner = TaskLearner(task, recipe, seed=0)
    named = [*twin.module.named_parameters()]
    kept = [each for _, each in named if each.ndim < 2]
    groups = [
        {"params": [each for _, each in named if each.ndim > 1], "weight_decay": 0.3},
        {"params": kept, "weight_decay": 0.0 if decay == "matrices" else 0.3},
    ]
    plain = torch.optim.AdamW(groups, 1e-2, (0.9, 0.95), foreach=False)
    for step in range(3):
        learner.position = 0
        learner.step(0, step)
        plain.zero_grad()
        twin.loss(*twin.batch(0, 0)).backward()
        for group in plain.param_groups:
            group["lr"] = recipe.rate(step)
        plain.step()
    expected = torch.cat([each.detach().flatten() for _, each in named])
    torch.testing.assert_close(learner.vector, expected, rtol=1e-5, atol=1e-6)  # of steps of 1e-2


@pytest.mark.parametrize("decay", ["matrices", "all"])
def test_muon_trains_hidden_matrices_and_continues_from_its_moments(
    decay: Literal["matrices", "all"], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(muon_module, "fast_dtype", lambda _: torch.bfloat16)  # torch's has no other
    recipe = replace(RECIPE, decay=decay, inner_optimizer="muon", clip_norm=1e9)
    task, twin = Layered(), Layered()
    learner = TaskLearner(task, recipe, seed=0)
    hidden = [twin.module.get_parameter(f"{name}.weight") for name in ("middle", "wide")]
    others = [each for each in twin.module.parameters() if all(each is not one for one in hidden)]
    matrices, kept = [each for each in others if each.ndim > 1], [each for each in others if each.ndim < 2]
    muon = torch.optim.Muon(hidden, weight_decay=0.3, adjust_lr_fn="match_rms_adamw")
    groups: list[dict[str, Any]] = [
        {"params": matrices},
        {"params": kept, "weight_decay": 0.0 if decay == "matrices" else 0.3},
    ]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.3, foreach=False)
    for step in range(4):
        if step == 2:
            saved = {name: tensor.clone() for name, tensor in learner.moments().items()}
            values = learner.vector.clone()
            learner = TaskLearner(Layered(), recipe, seed=0)
            learner.vector.copy_(values)
            for name, tensor in learner.moments(make=True).items():
                tensor.copy_(saved.pop(name))
            assert not saved
        learner.position = 0
        learner.step(0, step)
        twin.module.zero_grad()
        twin.loss(*twin.batch(0, 0)).backward()
        for group in (*muon.param_groups, *adamw.param_groups):
            group["lr"] = recipe.rate(step)
        muon.step()
        adamw.step()
    expected = torch.cat([each.detach().flatten() for each in twin.module.parameters()])
    torch.testing.assert_close(learner.vector, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "hidden"),
    (
        *((f"{name}.weight", False) for name in ("model.embed_tokens", "lm_head", "transformer.wte", "score", "head")),
        *((f"{name}.weight", False) for name in ("word_embeddings", "pos_emb", "shared", "output", "embed_out")),
        *(
            (f"layers.0.{name}.weight", True)
            for name in ("q_proj", "o_proj", "attention.out_proj", "multihead", "c_fc")
        ),
        ("layers.0.q_proj.lora_A.weight", False),
    ),
)
def test_embeddings_and_output_layers_are_not_hidden(name: str, hidden: bool) -> None:
    assert is_hidden_matrix(name, (4, 4)) == hidden and not is_hidden_matrix(name, (4,))


def test_muon_needs_a_hidden_matrix() -> None:
    recipe = replace(RECIPE, inner_optimizer="muon")
    masked = Masked([8], [0] * 8)
    masked.module = nn.Sequential(OrderedDict(embed=nn.Embedding(WORDS, 8), lm_head=nn.Linear(8, WORDS)))
    with pytest.raises(ValueError, match="has none"):
        TaskLearner(masked, recipe, seed=0)


def test_bfloat16_module_keeps_float32_parameters() -> None:
    learner = TaskLearner(
        Masked([4, 4], [0] * 8, torch.bfloat16), replace(RECIPE, batches=2, learning_rate=1e-5), seed=0
    )
    before, computed = learner.vector.clone(), Masked([8], [0] * 8, torch.bfloat16)
    assert torch.equal(before, torch.cat([each.detach().float().flatten() for each in computed.module.parameters()]))
    for step in range(40):
        learner.position = 0
        assert learner.step(0, step).tokens == 8 * 13
    moved = (learner.vector - before).abs()
    assert 0 < float(moved.max()) < 1e-3, "steps smaller than bfloat16 resolves add up"
    learner.evaluate()
    module = learner._task.module
    rounded = torch.cat([each.detach().float().flatten() for each in module.parameters()])
    assert torch.equal(rounded, learner.vector.bfloat16().float())


def test_modes_follow_training_and_evaluation() -> None:
    """Of all parts: a library may have left some in eval mode."""
    task = Masked([8], [0] * 8)
    next(task.module.children()).eval()
    learner = TaskLearner(task, RECIPE, seed=0)
    for _ in range(2):
        learner.step(0, 0)
        assert all(each.training for each in task.module.modules())
        assert learner.evaluate() == 0.0
        learner.position = 0
