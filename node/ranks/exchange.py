"""Between machines of one peer: the vectors and the optimiser's state, which machine 0 alone keeps.

Each machine's ranks share memory of the layout of machine 0's (`node.training.shared`). All ranks call these together.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from node.ranks.cluster import Machines
from node.runtime import tensors
from node.runtime.tensors import Part
from node.training.shared import Shared
from protocols.base import Vector

PIECE_ELEMENTS = 1 << 22
"""Elements that travel at once."""


class Exchange:
    def __init__(self, rank: int, machines: Machines, new_group: Callable[..., Any]) -> None:
        self._rank, self._machines = rank, machines
        self._is_first = rank in machines.firsts
        self._firsts = new_group(machines.firsts, backend="gloo")
        self._all = new_group(backend="gloo")

    def spread(self, shared: Shared) -> None:
        """Copy machine 0's vectors to the other machines."""
        if self._is_first:
            for vector in (shared.local, shared.anchor):
                for piece in torch.split(vector, PIECE_ELEMENTS):
                    dist.broadcast(piece, 0, group=self._firsts)
        self._wait()

    def clear(self, local: Vector) -> None:
        """Before the ranks write their parts, each of which is one rank's alone."""
        self._wait()  # no rank still reads it
        if self._is_first:
            local.zero_()
        self._wait()

    def collect(self, local: Vector) -> None:
        """After that: put the parts of all machines together in machine 0's vector, bit for bit."""
        self._wait()
        if self._is_first:
            for piece in torch.split(local.view(torch.int32), PIECE_ELEMENTS):  # as float32, -0 + 0 would be 0
                dist.reduce(piece if self._rank == 0 else piece.clone(), 0, group=self._firsts)
        self._wait()

    def write_parts(self, path: Path, parts: Sequence[Part]) -> None:
        """Write parts of tensors into a file of machine 0's."""
        errors: list[Exception] = []
        if self._machines.is_here(0):
            with _kept(errors):
                tensors.write_parts(path, parts)
        for rank in range(self._machines.firsts[1], self._machines.size):
            if self._rank == rank:
                for each in _portions(parts):
                    self._send(_names(each), 0)
                    dist.send(_bytes(each), 0, group=self._all)
                self._send([], 0)
            elif self._rank == 0:
                while names := self._receive(rank):
                    data, portion = _room(names)
                    dist.recv(data, rank, group=self._all)
                    with _kept(errors):
                        tensors.write_parts(path, portion)
        _raise(errors)

    def read_parts(self, path: Path, parts: Sequence[Part]) -> None:
        """Read what `write_parts` writes."""
        errors: list[Exception] = []
        if self._machines.is_here(0):
            with _kept(errors):
                tensors.read_parts(path, parts)
        for rank in range(self._machines.firsts[1], self._machines.size):
            if self._rank == rank:
                for each in _portions(parts):
                    self._send(_names(each), 0)
                    data, portion = _room(_names(each))
                    dist.recv(data, 0, group=self._all)
                    for (*_, into), (*_, found) in zip(each, portion, strict=True):
                        into.copy_(found)
                self._send([], 0)
            elif self._rank == 0:
                while names := self._receive(rank):
                    data, portion = _room(names)
                    with _kept(errors):
                        tensors.read_parts(path, portion)
                    dist.send(data, rank, group=self._all)
        _raise(errors)

    def _wait(self) -> None:
        dist.all_reduce(torch.zeros(1), group=self._all)

    def _send(self, names: list[Any], rank: int) -> None:
        text = bytearray(json.dumps(names).encode())
        dist.send(torch.tensor([len(text)]), rank, group=self._all)
        dist.send(torch.frombuffer(text, dtype=torch.uint8), rank, group=self._all)

    def _receive(self, rank: int) -> list[Any]:
        length = torch.zeros(1, dtype=torch.int64)
        dist.recv(length, rank, group=self._all)
        text = torch.empty(int(length), dtype=torch.uint8)
        dist.recv(text, rank, group=self._all)
        names: list[Any] = json.loads(text.numpy().tobytes())
        return names


@contextmanager
def _kept(errors: list[Exception]) -> Iterator[None]:
    """Keep what fails until the exchange is over: its other ranks wait for this one's part in it."""
    try:
        yield
    except (OSError, ValueError) as error:
        errors.append(error)


def _raise(errors: Sequence[Exception]) -> None:
    if errors:
        raise errors[0]


def _portions(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """The same parts, cut and taken together, so that about a piece travels at once."""
    portion, held = list[Part](), 0
    for name, shape, offset, tensor in parts:
        flat = tensor.detach().view(-1)
        for low in range(0, len(flat), PIECE_ELEMENTS):
            piece = flat[low : low + PIECE_ELEMENTS]
            portion.append((name, shape, offset + low, piece))
            held += len(piece)
            if held >= PIECE_ELEMENTS or len(portion) >= 1 << 14:
                yield portion
                portion, held = [], 0
    if portion:
        yield portion


def _names(portion: Sequence[Part]) -> list[Any]:
    """Of each part: name, shape, offset, number of elements. They are float32."""
    return [(name, shape, offset, len(piece)) for name, shape, offset, piece in portion]


def _bytes(portion: Sequence[Part]) -> Vector:
    return torch.cat([piece.float().cpu() for *_, piece in portion])


def _room(names: Sequence[Any]) -> tuple[Vector, list[Part]]:
    """A vector for these parts, and the parts in it."""
    data = torch.zeros(sum(length for *_, length in names), dtype=torch.float32)
    cut = torch.split(data, [length for *_, length in names])
    return data, [(name, tuple(shape), at, piece) for (name, shape, at, _), piece in zip(names, cut, strict=True)]
