"""What the data phase works on: the encoded mean of a round, its chunks, parts and their digests."""

from __future__ import annotations

import hashlib
import itertools
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from protocols import wire
from protocols.base import Compute, Deadline, PeerId, RoundKey, Signer
from protocols.codec import Codec
from protocols.plan import Terms
from protocols.vectors import CHUNK_ELEMENTS, Flat, chunk_count, chunk_range


class HeldPart:
    """One reduced part, encoded: filled chunk by chunk, then sealed.

    Attributes:
        low, high: its range of elements.
        masks: of each chunk that is in: a bit for each contributor.
        result: what it turned out to be, once all chunks are in.
        done: the same as its reducer signed it; None if it came from somebody who did not keep that.
    """

    def __init__(self, codec: Codec, low: int, high: int, chunk_elements: int = CHUNK_ELEMENTS) -> None:
        self.codec, self.low, self.high, self.chunk_elements = codec, low, high, chunk_elements
        self.chunks = chunk_count(high - low, chunk_elements)
        self.masks: list[int] = []
        self.result: wire.Part | None = None
        self.done: wire.PartDone | None = None
        self._whole = codec.encoded_bytes(chunk_elements)
        size = sum(self.size(index) for index in range(self.chunks))
        # Anonymous memory costs nothing until it is written; a bytearray would be cleared on the loop.
        self._memory = memoryview(mmap.mmap(-1, max(1, size)))

    def elements(self, index: int) -> tuple[int, int]:
        """Element range of a chunk."""
        return chunk_range(self.low, self.high, index, self.chunk_elements)

    def size(self, index: int) -> int:
        """Encoded bytes of a chunk."""
        low, high = self.elements(index)
        return self.codec.encoded_bytes(high - low)

    def chunk(self, index: int) -> memoryview:
        """The encoded bytes of a chunk."""
        start = index * self._whole
        return self._memory[start : start + self.size(index)]

    def decode(self, into: Flat) -> None:
        """Decode it to where it belongs.

        Raises:
            BadPayload: a chunk does not decode to finite numbers.
        """
        scratch = torch.empty(min(self.chunk_elements, self.high - self.low))
        for index in range(self.chunks):
            low, high = self.elements(index)
            self.codec.decode(self.chunk(index), scratch[: high - low])
            into.write(low, scratch[: high - low])


class Held:
    """The encoded mean of one round: one buffer, filled chunk by chunk."""

    def __init__(self, codec: Codec, bounds: Sequence[int], chunk_elements: int = CHUNK_ELEMENTS) -> None:
        self.codec = codec
        self.bounds = tuple(bounds)
        self.chunk_elements = chunk_elements
        sizes = [sum(codec.encoded_bytes(high - low) for low, high in self._ranges(part)) for part in range(self.parts)]
        self._offsets = list(itertools.accumulate(sizes, initial=0))
        self._whole = codec.encoded_bytes(chunk_elements)
        # Anonymous memory costs nothing until it is written; a bytearray would be cleared on the loop.
        self._memory = memoryview(mmap.mmap(-1, max(1, self._offsets[-1])))

    @property
    def parts(self) -> int:
        return len(self.bounds) - 1

    def chunks(self, part: int) -> int:
        return chunk_count(self.bounds[part + 1] - self.bounds[part], self.chunk_elements)

    def elements(self, part: int, index: int) -> tuple[int, int]:
        """Element range of a chunk."""
        return chunk_range(self.bounds[part], self.bounds[part + 1], index, self.chunk_elements)

    def chunk(self, part: int, index: int) -> memoryview:
        """The encoded bytes of a chunk."""
        low, high = self.elements(part, index)
        start = self._offsets[part] + index * self._whole
        return self._memory[start : start + self.codec.encoded_bytes(high - low)]

    def decode(self, part: int, into: Flat) -> None:
        """Decode one part.

        Raises:
            BadPayload: a chunk does not decode to finite numbers.
        """
        scratch = torch.empty(min(self.chunk_elements, self.bounds[part + 1] - self.bounds[part]))
        for index, (low, high) in enumerate(self._ranges(part)):
            self.codec.decode(self.chunk(part, index), scratch[: high - low])
            into.write(low, scratch[: high - low])

    def _ranges(self, part: int) -> list[tuple[int, int]]:
        return [self.elements(part, index) for index in range(self.chunks(part))]


def chunk_digest(mask: int, data: memoryview) -> bytes:
    """What stands for one reduced chunk in its part's digest."""
    digest = hashlib.sha256(mask.to_bytes(4, "little"))
    digest.update(data)
    return digest.digest()


def seal(masks: Sequence[int], digests: Sequence[bytes]) -> wire.Part:
    """The part that these chunks make up."""
    runs = tuple(wire.Run(len(list(group)), mask) for mask, group in itertools.groupby(masks))
    return wire.Part(hashlib.sha256(b"".join(digests)).digest(), runs)


def part_message(key: RoundKey, plan: bytes, part: int, reducer: int, result: wire.Part) -> bytes:
    """What a reducer signs."""
    numbers = part.to_bytes(2, "little") + reducer.to_bytes(2, "little")
    return b"starling part" + wire.body(key) + plan + numbers + wire.body(result)


@dataclass(frozen=True, slots=True)
class Task:
    """What both sides of the data phase work on.

    Attributes:
        mine: this member's vectors, unchanged until the data phase ends.
        held: takes the encoded mean.
        deadline: end of the data phase.
    """

    key: RoundKey
    terms: Terms
    me: PeerId
    mine: Flat
    held: Held
    compute: Compute
    signer: Signer
    deadline: Deadline

    def size(self, part: int, index: int) -> int:
        """Encoded bytes of a chunk."""
        low, high = self.held.elements(part, index)
        return self.held.codec.encoded_bytes(high - low)

    def chunk_elements(self, part: int) -> int:
        """Elements of the largest chunk of a part."""
        low, high = self.terms.part(part)
        return min(self.held.chunk_elements, high - low)
