"""Sends and receives vectors chunk by chunk: for each chunk a header, then its encoded elements.

Codecs run through `Compute`. A receiver refuses any chunk but the one that is due, and reads it only when it has
processed the previous one, so a slow receiver slows its sender.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from protocols import wire
from protocols.base import BadPayload, Compute, Header, Stream
from protocols.vectors.layout import PartLayout
from protocols.vectors.views import VectorView

HEADER_LIMIT = 512  # limit of the bytes of a chunk's header, or of a message that comes instead of it

ChunkHeader = TypeVar("ChunkHeader", wire.Chunk, wire.Reduced)
OnHeader = Callable[[Header], None]  # called with each header before it is checked to be that of a chunk; may raise


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
