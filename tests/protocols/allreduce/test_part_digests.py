"""The digests of reduced parts: bytes that must not change."""

from __future__ import annotations

from protocols.allreduce.parts import chunk_digest, part_digest


def test_part_digests_are_stable() -> None:
    chunks, masks = [bytes(range(256)) * 4, bytes(range(255, -1, -1)) * 4, b"the last"], [7, 7, 3]
    digests = [chunk_digest(mask, memoryview(chunk)) for mask, chunk in zip(masks, chunks, strict=True)]
    golden = "1a02c665cc0c72689466f739543a394d77bacf4194d57ec5724b14fe891fd818"
    assert part_digest(100, 614, masks, digests).digest.hex() == golden


def test_digest_of_a_clustered_chunk_covers_its_members() -> None:
    """The members come before the elements, so that what a holder sends has the same digest."""
    data, members = bytes(range(64)), bytes([3, 0, 0, 0, 1, 0, 0, 0])
    found = chunk_digest(3, memoryview(data), members)
    assert found == chunk_digest(3, members + data)
    assert found not in {chunk_digest(3, data), chunk_digest(3, data, bytes([1, 0, 0, 0, 1, 0, 0, 0]))}
    assert found.hex() == "f54ecac91311461f48e19c62b1e272ec3f4fbe03728ae42aeabad97cb8282f77"
