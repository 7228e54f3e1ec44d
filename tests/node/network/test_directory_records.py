"""Directory records: how they are unpacked and verified, and how many a store keeps."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from pathlib import Path

import msgpack
import pytest
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.utils import MSGPackSerializer
from hypothesis import given
from hypothesis import strategies as st

from node.network.directory_records import MAX_HINTS_PER_KEY, RecordStore, check, loads, name_of, unpack
from node.runtime import identity
from node.runtime.clock import WallClock
from protocols.base import BadPayload
from tests.support.directory_examples import RUN, sealed
from tests.support.variants import variants


def dictionary_of(items: object) -> bytes:
    return msgpack.packb(msgpack.ExtType(0x50, msgpack.packb([1e9, 0.0, items])))


class TestUnpacking:
    def test_dht_values_round_trip(self) -> None:
        found = DictionaryDHTValue()
        found.store("peer", b"value", 1e10)
        assert loads(MSGPackSerializer.dumps(found)) == [("peer", b"value", 1e10)]
        for plain in ("peer", b"value"):
            assert loads(MSGPackSerializer.dumps(plain)) == plain

    @pytest.mark.parametrize(
        "packed",
        [
            *map(MSGPackSerializer.dumps, (None, 1, 1.0, [], [b""], {}, (1, 2), bytes(5000))),
            *map(MSGPackSerializer.dumps, (msgpack.ExtType(0x50, b""), msgpack.ExtType(0x41, b"x"))),
            *map(dictionary_of, ([["p", b"v"]], [["p", "v", 1.0]], [[b"p", b"v", 1.0]], [["p", b"v", float("inf")]])),
            *map(dictionary_of, ([3], 3, [[msgpack.ExtType(0x50, b""), b"v", 1.0]])),
        ],
    )
    def test_other_values_are_rejected(self, packed: bytes) -> None:
        with pytest.raises(ValueError):
            loads(packed)

    @given(st.binary(max_size=300))
    def test_any_bytes_raise_at_most_value_error(self, packed: bytes) -> None:
        for data in (packed, msgpack.packb(msgpack.ExtType(0x50, packed))):
            with suppress(ValueError):
                assert isinstance(loads(data), str | bytes | list)
        with suppress(BadPayload):
            unpack(packed)

    def test_deep_nesting_is_rejected(self) -> None:
        for deep in (b"\x91" * 100_000, b"\x91" * 400, b"\xdd\xff\xff\xff\xff" * 100):
            with pytest.raises(ValueError):
                loads(deep)
            with pytest.raises(BadPayload):
                unpack(deep[:4096])


class TestRecords:
    def test_signature_covers_every_field(self, tmp_path: Path) -> None:
        key, other = identity.create(tmp_path / "key"), identity.create(tmp_path / "other")
        hint, now = sealed(key), WallClock().wall()
        check(unpack(hint.pack()), RUN, now, key)
        for changed in (*variants(hint), dataclasses.replace(hint, peer=other.peer_id)):
            with pytest.raises(BadPayload):
                check(changed, RUN, now, key)
        with pytest.raises(BadPayload):
            check(hint, bytes(32), now, key)

    def test_record_names_do_not_collide(self) -> None:
        assert len({name_of(b"ab", "c"), name_of(b"a", "bc"), name_of(b"", "abc")}) == 3


class TestRecordStore:
    def test_store_size_is_bounded(self) -> None:
        records = RecordStore(lambda: 0.0)
        for key in range(300):
            for peer in range(20):
                records.put(key, f"{key}/{peer}", b"", 100.0)
        assert len(records) == 4096 and len(records._kept) <= 256

    def test_keys_per_peer_are_bounded(self) -> None:
        records = RecordStore(lambda: 0.0)
        assert sum(records.put(key, "greedy", b"", 100.0) for key in range(100)) == 16
        assert records.put(50, "other", b"", 100.0)

    def test_full_key_keeps_and_renews_existing_records(self) -> None:
        now = [0.0]
        records = RecordStore(lambda: now[0])
        honest, strangers = [f"{n}" for n in range(10)], [f"stranger {n}" for n in range(MAX_HINTS_PER_KEY)]
        assert all(records.put("key", peer, b"", 180.0) for peer in honest)
        assert sum(records.put("key", peer, b"", 655.0) for peer in strangers) == MAX_HINTS_PER_KEY - len(honest)
        now[0] = 120.0
        assert all(records.put("key", peer, b"", 300.0) for peer in honest)
        assert not records.put("key", "late", b"", 780.0)
        now[0] = 301.0
        assert records.put("key", "late", b"", 480.0) and len(records) <= MAX_HINTS_PER_KEY
        assert "late" in records.live("key")

    def test_expired_records_are_replaced_and_older_ones_rejected(self) -> None:
        now = [0.0]
        records = RecordStore(lambda: now[0])
        assert records.put("key", "peer", b"new", 20.0)
        assert not records.put("key", "peer", b"old", 10.0)
        assert not records.put("key", "dead", b"", 0.0)
        assert records.live("key")["peer"].value == b"new"
        for key in range(16):
            records.put(key, "greedy", b"", 30.0)
        now[0] = 31.0
        assert records.live("key") == {} and records.put("key", "greedy", b"", 60.0) and len(records) == 1
