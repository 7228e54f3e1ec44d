"""The identity file: private, complete and exact; and signatures that a peer id is enough to verify."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from base58 import BITCOIN_ALPHABET
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from node.runtime import identity
from node.runtime.identity import IdentityError

# From libp2p's specification of peer ids: an Ed25519 private key in protobuf form. The id is go-libp2p's.
SPEC_PRIVATE = bytes.fromhex(
    "080112407e0830617c4a7de83925dfb2694556b12936c477a0e1feb2e148ec9da60fee7d"
    "1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e"
)
SPEC_PUBLIC = bytes.fromhex("1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "identity"


@pytest.mark.parametrize("umask", [0o022, 0])
def test_created_file_is_private_and_loads_same_peer(path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        made = identity.create(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == ["identity"]
    assert made.peer_id.startswith("12D3Koo") and len(made.peer_id) == 52
    assert identity.load(path).peer_id == made.peer_id
    assert repr(made) == f"Identity(path={path!r}, peer_id={made.peer_id!r})", "without the private key"


def test_create_never_overwrites(path: Path) -> None:
    path.write_bytes(b"something")
    with pytest.raises(IdentityError, match="exists already"):
        identity.create(path)
    assert path.read_bytes() == b"something" and os.listdir(path.parent) == ["identity"]


def test_loads_key_file_of_the_specification(path: Path) -> None:
    path.write_bytes(SPEC_PRIVATE)
    path.chmod(0o600)
    mine = identity.load(path)
    assert identity.public_key_of(mine.peer_id) == SPEC_PUBLIC


def test_missing_file_or_directory_gives_one_clear_line(path: Path) -> None:
    with pytest.raises(IdentityError, match=r"cannot write an identity to .*: choose a directory"):
        identity.create(path.parent / "nowhere" / "identity")
    with pytest.raises(IdentityError, match="cannot read the identity"):
        identity.load(path)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o777])
def test_load_rejects_file_readable_by_others(path: Path, mode: int) -> None:
    identity.create(path)
    path.chmod(mode)
    with pytest.raises(IdentityError, match="chmod 600"):
        identity.load(path)


OTHER_PUBLIC = Ed25519PrivateKey.generate().public_key().public_bytes_raw()


@pytest.mark.parametrize(
    "content, words",
    [
        pytest.param(b"", "does not hold an Ed25519 key", id="empty"),
        pytest.param(b"\x08\x01", "does not hold an Ed25519 key", id="short"),
        pytest.param(SPEC_PRIVATE[:-1], "does not hold an Ed25519 key", id="cut"),
        pytest.param(SPEC_PRIVATE + b"x", "does not hold an Ed25519 key", id="long"),
        pytest.param(b"\x08\x00" + SPEC_PRIVATE[2:], "does not hold an Ed25519 key", id="rsa"),
        pytest.param(b"-----BEGIN" * 7, "does not hold an Ed25519 key", id="pem"),
        pytest.param(SPEC_PRIVATE[:-32] + OTHER_PUBLIC, "damaged", id="mismatched halves"),
    ],
)
def test_load_rejects_other_content(path: Path, content: bytes, words: str) -> None:
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(IdentityError, match=words):
        identity.load(path)


def test_load_rejects_links_and_directories(path: Path) -> None:
    target = path.with_name("target")
    identity.create(target)
    path.symlink_to(target)
    with pytest.raises(IdentityError, match="symbolic link"):
        identity.load(path)
    with pytest.raises(IdentityError, match="not a regular file"):
        identity.load(path.parent)


def test_only_one_process_holds_an_identity(path: Path) -> None:
    mine = identity.create(path)
    again = identity.load(path).held()
    with mine.held(), pytest.raises(IdentityError, match="in use by another running peer"):
        again.__enter__()
    with identity.load(path).held():
        pass


def test_signature_is_verified_by_peer_id(tmp_path: Path) -> None:
    alice, bob = identity.create(tmp_path / "alice"), identity.create(tmp_path / "bob")
    signature = alice.sign(b"message")
    assert len(signature) == 64
    assert bob.verify(alice.peer_id, b"message", signature)
    assert not bob.verify(bob.peer_id, b"message", signature)
    assert not bob.verify(alice.peer_id, b"other", signature)
    assert not bob.verify(alice.peer_id, b"message", signature[:-1])
    assert not bob.verify(alice.peer_id, b"message", b"")


@given(st.binary(min_size=32, max_size=32))
def test_peer_ids_and_keys_are_one_to_one(key: bytes) -> None:
    assert identity.public_key_of(identity.peer_id_of(key)) == key


@given(st.one_of(st.text(max_size=80), st.text(BITCOIN_ALPHABET.decode(), min_size=52, max_size=52)))
def test_invalid_peer_id_is_rejected(peer: str) -> None:
    with pytest.raises(ValueError):
        identity.public_key_of(peer)
