"""Vectors that a peer and its worker share: one unnamed file, mapped by both.

    one page    counters; both sides read them at any time, and one side writes each; the state of the loss scale
    local       the local parameters
    anchor      the outer parameters

The peer keeps the file open, so it outlives the worker: the next worker finds the vectors as the last one left them.
A user's script (`node.training.script`) cannot be killed, and might still write. So each gets a file of its own with
the counters and the local parameters. The anchor is in a file by itself.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
import warnings

import torch

from protocols.base import Vector

_PAGE_BYTES, _SCALE_AT = 4096, 2048
_ATTENTION, _STEPS, _POSITION, _THREADS, _WAITS, _REVOKED = range(6)


def create() -> int:
    """Open a new, empty, unnamed file, on Linux in memory, and return its descriptor."""
    if sys.platform == "linux":
        return os.memfd_create("starling")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def read_only_vector(descriptor: int, elements: int) -> Vector:
    """The vector of a file that another process has written. Never write to it."""
    memory = mmap.mmap(descriptor, 4 * elements, prot=mmap.PROT_READ)
    with warnings.catch_warnings():  # torch knows no tensors that are read only
        warnings.simplefilter("ignore")
        return torch.frombuffer(memory, dtype=torch.float32, count=elements)


def _mapped(descriptor: int, size: int) -> tuple[mmap.mmap, bool]:
    """The file, which is extended to `size` if it is smaller, and whether it was."""
    fresh = os.fstat(descriptor).st_size < size
    if fresh:
        os.ftruncate(descriptor, size)
    return mmap.mmap(descriptor, size), fresh


def shared_vector(descriptor: int, elements: int) -> Vector:
    """A file that holds one vector, and is extended to it."""
    return torch.frombuffer(_mapped(descriptor, 4 * elements)[0], dtype=torch.float32, count=elements)


class Shared:
    """The mapped file, which is extended as needed (OSError), and may be closed afterwards. Vectors are float32.

    With `anchor`, the file holds no other.
    """

    def __init__(self, descriptor: int, elements: int, anchor: Vector | None = None) -> None:
        count = elements if anchor is not None else 2 * elements
        memory, self.fresh = _mapped(descriptor, _PAGE_BYTES + 4 * count)
        self._numbers = memoryview(memory)[:_PAGE_BYTES].cast("q")
        vectors = torch.frombuffer(memory, dtype=torch.float32, count=count, offset=_PAGE_BYTES)
        self.loss_scale = torch.frombuffer(memory, dtype=torch.float32, count=2, offset=_SCALE_AT)  # 0, 0: not known
        self.local: Vector = vectors[:elements]
        self.anchor: Vector = vectors[elements:] if anchor is None else anchor

    @property
    def attention(self) -> bool:
        """Set by the peer: the worker stops after the present step and reads the next command."""
        return self._numbers[_ATTENTION] != 0

    @attention.setter
    def attention(self, wanted: bool) -> None:
        self._numbers[_ATTENTION] = wanted

    @property
    def revoked(self) -> bool:
        """Set by the peer: what it writes to the vectors from now on is not for the script that had them."""
        return self._numbers[_REVOKED] != 0

    def revoke(self) -> None:
        self._numbers[_REVOKED] = 1

    @property
    def steps(self) -> int:
        return self._numbers[_STEPS]

    @property
    def heartbeats(self) -> int:
        """A number that rises while a worker is alive: with each inner step, and while it waits for data."""
        return self._numbers[_STEPS] + self._numbers[_WAITS]

    @property
    def position(self) -> int:
        return self._numbers[_POSITION]

    @property
    def threads(self) -> int:
        """Threads that the worker computes with; 0 before the first worker has started."""
        return self._numbers[_THREADS]

    @threads.setter
    def threads(self, count: int) -> None:
        self._numbers[_THREADS] = count

    def claim(self, position: int) -> None:
        """Mark the batches before `position` as drawn, before a step that may not complete."""
        self._numbers[_POSITION] = position

    def waited(self) -> None:
        self._numbers[_WAITS] += 1

    def stepped(self) -> None:
        self._numbers[_STEPS] += 1
