"""Valid headers of every kind of this repository, and changes of single values inside encoded ones."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import struct
import typing
from collections.abc import Callable
from functools import partial
from typing import Any

import msgpack
from hypothesis import strategies as st

from protocols import wire
from protocols.base import BadPayload, Header
from protocols.pipeline.messages import JobDone, JobOutput, OuterOutput
from tests.support.paths import REPOSITORY

for _path in sorted(each for top in ("node", "protocols") for each in (REPOSITORY / top).rglob("*.py")):
    if "\nregister(" in _path.read_text():
        importlib.import_module(".".join(_path.relative_to(REPOSITORY).with_suffix("").parts))
KINDS: tuple[type, ...] = tuple(wire._KINDS.values())
LEAVES: dict[type, list[Any]] = {
    bool: [False, True],
    int: [0, 1, 5, 31, 32, 1 << 16, 1 << 20, (1 << 32) - 1, 1 << 32, 1 << 40, 1 << 48, 1 << 53],
    float: [0.0, 0.1, 1.0, 1e-300, 600.0, wire.MAX_SECONDS, 1e13, 1e30],
    str: ["", "p", "12D3KooW" * 2, "ß" * 16, "12D3KooW" * 8],
    bytes: [b"", b"\xff", bytes(16), bytes(32), b"\x80" * 32, b"s" * 64, b"s" * 128],
}
WRONG: dict[type, list[Any]] = {
    bool: [0, 1, 1.0, None, "true", b"\x01"],
    int: [-1, 1 << 63, (1 << 64) - 1, True, False, 1.0, math.nan, None, "1", b"1"],
    float: [math.nan, math.inf, -math.inf, -1.0, 1e300, 0, 1, True, None, "1.0"],
    str: ["x" * 300, b"x", None, 1],
    bytes: [b"x" * 60_000, "x" * 32, None, 1],
    list: [None, 1, "x", b"x", 1.0, True, [[]] * 2000],
}
"""Values that no field of the type accepts; only a loss may be negative."""
NESTED = [{}, [[[[[]]]]], msgpack.ExtType(5, b""), msgpack.ExtType(5, b"x" * 40), {"a": 1}]


def accepted(spec: wire.Spec, value: Any) -> bool:
    try:
        spec.unpack(_packed(spec, value))
    except (BadPayload, struct.error):
        return False
    return True


def _packed(spec: wire.Spec, value: Any) -> Any:
    """A list of integers that is packed into bytes; other values as they are."""
    return spec.pack(value) if spec.what.endswith("little-endian") and isinstance(value, list) else value


def packs(spec: wire.Spec, value: Any) -> bool:
    return accepted(spec, spec.pack(value)) or (spec.is_last and not value)


def valid(hint: Any, fits: Callable[[Any], bool]) -> st.SearchStrategy[Any]:
    """Values of a field's type that its spec accepts, its bounds among them."""
    if dataclasses.is_dataclass(hint):
        return headers(typing.cast("type", hint))
    if typing.get_origin(hint) is tuple:
        inner = valid(typing.get_args(hint)[0], lambda value: fits([value]))
        return st.lists(inner, max_size=3).map(tuple)
    return st.sampled_from([value for value in LEAVES[hint] if fits(value)])


@functools.cache
def headers(kind: type) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(kind)
    fields = {
        name: valid(hints[name], partial(accepted, spec)).filter(partial(packs, spec))
        for name, spec in wire._specs(kind)
    }
    return st.builds(kind, **fields)


def places(packed: list[Any], path: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    found = [(*path, index) for index in range(len(packed))]
    for index, value in enumerate(packed):
        if isinstance(value, list):
            found += places(value, (*path, index))
    return found


def replaced(packed: Any, path: tuple[int, ...], value: Any) -> list[Any]:
    head, *rest = path
    inner = replaced(packed[head], tuple(rest), value) if rest else value
    return [*packed[:head], inner, *packed[head + 1 :]]


any_header: st.SearchStrategy[Header] = st.sampled_from(KINDS).flatmap(headers)


def value_at(packed: Any, path: tuple[int, ...]) -> Any:
    return value_at(packed[path[0]], path[1:]) if path else packed


def spoiled(header: Header, place: int, wrong: int) -> bytes:
    """The encoded header with one value that its field does not accept. Any two numbers say which."""
    packed = msgpack.unpackb(wire.encode(header))
    paths = [path for path in places(packed) if path[0] >= 2]
    path = paths[place % len(paths)]
    values = [*WRONG[type(value_at(packed, path))], *NESTED]
    if isinstance(header, JobOutput | OuterOutput | JobDone):  # a loss may be negative
        values = [value for value in values if value != -1.0 or type(value) is not float]
    return bytes(msgpack.packb(replaced(packed, path, values[wrong % len(values)])))
