"""A peer's identity: an Ed25519 key in libp2p's own file format, and signatures bound to peer ids.

The peer id of an Ed25519 key contains the public key (identity multihash of its protobuf, in base58btc), which is
enough to verify its signatures. Source: https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from base58 import b58decode, b58encode
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from node.runtime.locks import hold
from protocols.base import PeerId

_KEY_BYTES = 32
_PRIVATE_PREFIX = b"\x08\x01\x12\x40"
"""Protobuf PrivateKey: key type Ed25519 = 1, then 64 bytes: the private key and the public key."""
_PUBLIC_PREFIX = b"\x08\x01\x12\x20"  # protobuf PublicKey: key type Ed25519 = 1, then the 32 bytes of the key
_PEER_ID_PREFIX = b"\x00\x24" + _PUBLIC_PREFIX  # identity multihash of the 36 bytes of the public key's protobuf
_FILE_BYTES = len(_PRIVATE_PREFIX) + 2 * _KEY_BYTES
_PEER_ID_CHARACTERS = 52


class IdentityError(Exception):
    """The identity file cannot be used. The message says what happened, why, and what to do."""


def peer_id_of(public_key: bytes) -> PeerId:
    return b58encode(_PEER_ID_PREFIX + public_key).decode()


def public_key_of(peer: PeerId) -> bytes:
    """The raw Ed25519 public key, 32 bytes, in a peer id; else ValueError."""
    if len(peer) != _PEER_ID_CHARACTERS:
        raise ValueError(f"{peer[:60]!r} is not the id of an Ed25519 key")
    key = b58decode(peer)[len(_PEER_ID_PREFIX) :]
    if len(key) != _KEY_BYTES or peer_id_of(key) != peer:  # another prefix, or another spelling of the same bytes
        raise ValueError(f"{peer!r} is not the id of an Ed25519 key")
    return key


def is_peer_id(text: str) -> bool:
    try:
        return bool(public_key_of(text))
    except ValueError:
        return False


@lru_cache(maxsize=1024)  # a tenth of the time of a verification goes into reading the id
def _key_of(peer: PeerId) -> Ed25519PublicKey:
    return Ed25519PublicKey.from_public_bytes(public_key_of(peer))


def verify(peer: PeerId, message: bytes, signature: bytes) -> bool:
    """Whether `peer` signed `message`. False also if the id or the signature is malformed."""
    try:
        _key_of(peer).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


@dataclass(frozen=True, slots=True)
class Identity:
    """A peer's key, its id and the file that p2pd reads it from. Implements `protocols.base.Signer`."""

    path: Path
    peer_id: PeerId
    _key: Ed25519PrivateKey = field(repr=False)

    def sign(self, message: bytes) -> bytes:
        return self._key.sign(message)

    def verify(self, peer: PeerId, message: bytes, signature: bytes) -> bool:
        return verify(peer, message, signature)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lock the identity file inside the context: two daemons with one id disturb each other's connections."""
        try:
            held = hold(self.path)
        except OSError as error:
            raise IdentityError(f"cannot lock {self.path} ({error.strerror}): move it to a local disk") from None
        if held is None:
            raise IdentityError(
                f"{self.path} is in use by another running peer: two peers cannot share one identity; "
                "stop that peer, or give this one another identity file"
            )
        try:
            yield
        finally:
            os.close(held)


def _identity(path: Path, key: Ed25519PrivateKey) -> Identity:
    return Identity(path, peer_id_of(key.public_key().public_bytes_raw()), key)


def create(path: Path) -> Identity:
    """Create an identity at `path`, readable only by its owner. Never replaces a file, nor leaves an incomplete one."""
    key = Ed25519PrivateKey.generate()
    content = _PRIVATE_PREFIX + key.private_bytes_raw() + key.public_key().public_bytes_raw()
    draft = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.link(draft, path)  # unlike a rename, refuses to replace
        finally:
            draft.unlink()
        sync_directory(path.parent)
    except FileExistsError:
        raise IdentityError(f"{path} exists already: it is not overwritten; load it, or move it away") from None
    except OSError as error:
        raise IdentityError(
            f"cannot write an identity to {path} ({error.strerror}): "
            "choose a directory that exists and is writable, on a local disk"
        ) from None
    return _identity(path, key)


def sync_directory(path: Path) -> None:
    """Renames and links in it then survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load(path: Path) -> Identity:
    content = _read_private(path)
    if len(content) != _FILE_BYTES or not content.startswith(_PRIVATE_PREFIX):
        raise IdentityError(
            f"{path} does not hold an Ed25519 key in libp2p's format (hivemind writes RSA keys): "
            "move it away, and this peer creates a new identity"
        )
    private, public = content[len(_PRIVATE_PREFIX) : -_KEY_BYTES], content[-_KEY_BYTES:]
    key = Ed25519PrivateKey.from_private_bytes(private)
    if key.public_key().public_bytes_raw() != public:
        raise IdentityError(f"{path} is damaged (its two halves do not match): restore it, or move it away")
    return _identity(path, key)


def _read_private(path: Path) -> bytes:
    try:
        # Do not follow a link to another user's file, and do not block on a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        why = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
        raise IdentityError(f"cannot read the identity {path} ({why}): check the path and its permissions") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise IdentityError(f"{path} is not a regular file: give the path of an identity file")
        if status.st_uid != os.geteuid():
            raise IdentityError(f"{path} belongs to another user: run as its owner, or use an identity of your own")
        if status.st_mode & 0o077:
            raise IdentityError(
                f"{path} is open to others (mode {stat.S_IMODE(status.st_mode):04o}), who could act as this peer: "
                f"chmod 600 {path}"
            )
        return os.read(descriptor, _FILE_BYTES + 1)
    finally:
        os.close(descriptor)


def load_or_create(path: Path) -> Identity:
    """The identity at `path`, created if there is none. Two processes that start at once get the same one."""
    if not os.path.lexists(path):
        try:
            return create(path)
        except IdentityError:
            if not os.path.lexists(path):
                raise
    return load(path)
