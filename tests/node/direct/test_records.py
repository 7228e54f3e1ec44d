"""Keys and records by known answers, and what an attacker on the way can do: end a connection, and nothing else."""

from __future__ import annotations

import asyncio
import hmac
import socket
from typing import Any

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305
from hypothesis import example, given
from hypothesis import strategies as st

from node.direct import records
from node.direct.connection import DirectConnection
from node.direct.records import AES, CHACHA, RECORD_BYTES, KeySpent, RecordError, RecordSealer, choose_cipher, token_id
from tests.support.direct_connections import connected, handshake

AEAD = {AES: (AESGCM, 16), CHACHA: (ChaCha20Poly1305, 32)}
KEYS = {
    (AES, "client"): "b1e192831d43569c5e559e3b3e8457df",
    (AES, "server"): "17c57d57093a84f6b807905de1ac556b",
    (CHACHA, "client"): "bf0343c181cb6b2ac74b1d82fa5d7867d35f60e344b1a34f5c1978b311fac2c7",
    (CHACHA, "server"): "c44ef2a7401455f42e07e51737f24b5ef253ca228ef714b571e44ce5bc9cd117",
}
RECORDS = {
    AES: ("00000008f1d9158e98c441341c73f27f9a2cc0bd3d30b6fb48ed7148", "00000000d228133751a9ccd5af6ba03d3c9420ad"),
    CHACHA: ("0000000801a2a0b28430c6797a3c443607bc1fbec7d99090ee6e7632", "0000000069f0c58687ac784324114027a0fe6a97"),
}
"""What a client sends first: `starling`, and the end of the stream."""


def hkdf(secret: bytes, salt: bytes, info: bytes, length: int) -> bytes:
    """RFC 5869 with SHA-256, of at most one block."""
    return hmac.digest(hmac.digest(salt, secret, "sha256"), info + b"\x01", "sha256")[:length]


@pytest.mark.parametrize("cipher, side", KEYS)
def test_keys_are_hkdf_of_both_nonces(cipher: str, side: str) -> None:
    parts = (b"starling direct 1", cipher.encode(), b"12D3KooWClient", b"12D3KooWServer", side.encode())
    info = b"".join(len(part).to_bytes(2, "big") + part for part in parts)
    known = bytes.fromhex(KEYS[cipher, side])
    assert hkdf(bytes(range(32)), bytes(range(0x40, 0x60)), info, AEAD[cipher][1]) == known
    assert handshake(cipher).key(of_client=side == "client") == known


def test_token_id_follows_from_the_secret() -> None:
    known = bytes.fromhex("541ee00b3ad8f38cf69d879b47e095ea")
    assert hkdf(bytes(range(32)), bytes(32), b"starling direct 1 token id", 16) == known == token_id(bytes(range(32)))


@pytest.mark.parametrize("cipher", RECORDS)
def test_records_are_known(cipher: str) -> None:
    sealer, _ = handshake(cipher).codecs(is_client=True)
    _, opener = handshake(cipher).codecs(is_client=False)
    aead: Any = AEAD[cipher][0](bytes.fromhex(KEYS[cipher, "client"]))
    for count, (plain, known) in enumerate(zip((b"starling", b""), map(bytes.fromhex, RECORDS[cipher]), strict=True)):
        head, memory = len(plain).to_bytes(4, "big"), memoryview(bytearray(64))
        assert memory[: sealer.seal(plain, memory)] == known
        assert known == head + aead.encrypt(count.to_bytes(12, "big"), plain, head)
        opener.open(memory[: len(known)], memory[4 : 4 + len(plain)])  # in place
        assert memory[4 : 4 + len(plain)] == plain


def test_key_has_a_last_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_MAX_RECORDS", 3)
    monkeypatch.setattr(records, "_RENEWED_AFTER", 2)
    sealer, worn = handshake().codecs(is_client=True)[0], []
    with pytest.raises(KeySpent):
        for _ in range(4):
            sealer.seal(b"", memoryview(bytearray(20)))
            worn.append(sealer.nonces.needs_rekey)
    assert worn == [False, True, True]


def test_chacha_is_chosen_unless_aes_is_fast_for_both() -> None:
    assert [choose_cipher(a, b) for a in (True, False) for b in (True, False)] == [AES, CHACHA, CHACHA, CHACHA]


# -- over a pair of sockets -------------------------------------------------------------------------------------------

SIZES = st.one_of(st.integers(0, 300), st.sampled_from([RECORD_BYTES + more for more in (-1, 0, 1)]))


