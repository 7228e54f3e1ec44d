"""A script's parameters as one flat vector of float32: copied out at the end of a round, and in after it.

They are found by name each time. So the script may move, convert back or rebind them between two steps; what it may
not change is which names there are, their shapes and dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from node.tasks.bystanders import Bystanders, listed
from node.tasks.extra import ExtraTensors, named_parameters, plain_name
from protocols.base import Layout, Vector

_WRAPPERS = ("_orig_mod", "module")  # of torch.compile, and of DistributedDataParallel


def _words(parameter: tuple[str, list[int]] | None) -> str:
    return f"{parameter[0]} of shape {tuple(parameter[1])}" if parameter else "no parameter more"


class SwarmError(RuntimeError):
    """The script cannot take part, or uses the library wrongly. The message is one line: what, why, what to do."""


def bare(model: nn.Module) -> nn.Module:
    """The model without wrappers that change the names of its parameters."""
    wrapped = (torch._dynamo.OptimizedModule, nn.parallel.DistributedDataParallel, nn.DataParallel)
    while isinstance(model, wrapped):
        model = next(getattr(model, each) for each in _WRAPPERS if hasattr(model, each))
    return model


def running_statistics(model: nn.Module) -> list[str]:
    """Names of the buffers that BatchNorm and its like change in training."""
    return [
        plain_name(f"{path}.{name}").lstrip(".")
        for path, part in model.named_modules()
        if isinstance(part, nn.modules.batchnorm._NormBase) and part.track_running_stats
        for name in ("running_mean", "running_var")
    ]


def keeping_modes(model: nn.Module, evaluate: Callable[[], float]) -> Callable[[], float]:
    """`evaluate`, after which the modules are in the modes that they had: a loop does not know when it is called."""

    def evaluated() -> float:
        modes = [(each, each.training) for each in model.modules()]
        try:
            return evaluate()
        finally:
            for each, mode in modes:
                each.training = mode

    return evaluated


class Parameters:
    """Those that take gradients now, and other tensors by name (`extra`): None means BatchNorm's statistics.

    Of `optimizer` only the parameters are looked at: it must not train others than the model has.
    """

    def __init__(self, model: nn.Module, extra: Sequence[str] | None = None, optimizer: Any = None) -> None:
        self._model = model = bare(model)
        named = [(name, each) for name, each in named_parameters(model).items() if each.requires_grad]
        if not named:
            raise SwarmError("the model has no parameter that takes gradients: there is nothing to train")
        for name, each in named:
            if each.is_meta or is_lazy(each):
                raise SwarmError(f"parameter {name} is without data: give it data (a lazy one: run the model) and join")
            if not each.is_floating_point():
                raise SwarmError(f"parameter {name} is {each.dtype}: only real numbers are averaged; freeze it")
        self._expected = {name: (tuple(each.shape), each.dtype) for name, each in named}
        self._optimizer = optimizer
        ids = self._trained_ids()
        if ids and not any(id(each) in ids for _, each in named):
            raise SwarmError("the optimizer trains no parameter of the model: make it from model.parameters()")
        self._trained = [name for name, each in named if id(each) in ids]
        self._extra_names = running_statistics(model) if extra is None else list(extra)
        self._count = sum(math.prod(shape) for shape, _ in self._expected.values())
        self._extra = ExtraTensors(model, self._extra_names, self._count)
        shapes = tuple((name, shape) for name, (shape, _) in self._expected.items())
        self.layout = Layout(((*shapes, *self._extra.fragment),))
        self.device = named[0][1].device  # at first
        self._bystanders = Bystanders(model, named)
        self._taken: dict[str, torch.Tensor] = {}  # of parameters that are not float32, as last copied

    def require(self, known: Sequence[Sequence[Any]]) -> None:
        """Raise `SwarmError` unless these are the parameters that the peer knows: fragments of names with shapes."""
        mine = [(name, list(shape)) for name, shape in self.layout.fragments[0]]
        theirs = [(name, list(shape)) for name, shape in known[0]]
        for own, other in zip_longest(mine, theirs):
            if own != other:
                raise SwarmError(f"the model has {_words(own)} where the peer's run has {_words(other)}")

    @property
    def elements(self) -> int:
        return sum(self.layout.sizes())

    def news(self) -> list[str]:
        """What else changes in the model, and is not averaged; each is told once."""
        return list(self._bystanders.news(self._extra_names))

    def checked(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters by name. Raises `SwarmError`."""
        present = named_parameters(self._model)
        if gone := [name for name in self._expected if name not in present]:
            raise SwarmError(f"the model has no parameter {listed(gone)} any more: keep those of the join")
        for name, (shape, dtype) in self._expected.items():
            each = present[name]
            if tuple(each.shape) != shape or each.dtype != dtype:
                was, now = f"{dtype} {shape}", f"{each.dtype} {tuple(each.shape)}"
                raise SwarmError(f"parameter {name} is {now}, and was {was} at the join: keep shape and dtype")
        ids = self._trained_ids()
        if lost := [name for name in self._trained if id(present[name]) not in ids]:
            raise SwarmError(
                f"the optimizer does not train parameter {listed(lost)} any more: the model has a new one. Change its "
                "values in place, or make the optimizer, and join, after the change"
            )
        return [(name, present[name]) for name in self._expected]

    def _trained_ids(self) -> set[int]:
        groups = getattr(self._optimizer, "param_groups", ())
        return {id(each) for group in groups for each in group["params"]}

    @torch.no_grad()
    def copy_out(self, into: Vector, fresh: bool = False) -> None:
        """Write the parameters to the vector. `fresh`: it holds nothing yet.

        A parameter in bfloat16 is the rounded value of what was copied in. The vector gets its change since then, so
        that rounding is not taken for training.
        """
        low = 0
        for name, parameter in self.checked():
            high = low + parameter.numel()
            self._put(into[low:high].view(parameter.shape), *self._outgoing(name, parameter.detach(), fresh))
            low = high
        self._extra_of(into).store()

    def _outgoing(self, name: str, value: torch.Tensor, fresh: bool) -> tuple[torch.Tensor, bool]:
        """What the vector gets for a value, and whether it is to be added."""
        taken = None if fresh else self._taken.get(name)
        self._remember(name, value)
        return (value, False) if taken is None else (value.float() - taken.float(), True)

    @staticmethod
    def _put(place: torch.Tensor, value: torch.Tensor, is_change: bool) -> None:
        if is_change:
            place.add_(value.to(place.device))
        else:
            place.copy_(value)

    @torch.no_grad()
    def copy_in(self, vector: Vector) -> None:
        """Write the vector to the parameters, in place."""
        try:
            self._copy_in(vector)
        except KeyboardInterrupt:  # half of the parameters would be of another round: do it again, then stop
            self._copy_in(vector)
            raise

    def _copy_in(self, vector: Vector) -> None:
        low = 0
        for name, parameter in self.checked():
            high, value = low + parameter.numel(), parameter.detach()
            value.copy_(vector[low:high].view(parameter.shape))
            self._remember(name, value)
            low = high
        self._extra_of(vector).load()

    def _remember(self, name: str, value: torch.Tensor) -> None:
        if self._expected[name][1] != torch.float32:
            self._taken[name] = value.detach().to(self._expected[name][1], copy=True)

    def _extra_of(self, vector: Vector) -> ExtraTensors:
        self._extra.allocate(lambda _: vector, resume=True)(self._count)
        return self._extra
