"""A user's own task, `package.module:factory`: imported on this machine, built, and checked before training.

A run's manifest carries the name and the options, never code: each peer must have the module itself. Only the worker
imports it, and only after the user of this machine has also named it (`node.joining.run_selector`). One batch is tried
out before training: it shows what fails, and what training changes beside the parameters.
"""

from __future__ import annotations

import importlib
import inspect
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from node.tasks.base import Batch, Task, TaskContext, count_targets, extra, trained
from node.tasks.bystanders import Bystanders, listed, same_values
from node.tasks.checkpointing import first_kept, repeated_blocks
from node.tasks.flat import FlatParameters, flatten_parameters
from node.tasks.name import TaskError
from node.tasks.recipe import MAX_ELEMENTS
from node.tasks.saved_tensors import saved_tensors

MAX_TENSORS = 4096
MAX_TENSOR_NAME_CHARACTERS = 200  # these limits keep the layout, which the worker sends to its peer in one line, small
_SHIFT = 0.02
"""By so much of their size, plus the same, parameters move before the second loss: a mean of parameters (a teacher's)
equals them until they do."""
_LOSS = "loss() must return a tensor without dimensions that depends on the parameters"


@dataclass(frozen=True, slots=True)
class Findings:
    """What one batch changes beside the trained tensors: what is averaged, too precise for that, or of no interest to
    other peers; and what gets no gradient.
    """

    extra: list[str]
    imprecise: list[str]
    private: list[str]
    unreached: list[str]


