"""Encrypted records of a direct connection, and the keys for them. Pure.

A record is a 4-byte big-endian length of its plaintext, the ciphertext, and a 16-byte tag. The length is authenticated
as associated data. A record of length 0 ends a stream. So an attacker on the way can neither read, change, drop,
repeat, reorder nor cut off records without the receiver noticing, except that it can break the connection.

Each direction has its own key. Nonces count records from 0, so no nonce repeats under one key. Both sides contribute a
random nonce to the keys. So a replayed opening yields other keys than the recorded connection had.

Sources: RFC 5116 (AEAD), RFC 5869 (HKDF), NIST SP 800-38D (GCM; section 8.2.1, deterministic nonces), RFC 8439
(ChaCha20-Poly1305), RFC 8446 section 5.5 (how much one key may encrypt).
"""

from __future__ import annotations

import timeit
from dataclasses import dataclass
from functools import cache

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from protocols.base import Buffer, PeerId

RECORD_BYTES = 256 << 10  # largest plaintext of a record
LENGTH_BYTES, TAG_BYTES, NONCE_BYTES, TOKEN_ID_BYTES = 4, 16, 16, 16
OVERHEAD_BYTES = LENGTH_BYTES + TAG_BYTES
AES, CHACHA = "aes-128-gcm", "chacha20-poly1305"
_CIPHERS: dict[str, tuple[type[AESGCM] | type[ChaCha20Poly1305], int]] = {
    AES: (AESGCM, 16),
    CHACHA: (ChaCha20Poly1305, 32),
}
_MAX_RECORDS, _RENEWED_AFTER = 1 << 24, 1 << 21
"""Records under one key: at most, and until no new stream begins under it. At 256 KiB each these are 4 TiB and 512 GiB.
After n blocks of 16 bytes an attacker can tell AES-GCM from noise with a chance of n^2 / 2^129: here 2^-53 and 2^-59.
TLS 1.3 stops at about 2^-57."""
_DOMAIN = b"starling direct 1"


class RecordError(ConnectionError):
    """A record is not what the other side sent, or is longer than allowed. The connection is useless after it."""


class KeySpent(ConnectionError):
    """A key has been used for as many records as it may."""


def token_id(secret: bytes) -> bytes:
    """The public id of a token.

    It follows from the secret, because it is what a peer sends to a port that another peer has named. If that peer
    could choose these bytes, it could choose a command to another program that listens on its machine or network.
    """
    return HKDF(SHA256(), TOKEN_ID_BYTES, None, _DOMAIN + b" token id").derive(secret)


@dataclass(frozen=True, slots=True)
class Handshake:
    cipher: str
    secret: bytes
    client: PeerId
    server: PeerId
    client_nonce: bytes
    server_nonce: bytes

    def key(self, *, of_client: bool) -> bytes:
        """The key for what the client, or the server, sends.

        HKDF-SHA256 of the secret; salt: both nonces; info: domain, cipher, both peer ids, direction.
        """
        names = (self.cipher.encode(), self.client.encode(), self.server.encode())
        direction = b"client" if of_client else b"server"
        info = b"".join(len(part).to_bytes(2, "big") + part for part in (_DOMAIN, *names, direction))
        length = _CIPHERS[self.cipher][1]
        return HKDF(SHA256(), length, self.client_nonce + self.server_nonce, info).derive(self.secret)

    def codecs(self, *, is_client: bool) -> tuple[RecordSealer, RecordOpener]:
        kind, _ = _CIPHERS[self.cipher]
        mine, theirs = self.key(of_client=is_client), self.key(of_client=not is_client)
        return RecordSealer(kind(mine)), RecordOpener(kind(theirs))


class Nonces:
    def __init__(self) -> None:
        self._next = 0

    def take(self) -> bytes:
        """Raises `KeySpent` when as many have been taken as may be used with one key."""
        if self._next >= _MAX_RECORDS:
            raise KeySpent("the connection has carried as many records as its key allows")
        self._next += 1
        return (self._next - 1).to_bytes(12, "big")

    @property
    def needs_rekey(self) -> bool:
        return self._next >= _RENEWED_AFTER


class RecordSealer:
    def __init__(self, cipher: AESGCM | ChaCha20Poly1305) -> None:
        self.nonces = Nonces()
        self._cipher = cipher

    def seal(self, data: Buffer, into: memoryview) -> int:
        """Write the record of `data`, at most `RECORD_BYTES` bytes, into `into`. Returns the record's size."""
        size = len(data)
        head = size.to_bytes(LENGTH_BYTES, "big")
        into[:LENGTH_BYTES] = head
        end = size + OVERHEAD_BYTES
        self._cipher.encrypt_into(self.nonces.take(), data, head, into[LENGTH_BYTES:end])
        return end


class RecordOpener:
    """Decrypts the records of one direction, which must come in the order in which they were sealed."""

    def __init__(self, cipher: AESGCM | ChaCha20Poly1305) -> None:
        self.nonces = Nonces()
        self._cipher = cipher

    @staticmethod
    def length(head: Buffer) -> int:
        """The plaintext's length, from a record's first 4 bytes. It is authentic only when `open` has succeeded."""
        size = int.from_bytes(head, "big")
        if size > RECORD_BYTES:
            raise RecordError(f"a record of {size} bytes, where at most {RECORD_BYTES} are allowed")
        return size

    def open(self, record: memoryview, into: memoryview) -> None:
        """Decrypt a whole record into `into`, which has the plaintext's length and may be the ciphertext's memory.

        `RecordError` if it is not the next record that the other side sealed. `into` then holds no usable data.
        """
        try:
            self._cipher.decrypt_into(self.nonces.take(), record[LENGTH_BYTES:], bytes(record[:LENGTH_BYTES]), into)
        except InvalidTag:
            raise RecordError("a record was changed, repeated, or left out on the way") from None


@cache
def has_fast_aes() -> bool:
    """Whether AES-GCM is faster than ChaCha20-Poly1305 on this machine. Takes about 2 ms, once."""
    data, into = bytes(RECORD_BYTES), memoryview(bytearray(RECORD_BYTES + TAG_BYTES))

    def seconds(name: str) -> float:
        kind, length = _CIPHERS[name]
        cipher = kind(bytes(length))
        return min(timeit.repeat(lambda: cipher.encrypt_into(bytes(12), data, b"", into), number=1, repeat=5))

    return seconds(AES) <= seconds(CHACHA)


def choose_cipher(fast_aes_here: bool, fast_aes_there: bool) -> str:
    return AES if fast_aes_here and fast_aes_there else CHACHA


def is_known(cipher: str) -> bool:
    return cipher in _CIPHERS
