"""Memory for chunks, recycled from round to round: fresh memory costs more than hashing or averaging what is written to
it, .3 to .5 seconds a gigabyte for page faults, and 2 seconds if a hypervisor first has to find the pages.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections import Counter, deque

GRANULE_BYTES = 1 << 18
"""Sizes are rounded up to a multiple of this. So the shorter last chunks of parts, whose lengths differ from round to
round, are recycled as well. What a chunk does not write to takes no memory."""


class ChunkPool:
    """Lends memory, and takes it back when no view of it is left.

    Each piece is lent through a new object, which all views of it keep alive: slices of a memoryview, tensors. So
    memory cannot be lent twice while a stream still sends it. Of each size the pool holds at most as many free pieces
    as were taken in the present or the previous round, whichever is more.

    Any thread may take memory, and views may vanish on any thread, in the middle of `take` too. Therefore each step
    that two threads could make at once is one operation of a deque or a list. A wrong count changes only how much stays
    free.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[mmap.mmap]] = {}  # size -> memory of that size
        self._returned: deque[mmap.mmap] = deque()  # free memory that is not in `_free` yet
        self._taken, self._taken_before = Counter[int](), Counter[int]()  # pieces by size, in this round and the last

    @property
    def free_bytes(self) -> int:
        self._collect()
        return sum(size * len(pieces) for size, pieces in list(self._free.items()))

    def take(self, size_bytes: int) -> memoryview:
        """Writable memory with undefined content."""
        self._collect()
        capacity = max(1, -(-size_bytes // GRANULE_BYTES)) * GRANULE_BYTES
        try:
            memory = self._free[capacity].pop()
        except (KeyError, IndexError):
            # Private memory: its page faults cost a third less than those of shared memory, the default.
            memory = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._taken[capacity] += 1
        lent = (ctypes.c_ubyte * size_bytes).from_buffer(memory)
        weakref.finalize(lent, self._returned.append, memory).atexit = False
        return memoryview(lent).cast("B")

    def next_round(self) -> None:
        """Begin a round: release memory that neither of the last two rounds needed."""
        self._collect()
        self._taken, self._taken_before = Counter(), self._taken
        for size, pieces in list(self._free.items()):
            del pieces[self._taken_before[size] :]

    def _collect(self) -> None:
        """Move returned memory to the free memory, as far as the limit allows; what exceeds it is unmapped."""
        while True:
            try:
                memory = self._returned.popleft()
            except IndexError:
                return
            size = len(memory)
            pieces = self._free.setdefault(size, [])
            if len(pieces) < max(self._taken[size], self._taken_before[size]):
                pieces.append(memory)