def pattern(size: int) -> bytes:
    return (bytes(range(251)) * (size // 251 + 1))[:size]


@given(st.sampled_from([AES, CHACHA]), st.lists(SIZES, max_size=12), st.lists(SIZES, max_size=12))
@example(AES, [3 * RECORD_BYTES + 5], [1, RECORD_BYTES, 1])
def test_any_split_of_writes_and_reads_gives_the_same_bytes(cipher: str, writes: list[int], reads: list[int]) -> None:
    data = pattern(sum(writes))

    async def main() -> bytes:
        a, b = connected(cipher)

        async def send() -> None:
            done = 0
            for size in writes:
                await a.write(data[done : done + size])
                done += size
            await a.end()

        got, sending = bytearray(), asyncio.create_task(send())
        for size in [*reads, len(data)]:
            part = bytearray(min(size, len(data) - len(got)))
            await b.read_into(memoryview(part))
            got += part
        with pytest.raises(EOFError, match="the peer is done"):
            await b.read_into(memoryview(bytearray(1)))
        await sending
        for end in (a, b):
            end.abort()
        return bytes(got)

    assert asyncio.run(main()) == data


def sealed(sealer: RecordSealer, *plain: bytes) -> list[bytes]:
    memory = memoryview(bytearray(64))
    return [bytes(memory[: sealer.seal(each, memory)]) for each in plain]


async def received(wire: bytes, at_once: int, cipher: str = AES) -> tuple[bytes, Exception]:
    """What a server gives out of these bytes, and the error after it, which stays once a record was not genuine."""
    end, far = socket.socketpair()
    end.setblocking(False)
    far.sendall(wire)
    far.shutdown(socket.SHUT_WR)
    connection, got = DirectConnection(end, handshake(cipher).codecs(is_client=False)), bytearray()
    try:
        while True:
            part = bytearray(at_once)
            await connection.read_into(memoryview(part))
            got += part
    except (OSError, EOFError) as error:
        if isinstance(error, RecordError):
            assert connection.closed and connection.failure is error
            with pytest.raises(ConnectionError):
                await connection.read_into(memoryview(bytearray(1)))
        return bytes(got), error
    finally:
        connection.abort()
        far.close()


PLAIN = [b"first", b"second one", b"3rd"]


@given(st.data())
def test_changed_records_are_never_given_out(data: st.DataObject) -> None:
    mine = sealed(handshake().codecs(is_client=True)[0], *PLAIN, b"")
    theirs = sealed(handshake().codecs(is_client=False)[0], *(each.upper() for each in PLAIN))
    index, other = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 2))
    how = data.draw(st.sampled_from(["drop", "repeat", "swap", "reflect", "insert"]))
    changed = list(mine)
    if how == "drop":
        del changed[index]
    elif how == "repeat":
        changed.insert(data.draw(st.integers(index + 1, 4)), mine[index])
    elif how == "swap":
        changed[index], changed[other] = changed[other], changed[index]
    elif how == "reflect":
        changed[index] = theirs[other]
    else:
        changed.insert(index, data.draw(st.binary(min_size=24, max_size=40).map(lambda tail: bytes(3) + tail)))
    got, error = asyncio.run(received(b"".join(changed), data.draw(st.sampled_from([1, 3]))))
    assert b"".join(PLAIN).startswith(got)
    if how == "drop" and index == 3:
        assert isinstance(error, EOFError) and str(error) == "broken off"
    elif changed[:4] == mine:
        assert str(error) == "the peer is done"
    else:
        assert isinstance(error, RecordError | EOFError) and str(error) != "the peer is done"


@pytest.mark.parametrize("cipher", [AES, CHACHA])
def test_each_flipped_bit_is_noticed(cipher: str) -> None:
    (record,) = sealed(handshake(cipher).codecs(is_client=True)[0], b"sixteen bytes ok")

    async def main() -> None:
        for bit in range(8 * len(record)):
            flipped = bytearray(record)
            flipped[bit // 8] ^= 1 << bit % 8
            got, error = await received(bytes(flipped), 1, cipher)
            waits_for_more = 16 < int.from_bytes(flipped[:4], "big") <= RECORD_BYTES
            assert not got and (str(error) == "broken off" if waits_for_more else isinstance(error, RecordError))

    asyncio.run(main())


async def test_small_pieces_are_one_record() -> None:
    a, b = connected()
    await a.write(b"a header", pattern(1000))
    for size in (8, 1000):
        await b.read_into(memoryview(bytearray(size)))
    assert a.moved_bytes == b.moved_bytes == 1008 + records.OVERHEAD_BYTES
    for end in (a, b):
        end.abort()


async def test_tiny_records_do_not_hold_the_loop() -> None:
    a, b = connected(buffer_bytes=200_000)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    for _ in range(200):
        await a.write(b"x")
    counting = asyncio.create_task(count())
    await b.read_into(memoryview(bytearray(200)))
    counting.cancel()
    assert turns >= 4
    for end in (a, b):
        end.abort()
