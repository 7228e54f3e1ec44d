"""Extra tensors: what training changes beside the trained parameters, such as BatchNorm's running statistics.

They are averaged with the parameters, at the end of the flat vector, by a plain mean: momentum could make a running
variance negative. In the layout their names begin with `extra:`. Each begins a block of its own of the codecs, because
its values may be of another size than its neighbours'; the elements between are called `padding:`.

A running variance may be a million times as large as a weight. In the vector it would hide the parameters from all
that compares norms, and a first trained state would look like an attack to a peer that has none. So the vector holds
x / 16 up to x = 16 and, beyond, 1 + log(x / 16). Tensors are written before a step and read after it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

import torch
from torch import nn

from node.tasks.name import TaskError
from protocols.base import Layout, Vector
from protocols.vectors import lowbit, sparse
from protocols.vectors.views import LARGEST_FLOAT32

EXTRA: Final = "extra:"
PADDING: Final = "padding:"
_UNIT = 16.0
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # those of which float32 holds every value
_NOT_NEGATIVE = re.compile(r"(^|_)(var|variance|std|sq)$")
"""Names of statistics that are never negative. The mean of rounded ones may be, by the rounding."""

Fragment: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]


# -- in a layout ------------------------------------------------------------------------------------------------------


def trained_elements(layout: Layout) -> int:
    """Number of elements of the trained parameters, which come first."""
    every = (each for fragment in layout.fragments for each in fragment)
    return sum(math.prod(shape) for name, shape in every if not name.startswith((EXTRA, PADDING)))


def extra_elements(layout: Layout) -> int:
    return sum(layout.sizes()) - trained_elements(layout)


def named_tensors(fragment: Fragment, vector: Vector) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a vector by their names in the module, without padding; extra ones as the module may hold them."""
    for name, tensor in _slices(fragment, vector):
        if name.startswith(EXTRA):
            value = unpacked(tensor)
            is_positive = _NOT_NEGATIVE.search(name.rpartition(".")[2])
            yield name.removeprefix(EXTRA), value.clamp(min=0) if is_positive else value
        elif not name.startswith(PADDING):
            yield name, tensor


def _slices(fragment: Fragment, vector: Vector) -> Iterator[tuple[str, torch.Tensor]]:
    low = 0
    for name, shape in fragment:
        high = low + math.prod(shape)
        yield name, vector[low:high].view(shape)
        low = high


def packed(tensor: torch.Tensor) -> torch.Tensor:
    held = tensor.float() / _UNIT
    large = held.abs() > 1
    if bool(large.any()):  # in float64: what is packed again is the same
        value = held[large].double()
        held[large] = value.sign().mul_(value.abs().log().add_(1)).float()
    return held


def unpacked(held: torch.Tensor) -> torch.Tensor:
    tensor = held * _UNIT
    large = held.abs() > 1
    if bool(large.any()):
        value = held[large].double()
        size = value.abs().sub_(1).exp_().mul_(_UNIT).clamp_(max=LARGEST_FLOAT32)
        tensor[large] = value.sign().mul_(size).float()
    return tensor


def _fragment(shapes: Mapping[str, tuple[int, ...]], before: int) -> Fragment:
    found: list[tuple[str, tuple[int, ...]]] = []
    grain = sparse.GROUP
    for name, shape in shapes.items():
        if gap := -before % grain:
            found.append((f"{PADDING}{len(found)}", (gap,)))
        found.append((f"{EXTRA}{name}", shape))
        before += gap + math.prod(shape)
        grain = lowbit.BLOCK
    return tuple(found)


# -- of a module ------------------------------------------------------------------------------------------------------


class ExtraTensors:
    def __init__(self, module: nn.Module, names: Sequence[str], before: int) -> None:
        self._module = module
        self._like = {name: _checked(module, name) for name in names}
        self.fragment = _fragment({name: tuple(each.shape) for name, each in self._like.items()}, before)
        self._elements = sum(math.prod(shape) for _, shape in self.fragment)
        self.vector = self._tail = torch.empty(0)

    def allocate(self, allocate: Callable[[int], Vector], resume: bool) -> Callable[[int], Vector]:
        """Allocate the whole vector in place of that of the parameters, which is its beginning."""

        def place(elements: int) -> Vector:
            self.vector = allocate(elements + self._elements)
            self._tail = self.vector[elements:]
            if not resume:
                self._tail.zero_()
                self.store()
            return self.vector[:elements] if self._elements else self.vector

        return place

    @torch.no_grad()
    def load(self) -> None:
        for name, value in named_tensors(self.fragment, self._tail):
            self._tensor(name).copy_(value)

    @torch.no_grad()
    def store(self) -> None:
        for name, held in _slices(self.fragment, self._tail):
            if name.startswith(EXTRA):
                held.copy_(packed(self._tensor(name.removeprefix(EXTRA))))

    def _tensor(self, name: str) -> torch.Tensor:
        """The module's present tensor of this name, which may be another one than at the start."""
        tensor, like = find(self._module, name), self._like[name]
        if tensor is None or tensor.shape != like.shape:
            now = "gone" if tensor is None else f"of shape {tuple(tensor.shape)}"
            raise TaskError(f"tensor {name}, which is averaged, is {now}: it must keep its shape {tuple(like.shape)}")
        return tensor.detach()


@torch.no_grad()
def overwrite(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a value into a tensor of its shape, also if `expand()` has made that: its repeated elements are one."""
    for at, stride in enumerate(tensor.stride()):
        if not stride and tensor.shape[at] > 1:
            tensor, value = tensor.narrow(at, 0, 1), value.narrow(at, 0, 1)
    tensor.detach().copy_(value)


def plain_name(name: str) -> str:
    """A tensor's name without what torch.compile adds to it when it wraps a part of a module."""
    return name.replace("_orig_mod.", "")


def named_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Each once, by its plain name."""
    return {plain_name(name): parameter for name, parameter in module.named_parameters()}


def part_of(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The part that holds the tensor of this plain name, and its name there. Raises AttributeError."""
    path, _, key = name.rpartition(".")
    part = module.get_submodule(path)
    return getattr(part, "_orig_mod", part), key


def find(module: nn.Module, name: str) -> torch.Tensor | None:
    """The parameter or buffer of this plain name."""
    try:
        part, key = part_of(module, name)
    except AttributeError:
        return None
    return part._buffers.get(key) if key in part._buffers else part._parameters.get(key)


def _checked(module: nn.Module, name: str) -> torch.Tensor:
    tensor = find(module, name)
    if tensor is None:
        raise TaskError(f"extra() names {name}, and the module has no buffer or parameter of that name")
    if tensor.dtype not in DTYPES or tensor.requires_grad:
        what = "takes gradients" if tensor.requires_grad else f"is {tensor.dtype}"
        raise TaskError(f"extra() names {name}, which {what}: a float32, bfloat16 or float16 tensor without is needed")
    return tensor
