"""Messages that no honest code sends: single fields of encoded headers changed, well-formed or not."""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from typing import Any, TypeAlias

import msgpack

from protocols import wire
from protocols.base import Buffer, Header
from protocols.streams.framing import FramedStream
from tests.sim.pipe import SimPipe
from tests.support.disguises import Disguise, SpoofedStream
from tests.support.wire_examples import replaced, value_at

FOREIGN = b"\xee" * 32
"""A digest of no run, round or state."""
Change: TypeAlias = Mapping[str, Any] | Callable[[Any], Header | bytes]
"""Fields, by dotted names as `offers.0.tokens`, with the packed value of each or a function of the honest one; or what
the liar sends in the place of the whole header."""


def more(honest: int) -> int:
    return honest + 1


@functools.cache
def path_of(kind: Any, field: str) -> tuple[int, ...]:
    path, hint = [], kind
    for name in field.split("."):
        if is_dataclass(hint):
            names = [each for each, _ in wire._specs(typing.cast("type", hint))]
            path.append(names.index(name) + 2 * (hint is kind))
            hint = typing.get_type_hints(hint)[name]
        else:
            path.append(int(name))
            hint = typing.get_args(hint)[0]
    return tuple(path)


def forged(header: Header, change: Change) -> bytes:
    if callable(change):
        false = change(header)
        return false if isinstance(false, bytes) else wire.encode(false)
    values = msgpack.unpackb(wire.encode(header))
    for field, value in change.items():
        path = path_of(type(header), field)
        values = replaced(values, path, value(value_at(values, path)) if callable(value) else value)
    return bytes(msgpack.packb(values))


def forging(kind: type[Any], change: Change) -> Disguise:
    def disguise(method: str, stream: FramedStream, pipe: SimPipe) -> SpoofedStream:
        async def send(stream: FramedStream, header: Header, payload: Buffer) -> None:
            if not isinstance(header, kind):
                return await stream.send(header, payload)
            packed = forged(header, change)
            await pipe.write(len(packed).to_bytes(4, "big") + packed + bytes(payload))

        return SpoofedStream(stream, send)

    return disguise
