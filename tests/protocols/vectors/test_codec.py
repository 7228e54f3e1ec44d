"""Codecs: the error bound holds for all floats, and no bytes decode to NaN or infinity."""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.base import BadPayload, Vector
from protocols.vectors.codec import CODECS, Codec, codec
from tests.golden import codecs as golden
from tests.support.codecs import LARGEST, bits, decoded, encoded, error_bound

EDGES = [0.0, -0.0, 2**-149, -(2**-149), 2**-126, 65504.0, 65519.9, 65520.0, 3.3895e38, 3.3961775e38, LARGEST, -LARGEST]
SIDES = CODECS | {side.name: side for side in (codec("topk").reduced(members) for members in (1, 3))}
every_codec = pytest.mark.parametrize("each", SIDES.values(), ids=SIDES)
finite = st.floats(width=32, allow_nan=False, allow_infinity=False) | st.sampled_from(EDGES)


@st.composite
def vectors(draw: st.DrawFn) -> Vector:
    """Up to three blocks of int8, most of it one value, with adversarial elements sown in."""
    size = draw(st.sampled_from([0, 1, 2, 127, 128, 129, 256, 300]))
    vector = torch.full((size,), draw(finite))
    for value in draw(st.lists(finite, max_size=12)) if size else []:
        vector[draw(st.integers(0, size - 1))] = value
    return vector


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@every_codec
@settings(max_examples=50)
@given(vector=vectors())
def test_encoding_once_and_again_stays_within_bounds(each: Codec, vector: Vector) -> None:
    before = bits(vector)
    once = decoded(each, encoded(each, vector), len(vector))
    twice = decoded(each, encoded(each, once), len(vector))
    for source, result in ((vector, once), (once, twice)):
        bound = error_bound(each, source)
        assert result.isfinite().all() and bound.isfinite().all()
        assert ((result.double() - source.double()).abs() <= bound.double()).all()
    assert bits(vector) == before
    if each.name not in ("int8", "int4", "topk of 1", "topk of 3"):  # their scales are computed anew
        assert bits(twice) == bits(once)


@every_codec
@settings(max_examples=50)
@given(size=st.integers(1, 300), random=st.randoms(use_true_random=False), tame=st.booleans())
def test_random_bytes_of_correct_size_are_decoded_safely(each: Codec, size: int, random: Random, tame: bool) -> None:
    data = bytearray(random.randbytes(each.encoded_bytes(size)))
    if tame and each.name in ("int8", "int4", "e3m0"):  # random scales are mostly rejected: use good ones too
        scales = -(-size // 128)
        struct.pack_into(f"<{scales}f", data, 0, *[random.uniform(0, 2.6e36) for _ in range(scales)])
    with suppress(BadPayload):
        assert decoded(each, data, size).isfinite().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@every_codec
def test_non_finite_input_is_rejected_at_any_position(each: Codec, bad: float) -> None:
    for size in (1, 8, 129, 333):
        for at in {0, 1, 5, size // 2, size - 2, size - 1} & set(range(size)):
            vector = torch.ones(size)
            vector[at] = bad
            with pytest.raises(ValueError, match="NaN or infinity"):
                encoded(each, vector)


@pytest.mark.parametrize("name, word", [("fp32", "<f"), ("fp16", "<e"), ("bf16", None)])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_decoder_rejects_non_finite_values(name: str, word: str | None, bad: float) -> None:
    each = codec(name)
    data = encoded(each, torch.ones(201))
    unit = struct.pack(word, bad) if word else struct.pack("<f", bad)[2:]
    for at in (0, 7, 200):
        bent = bytearray(data)
        bent[at * len(unit) : (at + 1) * len(unit)] = unit
        with pytest.raises(BadPayload, match="NaN or infinity"):
            decoded(each, bent, 201)


@every_codec
def test_encoded_sizes_are_known_and_enforced(each: Codec) -> None:
    per_element = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1, "int4": 0.5, "e3m0": 0.5}.get(each.name)
    for size in (0, 1, 127, 128, 129, 262_144):
        scales = -(-size // 128) * 4 if each.name in ("int8", "int4", "e3m0") else 0
        total = each.encoded_bytes(size)
        assert per_element is None or total == math.ceil(size * per_element) + scales
        vector, held = torch.ones(size), bytearray(total + 1)
        with pytest.raises(ValueError, match=f"takes {total} bytes"):
            each.encode(vector, memoryview(held))
        with pytest.raises(BadPayload, match=f"takes {total}"):
            each.decode(held, vector)
    assert codec("int8").encoded_bytes(262_144) <= 0.27 * 4 * 262_144


@every_codec
def test_any_buffer_at_any_offset_is_accepted(each: Codec) -> None:
    vector = golden.ordinary()[:1000]
    want = encoded(each, vector)
    back = bits(decoded(each, want, 1000))
    with mmap.mmap(-1, len(want) + 3) as mapped:
        for held in (bytearray(len(want) + 3), mapped):
            with memoryview(held) as view, view[3:] as into:
                each.encode(vector, into)
                assert into == want
                assert bits(decoded(each, into, 1000)) == back
    assert bits(decoded(each, bytes(want), 1000)) == back
    with pytest.raises(ValueError, match="read-only"):
        each.encode(vector, memoryview(bytes(want)))


@every_codec
def test_only_flat_float_vectors_are_encoded(each: Codec) -> None:
    good = torch.ones(8)
    for bad in (good.double(), good.view(2, 4), good[::2], good.clone().requires_grad_()):
        with pytest.raises(ValueError, match="a vector is"):
            encoded(each, bad)
        with pytest.raises(ValueError, match="a vector is"):
            each.decode(bytes(each.encoded_bytes(len(bad))), bad)


def test_bits_do_not_depend_on_thread_count() -> None:
    runs = []
    for count in (1, 2):
        with threads(count):
            runs.append(golden.digests())
    assert runs[0] == runs[1] == json.loads(golden.FILE.read_text())


def test_unknown_codec_error_lists_known_codecs() -> None:
    assert codec("int8") is CODECS["int8"]
    with pytest.raises(ValueError) as raised:
        codec("int-8")
    known = "there are fp32, fp16, bf16, int8, int4, e3m0, topk"
    assert str(raised.value) == f"unknown codec 'int-8': {known}; did you mean 'int8'?"
