"""Parts and their chunks: where elements are decoded to, and what must stay as it is."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from protocols.allreduce.parts import ReducedPart
from protocols.base import BadPayload, Vector
from protocols.streams.chunks import PartLayout
from protocols.vectors.codec import CODECS
from protocols.vectors.views import VectorView

LOW, HIGH = 4096, 3 * 4096 + 100
CHUNK = 4096
every_codec = pytest.mark.parametrize("name", CODECS)


def encoded_part(name: str) -> tuple[ReducedPart, Vector]:
    """A part of random elements, and the vector that it was made from."""
    vector = torch.randn(HIGH, generator=torch.Generator().manual_seed(1))
    part = ReducedPart(CODECS[name], LOW, HIGH, CHUNK)
    for index in range(part.chunks):
        low, high = part.elements(index)
        part.codec.encode(vector[low:high], part.chunk(index))
    return part, vector


def content(part: ReducedPart) -> list[bytes]:
    return [bytes(part.chunk(index)) for index in range(part.chunks)]


def decoded_to(part: ReducedPart, sizes: Sequence[int]) -> Vector:
    """What the part writes to vectors of these sizes, one after the other."""
    vectors = [torch.full((size,), torch.nan) for size in sizes]
    part.decode(VectorView(vectors))
    return torch.cat(vectors)


@every_codec
def test_part_decodes_alike_into_one_vector_or_many(name: str) -> None:
    part, _ = encoded_part(name)
    before = content(part)
    whole = decoded_to(part, [HIGH])
    assert torch.equal(whole[LOW:], decoded_to(part, [LOW + 7, 500, HIGH - LOW - 507])[LOW:])
    assert whole[:LOW].isnan().all() and whole[LOW:].isfinite().all()
    scratch = part.scratch_vector()
    pieces = [part.decoded(index, scratch).clone() for index in range(part.chunks)]
    assert torch.equal(torch.cat(pieces), whole[LOW:])
    assert content(part) == before


@every_codec
def test_encoded_chunk_is_that_of_the_codec(name: str) -> None:
    """With an in-place codec it is the vector's own memory, which stays as it is."""
    part, vector = encoded_part(name)
    layout, before = PartLayout(CODECS[name], LOW, HIGH, CHUNK), vector.clone()
    buffer = layout.chunk_buffer()
    for index, data in enumerate(content(part)):
        assert bytes(layout.encoded(vector[slice(*layout.elements(index))], buffer(index))) == data
    assert torch.equal(vector, before)
    vector[LOW + 5] = torch.inf
    with pytest.raises(ValueError, match="NaN or infinity"):
        layout.encoded(vector[slice(*layout.elements(0))], buffer(0))


def test_bad_number_in_a_part_is_found_where_it_is() -> None:
    """Also where nothing is copied on the way."""
    part, _ = encoded_part("fp32")
    torch.frombuffer(part.chunk(1), dtype=torch.float32)[3] = torch.nan
    for into in (None, VectorView([torch.empty(HIGH)])):
        with pytest.raises(BadPayload):
            part.decode(into)
    with pytest.raises(BadPayload):
        part.decoded(1, part.scratch_vector())
