"""The model against an independent one, its names, its flat vectors, its presets."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from node.tasks.flat import flatten
from node.tasks.gpt import RMS_EPS, Gpt, GptTask
from node.tasks.gpt_presets import PRESETS, GptConfig, Preset, preset, recipe_for
from node.tasks.recipe import Recipe
from node.tasks.text import load

SMALL = GptConfig(layers=2, width=16, heads=2, context=12)


def tokens(rows: int, positions: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(256, (rows, positions), generator=torch.Generator().manual_seed(seed))


def naive(model: Gpt, row: list[int]) -> torch.Tensor:
    """Logits (positions, 256) of one row in float64, position by position, from the state dict and the papers alone."""
    weights = {name: tensor.double() for name, tensor in model.state_dict().items()}
    heads, size = model.shape.heads, model.shape.width // model.shape.heads

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / math.sqrt(float((x * x).mean()) + RMS_EPS) * weights[name]

    def turn(x: torch.Tensor, position: int) -> torch.Tensor:
        pairs = torch.complex(x[: size // 2], x[size // 2 :])
        angles = [position * 10000 ** (-2 * pair / size) for pair in range(size // 2)]
        turned = pairs * torch.tensor([complex(math.cos(angle), math.sin(angle)) for angle in angles])
        return torch.cat((turned.real, turned.imag))

    states = [weights["model.embed_tokens.weight"][token] for token in row]
    for layer in range(model.shape.layers):
        at = f"model.layers.{layer}."
        inputs = [norm(x, at + "input_layernorm.weight") for x in states]
        q, k, v = ([weights[at + f"self_attn.{n}_proj.weight"] @ x for x in inputs] for n in "qkv")
        for position in range(len(row)):
            heard = []
            for head in range(heads):
                part = slice(head * size, (head + 1) * size)
                query = turn(q[position][part], position)
                scores = [float(query @ turn(k[j][part], j)) / math.sqrt(size) for j in range(position + 1)]
                odds = [math.exp(score) for score in scores]
                heard.append(sum(odd / sum(odds) * v[j][part] for j, odd in enumerate(odds)))
            x = states[position] + weights[at + "self_attn.o_proj.weight"] @ torch.cat(heard)
            y = norm(x, at + "post_attention_layernorm.weight")
            gate, up = weights[at + "mlp.gate_proj.weight"] @ y, weights[at + "mlp.up_proj.weight"] @ y
            states[position] = x + weights[at + "mlp.down_proj.weight"] @ (gate / (1 + torch.exp(-gate)) * up)
    return torch.stack([weights["lm_head.weight"] @ norm(x, "model.norm.weight") for x in states])


def test_gpt_equals_a_naive_llama() -> None:
    model = Gpt(SMALL, seed=1)
    with torch.no_grad():
        for parameter in model.parameters():  # larger weights than at the start, and gains that are not all one
            parameter.mul_(2) if parameter.ndim == 2 else parameter.copy_(torch.linspace(0.5, 1.5, len(parameter)))
        rows = tokens(2, 12)
        logits = model(rows)
    assert logits.abs().max() > 1
    for row, got in zip(rows.tolist(), logits, strict=True):
        torch.testing.assert_close(got.double(), naive(model, row), rtol=1e-4, atol=1e-5)


def test_initial_weights_depend_only_on_the_seed() -> None:
    torch.manual_seed(1)
    first = flatten(Gpt(SMALL, seed=5)).vector
    torch.manual_seed(2)
    before = torch.get_rng_state()
    assert torch.equal(first, flatten(Gpt(SMALL, seed=5)).vector)
    assert torch.equal(before, torch.get_rng_state())
    assert not torch.equal(first, flatten(Gpt(SMALL, seed=6)).vector)


def test_flatten_rejects_unsupported_modules() -> None:
    with pytest.raises(ValueError, match="no parameters"):
        flatten(nn.ReLU())
    with pytest.raises(ValueError, match=r"weight is torch\.float64"):
        flatten(nn.Linear(2, 2).double())
    with pytest.raises(ValueError, match=r"1\.weight is torch\.float32 on meta: float32 or bfloat16 on cpu is needed"):
        flatten(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")))


def test_tied_parameters_stay_tied() -> None:
    first, second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    second.weight = first.weight
    flat = flatten(nn.Sequential(first, second))
    flat.vector.fill_(2)
    assert flat.layout.sizes() == (9,)
    assert torch.equal(second.weight.detach(), torch.full((3, 3), 2.0))


def test_preset_follows_rounds_and_optimiser() -> None:
    for rounds, inner_steps in ((39, 25), (40, 51)):
        expected = Recipe(inner_steps, rounds, 12e-3, 0.9, 0.5, inner_optimizer="muon")
        assert recipe_for(64, rounds, inner_steps) == expected
        adamw = replace(expected, learning_rate=6e-3, inner_optimizer="adamw")
        assert recipe_for(64, rounds, inner_steps, "adamw") == adamw
    assert recipe_for(64, 40, 50) == Recipe(50, 40, 12e-3, 0.7, 0.8, inner_optimizer="muon", outer_decay=1 / 16)
    assert recipe_for(128, 40, 50, "adamw") == Recipe(50, 40, 6e-3, 0.7, 0.8, outer_decay=1 / 16)
    with pytest.raises(ValueError, match="no preset 'big': one of w64, w96"):
        preset("big")


@pytest.mark.parametrize("bad", [{"layers": 0}, {"layers": 1.5}, {"context": True}])
def test_shape_needs_positive_whole_numbers(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be a whole number, at least 1, not"):
        replace(SMALL, **bad)


def test_generate_takes_the_most_likely_byte() -> None:
    model = Gpt(SMALL, seed=4)
    text = list(b"import this")
    for _ in range(6):  # beyond the context of 12
        with torch.no_grad():
            text.append(int(model(torch.tensor([text[-12:]]))[0, -1].argmax()))
    assert model.generate(b"import this", 6) == bytes(text[11:])
    drawn = [model.generate(b"import this", 20, temperature=1.0, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2] and len(drawn[0]) == 20
    with pytest.raises(ValueError, match="prompt is empty"):
        model.generate(b"", 1)


def test_task_predicts_the_next_byte(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(10, 127)) * 140)  # 10 ends a line, and a block
    task = GptTask(Preset(SMALL, 3, PRESETS["w64"].recipe), load(tmp_path / "a.txt"))
    inputs, targets = task.batch(0, 0)
    assert inputs.shape == targets.shape == (3, 12) and inputs.dtype == torch.int64
    assert torch.equal(torch.where(inputs < 126, inputs + 1, 10), targets)
    assert float(task.loss(inputs, targets).detach()) == pytest.approx(math.log(256), abs=0.6)
    assert task.evaluate() == pytest.approx(math.log(256), abs=0.6)
    assert task.evaluate() == task.evaluate()
    with pytest.raises(ValueError, match=r"text has \d+ bytes: a window takes 12001"):
        GptTask(Preset(GptConfig(1, 16, 2, 12000), 3, PRESETS["w64"].recipe), load(tmp_path / "a.txt"))
