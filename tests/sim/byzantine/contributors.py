"""Byzantine contributors: a stream wrapper that changes what the peer's honest code sends."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgpack

from protocols import wire
from protocols.allreduce.plan import offer_message
from protocols.base import Buffer, Header, Signer
from protocols.framing import FramedStream
from tests.sim.pipe import SimPipe

LIES = (
    "nan",
    "infinity",
    "norm",
    "size",
    "codec",
    "huge-length",
    "endless-header",
    "garbage",
    "twice",
    "stale",
    "weight-nan",
    "weight-negative",
    "weight-huge",
)
"""Every lie of a contributor. All but the last are refused; the last is clamped."""

VOTERS_LIES = (
    "two-parts",
    "another-life",
    "forged-vote",
    "forged-certificate",
    "another-state",
    "another-vector",
    "another-place",
    "eviction",
    "usurped-plan",
)
"""Every lie of a reducer or a voter (`tests.sim.byzantine.voters`): each is refused, and named."""


def raw(header: Header, change: Callable[[list[Any]], None]) -> bytes:
    """A header's frame with fields that no honest encoder would write."""
    values = msgpack.unpackb(wire.encode(header))
    change(values)
    packed = msgpack.packb(values)
    return len(packed).to_bytes(4, "big") + bytes(packed)


class ByzantineContributorStream:
    """A stream that changes every message to which its lie applies."""

    def __init__(self, stream: FramedStream, pipe: SimPipe, lie: str, signer: Signer) -> None:
        self._stream, self._pipe, self._lie, self._signer = stream, pipe, lie, signer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def send(self, header: Header, payload: Buffer = b"") -> None:
        lie = self._lie
        if isinstance(header, wire.Chunk):
            await self._send_chunk(header, payload)
        elif isinstance(header, wire.Contribute) and lie == "codec":
            await self._stream.send(replace(header, codec="fp64"))
        elif isinstance(header, wire.Contribute) and lie == "stale":
            await self._stream.send(replace(header, key=replace(header.key, lineage=bytes(32))))
        elif isinstance(header, wire.Ready) and lie in ("weight-nan", "weight-negative"):
            tokens = math.nan if lie == "weight-nan" else -1
            await self._pipe.write(raw(header, lambda values: values[3].__setitem__(1, tokens)))
        elif isinstance(header, wire.Ready) and lie == "weight-huge":
            offer = replace(header.offer, tokens=10**9)
            offer = replace(offer, signature=self._signer.sign(offer_message(header.key, offer)))
            await self._stream.send(replace(header, offer=offer))
        else:
            await self._stream.send(header, payload)

    async def _send_chunk(self, header: wire.Chunk, payload: Buffer) -> None:
        match self._lie:
            case "nan" | "infinity":
                await self._stream.send(header, _poisoned(payload, math.nan if self._lie == "nan" else math.inf))
            case "norm":
                await self._stream.send(header, _poisoned(payload, 1e30))  # large in every codec
            case "size":
                await self._stream.send(replace(header, size=header.size + 1), bytes(payload) + b"!")
            case "huge-length":
                await self._pipe.write(raw(header, lambda values: values.__setitem__(3, 2**63)))
            case "endless-header":
                await self._pipe.write((2**31).to_bytes(4, "big"))
                await self._pipe.write(bytes(4096))
            case "garbage":
                await self._pipe.write((16).to_bytes(4, "big") + b"\xc1" * 16)
            case "twice":
                await self._stream.send(header, payload)
                await self._stream.send(header, payload)
            case _:
                await self._stream.send(header, payload)


def _poisoned(payload: Buffer, value: float) -> bytes:
    """The payload with a number in its first four bytes, which hold a float32 value or a scale in most codecs."""
    return struct.pack("<f", value) + bytes(payload)[4:]
