"""Many lineages in little memory: in their order, found by their place and by themselves. Pure."""

from __future__ import annotations

from array import array
from bisect import bisect_left

_BYTES = 32


class LineageIndex:
    """40 bytes each; a dictionary takes four times that."""

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
        """Its place, if it is here."""
        low = _key(lineage, 0)
        for at in range(bisect_left(self._sorted, low), len(self._sorted)):
            place = self._sorted[at] - low
            if place >> 32:
                break
            if self[place] == lineage:
                return place
        return None

    def cut(self, length: int) -> None:
        """Forget all but the first so many."""
        if length < len(self):
            del self._bytes[length * _BYTES :]
            self._sorted = array("Q", (each for each in self._sorted if each & 0xFFFFFFFF < length))


def _key(lineage: bytes, place: int) -> int:
    return int.from_bytes(lineage[:4], "big") << 32 | place
