"""Activations that a peer and its worker share: one unnamed file beside that of the vectors.

    first       the input of a job, or a gradient
    second      its gradient, or its targets
    result      what it returns, and after it the targets of a batch that was drawn

Only one job runs at a time. The peer fills the inputs and reads the result inside the job's turn.
"""

from __future__ import annotations

import mmap
import os

from node.training.stage_job import StageSizes
from protocols.base import Buffer


class ActivationSlots:
    """The mapped file."""

    def __init__(self, descriptor: int, sizes: StageSizes) -> None:
        """
        Args:
            descriptor: of the file, which is extended as needed.

        Raises:
            OSError: there is not enough space.
        """
        slot = max(sizes.activation_bytes, sizes.target_bytes, sizes.logit_bytes)
        total = 3 * slot + sizes.target_bytes
        if os.fstat(descriptor).st_size < total:
            os.ftruncate(descriptor, total)
        memory = memoryview(mmap.mmap(descriptor, total))
        self._inputs = memory[:slot], memory[slot : 2 * slot]
        self._result = memory[2 * slot :]

    def put(self, number: int, data: Buffer) -> None:
        """Fill an input, 0 or 1."""
        self._inputs[number][: len(data)] = data

    def take(self, number: int, size: int) -> Buffer:
        """The first `size` bytes of an input; valid until it is filled again."""
        return self._inputs[number][:size]

    def answer(self, *parts: Buffer) -> None:
        """Fill the result with these parts, one after the other."""
        low = 0
        for part in parts:
            self._result[low : low + len(part)] = part
            low += len(part)

    def result(self, size: int, after: int = 0) -> bytes:
        """A copy of `size` bytes of the result, behind the first `after` bytes."""
        return bytes(self._result[after : after + size])
