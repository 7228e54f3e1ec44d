"""The chain's records: each has one encoding and one lineage, and states its contributors."""

from __future__ import annotations

import itertools
import struct
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.base import BadPayload, Contribution, LinkFault, Member
from protocols.consensus import record as records
from protocols.consensus.messages import MAX_RECORD_BYTES
from protocols.consensus.record import ClusterDigest, Kind, Record
from protocols.wire import MAX_ROSTER, ChunkSpan, PartDigest
from tests.support.variants import variants
from tests.support.wire_examples import headers, places

RECORD = Record(
    parent=b"p" * 32,
    state_root=b"s" * 32,
    round=7,
    kind=Kind.MEAN,
    plan=b"d" * 32,
    parts=(PartDigest(b"1" * 32, (ChunkSpan(2, 3), ChunkSpan(1, 1))), PartDigest(b"2" * 32, ())),
    roster=(Member("anna"), Member("bert", 2)),
)

BOUNDS = (0, 10, 10, 25)
PARTS = (
    PartDigest(b"1" * 32, (ChunkSpan(2, 0b011), ChunkSpan(1, 0b001))),  # [0, 4) [4, 8) [8, 10)
    PartDigest(b"2" * 32, ()),
    PartDigest(b"3" * 32, (ChunkSpan(1, 0b010), ChunkSpan(3, 0b011))),  # [10, 14) [14, 18) [18, 22) [22, 25)
)


def wide(value: Any, path: tuple[int, ...]) -> bytes:
    """msgpack of `value`, but what lies at `path` takes a longer form than it needs."""
    if not path:
        if isinstance(value, int):
            return b"\xd3" + struct.pack(">q", value)
        if isinstance(value, bytes):
            return b"\xc6" + struct.pack(">I", len(value)) + value
        if isinstance(value, str):
            return b"\xdb" + struct.pack(">I", len(value.encode())) + value.encode()
        return b"\xdd" + struct.pack(">I", len(value)) + b"".join(msgpack.packb(item) for item in value)
    head, *rest = path
    items = [wide(item, tuple(rest)) if index == head else msgpack.packb(item) for index, item in enumerate(value)]
    return bytes(msgpack.Packer().pack_array_header(len(value))) + b"".join(items)


@pytest.mark.parametrize(
    ("bounds", "tiled"),
    [
        (BOUNDS, True),
        ((0, 0, 25, 25), True),
        ((), False),
        ((0, 25), False),
        ((0, 10, 10, 10, 25), False),
        ((1, 10, 10, 25), False),
        ((0, 10, 10, 24), False),
        ((0, 10, 10, 26), False),
        ((0, 30, 10, 25), False),
        ((0, 10, 9, 25), False),
    ],
)
def test_parts_must_tile_the_vector_in_order(bounds: tuple[int, ...], tiled: bool) -> None:
    assert replace(RECORD, parts=PARTS, bounds=bounds).tiles(25) is tiled


def test_record_without_clusters_keeps_its_bytes() -> None:
    """Chains from before records had the field go on: the lineage names the bytes."""
    whole = replace(RECORD, parts=PARTS, bounds=BOUNDS, peers=("anna", "bert"))
    golden = "9b5fa68adbd603baf45686be41c070439d87784bdea3ce8fbed3598b8f540ab6"
    assert records.lineage(records.encode(whole)).hex() == golden
    clustered = replace(whole, clusters=(ClusterDigest(b"c" * 32, 31), ClusterDigest(b"d" * 32, 1)))
    assert records.decode(records.encode(clustered)) == clustered
    assert (whole.contributors, clustered.contributors) == (2, 32)


def test_largest_clustered_record_fits_beside_its_votes() -> None:
    peers = tuple("12D3KooW" + f"{index:044}" for index in range(MAX_ROSTER))
    runs = tuple(ChunkSpan(1 << 20, (1 << 32) - 1 - index) for index in range(8))
    largest = replace(
        RECORD,
        parts=(PartDigest(b"1" * 32, runs),) * MAX_ROSTER,
        roster=tuple(Member(peer, 1 << 40) for peer in peers),
        peers=peers,
        bounds=(1 << 47,) * (MAX_ROSTER + 1),
        complaints=(LinkFault(peers[0], peers[1], 1 << 40),) * MAX_ROSTER,
        clusters=(ClusterDigest(b"c" * 32, MAX_ROSTER),) * MAX_ROSTER,
    )
    assert len(records.encode(largest)) <= 14_000 < MAX_RECORD_BYTES


