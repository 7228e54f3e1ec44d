"""The inner optimiser on flat vectors: AdamW, or Muon for hidden matrices and AdamW for the rest."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence

import torch

from node.tasks.flat import FlatParameters
from node.tasks.recipe import Recipe
from node.training.muon import Muon
from protocols.base import Layout, Vector

ADAPTER = "lora_"
"""In the names of an adapter's tensors, which are never decayed."""
_INPUT_OR_OUTPUT = re.compile(
    r"(^|\.)(\w*emb(ed\w*)?|wte|wpe|shared|(lm_|embed_)?(head|out)|output(_layer)?|score)(\.\w+)?$"
)
"""In the names of the matrices at a model's input and output."""

Included = Callable[[str, tuple[int, ...]], bool]


def is_decayed(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) >= 2 and ADAPTER not in name


def is_hidden_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether Muon trains a tensor: no embedding, output layer or adapter, as told by the name."""
    return len(shape) == 2 and ADAPTER not in name and not _INPUT_OR_OUTPUT.search(name)


def _placed(layout: Layout) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
    """Each tensor: name, shape, and its range in the vector."""
    (tensors,), low = layout.fragments, 0
    for name, shape in tensors:
        high = low + math.prod(shape)
        yield name, shape, low, high
        low = high


def tensor_runs(layout: Layout, vector: Vector, included: Included) -> list[Vector]:
    """The parts of the vector that hold the included tensors, as few views as possible."""
    spans: list[tuple[int, int]] = []
    for name, shape, low, high in _placed(layout):
        if low == high or not included(name, shape):
            continue
        if spans and spans[-1][1] == low:
            low = spans.pop()[0]
        spans.append((low, high))
    return [vector[low:high] for low, high in spans]


def matrices(layout: Layout, vector: Vector) -> list[torch.Tensor]:
    return [vector[low:high].view(shape) for name, shape, low, high in _placed(layout) if is_hidden_matrix(name, shape)]


class InnerOptimizer:
    """Clips the gradient, sets the recipe's learning rate, and takes the step of the recipe's optimiser.

    Muon's step is about the size of AdamW's (Liu et al. 2025, section 2.2), so both take the same learning rate.
    """

    def __init__(self, flat: FlatParameters, recipe: Recipe) -> None:
        self._gradient, self._recipe = flat.gradient, recipe
        self._decayed = tensor_runs(flat.layout, flat.vector, is_decayed) if recipe.decay == "matrices" else []
        muon = recipe.inner_optimizer == "muon"
        self._optimizers = [
            *(_muon(flat, recipe) if muon else ()),
            *_adamw(flat, recipe, lambda *tensor: not (muon and is_hidden_matrix(*tensor))),
        ]

    def clear(self) -> None:
        """The gradients stay views of their vector."""
        self._gradient.zero_()

    def step(self, round_number: int, step: int, divisor: int = 1) -> bool:
        """Take the step along the gradients / `divisor`; False, and no change, if they are not finite."""
        if divisor != 1:
            self._gradient.div_(divisor)
        norm = float(torch.linalg.vector_norm(self._gradient))
        if not math.isfinite(norm):
            return False
        self._gradient.mul_(min(1.0, self._recipe.clip_norm / (norm + 1e-6)))
        rate = self._rate(round_number, step)
        if self._decayed:
            torch._foreach_mul_(self._decayed, 1 - rate * self._recipe.weight_decay)
        for optimizer in self._optimizers:
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
        return True

    def moments(self, make: bool = False) -> dict[str, torch.Tensor]:
        """AdamW's `exp_avg`, `exp_avg_sq`, `step`, Muon's `momentum_buffer`; of several parameters `exp_avg.0`, …."""
        found: dict[str, torch.Tensor] = {}
        for optimizer in self._optimizers:
            (group,) = optimizer.param_groups
            for number, parameter in enumerate(group["params"]):
                state = optimizer.state[parameter]
                if make and not state:
                    state.update(_first_state(optimizer, parameter))
                suffix = f".{number}" if len(group["params"]) > 1 else ""
                found |= {f"{name}{suffix}": tensor for name, tensor in state.items()}
        return found

    def _rate(self, round_number: int, step: int) -> float:
        """Surplus steps keep the round's last rate, as the other peers do."""
        steps = self._recipe.inner_steps
        return self._recipe.rate(round_number * steps + min(step, steps - 1))


def _adamw(flat: FlatParameters, recipe: Recipe, included: Included) -> list[torch.optim.Optimizer]:
    # One parameter for each run of tensors: a step is a few passes over it, however many tensors it holds.
    runs = (tensor_runs(flat.layout, vector, included) for vector in (flat.vector, flat.gradient))
    parameters = _parameters(*runs)
    decay = _own_decay(recipe)
    if not parameters:
        return []
    return [torch.optim.AdamW(parameters, recipe.learning_rate, recipe.betas, weight_decay=decay, fused=True)]


def _muon(flat: FlatParameters, recipe: Recipe) -> list[torch.optim.Optimizer]:
    parameters = _parameters(*(matrices(flat.layout, vector) for vector in (flat.vector, flat.gradient)))
    return [Muon(parameters, recipe.learning_rate, _own_decay(recipe))] if parameters else []


def _own_decay(recipe: Recipe) -> float:
    return 0.0 if recipe.decay == "matrices" else recipe.weight_decay


def _parameters(values: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> list[torch.nn.Parameter]:
    found = [torch.nn.Parameter(each) for each in values]
    for parameter, gradient in zip(found, gradients, strict=True):
        parameter.grad = gradient
    return found


def _first_state(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    if isinstance(optimizer, Muon):
        return {"momentum_buffer": torch.zeros_like(parameter)}
    return {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }
