"""Snapshots: an index that makes the state root, chunks that can be checked one by one, and what is kept of them."""

from __future__ import annotations

import gc
import hashlib
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch

from node.storage.buffers import FileBuffer, outer_buffer
from protocols.base import CHUNK_BYTES, BadPayload, Member, Vector
from protocols.history.chain import Chain, state_root
from protocols.registry import CHUNK_ELEMENTS
from protocols.sync.snapshot import Snapshot, SnapshotIndex, Snapshots
from protocols.vectors.views import chunk_digests, root, root_of
from tests.support.fake_rounds import RUN, line

SIZES = (1, 7, CHUNK_ELEMENTS - 1, CHUNK_ELEMENTS, CHUNK_ELEMENTS + 1, 3 * CHUNK_ELEMENTS)


def vectors(elements: int, seed: int = 1) -> tuple[Vector, Vector]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(elements, generator=generator), torch.randn(elements, generator=generator)


def made(elements: int = 10, round_number: int = 0, lineage: bytes = b"l" * 32) -> Snapshot:
    parameters, velocity = vectors(elements)
    snapshot = Snapshot(lineage, round_number, SnapshotIndex.of(parameters, velocity))
    snapshot.fill(parameters, velocity)
    return snapshot


@pytest.mark.parametrize("elements", SIZES)
def test_root_follows_from_the_digests(elements: int) -> None:
    parameters, velocity = vectors(elements)
    assert root_of([(elements, chunk_digests(parameters))]) == root([parameters])
    index = SnapshotIndex.of(parameters, velocity)
    assert index.parameters_root == root([parameters])
    assert index.state_root(7) == state_root(root([parameters]), root([velocity]), 7) != index.state_root(8)


@pytest.mark.parametrize("elements", SIZES)
def test_chunks_match_the_digests_of_the_index(elements: int) -> None:
    snapshot = made(elements)
    digests = snapshot.index.digests
    assert [hashlib.sha256(snapshot.chunk(index)).digest() for index in range(len(digests))] == list(digests)
    assert [snapshot.index.size(index) for index in range(len(digests))] == [
        len(snapshot.chunk(index)) for index in range(len(digests))
    ]
    assert max(map(snapshot.index.size, range(len(digests)))) <= CHUNK_BYTES
    for bad in (-1, len(digests), 1 << 32):
        with pytest.raises(BadPayload, match="of a snapshot of"):
            snapshot.chunk(bad)


@pytest.mark.parametrize("elements", SIZES)
@pytest.mark.parametrize("place", ["memory", "disk"])
def test_snapshot_is_rebuilt_from_index_and_chunks(elements: int, place: str, tmp_path: Path) -> None:
    snapshot = made(elements)
    packed = snapshot.index.pack()
    assert len(packed) == SnapshotIndex.packed_bytes(elements)
    index = SnapshotIndex.unpack(elements, packed)
    assert index == snapshot.index
    make_buffer = partial(outer_buffer, tmp_path / "outer.safetensors", [elements], snapshot.round, snapshot.lineage)
    again = Snapshot(snapshot.lineage, snapshot.round, index, None if place == "memory" else make_buffer())
    assert again.fresh
    for number in range(len(index.digests)):
        again.put(number, snapshot.chunk(number))
    found, expected = ([torch.empty(elements) for _ in range(2)] for _ in range(2))
    again.copy(*found)
    snapshot.copy(*expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    if place == "disk":  # who comes back finds what is there already, and only that
        later = Snapshot(snapshot.lineage, snapshot.round, index, make_buffer())
        assert not later.fresh and later.chunk(0) == snapshot.chunk(0)
        assert outer_buffer(tmp_path / "outer.safetensors", [elements], snapshot.round + 1, snapshot.lineage).fresh


def test_buffer_stays_readable_after_unlink(tmp_path: Path) -> None:
    buffer = FileBuffer(tmp_path / "file", b"header", 10)
    buffer.write(3, b"abc")
    (tmp_path / "file").unlink()
    held = bytearray(4)
    buffer.read(2, memoryview(held))
    assert held == b"\0abc"
    with pytest.raises(OSError, match="was replaced"):
        (tmp_path / "file").write_bytes(b"header")
        FileBuffer(tmp_path / "file", b"header", 10, there=True)
    assert (tmp_path / "file").read_bytes() == b"header"


def test_index_of_another_size_is_rejected() -> None:
    packed = made().index.pack()
    for bad in (b"", packed[:-1], packed + b"\x00", packed * 2):
        with pytest.raises(BadPayload, match="an index of"):
            SnapshotIndex.unpack(10, bad)


def test_snapshot_is_independent_of_its_source() -> None:
    parameters, velocity = vectors(10)
    snapshot = Snapshot(b"l" * 32, 0, SnapshotIndex.of(parameters, velocity))
    snapshot.fill(parameters, velocity)
    before = bytes(snapshot.chunk(0)), bytes(snapshot.chunk(1))
    parameters.zero_(), velocity.zero_()
    assert (bytes(snapshot.chunk(0)), bytes(snapshot.chunk(1))) == before


def test_last_two_snapshots_are_kept_and_others_freed() -> None:
    snapshots, gone = Snapshots(), []
    for number in (0, 4, 12, 8):
        snapshot = made(round_number=number, lineage=bytes([number]) * 32)
        gone.append(weakref.ref(snapshot))
        snapshots.put(snapshot)
    del snapshot
    gc.collect()
    assert [each.round for each in snapshots.held()] == [12, 8]
    assert [each.lineage for each in snapshots.held()] == [bytes([12]) * 32, bytes([8]) * 32]
    assert [ref() is None for ref in gone] == [True, True, False, False]
    assert snapshots.get(bytes([4]) * 32) is None and snapshots.get(bytes([8]) * 32) is not None
    snapshots.put(made(round_number=8, lineage=bytes([8]) * 32))
    assert len(snapshots.held()) == 2


def test_snapshots_of_abandoned_branch_are_dropped() -> None:
    chain, snapshots = Chain(RUN, "run", tuple(Member(name) for name in ("anna", "bert", "cleo"))), Snapshots(keep=4)
    start = chain.head
    chain.switch(start.key.lineage, line(start, 3))
    for lineage in (start.key.lineage, chain.head.key.lineage):
        snapshots.put(made(lineage=lineage))
    chain.switch(start.key.lineage, line(start, 2, plan=b"e" * 32))
    snapshots.prune(chain)
    assert [each.lineage for each in snapshots.held()] == [start.key.lineage]
