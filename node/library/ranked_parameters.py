"""The parameters of a script of several ranks: rank 0 has the flat vector, and all ranks hold the same after a round.

A parameter is whole on each rank (DDP), or a DTensor, of which each rank has a window (FSDP2, tensor parallel). Parts
go from and to rank 0 through the ranks' group, one parameter after the other, so no rank ever holds more of others'.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, zip_longest
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from node.library.parameters import Parameters, SwarmError
from node.library.ranks import Ranks
from node.tasks.extra import find
from protocols.base import Vector

Bounds = list[list[int]]
"""First and last index, exclusive, in each dimension of the whole parameter."""
_WORDS = {4: torch.int32, 2: torch.int16, 8: torch.int64}


class RankedParameters(Parameters):
    """Rank 0 calls `copy_out` and `copy_in`, and the others do their part as operations of `ranks`."""

    def __init__(self, ranks: Ranks, model: nn.Module, extra: Sequence[str] | None, optimizer: Any) -> None:
        """All ranks make it at the same time. Raises `SwarmError` on all if their models differ."""
        self._ranks, self.differ, why = ranks, False, ""
        try:
            if any(isinstance(each, FullyShardedDataParallel) for each in model.modules()):
                raise SwarmError("FullyShardedDataParallel hides which parameters it divides: use fully_shard")
            _reshard(model)
            super().__init__(model, extra, optimizer)
            layout = [list(map(str, each)) for each in self._expected.items()], self._extra_names
        except (SwarmError, ValueError) as error:
            why, layout = str(error), ([], [])
        others = ranks.exchange(layout, why)
        for rank, other in enumerate(others):
            if other != others[0]:
                raise SwarmError(
                    f"the model of rank {rank} has other parameters than that of rank 0: {_other(others, rank)}"
                )
        self._agree()
        if self.differ:
            raise SwarmError("the ranks' parameters differ: seed them alike, or join after DistributedDataParallel(…)")
        ranks.operations |= {"copy_out": self._gather, "copy_in": self._spread}

    def checked(self) -> list[tuple[str, nn.Parameter]]:
        _reshard(self._model)
        return super().checked()

    def copy_out(self, into: Vector | None, fresh: bool = False) -> None:
        with self._ranks.operation("copy_out", fresh=fresh):
            self._gather(into, fresh)

    def copy_in(self, vector: Vector | None) -> None:
        with self._ranks.operation("copy_in"):
            self._spread(vector)

    def news(self) -> list[str]:
        lines = super().news()
        if self.differ:
            lines.append(
                "the ranks trained different parameters, and those of rank 0 count: average gradients over all ranks"
            )
        return lines

    @torch.no_grad()
    def _gather(self, into: Vector | None = None, fresh: bool = False) -> None:
        low = 0
        for name, parameter, windows in self._agree():
            high = low + parameter.numel()
            place = None if into is None else into[low:high].view(parameter.shape)
            if windows:
                self._gather_windows(place, windows, *self._outgoing(name, local_part(parameter), fresh))
            elif place is not None:
                self._put(place, *self._outgoing(name, parameter.detach(), fresh))
            low = high
        if into is not None:
            self._extra_of(into).store()

    def _gather_windows(
        self, place: torch.Tensor | None, windows: list[Bounds], value: torch.Tensor, is_change: bool
    ) -> None:
        for rank, window in _distinct(windows):
            if place is not None:
                part = value if rank == 0 else self._ranks.receive(_shape(window), rank)
                self._put(place[_slices(window)], part, is_change)
            elif rank == self._ranks.rank:
                self._ranks.send(value.to("cpu", torch.float32).contiguous(), 0)

    @torch.no_grad()
    def _spread(self, vector: Vector | None = None) -> None:
        low = 0
        for name, parameter, windows in self._agree():
            high = low + parameter.numel()
            place = None if vector is None else vector[low:high].view(parameter.shape)
            mine = local_part(parameter)
            if windows:
                self._spread_windows(place, windows, mine)
            else:
                whole = torch.empty(parameter.shape) if place is None else place
                self._ranks.broadcast(whole)
                mine.copy_(whole)
            self._remember(name, mine)
            low = high
        if vector is not None:
            self._extra_of(vector).load()
        for name in self._extra_names:
            if (tensor := find(self._model, name)) is not None:
                held = tensor.detach().cpu().contiguous()
                self._ranks.broadcast(held)
                tensor.detach().copy_(held)

    def _spread_windows(self, place: torch.Tensor | None, windows: list[Bounds], mine: torch.Tensor) -> None:
        for rank, window in enumerate(windows):
            if 0 in _shape(window):
                continue
            if place is not None:
                part = place[_slices(window)]
                mine.copy_(part) if rank == 0 else self._ranks.send(part.contiguous(), rank)
            elif rank == self._ranks.rank:
                mine.copy_(self._ranks.receive(_shape(window), 0))

    def _agree(self) -> list[tuple[str, nn.Parameter, list[Bounds]]]:
        """The parameters, of those that are divided with each rank's window; once all ranks have the right ones."""
        why, checksum = "", 0
        found: list[tuple[str, nn.Parameter]] = []
        windows: list[Bounds | None] = []
        try:
            found = self.checked()
            windows = [_window(name, each) for name, each in found]
            checksum = _checksum(each for (_, each), window in zip(found, windows, strict=True) if window is None)
        except SwarmError as error:
            why = str(error)
        every = self._ranks.exchange([windows, checksum], why)
        self.differ = any(other != every[0][1] for _, other in every)
        return [
            (name, parameter, [] if windows[at] is None else [each[at] for each, _ in every])
            for at, (name, parameter) in enumerate(found)
        ]


def _reshard(model: nn.Module) -> None:
    """After an evaluation, the root's parameters are still those of the forward pass, which are thrown away."""
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def local_part(parameter: nn.Parameter) -> torch.Tensor:
    """The values that this rank holds. They share the parameter's memory."""
    value = parameter.detach()
    return value.to_local() if isinstance(value, DTensor) else value


def _window(name: str, parameter: nn.Parameter) -> Bounds | None:
    """What this rank has of a parameter; None if it is not divided."""
    if not isinstance(parameter, DTensor):
        return None
    sizes, begins = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    here = tuple(local_part(parameter).shape)
    if tuple(sizes) != here and math.prod(sizes) + math.prod(here):
        raise SwarmError(f"parameter {name} is divided in a way that is not known ({parameter.placements})")
    return [[begin, begin + size] for begin, size in zip(begins, sizes, strict=True)]


def _shape(window: Bounds) -> list[int]:
    return [high - low for low, high in window]


def _slices(window: Bounds) -> tuple[slice, ...]:
    return tuple(slice(low, high) for low, high in window)


def _distinct(windows: list[Bounds]) -> Iterator[tuple[int, Bounds]]:
    """Each window that has elements, with the first rank that has it."""
    for rank, window in enumerate(windows):
        if window not in windows[:rank] and 0 not in _shape(window):
            yield rank, window


def _checksum(parameters: Iterable[torch.Tensor]) -> int:
    """Equal for equal bits."""
    return sum(int(each.detach().view(_WORDS[each.element_size()]).sum(dtype=torch.int64)) for each in parameters)


def _other(layouts: Sequence[Any], rank: int) -> str:
    """The first difference between the layout of a rank and that of rank 0."""
    for theirs, ours in zip_longest(*(chain(layouts[each][0], layouts[each][1]) for each in (rank, 0))):
        if theirs != ours:
            return f"{theirs or 'nothing'} in place of {ours or 'nothing'}"
    return ""
