"""A compact index of lineages: by place, and from lineage to place. No I/O."""

from __future__ import annotations

from array import array
from bisect import bisect_left

_BYTES = 32


class LineageIndex:
    """Lineages in order. Each takes 40 bytes, a quarter of what a dictionary takes."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._sorted = array("Q")  # the first four bytes of a lineage, and its place

    def __len__(self) -> int:
        return len(self._bytes) // _BYTES

    def __getitem__(self, place: int) -> bytes:
        return bytes(self._bytes[place * _BYTES : (place + 1) * _BYTES])

    def append(self, lineage: bytes) -> None:
        key = _key(lineage, len(self))
        self._bytes += lineage
        self._sorted.insert(bisect_left(self._sorted, key), key)

    def find(self, lineage: bytes) -> int | None:
        """Place of a lineage; None if it is not in the index."""
        low = _key(lineage, 0)
        for at in range(bisect_left(self._sorted, low), len(self._sorted)):
            place = self._sorted[at] - low
            if place >> 32:
                break
            if self[place] == lineage:
                return place
        return None

    def cut(self, length: int) -> None:
        """Remove all but the first `length`."""
        if length < len(self):
            del self._bytes[length * _BYTES :]
            self._sorted = array("Q", (each for each in self._sorted if each & 0xFFFFFFFF < length))


def _key(lineage: bytes, place: int) -> int:
    return int.from_bytes(lineage[:4], "big") << 32 | place