class OwnTask:
    """A `Task` that names the user's task in its errors.

    Of the tensors that training changes, a peer keeps for itself those that are `kept`, and those that are `private`:
    of integers, or not persistent.
    """

    def __init__(self, name: str, task: Task) -> None:
        self.name, self._task = name, task
        self._changed, self._trains_all = list[str](), True
        self.kept: list[str] = []
        self.private: list[str] = []

    @property
    def module(self) -> nn.Module:
        return self._task.module

    @property
    def timeout_seconds(self) -> float | None:
        """The task's own limit for a worker that shows no sign of work; None: it has none."""
        seconds = getattr(self._task, "timeout_seconds", None)
        if seconds is None:
            return None
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
            raise self._fault(f"timeout_seconds must be a positive number, not {seconds!r}")
        return float(seconds)

    @property
    def independent_rows(self) -> int | None:
        """Rows of each batch that several devices may share; None: a batch is not divided."""
        rows = getattr(self._task, "independent_rows", None)
        if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 1):
            raise self._fault(f"independent_rows must be a whole number of at least 1, not {rows!r}")
        return rows

    def batch(self, seed: int, position: int) -> Batch:
        with blamed(self.name, "batch()"):
            return self._task.batch(seed, position)

    def loss(self, *batch: torch.Tensor) -> torch.Tensor:
        with blamed(self.name, "loss()"):
            loss = self._task.loss(*batch)
        depends = isinstance(loss, torch.Tensor) and (loss.requires_grad or not torch.is_grad_enabled())
        if not depends or loss.dim():
            raise self._fault(_LOSS)
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        with blamed(self.name, "the gradient of loss()"):
            loss.backward()  # type: ignore[no-untyped-call]

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        with blamed(self.name, "trained()"):
            return trained(self._task)

    def extra(self) -> list[str]:
        """Names of the extra tensors: the user's or, without them, those that the try-out has seen change."""
        with blamed(self.name, "extra()"):
            named = extra(self._task)
        return self._changed if named is None else [*named]

    def targets(self, batch: Batch) -> int:
        with blamed(self.name, "targets()"):
            return count_targets(self._task, batch)

    def activation_bytes(self, *_: bool) -> int:
        """Of a batch, kept for the backward pass, counted in one more loss; 0: not known."""
        sizes, others = list[int](), (*self.module.parameters(), *self.module.buffers())
        with suppress(TaskError), _put_back(self, self._trains_all):
            with first_kept(repeated_blocks(self.module)), saved_tensors(others, sizes.append), torch.enable_grad():
                self.loss(*self.batch(0, 0))
            return sum(sizes)
        return 0

    def evaluate(self) -> float:
        with blamed(self.name, "evaluate()"), torch.no_grad():
            return float(self._task.evaluate())

    def try_out(self, seed: int, training: bool = True) -> list[str]:
        """Report errors of a batch and its gradient before a round begins; returns lines that the operator should
        know.
        """
        self._trains_all = training
        with _with_traceback():
            batch = self.batch(seed, 0)
            right = isinstance(batch, tuple) and batch and all(isinstance(each, torch.Tensor) for each in batch)
            if not right or not batch[-1].numel():
                raise self._fault("batch() must return a tuple of tensors, the last of them the targets")
            again = self.batch(seed, 0)
            if len(again) != len(batch) or not all(map(same_values, batch, again)):
                raise self._fault(
                    "batch() gave different batches for the same seed and position: it must depend on nothing else"
                )
            if (rows := self.independent_rows) and any(not each.dim() or len(each) != rows for each in batch):
                raise self._fault(f"independent_rows is {rows}, and the tensors of a batch must have as many rows")
            if (count := self.targets(batch)) < 0:
                raise self._fault(f"targets() must return a number of targets, not {count}")
            found = _tried(self, batch, training)
            if len(found.unreached) == len(self.trained()):
                raise self._fault(_LOSS)
            self._changed = found.extra
            self.kept = [name for name in (*found.extra, *found.imprecise) if name not in self.extra()]
            self.private = [name for name in found.private if name not in self.extra()]
            if (count := len(self.trained()) + 2 * len(self.extra())) > MAX_TENSORS:  # each may have padding before it
                raise self._fault(f"{count} tensors to average, at most {MAX_TENSORS}: buffers may be non-persistent")
            return [*self._lines(found)]

    def _lines(self, found: Findings) -> Iterator[str]:
        start, names = f"task {self.name}: training changes", self.extra()
        if names:
            yield f"{start} {listed(names)}: averaged with the parameters ({len(names)} tensors)"
        if kept := [name for name in found.extra if name not in names]:
            yield f"{start} {listed(kept)}, which extra() leaves out: each peer keeps its own"
        if kept := found.imprecise:
            yield f"{start} {listed(kept)}, too precise to be averaged: each peer keeps its own"
        if lost := found.unreached:
            what = f"{len(lost)} trained parameters get no gradient from loss(): {listed(lost)}"
            yield f"task {self.name}: {what}; they are averaged, and not trained"

    def _fault(self, why: str) -> TaskError:
        return TaskError(f"task {self.name}: {why}")


def _tried(task: OwnTask, batch: Batch, training: bool) -> Findings:
    """Take the loss of a batch and its gradient, and put everything back."""
    with _put_back(task, training) as (bystanders, copies):
        parameters, reached = task.trained(), set[str]()
        flat = flatten_parameters(parameters)
        flat.views.watch(task.module, task.name)
        hooks = [
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: reached.add(name))  # type: ignore[no-untyped-call]
            for name, parameter in parameters
        ]
        try:
            _differentiate(task, batch, flat)
            flat.vector.add_(flat.vector.abs().add_(1), alpha=_SHIFT)
            flat.refresh()
            with suppress(TaskError), torch.no_grad():  # the task may check values that it expects
                task.loss(*batch)
            return Findings(*bystanders.changed(copies), [name for name, _ in parameters if name not in reached])
        finally:
            for hook in hooks:
                hook.remove()
            flat.views.detach()


