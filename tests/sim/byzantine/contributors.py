"""Byzantine contributors: a stream wrapper that changes what the peer's honest code sends."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from typing import Any

from protocols import wire
from protocols.allreduce.clustered_messages import OfferToLead
from protocols.allreduce.plan import offer_message
from protocols.base import Buffer, Header, Signer
from protocols.streams.framing import FramedStream
from tests.sim.pipe import SimPipe

LIES = ("nan", "infinity", "norm", "size", "endless-header", "garbage", "twice", "weight-huge")
"""Every lie of a contributor. All but the last are refused; the last is clamped."""

VOTERS_LIES = ("two-parts", "forged-certificate", "usurped-plan")


class ByzantineContributorStream:
    def __init__(self, stream: FramedStream, pipe: SimPipe, lie: str, signer: Signer) -> None:
        self._stream, self._pipe, self._lie, self._signer = stream, pipe, lie, signer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def send(self, header: Header, payload: Buffer = b"") -> None:
        if isinstance(header, wire.Chunk | wire.Partial):
            await self._send_chunk(header, payload)
        elif isinstance(header, wire.Ready | OfferToLead) and self._lie == "weight-huge":
            header = replace(header, offer=replace(header.offer, tokens=10**9))
            signed = header.signed() if isinstance(header, OfferToLead) else offer_message(header.key, header.offer)
            await self._stream.send(replace(header, offer=replace(header.offer, signature=self._signer.sign(signed))))
        else:
            await self._stream.send(header, payload)

    async def _send_chunk(self, header: wire.Chunk | wire.Partial, payload: Buffer) -> None:
        match self._lie:
            case "nan" | "infinity":
                await self._stream.send(header, _poisoned(payload, math.nan if self._lie == "nan" else math.inf))
            case "norm":
                await self._stream.send(header, _poisoned(payload, 1e30))  # large in every codec
            case "size":
                await self._stream.send(replace(header, size=header.size + 1), bytes(payload) + b"!")
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
