"""Vectors that a peer and its worker share: one nameless file, mapped by both.

    a page      numbers that either side reads at any time, each written by one of them
    local       the local parameters, one vector for each fragment
    anchor      what the pseudo-gradient is measured from, the same

The file outlives the worker, because the peer holds it: the next worker finds everything as the last one left it.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from collections.abc import Sequence

import torch

from protocols.base import Vector

_PAGE_BYTES = 4096
_ATTENTION, _STEPS, _POSITION, _LONGEST_STEP, _THREADS = range(5)


def create() -> int:
    """A file descriptor of a new, empty file without a name: in memory where that can be had.

    Raises:
        OSError: there is none.
    """
    if sys.platform == "linux":
        return os.memfd_create("starling")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class Shared:
    """The mapped file.

    Attributes:
        local, anchor: float32 vectors, one for each fragment.
        fresh: the file was empty before: the vectors hold zeros.
    """

    def __init__(self, descriptor: int, sizes: Sequence[int]) -> None:
        """
        Args:
            descriptor: of the file, which is extended to what it has to hold; it may be closed afterwards.
            sizes: elements of each fragment.

        Raises:
            OSError: there is no room.
        """
        total = _PAGE_BYTES + 2 * 4 * sum(sizes)
        self.fresh = os.fstat(descriptor).st_size < total
        if self.fresh:
            os.ftruncate(descriptor, total)
        memory = mmap.mmap(descriptor, total)
        self._numbers = memoryview(memory)[:_PAGE_BYTES].cast("q")
        vectors, low = [], _PAGE_BYTES
        for size in (*sizes, *sizes):
            vectors.append(torch.frombuffer(memory, dtype=torch.float32, count=size, offset=low))
            low += 4 * size
        self.local: tuple[Vector, ...] = tuple(vectors[: len(sizes)])
        self.anchor: tuple[Vector, ...] = tuple(vectors[len(sizes) :])

    @property
    def attention(self) -> bool:
        """Set by the peer: the worker takes no further step, and reads what it is told."""
        return self._numbers[_ATTENTION] != 0

    @attention.setter
    def attention(self, wanted: bool) -> None:
        self._numbers[_ATTENTION] = wanted

    @property
    def steps(self) -> int:
        """Inner steps that workers have taken here: what moves while one is alive."""
        return self._numbers[_STEPS]

    @property
    def position(self) -> int:
        """Where the next step draws its data, whatever becomes of the one that is being taken."""
        return self._numbers[_POSITION]

    @property
    def longest_step_seconds(self) -> float:
        """0 before the first step."""
        return self._numbers[_LONGEST_STEP] / 1e6

    @property
    def threads(self) -> int:
        """Threads that the worker computes with; 0 before the first one has begun."""
        return self._numbers[_THREADS]

    @threads.setter
    def threads(self, count: int) -> None:
        self._numbers[_THREADS] = count

    def claim(self, position: int) -> None:
        """Set by the worker before a step: data before `position` are drawn."""
        self._numbers[_POSITION] = position

    def stepped(self, seconds: float) -> None:
        """Set by the worker after a step that took so long."""
        self._numbers[_STEPS] += 1
        self._numbers[_LONGEST_STEP] = max(self._numbers[_LONGEST_STEP], int(seconds * 1e6))
