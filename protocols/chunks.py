"""Vectors and parts over a stream, one chunk after the other: a header, then the encoded elements.

Sender and receiver know the layout, so the receiver knows the index and the size of each chunk beforehand, and refuses
every other. Chunks go from and into buffers that exist before the first of them. Codecs and digests run through
`Compute`, one chunk at a time. A receiver reads a chunk only when its work on the one before is done, so a slow
receiver slows down its sender.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from protocols import wire
from protocols.allreduce.parts import PartLayout, ReducedPart, chunk_digest, seal
from protocols.base import BadPayload, Compute, Header, Stream
from protocols.vectors import VectorView

HEADER_LIMIT = 512
"""Bytes of the header of a chunk, or of a message in its place, at most."""

ChunkHeader = TypeVar("ChunkHeader", wire.Chunk, wire.Reduced)
OnHeader = Callable[[Header], None]
"""Sees each header before it has to be that of a chunk; may raise."""


def due(header: Header, kind: type[ChunkHeader], index: int, size: int) -> ChunkHeader:
    """The header, which has to be that of the chunk that is due.

    Args:
        size: encoded bytes of the chunk.

    Raises:
        BadPayload: it is another message, or the header of another chunk.
    """
    chunk = wire.expect(header, kind)
    if (chunk.index, chunk.size) != (index, size):
        raise BadPayload(f"chunk {chunk.index} of {chunk.size} bytes where {index} of {size} is due")
    return chunk


# -- contributions and states: `wire.Chunk` ---------------------------------------------------------------------------


async def send_vector(stream: Stream, layout: PartLayout, source: VectorView, compute: Compute) -> None:
    """Encode and send the elements of `source` that the layout covers.

    Raises:
        PeerSilent: the stream broke off.
    """
    scratch, buffer = layout.room(), layout.chunk_buffer()

    def encode(index: int, data: memoryview) -> None:
        layout.codec.encode(source.read(*layout.elements(index), scratch), data)

    for index in range(layout.chunks):
        data = buffer(index)
        await compute.run(partial(encode, index, data), len(data))
        await stream.send(wire.Chunk(index, len(data)), data)


async def send_encoded(stream: Stream, part: ReducedPart) -> None:
    """Send a part that is encoded already.

    Raises:
        PeerSilent: the stream broke off.
    """
    for index in range(part.chunks):
        data = part.chunk(index)
        await stream.send(wire.Chunk(index, len(data)), data)


async def receive_chunk(stream: Stream, index: int, into: memoryview, on_header: OnHeader | None = None) -> None:
    """Receive the encoded chunk that is due; it fills `into`.

    Raises:
        BadPayload: another message or chunk came; or `on_header` says so.
        PeerSilent: the stream broke off.
    """
    header = await stream.receive(HEADER_LIMIT)
    if on_header:
        on_header(header)
    due(header, wire.Chunk, index, len(into))
    await stream.receive_into(into)


async def receive_vector(
    stream: Stream, layout: PartLayout, into: VectorView, compute: Compute, on_header: OnHeader | None = None
) -> None:
    """Receive the elements that the layout covers, and decode them to where they belong in `into`.

    Raises:
        BadPayload: as for `receive_chunk`, or a chunk does not decode to finite numbers.
        PeerSilent: the stream broke off.
    """
    scratch, buffer = layout.room(), layout.chunk_buffer()

    def decode(index: int, data: memoryview) -> None:
        low, high = layout.elements(index)
        layout.codec.decode(data, scratch[: high - low])
        into.write(low, scratch[: high - low])

    for index in range(layout.chunks):
        data = buffer(index)
        await receive_chunk(stream, index, data, on_header)
        await compute.run(partial(decode, index, data), len(data))


# -- reduced parts: `wire.Reduced`, then `wire.PartDone` --------------------------------------------------------------


async def receive_reduced(
    stream: Stream,
    part: ReducedPart,
    compute: Compute,
    into: VectorView | None = None,
    allowed: int | None = None,
    progress: Callable[[], None] = lambda: None,
) -> wire.PartDone:
    """Fill `part` with reduced chunks, and set its `masks` and its `result` to what came.

    Args:
        into: takes the decoded elements; None: they are not decoded.
        allowed: mask of those who may be in the first chunk; a later chunk may hold only those of the chunk before.
            None: any may be.
        progress: called for every chunk.

    Returns:
        The sender's statement of what the part is; neither compared with `part.result` nor verified.

    Raises:
        BadPayload: another message or chunk came, or one that holds others than it may, or that does not decode.
        PeerSilent: the stream broke off.
    """
    digests: list[bytes] = []
    scratch = part.room() if into else None

    def accept(index: int) -> bytes:
        if scratch is not None:
            part.decode_chunk(index, into, scratch)
        return chunk_digest(part.masks[index], part.chunk(index))

    for index in range(part.chunks):
        data = part.chunk(index)
        header = due(await stream.receive(HEADER_LIMIT), wire.Reduced, index, len(data))
        if allowed is not None:
            if header.mask & ~allowed:
                raise BadPayload(f"reduced chunk {index} holds who is out already, or nobody's work")
            allowed = header.mask
        await stream.receive_into(data)
        part.masks.append(header.mask)
        digests.append(await compute.run(partial(accept, index), (2 if into else 1) * len(data)))
        progress()
    done = wire.expect(await stream.receive(wire.MAX_HEADER_BYTES), wire.PartDone)
    part.result = seal(part.low, part.high, part.masks, digests)
    return done
