"""The interface of tasks, users' own tasks included: what is trained, on which data, with which loss and settings.

A task is a torch module, a data stream and a loss. `node.training.trainer` adds everything else: flat vectors, the
optimiser, the schedule, rounds. The stream is a pure function of (seed, position). So one integer is enough to resume
it, and the streams of two peers differ only by their seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

import torch
from torch import nn

from node.outer.noloco import most_pull
from node.tasks.flat import require_trainable, unfrozen

MAX_ELEMENTS = 1 << 31
"""Largest number of parameters of a run."""

Batch: TypeAlias = tuple[torch.Tensor, ...]
"""The arguments of `Task.loss`. The last tensor holds the targets. Their number counts as tokens."""

OptionValue: TypeAlias = bool | int | float | str


@dataclass(frozen=True, slots=True)
class TaskContext:
    """Argument of the factory of a user's own task: `factory(given, **given.options)` returns a `Task`.

    Attributes:
        seed: of the initial weights, the same for all peers. Only the weights of a run's founder are used.
        device: "cpu", "cuda" or "mps": the device on which the module has to be.
        data: the value of --data on this machine, whose meaning the task defines. None: the option was not given.
        options: options of the run, the same for all peers.
    """

    seed: int
    device: str = "cpu"
    data: Path | None = None
    options: Mapping[str, OptionValue] = field(default_factory=dict)


class Task(Protocol):
    """A module, its data and its loss.

    A task may have four more members:

    - `trained()` returns the (name, parameter) pairs to train and average; without it, all that take gradients.
    - `targets(batch)` returns the number of a batch's targets; without it, the number of elements of its last tensor.
    - `extra()` returns the names of other tensors of the module that training changes and peers average
      (`node.tasks.extra`); without it, in a user's own task, those that the try-out sees change.
    - `timeout_seconds` is how long its worker may show no sign of work (`node.training.liveness`).
    """

    @property
    def module(self) -> nn.Module:
        """The module to train. Its constant buffers and frozen parameters stay local and are never averaged."""

    def batch(self, seed: int, position: int) -> Batch:
        """The `position`-th batch (from 0) of the stream of `seed`. The same arguments give the same batch."""

    def loss(self, *batch: torch.Tensor) -> torch.Tensor:
        """Mean loss over the batch's targets, in nats: a scalar to differentiate."""

    def evaluate(self) -> float:
        """Mean loss of the present module over held-out data, which no stream ever draws."""


InnerOptimizerName = Literal["muon"] | None
"""None: adamw."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Hyper-parameters of a run: the inner steps, the rounds, and the outer step (Nesterov SGD).

    Raises:
        ValueError: a value is out of its range. The message is one line that names it.

    Attributes:
        inner_steps: H, inner steps of a round.
        rounds: length of the run, and of the learning rate's cosine.
        batches: batches accumulated into one inner step.
        learning_rate, weight_decay: of the inner optimiser.
        betas: of AdamW (Loshchilov & Hutter 2019).
        clip_norm: L2 norm at which the gradient of an inner step is clipped.
        warmup_steps: number of first global inner steps in which the rate rises linearly.
        final_fraction: learning rate at the end of the cosine, as a fraction of `learning_rate`.
        outer_learning_rate, outer_momentum: of the outer step (Douillard et al. 2023, algorithm 1).
        outer_decay: share of the rounds, the last ones, in which the outer step goes in equal parts to a plain mean of
            the peers' parameters (learning rate 1, momentum 0). None: no such rounds. Not with `outer_pull`.
        outer_pull: only for gossip. If set, the outer step is NoLoCo's (Kolehmainen et al. 2025) with this gamma: it
            pulls the states of two peers together by this much instead of averaging them; best is
            1 - outer_momentum². None: gossip averages states.
        mean: what a step's gradient is: with token, the mean over the targets of all its batches; with batch (stored as
            None), the mean of the batches' means. The default is token for hf and users' own tasks.
        decay: what the weight decay applies to: with matrices, tensors of two or more dimensions except adapters, so
            not norms and biases; with all (stored as None), every parameter. The default is matrices for hf and users'
            own tasks.
        inner_optimizer: adamw (stored as None), or muon for hidden matrices (Jordan et al. 2024) with AdamW for all
            other parameters. Hidden are tensors of two dimensions, except adapters, embeddings and output layers.
            The default is muon for the presets of gpt, and adamw for hf and users' own tasks.
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
    mean: Literal["token"] | None = None
    decay: Literal["matrices"] | None = None
    inner_optimizer: InnerOptimizerName = None
    outer_decay: float | None = None

    def __post_init__(self) -> None:
        for name in ("inner_steps", "rounds", "batches"):
            require(self, name, lambda value: value >= 1, "at least 1")
        for name in ("learning_rate", "outer_learning_rate", "clip_norm"):
            require(self, name, lambda value: 0 < value < math.inf, "positive")
        for name in ("warmup_steps", "weight_decay"):
            require(self, name, lambda value: 0 <= value < math.inf, "0 or more")
        require(self, "outer_momentum", lambda value: 0 <= value < 1, "in [0, 1)")
        if self.outer_decay is not None:
            require(self, "outer_decay", lambda value: 0 <= value <= 1, "in [0, 1]")
            if self.outer_decay and self.outer_pull:
                raise ValueError("outer_decay and outer_pull cannot be combined: set one of them")
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

        It depends only on the global step, so a late joiner trains at the same rate as all other peers.
        """
        steps = self.inner_steps * self.rounds
        warmup = min(1.0, (global_step + 1) / (self.warmup_steps + 1))
        span = max(1, steps - self.warmup_steps)
        done = min(1.0, max(0.0, (global_step - self.warmup_steps) / span))
        cosine = 0.5 * (1 + math.cos(math.pi * done))
        return self.learning_rate * warmup * (self.final_fraction + (1 - self.final_fraction) * cosine)


def require(values: object, name: str, valid: Callable[[float], bool], words: str) -> None:
    """Check a number in a field of a dataclass; fields annotated as int must be whole numbers.

    Args:
        words: description of the valid range, for the message.

    Raises:
        ValueError: it is not valid. The message is one line that names the field.
    """
    value = getattr(values, name)
    # The annotation is a string here. In Python a bool is an int, but it is not meant as a number here.
    whole = next(each.type for each in fields(values) if each.name == name) == "int"  # type: ignore[arg-type]
    right = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not right or not valid(value):
        raise ValueError(f"{name} must be {'a whole number, ' if whole else ''}{words}, not {value!r}")


def trained(task: Task) -> list[tuple[str, nn.Parameter]]:
    """The parameters that a task trains, by name, after checking that they can be trained and averaged.

    Raises:
        ValueError: as for `node.tasks.flat.require_trainable`.
    """
    named: Callable[[], Iterable[tuple[str, nn.Parameter]]] | None = getattr(task, "trained", None)
    return require_trainable(named() if named else unfrozen(task.module))


def extra(task: Task) -> Sequence[str] | None:
    """Names of the extra tensors of a task; None for one that has none, and whose other tensors need no watch."""
    names: Callable[[], Sequence[str]] | None = getattr(task, "extra", None)
    return names() if names else None


def count_targets(task: Task, batch: Batch) -> int:
    """The number of a batch's targets."""
    count: Callable[[Batch], int] | None = getattr(task, "targets", None)
    return int(count(batch)) if count else batch[-1].numel()
