"""Directory records: signed, short-lived announcements of peers in the DHT, and the store that keeps them. No I/O."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgpack

from protocols.base import BadPayload, PeerId, Signer

HINT_BYTES = 4096  # largest size of a packed record
TTL_SECONDS = 600.0
_SKEW_SECONDS = 60.0
_SCOPE_BYTES = 128
_DOMAIN = b"starling/hint/1\0"
_BOUNDS = {"max_str_len": 128, "max_bin_len": HINT_BYTES, "max_array_len": 5, "max_map_len": 0, "max_ext_len": 0}

_DICTIONARY = 0x50  # hivemind's extension: [size, latest expiry, [[peer, value, expiry], ...]]
_MAX_KEYS = 256
_MAX_KEYS_PER_PEER = 16
_MAX_HINTS = 4096
MAX_HINTS_PER_KEY = 128
_PACKED = {"max_str_len": 256, "max_bin_len": HINT_BYTES + 8, "max_array_len": MAX_HINTS_PER_KEY, "max_map_len": 0}


def name_of(run: bytes, scope: str) -> bytes:
    return hashlib.sha256(_DOMAIN + len(run).to_bytes(4, "big") + run + scope.encode()).digest()


@dataclass(frozen=True, slots=True)
class DirectoryRecord:
    peer: PeerId
    scope: str
    expires: float
    value: bytes = field(repr=False)
    signature: bytes = field(default=b"", repr=False)

    def message(self, run: bytes) -> bytes:
        fields: bytes = msgpack.packb([run, self.scope, self.peer, self.expires, self.value])
        return _DOMAIN + fields

    def pack(self) -> bytes:
        """Encode the record; ValueError if it is over 4 KiB, or its scope over 128 bytes."""
        packed: bytes = msgpack.packb([self.peer, self.scope, self.expires, self.value, self.signature])
        if len(packed) > HINT_BYTES or len(self.scope.encode()) > _SCOPE_BYTES:
            raise ValueError(f"the record ({len(packed)} bytes) or its scope is too long: at most 4 KiB and 128 bytes")
        return packed


def unpack(packed: bytes) -> DirectoryRecord:
    """The signature is not checked."""
    if len(packed) > HINT_BYTES:
        raise BadPayload("a record that is too large")
    try:
        fields = msgpack.unpackb(packed, raw=False, **_BOUNDS)
    except (ValueError, msgpack.UnpackException):
        raise BadPayload("not a directory record") from None
    if not isinstance(fields, list) or [type(each) for each in fields] != [str, str, float, bytes, bytes]:
        raise BadPayload("not a directory record")
    return DirectoryRecord(*fields)


def check(hint: DirectoryRecord, run: bytes, now: float, signer: Signer) -> None:
    if not math.isfinite(hint.expires) or hint.expires > now + TTL_SECONDS + _SKEW_SECONDS:
        raise BadPayload("a record that is valid for too long")
    if hint.expires <= now:
        raise BadPayload("a record that has expired")
    if not signer.verify(hint.peer, hint.message(run), hint.signature):
        raise BadPayload("a record that is not signed by its peer")


def loads(packed: bytes) -> str | bytes | list[tuple[str, bytes, float]]:
    """Decode a value of hivemind's DHT: a string, bytes, or a dictionary as (peer, value, expiry); else ValueError."""
    found = msgpack.unpackb(packed, raw=False, **_PACKED)  # leaves extensions undecoded
    if isinstance(found, str | bytes):
        return found
    if not isinstance(found, msgpack.ExtType) or found.code != _DICTIONARY:
        raise ValueError(f"a {type(found).__name__} is not allowed in this DHT")
    match msgpack.unpackb(found.data, raw=False, **_PACKED):
        case [_, _, [*entries]] if all(map(_is_entry, entries)):
            return [(peer, value, expires) for peer, value, expires in entries]
    raise ValueError("not a dictionary of entries")


def _is_entry(item: object) -> bool:
    is_triple = isinstance(item, list) and [type(each) for each in item] == [str, bytes, float]
    return is_triple and math.isfinite(item[2])  # type: ignore[index]


class StoredValue(NamedTuple):
    value: bytes
    expires: float


class RecordStore:
    """Values by key and peer, until they expire. All numbers are bounded, but not the length of one value."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._kept: dict[Hashable, dict[PeerId, StoredValue]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._kept.values()))

    def put(self, key: Hashable, peer: PeerId, value: bytes, expires: float) -> bool:
        """Store a value if it expires later than the one that it replaces, and no limit is reached.

        A full store never evicts a live value for a new peer's: attackers could take all places with later expiries.
        """
        old = self._kept.get(key, {}).get(peer)
        if expires <= self._now() or (old is not None and old.expires >= expires):
            return False
        if old is None and not self._has_room(key, peer):
            self._sweep()
            if not self._has_room(key, peer):
                return False
        self._kept.setdefault(key, {})[peer] = StoredValue(value, expires)
        return True

    def live(self, key: Hashable) -> Mapping[PeerId, StoredValue]:
        now = self._now()
        return {peer: entry for peer, entry in self._kept.get(key, {}).items() if entry.expires > now}

    def _has_room(self, key: Hashable, peer: PeerId) -> bool:
        here = self._kept.get(key, {})
        if len(here) >= MAX_HINTS_PER_KEY or sum(peer in kept for kept in self._kept.values()) >= _MAX_KEYS_PER_PEER:
            return False
        return len(self) < _MAX_HINTS and (bool(here) or len(self._kept) < _MAX_KEYS)

    def _sweep(self) -> None:
        self._kept = {key: live for key in self._kept if (live := dict(self.live(key)))}
