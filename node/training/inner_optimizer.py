"""The inner optimiser on flat vectors: AdamW, or Muon for hidden matrices and AdamW for the rest. The loss scale."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from node.runtime.notes import warn
from node.tasks.recipe import Recipe
from node.training.muon import Muon
from protocols.base import Layout, Vector

ADAPTER = "lora_"
"""In the names of an adapter's tensors, which are never decayed."""
_INPUT_OR_OUTPUT = re.compile(
    r"(^|\.)(\w*emb(ed\w*)?|wte|wpe|shared|(lm_|embed_)?(head|out)|output(_layer)?|score)(\.\w+)?$"
)
"""In the names of the matrices at a model's input and output."""

LOSS_SCALE = "loss_scale"
"""The name of `LossScale.state` in the saved state of the optimiser."""
FIRST_SCALE, LEAST_SCALE, GROWTH_STEPS = 65536.0, 1.0, 2000
"""The first and third are those of `torch.amp.GradScaler`. The scale stays at 1 or more: if gradients overflow without
any scaling, the forward pass overflows, too, and a smaller scale does not mend that."""
_MANY_TARGETS = 1 << 20  # of a first step, whose number is not known: at most a low scale, and no overflow
SKIPPED_IN_A_ROW = 20
"""After so many skipped steps the user is told; with a loss scale, as soon as it cannot be halved."""

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


class LossScale:
    """Dynamic loss scaling for float16 (Micikevicius et al. 2018, section 3.2).

    A step whose gradient is not finite halves the scale, and so many good steps in a row as `GROWTH_STEPS` double it.
    """

    def __init__(self, of_sum: bool = False) -> None:
        self.state = torch.tensor([FIRST_SCALE, 0.0])  # the scale, and the good steps since it last changed
        self._unit = _MANY_TARGETS if of_sum else 1

    @property
    def factor(self) -> float:
        """By which the loss is multiplied, and the gradient is divided."""
        return float(self.state[0]) / self._unit

    def expect(self, divisor: int) -> None:
        """The loss of the next step will be a sum over about so many targets, whose mean is to be scaled."""
        self._unit = 1 << (divisor - 1).bit_length()  # a power of two, so that no bit of a gradient changes

    @property
    def is_least(self) -> bool:
        return float(self.state[0]) <= LEAST_SCALE

    def share(self, state: torch.Tensor) -> None:
        """Keep the state in this tensor from now on, which may have that of an earlier worker."""
        if not state[0]:
            state.copy_(self.state)
        self.state = state

    def update(self, is_finite: bool) -> None:
        scale, steps = self.state.tolist()
        if not is_finite:
            self.state[0], self.state[1] = max(LEAST_SCALE, scale / 2), 0
        elif steps + 1 < GROWTH_STEPS:
            self.state[1] = steps + 1
        else:
            self.state[0], self.state[1] = 2 * scale, 0


class InnerOptimizer:
    """Clips the gradient, sets the recipe's learning rate, and takes the step of the recipe's optimiser.

    Muon's step is about the size of AdamW's (Liu et al. 2025, section 2.2), so both take the same learning rate.
    `vector` and `gradient` begin at element `low` of the layout's vector, and may end before it. With Muon, no matrix
    may be divided. `total` returns the sum of a number over all that hold other parts. With a loss scale, the caller
    multiplies the loss by its `factor`.
    """

    def __init__(
        self,
        layout: Layout,
        vector: Vector,
        *,
        gradient: Vector,
        recipe: Recipe,
        low: int = 0,
        total: Callable[[float], float] = float,
        loss_scale: LossScale | None = None,
    ) -> None:
        self._gradient, self._recipe, self._total = gradient, recipe, total
        self._loss_scale = loss_scale
        self._skipped, self._told = 0, False  # steps skipped in a row, and whether the user was told of these
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
        whole: float = divisor
        if self._loss_scale:
            whole *= self._loss_scale.factor
            self._loss_scale.expect(divisor)
        if whole != 1:
            self._gradient.div_(whole)
        norm = self._norm()
        if not self._is_usable(norm):
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

    def _is_usable(self, norm: float) -> bool:
        """Whether the gradient is finite. If it is not, and this will hardly change, the user is told once."""
        scale, is_finite = self._loss_scale, math.isfinite(norm)
        if is_finite:
            self._skipped = 0
            self._told &= scale is not None and scale.is_least
        else:
            self._skipped += 1
            if not self._told and (scale.is_least if scale else self._skipped == SKIPPED_IN_A_ROW):
                self._told = True
                warn(_standstill(self._skipped, scale is not None))
        if scale:
            scale.update(is_finite)
        return is_finite

    def placed_moments(self, make: bool = False) -> list[Moment]:
        found = [moment for each in self._trained for moment in each.moments(make)]
        if found and self._loss_scale:
            found.append(Moment(LOSS_SCALE, (2,), 0, self._loss_scale.state))
        return found

    def moments(self, make: bool = False) -> dict[str, torch.Tensor]:
        """AdamW's `exp_avg`, `exp_avg_sq`, `step`, Muon's `momentum_buffer`; of several parameters `exp_avg.0`, ….

        After the first step, also the state of the loss scale, if there is one.
        """
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


def _standstill(skipped: int, is_float16: bool) -> str:
    steps = f"{skipped} training steps in a row were" if skipped > 1 else "a training step was"
    start = f"{steps} left out, because the gradient is not finite"
    if is_float16:
        return f"{start} in float16, even without loss scaling: try --precision bfloat16 or float32"
    return f"{start}: is the learning rate too high, or is something in the data not a number?"


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
