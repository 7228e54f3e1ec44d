"""How a vector, or a part of one, is cut into chunks that are encoded, sent and reduced one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from protocols.base import Vector
from protocols.registry import CHUNK_ELEMENTS
from protocols.vectors.codec import Codec
from protocols.vectors.views import chunk_count, chunk_range


class PartLayout:
    """How the elements [low, high) are cut into chunks, and where each chunk is in the `size_bytes` encoded bytes."""

    def __init__(self, codec: Codec, low: int, high: int, chunk_elements: int = CHUNK_ELEMENTS) -> None:
        self.codec, self.low, self.high, self.chunk_elements = codec, low, high, chunk_elements
        self.chunks = chunk_count(high - low, chunk_elements)
        self._whole = codec.encoded_bytes(chunk_elements)
        self.size_bytes = self.place(self.chunks - 1) + self.size(self.chunks - 1) if self.chunks else 0

    def elements(self, index: int) -> tuple[int, int]:
        return chunk_range(self.low, self.high, index, self.chunk_elements)

    def size(self, index: int) -> int:
        low, high = self.elements(index)
        return self.codec.encoded_bytes(high - low)

    def place(self, index: int) -> int:
        return index * self._whole

    def vector_for(self, data: memoryview, scratch: Vector) -> Vector:
        """A vector to decode a chunk into: in the memory of its bytes if the codec is `in_place`, else in `scratch`."""
        return torch.frombuffer(data, dtype=torch.float32) if self.codec.in_place else scratch

    def encoded(self, source: Vector, buffer: memoryview) -> memoryview:
        """Encode a chunk. Returns its bytes: those of `source` itself if the codec is `in_place`, else `buffer`."""
        data = source.numpy().data.cast("B") if self.codec.in_place else buffer
        self.codec.encode(source, data)
        return data

    def scratch_vector(self) -> Vector:
        return torch.empty(min(self.chunk_elements, self.high - self.low))

    def chunk_buffer(self) -> Callable[[int], memoryview]:
        """Memory for one encoded chunk. The result maps a chunk's index to its bytes; all chunks share the memory."""
        memory = memoryview(bytearray(self.size(0) if self.chunks else 0))
        return lambda index: memory[: self.size(index)]

    def pieces(self, count: int) -> Iterator[tuple[int, int, int, list[Vector]]]:
        """Walk the chunks with `count` scratch vectors, whose memory all chunks share.

        Yields a chunk's index, its element range [low, high), and the vectors, each of high - low elements.
        """
        vectors = [self.scratch_vector() for _ in range(count)]
        for index in range(self.chunks):
            low, high = self.elements(index)
            yield index, low, high, [vector[: high - low] for vector in vectors]