@contextmanager
def _put_back(task: OwnTask, training: bool) -> Iterator[tuple[Bystanders, dict[str, torch.Tensor]]]:
    """Afterwards parameters, other tensors and modes are as they were."""
    parameters = task.trained()
    bystanders, modes = Bystanders(task.module, parameters), [(part, part.training) for part in task.module.modules()]
    copies, values = bystanders.copy(), [parameter.detach().clone() for _, parameter in parameters]
    try:
        if training:
            task.module.train()
        yield bystanders, copies
    finally:
        bystanders.restore(copies)
        for (_, parameter), value in zip(parameters, values, strict=True):
            parameter.data.copy_(value)
        for part, mode in modes:
            part.training = mode


@torch.enable_grad()
def _differentiate(task: OwnTask, batch: Batch, flat: FlatParameters) -> None:
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


def make(name: str, given: TaskContext) -> OwnTask:
    """Import the module, call its factory, and check the result. The current directory is searched last."""
    with _with_traceback():
        factory = _find(name)
        try:
            inspect.signature(factory).bind(given, **given.options)
        except TypeError as error:
            raise TaskError(f"task {name}: the factory does not accept the run's options: {error}") from None
        torch.manual_seed(given.seed)  # of layers that draw their weights from the global generator
        with blamed(name, "the factory"):
            task = factory(given, **given.options)
        missing = [each for each in ("batch", "loss", "evaluate") if not callable(getattr(task, each, None))]
        if missing or not isinstance(getattr(task, "module", None), nn.Module):
            lacks = ", ".join(missing) or "module, a torch module"
            raise TaskError(f"task {name}: the factory's result, a {type(task).__name__}, lacks {lacks}")
        _check_parameters(name, task, given.device)
    return OwnTask(name, task)


def _find(name: str) -> Callable[..., Any]:
    module_name, _, attribute = name.partition(":")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)  # at the end: a file there cannot replace a library
    with blamed(name, f"importing {module_name}"):
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise  # the module itself imports something that is missing
            raise TaskError(
                f"task {name}: there is no module {error.name} on this machine, and code never comes from peers: "
                "put it into the directory in which you start Starling, or onto PYTHONPATH, or install it"
            ) from None
    factory = getattr(module, attribute, None)
    if not callable(factory):
        where = getattr(module, "__file__", None) or module_name
        raise TaskError(f"task {name}: {where} has no function {attribute}")
    return factory  # type: ignore[no-any-return]


def _check_parameters(name: str, task: Task, device: str) -> None:
    try:
        parameters = trained(task)
    except ValueError as error:
        raise TaskError(f"task {name}: {error}") from None
    elements = sum(parameter.numel() for _, parameter in parameters)
    first, longest = parameters[0][1], max(len(tensor) for tensor, _ in parameters)
    if elements > MAX_ELEMENTS:
        raise TaskError(f"task {name}: the module has {elements} parameters, more than {MAX_ELEMENTS}")
    if len(parameters) > MAX_TENSORS or longest > MAX_TENSOR_NAME_CHARACTERS:
        limits = f"{MAX_TENSORS}, with names of {MAX_TENSOR_NAME_CHARACTERS} characters"
        raise TaskError(f"task {name}: {len(parameters)} parameter tensors, names of {longest}: at most {limits}")
    wanted = torch.device(device)
    if first.device.type != wanted.type or (first.device.index or 0) != (wanted.index or 0):
        raise TaskError(f"task {name}: the module is on {first.device}, not on the device that was given: {device}")


@contextmanager
def blamed(name: str, where: str) -> Iterator[None]:
    """Turn any error of a user's code into a one-line error that names the task."""
    try:
        yield
    except TaskError:
        raise
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # the user's: Ctrl-C does not reach a worker
        why = " ".join(str(error).split())[:300]
        raise TaskError(f"task {name}: {where}: {type(error).__name__}{f': {why}' if why else ''}") from error


@contextmanager
def _with_traceback() -> Iterator[None]:
    """Print the traceback of an error in a user's code to stderr, which is logged, because one line is not enough."""
    try:
        yield
    except TaskError as error:
        if error.__cause__:
            traceback.print_exception(error.__cause__)
        raise
