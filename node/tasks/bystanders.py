"""The tensors of a user's module that the optimiser does not train: those that training changes are averaged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from node.tasks.extra import DTYPES, find, named_parameters, overwrite, part_of, plain_name

MAX_SHARE = 2
"""Frozen parameters may change in training, as a mean teacher's do. They are looked at only if they are at most so many
times as large as the trained ones, all together: a large frozen model does not change, and a copy of it is expensive.
"""
MAX_BUFFER_ELEMENTS = 1 << 27  # larger buffers are data, and are not looked at
_SHOWN = 3


class Bystanders:
    """The buffers of a module and, unless they are too large, its frozen parameters."""

    def __init__(self, module: nn.Module, trained: Sequence[tuple[str, nn.Parameter]]) -> None:
        self._module, self._trained = module, dict(trained)
        ids = {id(parameter) for _, parameter in trained}
        others = {name: each for name, each in named_parameters(module).items() if id(each) not in ids}
        frozen = {name: each for name, each in others.items() if not each.requires_grad}
        most = MAX_SHARE * sum(parameter.numel() for _, parameter in trained)
        self.tensors: dict[str, torch.Tensor] = {
            plain_name(name): buffer for name, buffer in module.named_buffers() if buffer.numel() <= MAX_BUFFER_ELEMENTS
        }
        if sum(each.numel() for each in frozen.values()) <= most:
            self.tensors.update(frozen)
        self._left_out = {id(each) for each in others.values() if each.requires_grad}  # by the task's trained()
        self._versions = self._present_versions()
        self._told: set[str] = set()

    def copy(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.tensors.items()}

    @torch.no_grad()
    def restore(self, copies: Mapping[str, torch.Tensor]) -> None:
        for name, value in copies.items():
            (part, key), tensor = part_of(self._module, name), self.tensors[name]
            overwrite(tensor, value)
            if key in part._buffers:
                part._buffers[key] = tensor
        self._versions = self._present_versions()

    def changed(self, copies: Mapping[str, torch.Tensor]) -> tuple[list[str], list[str], list[str]]:
        """Names of the tensors that differ from the copies: those to average, those of too precise a dtype, and those
        that do not count.
        """
        names = [name for name, old in copies.items() if not same_values(find(self._module, name), old)]
        counted = [name for name in names if self._counts(name)]
        averaged = [name for name in counted if copies[name].dtype in DTYPES]
        return (
            averaged,
            [name for name in counted if name not in averaged],
            [name for name in names if name not in counted],
        )

    def _counts(self, name: str) -> bool:
        part, key = part_of(self._module, name)
        return self.tensors[name].is_floating_point() and key not in part._non_persistent_buffers_set

    def news(self, known: Sequence[str]) -> Iterator[str]:
        """One line for each kind of change since the start that has no effect on the run, or an unwanted one."""
        now, before = self._present_versions(), self._versions
        moved = [name for name in now if now[name] != before[name] and name not in known and self._counts(name)]
        self._versions = now
        thawed = [
            name
            for name, parameter in named_parameters(self._module).items()
            if parameter.requires_grad and name not in self._trained and id(parameter) not in self._left_out
        ]
        frozen = [name for name, parameter in self._trained.items() if not parameter.requires_grad]
        yield from self._line(moved, "changes in training, but not in its first batch: each peer keeps its own")
        yield from self._line(thawed, "takes gradients since the start, but is not trained: it is not in the layout")
        yield from self._line(frozen, "takes no gradient any more: it is still averaged and, by the recipe, decayed")

    def _line(self, names: Iterable[str], what: str) -> Iterator[str]:
        new = [name for name in names if name not in self._told]
        self._told.update(new)
        if new:
            yield f"{listed(new)}: {what}"

    def _present_versions(self) -> dict[str, tuple[int, int]]:
        present = ((name, find(self._module, name)) for name in self.tensors)
        return {name: (id(each), -1 if each is None else each._version) for name, each in present}


def listed(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def same_values(tensor: torch.Tensor | None, other: torch.Tensor) -> bool:
    """Whether two tensors are equal, NaN to NaN."""
    if tensor is None or tensor.shape != other.shape or tensor.dtype != other.dtype:
        return False
    return bool(((tensor == other) | ((tensor != tensor) & (other != other))).all())
