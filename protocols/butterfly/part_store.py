"""The reduced parts of past rounds, on a disk: for those who take longer over a snapshot than memory can wait.

A round's parts stand in one room, one after the other, written in pieces of at most 1 MiB. Where the disk fails the
round is not kept, which costs nobody but those who would have asked for it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from protocols.allreduce.parts import PartLayout, ReducedPart
from protocols.base import Buffer, Compute
from protocols.gate import Gate
from protocols.sync.snapshot import SnapshotBuffer

log = logging.getLogger(__name__)

T = TypeVar("T")

STORE_ROUNDS = 64
LEAST_ROUNDS = 16
"""Kept however large they are: a state is eight bytes an element and a mean about one, so whoever can follow the rounds
at all has fetched a snapshot before eight of them are over, and it was five old at most when it was begun."""
LIMIT_BYTES = 4 << 30
GIVE_WAY_SECONDS = 10.0
"""What is to be written waits so long for a data phase, piece by piece: longer, and it is in memory for too long."""


class Stored(PartLayout):
    """A part in the store. Its bytes can be had for as long as it is held, even after its round has gone.

    Attributes:
        masks, result, done: as of `ReducedPart`.
    """

    def __init__(self, part: ReducedPart, room: SnapshotBuffer, offset: int) -> None:
        super().__init__(part.codec, part.low, part.high, part.chunk_elements)
        self.masks, self.result, self.done = part.masks, part.result, part.done
        self._room, self._offset = room, offset

    def chunk(self, index: int) -> bytearray:
        """The encoded bytes of a chunk; takes a disk's time.

        Raises:
            OSError: the file fails.
        """
        data = bytearray(self.size(index))
        self._room.read(self._offset + self.place(index), memoryview(data))
        return data

    def load(self) -> ReducedPart:
        """The part in memory; takes a disk's time, and raises as `chunk` does."""
        held = ReducedPart(self.codec, self.low, self.high, self.chunk_elements)
        for index in range(self.chunks):
            held.chunk(index)[:] = self.chunk(index)
        held.masks, held.result, held.done = self.masks, self.result, self.done
        return held


@dataclass(slots=True)
class _Round:
    """One round's parts; `pieces` of them are still to be written: part, chunk, place in the room."""

    room: SnapshotBuffer
    size_bytes: int
    parts: dict[bytes, Stored] = field(default_factory=dict)
    pieces: deque[tuple[ReducedPart, int, int]] = field(default_factory=deque)


class PartStore:
    """Parts by the lineage that their round extends and by their digest; the oldest rounds go first."""

    def __init__(
        self,
        make_room: Callable[[int], SnapshotBuffer],
        compute: Compute,
        gate: Gate,
        limit_bytes: int = LIMIT_BYTES,
        most_rounds: int = STORE_ROUNDS,
        least_rounds: int = LEAST_ROUNDS,
    ) -> None:
        """
        Args:
            make_room: for so many bytes; raises OSError where there is none.
            compute: runs what waits for the disk.
            gate: nothing is written while it is closed, or little.
        """
        self._make_room, self._compute, self._gate = make_room, compute, gate
        self._limit_bytes, self._most, self._least = limit_bytes, most_rounds, least_rounds
        self._rounds: dict[bytes, _Round] = {}
        self._begun: dict[bytes, _Round] = {}  # at most one: it is written now, or goes on when it is put again
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
        """The part with this digest, if it is here."""
        return next((each.parts[digest] for each in self._rounds.values() if digest in each.parts), None)

    async def read(self, part: Stored, index: int) -> Buffer | None:
        """A chunk of a stored part; None, and its round is dropped, where its file fails."""
        return await self._had(part, partial(part.chunk, index), part.size(index))

    async def load(self, part: Stored) -> ReducedPart | None:
        """All of a stored part; None as for `read`."""
        return await self._had(part, part.load, part.size_bytes)

    async def put(self, lineage: bytes, parts: Sequence[ReducedPart]) -> bool:
        """Write a round's sealed parts; what was cut short goes on where it was. False where the disk fails."""
        try:
            if lineage not in self._begun:
                self._begun = {lineage: await self._begin(parts)}
            each = self._begun[lineage]
            while each.pieces:
                await self._gate.passed(GIVE_WAY_SECONDS)
                part, index, place = each.pieces[0]
                await self._compute.run(partial(each.room.write, place, part.chunk(index)), part.size(index))
                each.pieces.popleft()
        except OSError as error:
            self._begun = {}
            self._fails(error)
            return False
        self._failing, self._begun = False, {}
        self._rounds[lineage] = each
        self._trim()
        return True

    async def _had(self, part: Stored, work: Callable[[], T], cost_bytes: int) -> T | None:
        try:
            return await self._compute.run(work, cost_bytes)
        except OSError as error:
            log.warning("the parts of a past round are lost: %s", error.strerror or error)
            self._rounds = {key: each for key, each in self._rounds.items() if part not in each.parts.values()}
            return None

    async def _begin(self, parts: Sequence[ReducedPart]) -> _Round:
        size_bytes = sum(part.size_bytes for part in parts)
        each = _Round(await self._compute.run(lambda: self._make_room(max(1, size_bytes)), 0), size_bytes)
        offset = 0
        for part in parts:
            assert part.result is not None
            each.parts[part.result.digest] = Stored(part, each.room, offset)
            each.pieces.extend((part, index, offset + part.place(index)) for index in range(part.chunks))
            offset += part.size_bytes
        return each

    def _trim(self) -> None:
        while len(self._rounds) > self._least and (
            len(self._rounds) > self._most or self.size_bytes > self._limit_bytes
        ):
            del self._rounds[next(iter(self._rounds))]

    def _fails(self, error: OSError) -> None:
        """Say so once, until it works again; the oldest round makes room for the next one."""
        if not self._failing:
            log.warning("a round's parts are not kept for those who come later: %s", error.strerror or error)
        self._failing = True
        if self._rounds:
            del self._rounds[next(iter(self._rounds))]
