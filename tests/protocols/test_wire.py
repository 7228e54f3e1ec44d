"""Headers: `decode` turns any bytes into a valid header or `BadPayload`, in bounded space and depth.

Headers are generated from the dataclasses themselves, so a new kind is tested from its first day.
"""

from __future__ import annotations

import dataclasses
import math
import re
import tracemalloc
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols import wire
from protocols.base import BadPayload, Header, RoundKey
from protocols.pipeline.messages import JobOutput
from tests.golden import wire as golden
from tests.support.paths import REPOSITORY
from tests.support.wire_examples import KINDS, any_header, headers, spoiled

NUMBERS = st.integers(0, 99)


def check(data: bytes) -> Header | None:
    """Decode; an error is short, and a header encodes to bytes that give it again."""
    try:
        header = wire.decode(data)
    except BadPayload as error:
        assert len(str(error)) < 300
        return None
    assert wire.decode(wire.encode(header)) == header
    return header


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@given(data=st.data())
@settings(max_examples=8)
def test_every_message_kind_round_trips(kind: Any, data: st.DataObject) -> None:
    header: Header = data.draw(headers(kind))
    packed = wire.encode(header)
    assert len(packed) <= wire.MAX_HEADER_BYTES
    back = wire.decode(packed)
    assert back == header and type(back) is kind and wire.encode(back) == packed
    assert wire.expect(back, kind) is back


@given(header=any_header.filter(lambda header: bool(wire.described(type(header)))), place=NUMBERS, wrong=NUMBERS)
@settings(max_examples=300)
def test_value_of_wrong_type_or_size_is_rejected(header: Header, place: int, wrong: int) -> None:
    with pytest.raises(BadPayload):
        wire.decode(spoiled(header, place, wrong))


fixed_count = any_header.filter(lambda header: not any(spec.is_last for _, spec in wire._specs(type(header))))


@given(header=fixed_count, wrong=st.sampled_from([-1, -2, 1 << 63, True, 1.0, math.nan, None, "1", [[]]]))
def test_other_version_kind_or_count_of_fields_is_rejected(header: Header, wrong: Any) -> None:
    version, kind, *fields = msgpack.unpackb(wire.encode(header))
    for why, packed in (
        ("speaks version", [wrong, kind, *fields]),
        ("unknown kind", [version, wrong, *fields]),
        ("fields of", [version, kind, *fields, wrong]),
        ("fields of|no version and kind", [version, kind, *fields][:-1]),
    ):
        with pytest.raises(BadPayload, match=why):
            wire.decode(msgpack.packb(packed))
    with pytest.raises(BadPayload, match="extra"):
        wire.decode(wire.encode(header) + b"\xc0")


LEAF = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.binary() | st.text()
EXTENSION = st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=8)) | st.just(msgpack.Timestamp(1, 2))
TREE = st.recursive(
    LEAF | EXTENSION, lambda inner: st.lists(inner, max_size=6) | st.dictionaries(LEAF, inner, max_size=3)
)


def cut(header: Header, place: int, length: int, insert: bytes) -> bytes:
    """An encoded header with some of its bytes replaced by others."""
    packed = wire.encode(header)
    start = place % (len(packed) + 1)
    return packed[:start] + insert + packed[start + length :]


any_kind = st.integers(0, max(wire._KINDS))
random_bytes = st.binary(max_size=400)


@given(
    random_bytes
    | st.builds(lambda kind, data: bytes([0x90 | 5, wire.VERSION, kind]) + data, any_kind, random_bytes)
    | st.builds(lambda kind, values: msgpack.packb([wire.VERSION, kind, *values]), any_kind, st.lists(TREE, max_size=8))
    | st.builds(cut, any_header, st.integers(0, 2000), st.integers(0, 8), st.binary(max_size=8))
)
@settings(max_examples=150)
def test_any_bytes_decode_or_raise_bad_payload(data: bytes) -> None:
    check(data)


