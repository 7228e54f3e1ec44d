"""The interface of tasks, users' own tasks included: what is trained, on which data, with which loss and settings.

A task is a torch module, a data stream and a loss. `node.training.trainer` adds everything else: flat vectors, the
optimiser, the schedule, rounds. The stream is a pure function of (seed, position). So one integer is enough to resume
it, and the streams of two peers differ only by their seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias

import torch
from torch import nn

from node.tasks.flat import require_trainable, unfrozen
from node.tasks.recipe import OptionValue

Batch: TypeAlias = tuple[torch.Tensor, ...]
"""The arguments of `Task.loss`. The last tensor holds the targets. Their number counts as tokens."""


@dataclass(frozen=True, slots=True)
class Step:
    """Result of one inner step: mean loss, and tokens. With 0 tokens the step was skipped and changed nothing."""

    loss: float
    tokens: int


@dataclass(frozen=True, slots=True)
class TaskContext:
    """Argument of the factory of a user's own task: `factory(given, **given.options)` returns a `Task`."""

    seed: int  # of the initial weights, the same for all peers; only the founder's weights are used
    device: str = "cpu"  # "cpu", "cuda", "cuda:1" or "mps": where the module has to be
    data: Path | None = None  # the value of --data on this machine, whose meaning the task defines
    options: Mapping[str, OptionValue] = field(default_factory=dict)  # of the run, the same for all peers


class Task(Protocol):
    """A module, its data and its loss.

    A task may have five more members:

    - `trained()` returns the (name, parameter) pairs to train and average; without it, all that take gradients.
    - `targets(batch)` returns the number of a batch's targets; without it, the number of elements of its last tensor.
    - `extra()` returns the names of other tensors of the module that training changes and peers average
      (`node.tasks.extra`); without it, in a user's own task, those that the try-out sees change.
    - `independent_rows` is the number of rows of each batch, if the loss is a mean over targets and no row depends on
      another: several devices may share one batch then (`node.ranks`). All tensors of a batch have the rows first.
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


def trained(task: Task) -> list[tuple[str, nn.Parameter]]:
    named: Callable[[], Iterable[tuple[str, nn.Parameter]]] | None = getattr(task, "trained", None)
    return require_trainable(named() if named else unfrozen(task.module))


def extra(task: Task) -> Sequence[str] | None:
    """Names of the extra tensors of a task; None for one that has none, and whose other tensors need no watch."""
    names: Callable[[], Sequence[str]] | None = getattr(task, "extra", None)
    return names() if names else None


def count_targets(task: Task, batch: Batch) -> int:
    count: Callable[[Batch], int] | None = getattr(task, "targets", None)
    return int(count(batch)) if count else batch[-1].numel()