# -- form -------------------------------------------------------------------------------------------------------------


@given(record=headers(Record))
def test_record_round_trips(record: Record) -> None:
    encoded = records.encode(record)
    assert records.decode(encoded) == record
    assert records.encode(records.decode(encoded)) == encoded


@given(record=headers(Record), data=st.data())
def test_non_canonical_encoding_is_rejected(record: Record, data: st.DataObject) -> None:
    unpacked = msgpack.unpackb(records.encode(record))
    path = data.draw(st.sampled_from([(), *places(unpacked)]))
    other = wide(unpacked, path)
    assert msgpack.unpackb(other) == unpacked
    with pytest.raises(BadPayload, match="canonical"):
        records.decode(other)


@given(record=headers(Record), cut=st.integers(1, 10_000), more=st.binary(min_size=1, max_size=4))
def test_truncated_or_extended_record_is_rejected(record: Record, cut: int, more: bytes) -> None:
    encoded = records.encode(record)
    for bad in (encoded[: -min(cut, len(encoded))], encoded + more, more + encoded):
        with pytest.raises(BadPayload):
            records.decode(bad)


@given(place=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_flipped_bit_is_rejected_or_changes_the_lineage(place: int, bit: int) -> None:
    encoded = bytearray(records.encode(RECORD))
    encoded[place % len(encoded)] ^= 1 << bit
    try:
        other = records.decode(bytes(encoded))
    except BadPayload:
        return
    assert other != RECORD and records.lineage(bytes(encoded)) != records.lineage(records.encode(RECORD))


# -- names ------------------------------------------------------------------------------------------------------------


def test_every_field_changes_the_lineage() -> None:
    others = list(variants(RECORD))
    names = {records.lineage(records.encode(each)) for each in (RECORD, *others)}
    assert len(names) == len(others) + 1 > 15
    assert {len(name) for name in names} == {32}


def test_genesis_differs_per_run_and_from_records() -> None:
    assert records.genesis(b"a" * 32) != records.genesis(b"b" * 32)
    assert records.genesis(b"a" * 32) != records.lineage(b"a" * 32)


def test_coordinator_order_depends_on_lineage_and_peers_only() -> None:
    names = ("anna", "bert", "cleo", "dora")
    roster = [Member(peer, incarnation) for incarnation, peer in enumerate(names)]
    by_roster = {records.coordinators(b"7" * 32, each) for each in itertools.permutations(roster)}
    assert by_roster == {("dora", "anna", "cleo", "bert")}
    by_lineage = [records.coordinators(bytes([line]) * 32, roster) for line in range(64)]
    assert all(sorted(order) == list(names) for order in by_lineage)
    assert all({order[place] for order in by_lineage} == set(names) for place in range(4)), "each member's turn comes"


def test_coordinator_order_survives_a_departure() -> None:
    roster = [Member(f"p{index}") for index in range(9)]
    order = records.coordinators(bytes(32), roster)
    assert records.coordinators(bytes(32), roster[1:]) == tuple(peer for peer in order if peer != "p0")


# -- contributors -----------------------------------------------------------------------------------------------------


def test_contributions_count_chunks() -> None:
    assert records.contributions(("anna", "bert", "cleo"), PARTS) == {
        "anna": Contribution(6, 7),
        "bert": Contribution(6, 7),
        "cleo": Contribution(0, 7),
    }
    assert list(records.contributions(("bert", "anna"), PARTS)) == ["bert", "anna"]


@given(every=st.lists(st.lists(st.integers(0, 7), max_size=40), min_size=1, max_size=6))
def test_contributions_match_the_masks(every: list[list[int]]) -> None:
    parts = [
        PartDigest(bytes(32), tuple(ChunkSpan(len(list(group)), each) for each, group in itertools.groupby(masks)))
        for masks in every
    ]
    chunks = [mask for masks in every for mask in masks]
    for bit, peer in enumerate("abc"):
        missing = sum(not mask & (1 << bit) for mask in chunks)
        assert records.contributions("abc", parts)[peer] == Contribution(len(chunks) - missing, len(chunks))
