"""A store on disk for the reduced parts of past rounds.

It is for peers whose snapshot takes longer than parts stay in memory. The parts of a round are in one buffer, one after
the other, and are written in pieces of at most 1 MiB. If the disk fails, the round is not kept, which harms only peers
that would have asked for it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

from protocols.aio import Gate
from protocols.allreduce.parts import ReducedPart
from protocols.base import Buffer, Compute
from protocols.vectors.layout import PartLayout

log = logging.getLogger(__name__)

T = TypeVar("T")

STORE_ROUNDS = 64
LEAST_ROUNDS = 16
"""Rounds that are kept however large they are. A state takes eight bytes an element, a mean about one. So a peer that
can follow the rounds at all fetches a snapshot in less than eight rounds; it was at most five rounds old at the start.
"""
LIMIT_BYTES = 4 << 30
GIVE_WAY_SECONDS = 10.0
"""Longest time that each piece waits for a data phase before it is written. Longer, and parts fill the memory."""


class DiskBuffer(Protocol):
    """Disk space of fixed size. Its calls block, and raise OSError if the file fails."""

    def read(self, offset: int, into: memoryview) -> None: ...

    def write(self, offset: int, data: Buffer) -> None: ...


class Stored(PartLayout):
    """A part in the store. Its bytes can be read as long as this object exists, even after its round was dropped.

    Attributes:
        masks, result, done: as in `ReducedPart`.
    """

    def __init__(self, part: ReducedPart, buffer: DiskBuffer, offset: int) -> None:
        super().__init__(part.codec, part.low, part.high, part.chunk_elements)
        self.masks, self.result, self.done = part.masks, part.result, part.done
        self._pool, self._buffer, self._offset = part.pool, buffer, offset

    def chunk(self, index: int) -> bytearray:
        """Read the encoded bytes of a chunk. Blocks until the disk answers.

        Raises:
            OSError: the file fails.
        """
        data = bytearray(self.size(index))
        self._read(index, memoryview(data))
        return data

    def _read(self, index: int, into: memoryview) -> None:
        self._buffer.read(self._offset + self.place(index), into)

    def load(self) -> ReducedPart:
        """Read the whole part into memory. Blocks and raises as `chunk` does."""
        held = ReducedPart(self.codec, self.low, self.high, self.chunk_elements, self._pool)
        for index in range(self.chunks):
            self._read(index, held.chunk(index))
        held.masks, held.result, held.done = self.masks, self.result, self.done
        return held


@dataclass(slots=True)
class _Round:
    """The parts of one round.

    Attributes:
        pieces: chunks that are not written yet: part, index of the chunk, offset in the buffer.
    """

    buffer: DiskBuffer
    size_bytes: int
    parts: dict[bytes, Stored] = field(default_factory=dict)
    pieces: deque[tuple[ReducedPart, int, int]] = field(default_factory=deque)


class PartStore:
    """Parts by the lineage that their round extends, and by digest. The oldest rounds are dropped first."""

    def __init__(
        self,
        make_buffer: Callable[[int], DiskBuffer],
        compute: Compute,
        gate: Gate,
        limit_bytes: int = LIMIT_BYTES,
        most_rounds: int = STORE_ROUNDS,
        least_rounds: int = LEAST_ROUNDS,
    ) -> None:
        """
        Args:
            make_buffer: makes a buffer of this many bytes; raises OSError if there is no space.
            compute: runs the calls that wait for the disk.
            gate: while it is closed, little or nothing is written.
        """
        self._make_buffer, self._compute, self._gate = make_buffer, compute, gate
        self._limit_bytes, self._most, self._least = limit_bytes, most_rounds, least_rounds
        self._rounds: dict[bytes, _Round] = {}
        self._begun: dict[bytes, _Round] = {}  # at most one, which is being written or continues at the next `put`
        self._failing = False

    def __contains__(self, lineage: bytes) -> bool:
        return lineage in self._rounds

    @property
    def rounds(self) -> int:
        return len(self._rounds)

    @property
    def size_bytes(self) -> int:
        return sum(each.size_bytes for each in self._rounds.values())

    def get(self, digest: bytes) -> Stored | None:
        """The part with this digest, if it is in the store."""
        return next((each.parts[digest] for each in self._rounds.values() if digest in each.parts), None)

    async def read(self, part: Stored, index: int) -> Buffer | None:
        """Read a chunk of a stored part. If its file fails, drop the round and return None."""
        return await self._on_disk(part, partial(part.chunk, index), part.size(index))

    async def load(self, part: Stored) -> ReducedPart | None:
        """Read all of a stored part; None as for `read`."""
        return await self._on_disk(part, part.load, part.size_bytes)

    async def put(self, lineage: bytes, parts: Sequence[ReducedPart]) -> bool:
        """Write a round's sealed parts, or continue a write that was cancelled. False if the disk fails."""
        try:
            if lineage not in self._begun:
                self._begun = {lineage: await self._begin(parts)}
            each = self._begun[lineage]
            while each.pieces:
                await self._gate.passed(GIVE_WAY_SECONDS)
                part, index, place = each.pieces[0]
                await self._compute.run(partial(each.buffer.write, place, part.chunk(index)), part.size(index))
                each.pieces.popleft()
        except OSError as error:
            self._begun = {}
            self._on_write_error(error)
            return False
        self._failing, self._begun = False, {}
        self._rounds[lineage] = each
        self._trim()
        return True

    async def _on_disk(self, part: Stored, work: Callable[[], T], cost_bytes: int) -> T | None:
        try:
            return await self._compute.run(work, cost_bytes)
        except OSError as error:
            log.warning("cannot read the parts of a past round, so they are dropped: %s", error.strerror or error)
            self._rounds = {key: each for key, each in self._rounds.items() if part not in each.parts.values()}
            return None

    async def _begin(self, parts: Sequence[ReducedPart]) -> _Round:
        size_bytes = sum(part.size_bytes for part in parts)
        each = _Round(await self._compute.run(lambda: self._make_buffer(max(1, size_bytes)), 0), size_bytes)
        offset = 0
        for part in parts:
            assert part.result is not None
            each.parts[part.result.digest] = Stored(part, each.buffer, offset)
            each.pieces.extend((part, index, offset + part.place(index)) for index in range(part.chunks))
            offset += part.size_bytes
        return each

    def _trim(self) -> None:
        while len(self._rounds) > self._least and (
            len(self._rounds) > self._most or self.size_bytes > self._limit_bytes
        ):
            del self._rounds[next(iter(self._rounds))]

    def _on_write_error(self, error: OSError) -> None:
        """Log the first of several failures in a row. Drop the oldest round, to make space for the next one."""
        if not self._failing:
            log.warning("cannot store a round's parts for peers that come later: %s", error.strerror or error)
        self._failing = True
        if self._rounds:
            del self._rounds[next(iter(self._rounds))]
