"""The door for users' own tasks: what is trained, on which data, with which loss, by which values.

A task is a torch module, a data stream and a loss. Everything else (flat vectors, the optimiser, the schedule, rounds)
is put round it by `node.training.trainer`. The stream is a pure function of (seed, position): it is resumed by
remembering one integer, and two peers differ by their seeds alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Protocol, TypeAlias

import torch
from torch import nn

from node.outer.noloco import most_pull
from protocols.base import Layout, Vector

MAX_ELEMENTS = 1 << 31
"""Parameters that a run may have."""

Batch: TypeAlias = tuple[torch.Tensor, ...]
"""The arguments of `Task.loss`. The last tensor holds the targets: its elements are what "tokens" counts."""

OptionValue: TypeAlias = bool | int | float | str


@dataclass(frozen=True, slots=True)
class TaskContext:
    """What the factory of a user's own task is given: `factory(given, **given.options)` returns a `Task`.

    Attributes:
        seed: of the initial weights, the same for all peers. They matter to a run's founder alone.
        device: "cpu", "cuda" or "mps": where the module has to be.
        data: what this machine's --data says; it is for the task to know what that means. None: nothing was said.
        options: the run's, the same for all peers.
    """

    seed: int
    device: str = "cpu"
    data: Path | None = None
    options: Mapping[str, OptionValue] = field(default_factory=dict)


class Task(Protocol):
    """What is trained."""

    @property
    def module(self) -> nn.Module:
        """Its parameters are float32; its buffers stay local and are never averaged."""

    def batch(self, seed: int, position: int) -> Batch:
        """The `position`-th batch (from 0) of the stream of `seed`; the same arguments give the same batch."""

    def loss(self, *batch: torch.Tensor) -> torch.Tensor:
        """Mean loss over the batch's targets, in nats: a scalar to differentiate."""

    def evaluate(self) -> float:
        """Mean loss of the module as it stands, over held-out data that no stream ever draws."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a task is trained: the inner steps (AdamW), the rounds, and the outer step (Nesterov SGD).

    Raises:
        ValueError: a value is out of its range; one line that names it.

    Attributes:
        inner_steps: H, inner steps of a round.
        rounds: length of the run, and of the learning rate's cosine.
        batches: batches accumulated into one inner step.
        learning_rate, betas, weight_decay: of AdamW (Loshchilov & Hutter 2019); the decay holds for every parameter.
        clip_norm: L2 norm at which the gradient of an inner step is clipped.
        warmup_steps: global inner steps in which the rate rises linearly.
        final_fraction: what the cosine leaves of the rate at the end.
        outer_learning_rate, outer_momentum: of the outer step (Douillard et al. 2023, algorithm 1).
        outer_pull: of gossip alone: the outer step is NoLoCo's (Kolehmainen et al. 2025), with this as its gamma, and
            pulls pairs of peers together by so much, best by 1 - outer_momentum², instead of averaging their states.
            None: it averages.
    """

    inner_steps: int
    rounds: int
    learning_rate: float
    outer_learning_rate: float
    outer_momentum: float
    batches: int = 1
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    warmup_steps: int = 20
    final_fraction: float = 0.1
    outer_pull: float | None = None

    def __post_init__(self) -> None:
        for name in ("inner_steps", "rounds", "batches"):
            require(self, name, lambda value: value >= 1, "at least 1")
        for name in ("learning_rate", "outer_learning_rate", "clip_norm"):
            require(self, name, lambda value: 0 < value < math.inf, "positive")
        for name in ("warmup_steps", "weight_decay"):
            require(self, name, lambda value: 0 <= value < math.inf, "0 or more")
        require(self, "outer_momentum", lambda value: 0 <= value < 1, "in [0, 1)")
        require(self, "final_fraction", lambda value: 0 <= value <= 1, "in [0, 1]")
        if self.outer_pull is not None:
            most = most_pull(self.outer_momentum)
            require(
                self, "outer_pull", lambda value: 0 < value < most, f"above 0 and, with this momentum, below {most:g}"
            )
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be two numbers in [0, 1), not {self.betas}")

    def rate(self, global_step: int) -> float:
        """Learning rate of the inner step `global_step` (round * inner_steps + step, from 0): warm-up, then cosine.

        It depends on nothing but the global step, so that a late joiner trains at everybody's rate.
        """
        steps = self.inner_steps * self.rounds
        warmup = min(1.0, (global_step + 1) / (self.warmup_steps + 1))
        span = max(1, steps - self.warmup_steps)
        done = min(1.0, max(0.0, (global_step - self.warmup_steps) / span))
        cosine = 0.5 * (1 + math.cos(math.pi * done))
        return self.learning_rate * warmup * (self.final_fraction + (1 - self.final_fraction) * cosine)


def require(values: object, name: str, valid: Callable[[float], bool], words: str) -> None:
    """Raise a ValueError of one line unless the number `name` of a dataclass is valid, and whole where it must be."""
    value = getattr(values, name)
    # The annotation is a string here; a bool passes for an int in Python, but not as a value that somebody meant.
    whole = next(each.type for each in fields(values) if each.name == name) == "int"  # type: ignore[arg-type]
    right = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not right or not valid(value):
        raise ValueError(f"{name} must be {'a whole number, ' if whole else ''}{words}, not {value!r}")


@dataclass(frozen=True, slots=True, eq=False)
class FlatParameters:
    """A module's parameters and gradients as flat vectors, one of each for a fragment of the layout.

    The module's tensors are views of the vectors: writing a vector changes the module, and copies nothing else.
    """

    layout: Layout
    vectors: tuple[Vector, ...]
    gradients: tuple[Vector, ...]


def require_trainable(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that are trained and averaged: all of them, by name.

    Raises:
        ValueError: there are none, or one is not float32, not on the device of the others, or not to be trained.
    """
    parameters = list(module.named_parameters())
    if not sum(parameter.numel() for _, parameter in parameters):
        raise ValueError("the module has no parameters to train")
    device = parameters[0][1].device
    for name, parameter in parameters:
        if parameter.dtype != torch.float32 or parameter.device != device:
            raise ValueError(
                f"parameter {name} is {parameter.dtype} on {parameter.device}: float32 on {device} is needed"
            )
        if not parameter.requires_grad:
            raise ValueError(f"parameter {name} takes no gradient: what is not trained has to be a buffer")
    return parameters


def flatten(module: nn.Module, allocate: Callable[[int], Vector] | None = None, resume: bool = False) -> FlatParameters:
    """Move a module's parameters into flat vectors, in the order of `named_parameters`; their values stay.

    One fragment today. Gradients are views as well: never set them to None, fill their vectors with zeros.

    Args:
        allocate: gives the vector, of so many elements, that is to hold the parameters (shared memory, say).
        resume: what that vector holds becomes the parameters' values, instead of the other way round.

    Raises:
        ValueError: as `require_trainable` does.
    """
    parameters = require_trainable(module)
    device = parameters[0][1].device
    layout = Layout((tuple((name, tuple(parameter.shape)) for name, parameter in parameters),))
    (size,) = layout.sizes()
    vector = torch.empty(size, device=device) if allocate is None else allocate(size)
    gradient = torch.zeros(size, device=device)
    low = 0
    for _, parameter in parameters:
        high = low + parameter.numel()
        view = vector[low:high].view(parameter.shape)
        if not resume:
            view.copy_(parameter.detach())
        parameter.data = view
        parameter.grad = gradient[low:high].view(parameter.shape)
        low = high
    return FlatParameters(layout, (vector,), (gradient,))
