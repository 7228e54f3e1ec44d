"""Vectors in chunks: how one is cut, encoded, sent and received. A header comes before the elements of each chunk.

Codecs run through `Compute`. A receiver refuses any chunk but the one that is due, and reads it only when it has
processed the previous one, so a slow receiver slows its sender.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import torch

from protocols import wire
from protocols.base import BadPayload, Compute, Header, Stream, Vector
from protocols.registry import CHUNK_ELEMENTS
from protocols.vectors.codec import Codec
from protocols.vectors.views import VectorView, chunk_count, chunk_range

HEADER_LIMIT = 512  # limit of the bytes of a chunk's header, or of a message that comes instead of it

ChunkHeader = TypeVar("ChunkHeader", wire.Chunk, wire.Partial, wire.Reduced)
OnHeader = Callable[[Header], None]  # called with each header before it is checked to be that of a chunk; may raise


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


def due(header: Header, kind: type[ChunkHeader], index: int, size: int) -> ChunkHeader:
    """Return the header if it is that of the expected chunk, with this many encoded bytes; else raise `BadPayload`."""
    chunk = wire.expect(header, kind)
    if (chunk.index, chunk.size) != (index, size):
        raise BadPayload(f"chunk {chunk.index} of {chunk.size} bytes where chunk {index} of {size} bytes is due")
    return chunk


async def send_vector(stream: Stream, layout: PartLayout, source: VectorView, compute: Compute) -> None:
    """Encode and send the elements of `source` that the layout covers. They must not change meanwhile."""
    scratch, buffer = layout.scratch_vector(), layout.chunk_buffer()

    def encode(index: int) -> memoryview:
        return layout.encoded(source.read(*layout.elements(index), scratch), buffer(index))

    for index in range(layout.chunks):
        data = await compute.run(partial(encode, index), layout.size(index))
        await stream.send(wire.Chunk(index, len(data)), data)


async def receive_chunk(stream: Stream, index: int, into: memoryview, on_header: OnHeader | None = None) -> None:
    """Receive the encoded chunk of this index, which fills `into`. Another message or chunk raises `BadPayload`."""
    header = await stream.receive(HEADER_LIMIT)
    if on_header:
        on_header(header)
    due(header, wire.Chunk, index, len(into))
    await stream.receive_into(into)


async def receive_vector(
    stream: Stream, layout: PartLayout, into: VectorView, compute: Compute, on_header: OnHeader | None = None
) -> None:
    """Receive the elements that the layout covers, and decode them into their place in `into`."""
    scratch, buffer = layout.scratch_vector(), layout.chunk_buffer()

    def decode(index: int, data: memoryview) -> None:
        low, high = layout.elements(index)
        layout.codec.decode(data, scratch[: high - low])
        into.write(low, scratch[: high - low])

    for index in range(layout.chunks):
        data = buffer(index)
        await receive_chunk(stream, index, data, on_header)
        await compute.run(partial(decode, index, data), len(data))
