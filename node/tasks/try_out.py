"""The try-out: one batch of a user's task before training, which finds what fails in it and what it changes.

Everything is put back afterwards: parameters, buffers, modes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from node.tasks.base import Batch
from node.tasks.bystanders import Bystanders
from node.tasks.flat import FlatParameters, flatten_parameters
from node.tasks.name import TaskError

_SHIFT = 0.02
"""By so much of their size, plus the same, parameters move before the second loss: a mean of parameters (a teacher's)
equals them until they do."""


class Tried(Protocol):
    """The part of a user's task that is tried out."""

    name: str

    @property
    def module(self) -> nn.Module: ...
    def trained(self) -> list[tuple[str, nn.Parameter]]: ...
    def loss(self, *batch: torch.Tensor) -> torch.Tensor: ...
    def backward(self, loss: torch.Tensor) -> None: ...


@dataclass(slots=True)
class Findings:
    """What one batch changes beside the trained tensors, which of these are too precise, and what gets no gradient."""

    extra: list[str] = field(default_factory=list)
    imprecise: list[str] = field(default_factory=list)
    unreached: list[str] = field(default_factory=list)


def try_out(task: Tried, batch: Batch, training: bool) -> Findings:
    """Take the loss of a batch and its gradient."""
    parameters = task.trained()
    bystanders = Bystanders(task.module, parameters)
    copies = bystanders.copy()
    flat = flatten_parameters(parameters)
    flat.views.watch(task.module, task.name)
    findings, reached = Findings(), set[str]()
    with _put_back(task.module, flat, training), _hooks(parameters, reached):
        try:
            _differentiate(task, batch, flat)
            findings.unreached = [name for name, _ in parameters if name not in reached]
            _move(flat)
            with suppress(TaskError), torch.no_grad():  # the task may check values that it expects
                task.loss(*batch)
            findings.extra, findings.imprecise = bystanders.changed(copies)
        finally:
            bystanders.restore(copies)
    return findings


@torch.enable_grad()
def _differentiate(task: Tried, batch: Batch, flat: FlatParameters) -> None:
    before = flat.compute[0].clone() if flat.compute else None
    flat.views.before_loss()
    loss = task.loss(*batch)
    flat.views.after_loss(is_first=True)
    if flat.compute and before is not None and not torch.equal(flat.compute[0], before):
        raise TaskError(
            f"task {task.name}: loss() changes parameters in bfloat16, which are copies of the trained values: "
            "make them float32, or leave them alone"
        )
    task.backward(loss)
    flat.views.after_backward()


def _move(flat: FlatParameters) -> None:
    (vector,) = flat.vectors
    vector.add_(vector.abs().add_(1), alpha=_SHIFT)
    flat.refresh()


@contextmanager
def _put_back(module: nn.Module, flat: FlatParameters, training: bool) -> Iterator[None]:
    """Put the module into train mode inside the context, if `training`; then put back its parameters and modes."""
    (vector,) = flat.vectors
    values, modes = vector.clone(), [(part, part.training) for part in module.modules()]
    if training:
        module.train()
    try:
        yield
    finally:
        vector.copy_(values)
        flat.refresh()
        flat.views.detach()
        for part, mode in modes:
            part.training = mode


@contextmanager
def _hooks(parameters: list[tuple[str, nn.Parameter]], reached: set[str]) -> Iterator[None]:
    handles = [
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: reached.add(name))  # type: ignore[no-untyped-call]
        for name, parameter in parameters
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
