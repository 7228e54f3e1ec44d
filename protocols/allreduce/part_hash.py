"""The hash of reduced parts, which a run's configuration names. Pure.

    sha256   the hash of runs that name none, because they were founded when there was no other
    blake3   as strong, and four to five times as fast (O'Connor et al. 2020, "BLAKE3: one function, fast everywhere")

Only the digests of a round's parts are made with it. State roots, snapshots, run ids and signatures use SHA-256 in
every run. Both hashes yield 32 bytes, so frames and records are the same.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from blake3 import blake3

from protocols import wire
from protocols.base import Buffer
from protocols.choices import require_known


class _Hasher(Protocol):
    def update(self, data: Buffer, /) -> object: ...

    def digest(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class PartHash:
    """One hash function, and what it is applied to. Both functions release the GIL while they hash a chunk."""

    name: str
    _begin: Callable[[bytes], _Hasher]

    def chunk(self, mask: int, data: Buffer) -> bytes:
        """Digest of one reduced chunk, from which its part's digest is made.

        Args:
            mask: bit mask of the chunk's contributors.
        """
        hasher = self._begin(mask.to_bytes(4, "little"))
        hasher.update(data)
        return hasher.digest()

    def part(self, low: int, high: int, masks: Sequence[int], digests: Sequence[bytes]) -> wire.PartDigest:
        """The digest of the part [low, high) with these chunks. It covers the range: equal bytes elsewhere differ."""
        runs = tuple(wire.ChunkSpan(len(list(group)), mask) for mask, group in itertools.groupby(masks))
        place = low.to_bytes(8, "little") + high.to_bytes(8, "little")
        return wire.PartDigest(self._begin(place + b"".join(digests)).digest(), runs)


SHA256: Final = PartHash("sha256", hashlib.sha256)
BLAKE3: Final = PartHash("blake3", blake3)
PART_HASHES: Final[dict[str, PartHash]] = {each.name: each for each in (SHA256, BLAKE3)}


def part_hash(name: str) -> PartHash:
    """The hash of this name.

    Raises:
        ValueError: unknown hash; the one-line message names the hashes that exist.
    """
    return PART_HASHES[require_known("digest", name, PART_HASHES)]
