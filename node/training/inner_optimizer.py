"""The inner optimiser on flat vectors: AdamW, or Muon for hidden matrices and AdamW for the rest."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

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


def spans(layout: Layout, included: Included) -> list[tuple[int, int]]:
    """Where the included tensors are in the vector, neighbours together."""
    found: list[tuple[int, int]] = []
    for name, shape, low, high in _placed(layout):
        if low == high or not included(name, shape):
            continue
        if found and found[-1][1] == low:
            low = found.pop()[0]
        found.append((low, high))
    return found


def tensor_runs(layout: Layout, vector: Vector, included: Included) -> list[Vector]:
    """The parts of the vector that hold the included tensors, as few views as possible."""
    return [vector[low:high] for low, high in spans(layout, included)]


def matrices(layout: Layout) -> list[tuple[int, int, tuple[int, ...]]]:
    """Range and shape of each matrix that Muon trains."""
    return [(low, high, shape) for name, shape, low, high in _placed(layout) if is_hidden_matrix(name, shape)]


@dataclass(frozen=True, slots=True, eq=False)
class Moment:
    """One tensor of the optimiser's state, or a part of it: where it is in the whole tensor of that name."""

    name: str
    shape: tuple[int, ...]  # of the whole
    offset: int  # of this part's first element
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Trained:
    """A parameter of an optimiser: a part of a run of tensors, or a matrix. `of` is the number of these."""

    optimizer: torch.optim.Optimizer
    parameter: torch.nn.Parameter
    number: int
    of: int
    shape: tuple[int, ...]  # of the whole run, or of the matrix
    offset: int  # of this part in it

    def moments(self, make: bool) -> Iterator[Moment]:
        state = self.optimizer.state[self.parameter]
        if make and not state:
            state.update(_first_state(self.optimizer, self.parameter))
        suffix = f".{self.number}" if self.of > 1 else ""
        for name, tensor in state.items():
            yield Moment(f"{name}{suffix}", self.shape if tensor.dim() else (), self.offset, tensor)


class InnerOptimizer:
    """Clips the gradient, sets the recipe's learning rate, and takes the step of the recipe's optimiser.

    Muon's step is about the size of AdamW's (Liu et al. 2025, section 2.2), so both take the same learning rate.
    `vector` and `gradient` begin at element `low` of the layout's vector, and may end before it. With Muon, no matrix
    may be divided. `total` returns the sum of a number over all that hold other parts.
    """

    def __init__(
        self,
        layout: Layout,
        vector: Vector,
        gradient: Vector,
        recipe: Recipe,
        low: int = 0,
        total: Callable[[float], float] = float,
    ) -> None:
        self._gradient, self._recipe, self._total = gradient, recipe, total
        muon = recipe.inner_optimizer == "muon"
        decayed = spans(layout, is_decayed) if recipe.decay == "matrices" else []
        self._decayed = [vector[a - low : b - low] for _, a, b in _cut(decayed, low, low + len(vector))]
        self._trained: list[_Trained] = []
        if muon:
            self._add_muon(layout, vector, low)
        runs = spans(layout, lambda *tensor: not (muon and is_hidden_matrix(*tensor)))
        found = [*_cut(runs, low, low + len(vector))]
        parameters = [_parameter(vector[a - low : b - low], gradient[a - low : b - low]) for _, a, b in found]
        if parameters:
            # One parameter for each run of tensors: a step is a few passes over it, however many tensors it holds.
            decay = _own_decay(recipe)
            adamw = torch.optim.AdamW(parameters, recipe.learning_rate, recipe.betas, weight_decay=decay, fused=True)
            for parameter, (number, a, _) in zip(parameters, found, strict=True):
                begin, end = runs[number]
                self._trained.append(_Trained(adamw, parameter, number, len(runs), (end - begin,), a - begin))
        self._optimizers = list(dict.fromkeys(each.optimizer for each in self._trained))

    def _add_muon(self, layout: Layout, vector: Vector, low: int) -> None:
        every = matrices(layout)
        mine = [(at, *each) for at, each in enumerate(every) if low <= each[0] and each[1] <= low + len(vector)]
        views = [(vector[a - low : b - low].view(shape), self._gradient[a - low : b - low]) for _, a, b, shape in mine]
        parameters = [_parameter(value, gradient.view(value.shape)) for value, gradient in views]
        if parameters:
            muon = Muon(parameters, self._recipe.learning_rate, _own_decay(self._recipe))
            for parameter, (number, _, _, shape) in zip(parameters, mine, strict=True):
                self._trained.append(_Trained(muon, parameter, number, len(every), shape, 0))

    def clear(self) -> None:
        """The gradients stay views of their vector."""
        self._gradient.zero_()

    def step(self, round_number: int, step: int, divisor: int = 1) -> bool:
        """Take the step along the gradients / `divisor`; False, and no change, if they are not finite."""
        if divisor != 1:
            self._gradient.div_(divisor)
        norm = self._norm()
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

    def _norm(self) -> float:
        norm = float(torch.linalg.vector_norm(self._gradient))
        return norm if self._total is float else math.sqrt(self._total(norm * norm))

    def placed_moments(self, make: bool = False) -> list[Moment]:
        return [moment for each in self._trained for moment in each.moments(make)]

    def moments(self, make: bool = False) -> dict[str, torch.Tensor]:
        """AdamW's `exp_avg`, `exp_avg_sq`, `step`, Muon's `momentum_buffer`; of several parameters `exp_avg.0`, …."""
        return {each.name: each.tensor for each in self.placed_moments(make)}

    def _rate(self, round_number: int, step: int) -> float:
        """Surplus steps keep the round's last rate, as the other peers do."""
        steps = self._recipe.inner_steps
        return self._recipe.rate(round_number * steps + min(step, steps - 1))


def _cut(runs: Sequence[tuple[int, int]], low: int, high: int) -> Iterator[tuple[int, int, int]]:
    """The parts of the runs in [low, high), each with the number of its run."""
    for number, (begin, end) in enumerate(runs):
        if max(begin, low) < min(end, high):
            yield number, max(begin, low), min(end, high)


def _own_decay(recipe: Recipe) -> float:
    return 0.0 if recipe.decay == "matrices" else recipe.weight_decay


def _parameter(value: torch.Tensor, gradient: torch.Tensor) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(value)
    parameter.grad = gradient
    return parameter


def _first_state(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    if isinstance(optimizer, Muon):
        return {"momentum_buffer": torch.zeros_like(parameter)}
    return {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }
