"""Whole parts of vectors over one stream: chunk by chunk, encoded as they go, decoded as they come."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from protocols import wire
from protocols.allreduce.parts import PartLayout
from protocols.base import BadPayload, Compute, Header, Stream
from protocols.vectors import VectorView

_LIMIT = 256
Other = Callable[[Header], None]
"""Sees each header before it has to be a chunk's; may raise."""


async def receive_chunk(stream: Stream, index: int, into: memoryview, other: Other | None = None) -> None:
    """Receive the chunk that is due.

    Raises:
        BadPayload: it is another one, or of another size.
        PeerSilent: the stream broke off.
    """
    header = await stream.receive(_LIMIT)
    if other:
        other(header)
    chunk = wire.expect(header, wire.Chunk)
    if (chunk.index, chunk.size) != (index, len(into)):
        raise BadPayload(f"chunk {chunk.index} of {chunk.size} bytes where {index} of {len(into)} is due")
    await stream.receive_into(into)


async def give(compute: Compute, stream: Stream, part: PartLayout, source: VectorView) -> None:
    """Encode and send the elements of a part.

    Raises:
        PeerSilent: the stream broke off.
    """
    if not part.chunks:
        return
    scratch, buffer = torch.empty(min(part.chunk_elements, part.high - part.low)), memoryview(bytearray(part.size(0)))
    for index in range(part.chunks):
        data, elements = buffer[: part.size(index)], source.read(*part.elements(index), scratch)
        await compute.run(partial(part.codec.encode, elements, data), len(data))
        await stream.send(wire.Chunk(index, len(data)), data)


async def take(
    compute: Compute, stream: Stream, part: PartLayout, into: VectorView, other: Other | None = None
) -> None:
    """Receive a part and decode it to where it belongs.

    Raises:
        BadPayload: what comes is not that part.
        PeerSilent: the stream broke off.
    """
    if not part.chunks:
        return
    scratch, buffer = torch.empty(min(part.chunk_elements, part.high - part.low)), memoryview(bytearray(part.size(0)))

    def decode(index: int, data: memoryview) -> None:
        low, high = part.elements(index)
        part.codec.decode(data, scratch[: high - low])
        into.write(low, scratch[: high - low])

    for index in range(part.chunks):
        data = buffer[: part.size(index)]
        await receive_chunk(stream, index, data, other)
        await compute.run(partial(decode, index, data), len(data))