@pytest.mark.parametrize("depth", [2, 100, 900, *range(985, 1030), 1100, 5000, 60_000])
def test_deep_nesting_is_rejected(depth: int) -> None:
    for nest in (b"\x91", b"\xdc\x00\x01", b"\x81\xc0"):
        deep = nest * (depth if depth * len(nest) < 60_000 else 60_000 // len(nest)) + b"\xc0"
        for data in (b"\x93\x01\x00" + deep, b"\x93" + deep + b"\x00\x00", b"\x93\x01" + deep + b"\xc0", deep):
            assert check(data) is None


@pytest.mark.parametrize(
    "start", [b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9", b"\xdc", b"\xde", b"\xda", b"\xc5", b"\xc8"], ids=bytes.hex
)
def test_huge_declared_lengths_allocate_nothing(start: bytes) -> None:
    tracemalloc.start()
    try:
        for length in (b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\x00\x00\xff\x00", b"\x08\x00\x00\x00"):
            deep = (start + length[-4 if start in b"\xdd\xdf\xdb\xc6\xc9" else -2 :]) * 1000
            for data in (deep, b"\x93\x01\x00" + deep, (b"\x93\x01\x00" + deep).ljust(wire.MAX_HEADER_BYTES, b"\0")):
                assert check(data) is None
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


def test_header_size_is_bounded_both_ways() -> None:
    with pytest.raises(BadPayload, match="more than"):
        wire.decode(bytes(wire.MAX_HEADER_BYTES + 1))
    runs = tuple(wire.ChunkSpan(1 << 32, (1 << 32) - 1) for _ in range(wire.MAX_ITEMS))
    fullest = wire.PartDone(32, 0, wire.PartDigest(bytes(32), runs), b"s" * 128)
    assert wire.decode(wire.encode(fullest)) == fullest
    twice = wire.PartDone(32, 0, wire.PartDigest(bytes(32), runs * 4), b"s" * 128)
    with pytest.raises(ValueError, match="more than"):
        wire.encode(twice)


def test_every_header_of_the_repository_is_registered() -> None:
    texts = (path.read_text() for top in ("node", "protocols") for path in (REPOSITORY / top).rglob("*.py"))
    bases = "Header", "VoteMessage", "ExchangeMessage"
    defined = {name for text in texts for name in re.findall(rf"^class (\w+)\((?:{'|'.join(bases)})\):", text, re.M)}
    assert defined - {*bases, "Record"} <= {kind.__name__ for kind in KINDS}, "a record travels encoded in others"


def test_numbers_and_bounds_never_change() -> None:
    assert golden.table() == golden.FILE.read_text()


@given(key=headers(RoundKey), junk=st.binary(max_size=60) | TREE.map(msgpack.packb))
def test_body_round_trips_or_is_rejected(key: RoundKey, junk: bytes) -> None:
    kind: Any = RoundKey  # no header, but with specs like one
    assert wire.from_canonical_bytes(kind, wire.canonical_bytes(key)) == key
    with pytest.raises(BadPayload):
        wire.from_canonical_bytes(kind, junk)


@dataclasses.dataclass(frozen=True)
class Before:
    """`After` as it was before it gained its last field."""

    size: int = wire.uint(9)


@dataclasses.dataclass(frozen=True)
class After:
    size: int = wire.uint(9)
    names: tuple[str, ...] = wire.last(wire.list_of(wire.text(4), 3), ())


@given(after=headers(After))
def test_last_field_has_one_encoding_and_leaves_older_bytes_alone(after: After) -> None:
    encoded = wire.canonical_bytes(after)
    assert wire.from_canonical_bytes(After, encoded) == after
    if not after.names:
        assert encoded == wire.canonical_bytes(Before(after.size))
    for names in ([], None, [1], ["a", "b", "c", "d"], b"a"):
        with pytest.raises(BadPayload, match=r"After\.names"):
            wire.from_canonical_bytes(After, msgpack.packb([after.size, names]))
    for fields in ([], [after.size, ["a"], ["a"]]):
        with pytest.raises(BadPayload, match="fields of After"):
            wire.from_canonical_bytes(After, msgpack.packb(fields))


@dataclasses.dataclass(frozen=True)
class Unbounded(Header):
    count: int = 0


@dataclasses.dataclass(frozen=True)
class Misplaced(Header):
    names: tuple[str, ...] = wire.last(wire.list_of(wire.text(4), 3), ())
    size: int = wire.optional(wire.uint(9), 1)


def test_mistakes_in_a_new_message_are_named() -> None:
    with pytest.raises(ValueError, match=r"number 1 of Unbounded belongs to \w+; numbers from \d+ on are free"):
        wire.register(1, (Unbounded,))
    with pytest.raises(ValueError, match="JobOutput is registered already"):
        wire.register(max(wire._KINDS) + 1, (JobOutput,))
    with pytest.raises(ValueError, match=r"Unbounded.count has no bounds"):
        wire.register(max(wire._KINDS) + 1, (Unbounded,))
    with pytest.raises(ValueError, match=r"Misplaced.names may be left out, so it must be the last field"):
        wire.register(max(wire._KINDS) + 1, (Misplaced,))
    with pytest.raises(ValueError, match="Unbounded has no number"):
        wire.encode(Unbounded())
