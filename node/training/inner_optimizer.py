"""The inner optimiser on flat vectors: AdamW, or Muon for hidden matrices and AdamW for the rest. The loss scale."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from node.runtime import tensors
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

    @property
    def part(self) -> tensors.Part:
        return self.name, self.shape, self.offset, self.tensor


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """A parameter of an optimiser, which is a part of a run of tensors, or of a matrix.

    `of` is the number of these runs or matrices, `number` this one's. `places` are the offsets in it of the rows of the
    parameter; a single one of a parameter that is in one piece.
    """

    optimizer: torch.optim.Optimizer
    parameter: torch.nn.Parameter
    number: int
    of: int
    shape: tuple[int, ...]  # of the whole run, or of the matrix
    places: Sequence[int] = (0,)

    def moments(self, make: bool) -> Iterator[Moment]:
        state = self.optimizer.state[self.parameter]
        if make and not state:
            state.update(_first_state(self.optimizer, self.parameter))
        for key, tensor in state.items():
            name = moment_name(key, self.number, self.of)
            if not tensor.dim():
                yield Moment(name, (), 0, tensor)
            elif len(self.places) == 1:
                yield Moment(name, self.shape, self.places[0], tensor)
            else:
                rows = tensor.reshape(len(self.places), -1)
                yield from (Moment(name, self.shape, at, row) for at, row in zip(self.places, rows, strict=True))


def moment_entries(layout: Layout, recipe: Recipe) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The tensors of the whole state, as `tensors.header` has them: they do not depend on how it is divided."""
    entries: dict[str, tuple[str, tuple[int, ...]]] = {}
    muon = recipe.inner_optimizer == "muon"
    every = matrices(layout) if muon else []
    for number, (_, _, shape) in enumerate(every):
        entries[moment_name("momentum_buffer", number, len(every))] = ("F32", shape)
    runs = spans(layout, lambda *tensor: not (muon and is_hidden_matrix(*tensor)))
    for number, (low, high) in enumerate(runs):
        for key, shape in (("step", ()), ("exp_avg", (high - low,)), ("exp_avg_sq", (high - low,))):
            entries[moment_name(key, number, len(runs))] = ("F32", shape)
    return entries


def moment_name(key: str, number: int, of: int) -> str:
    return f"{key}.{number}" if of > 1 else key


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
    With a loss scale, the caller multiplies the loss by its `factor`.
    """

    def __init__(
        self,
        recipe: Recipe,
        trained: Sequence[Trained],
        *,
        gradients: list[torch.Tensor],
        decayed: list[torch.Tensor],
        loss_scale: LossScale | None = None,
    ) -> None:
        self._recipe, self._trained = recipe, trained
        self._gradients, self._decayed, self._loss_scale = gradients, decayed, loss_scale
        self._optimizers = list(dict.fromkeys(each.optimizer for each in trained))
        self._skipped, self._told = 0, False  # steps skipped in a row, and whether the user was told of these

    def clear(self) -> None:
        """The gradients stay views of their vector."""
        torch._foreach_zero_(self._gradients)

    def step(self, round_number: int, step: int, divisor: int = 1) -> bool:
        """Take the step along the gradients / `divisor`; False, and no change, if they are not finite."""
        whole: float = divisor
        if self._loss_scale:
            whole *= self._loss_scale.factor
            self._loss_scale.expect(divisor)
        if whole != 1:
            torch._foreach_div_(self._gradients, whole)
        norm = self.norm()
        if not self._is_usable(norm):
            return False
        torch._foreach_mul_(self._gradients, min(1.0, self._recipe.clip_norm / (norm + 1e-6)))
        rate = self._rate(round_number, step)
        if self._decayed:
            torch._foreach_mul_(self._decayed, 1 - rate * self._recipe.weight_decay)
        for optimizer in self._optimizers:
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
        return True

    def norm(self) -> float:
        (gradient,) = self._gradients
        return float(torch.linalg.vector_norm(gradient))

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


class FlatOptimizer(InnerOptimizer):
    """Of a part of the layout's vector, which begins at element `low`. With Muon, no matrix may be divided."""

    def __init__(
        self,
        layout: Layout,
        vector: Vector,
        *,
        gradient: Vector,
        recipe: Recipe,
        low: int = 0,
        loss_scale: LossScale | None = None,
    ) -> None:
        trained: list[Trained] = []
        if muon := recipe.inner_optimizer == "muon":
            trained += _muon(layout, vector, gradient, recipe, low)
        runs = spans(layout, lambda *tensor: not (muon and is_hidden_matrix(*tensor)))
        parts = [*cut(runs, low, low + len(vector))]
        # One parameter for each run of tensors: a step is a few passes over it, however many tensors it holds.
        parameters = [parameter_of(vector[a - low : b - low], gradient[a - low : b - low]) for _, a, b in parts]
        if parameters:
            adamw = adamw_of(parameters, recipe)
            for parameter, (number, a, _) in zip(parameters, parts, strict=True):
                begin, end = runs[number]
                trained.append(Trained(adamw, parameter, number, len(runs), (end - begin,), (a - begin,)))
        decayed = spans(layout, is_decayed) if recipe.decay == "matrices" else []
        views = [vector[a - low : b - low] for _, a, b in cut(decayed, low, low + len(vector))]
        super().__init__(recipe, trained, gradients=[gradient], decayed=views, loss_scale=loss_scale)


def _muon(layout: Layout, vector: Vector, gradient: Vector, recipe: Recipe, low: int) -> Iterator[Trained]:
    every = matrices(layout)
    mine = [(at, *each) for at, each in enumerate(every) if low <= each[0] and each[1] <= low + len(vector)]
    views = [[part[a - low : b - low].view(shape) for part in (vector, gradient)] for _, a, b, shape in mine]
    if parameters := [parameter_of(*each) for each in views]:
        muon = Muon(parameters, recipe.learning_rate, own_decay(recipe))
        for parameter, (number, _, _, shape) in zip(parameters, mine, strict=True):
            yield Trained(muon, parameter, number, len(every), shape)


def adamw_of(parameters: Sequence[torch.nn.Parameter], recipe: Recipe) -> torch.optim.Optimizer:
    decay = own_decay(recipe)
    return torch.optim.AdamW(parameters, recipe.learning_rate, recipe.betas, weight_decay=decay, fused=True)


def cut(runs: Sequence[tuple[int, int]], low: int, high: int) -> Iterator[tuple[int, int, int]]:
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


def own_decay(recipe: Recipe) -> float:
    return 0.0 if recipe.decay == "matrices" else recipe.weight_decay


def parameter_of(value: torch.Tensor, gradient: torch.Tensor) -> torch.nn.Parameter:
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
