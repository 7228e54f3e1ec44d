"""Messages that set up direct connections. They travel over libp2p, which has authenticated both peers.

asker                           answerer
TokenRequest             ->
                         <-     TokenGrant              (the asker may now dial)

DialBack                 ->     dials the asker
                         <-     DialBackResult

WantSeen                 ->
                         <-     SeenAt

Punch                    ->     dials the asker's ports, from ports that its answer names
                         <-     Punched                 (the asker dials those, at the same time)
"""

from __future__ import annotations

from dataclasses import dataclass

from node.direct.records import TOKEN_ID_BYTES, token_id
from protocols.base import Header
from protocols.wire import blob, flag, list_of, one, peer_id, real, register, text, uint

METHOD = "starling/direct/1"
HEADER_LIMIT = 2048
SECRET_BYTES = 32
MAX_TOKENS, MAX_TOKEN_SECONDS = 8, 3600.0
MAX_PUNCHED, MAX_HOST_CHARACTERS = 4, 45
BUSY = "too many peers are being dialled"
MIN_PORT, MAX_PORT = 1024, 65_535
"""Ports below 1024 are never dialled: they belong to other services of the peer's machine or network."""


@dataclass(frozen=True, slots=True)
class ConnectionToken:
    """Permits one connection. The secret keys it."""

    secret: bytes = blob(SECRET_BYTES, SECRET_BYTES)

    @property
    def id(self) -> bytes:
        return token_id(self.secret)


@dataclass(frozen=True, slots=True)
class TokenRequest(Header):
    """Asks for tokens. `fast_aes`: AES is faster than ChaCha20 on the sender's machine."""

    fast_aes: bool = flag()


@dataclass(frozen=True, slots=True)
class TokenGrant(Header):
    """Tokens for `port` (0: none) of the host of the libp2p connection, valid for `seconds`."""

    port: int = uint(MAX_PORT)
    cipher: str = text(32)
    seconds: float = real(0, MAX_TOKEN_SECONDS)
    tokens: tuple[ConnectionToken, ...] = list_of(one(ConnectionToken), MAX_TOKENS)


@dataclass(frozen=True, slots=True)
class DialBack(Header):
    """Asks the other peer to dial the sender, which cannot dial it. The sender opens streams over that connection."""

    port: int = uint(MAX_PORT)
    cipher: str = text(32)
    token: ConnectionToken = one(ConnectionToken)


@dataclass(frozen=True, slots=True)
class DialBackResult(Header):
    """Whether the dial succeeded, and if not, why; `BUSY` if it was not tried."""

    why: str = text(120)


@dataclass(frozen=True, slots=True)
class WantSeen(Header):
    """Asks where the receiver sees the connection that the sender opened with this token; without one, a peer."""

    token: bytes = blob(TOKEN_ID_BYTES)
    peer: str = peer_id()


@dataclass(frozen=True, slots=True)
class SeenAt(Header):
    """A public IP address, and the port of the connection; empty and 0 if there is none."""

    host: str = text(MAX_HOST_CHARACTERS)
    port: int = uint(MAX_PORT)


@dataclass(frozen=True, slots=True)
class Punch(Header):
    """Asks the other peer to dial these ports at once, and to be dialled from them. The sender shows the token, and
    opens streams over the connection.
    """

    host: str = text(MAX_HOST_CHARACTERS)
    ports: tuple[int, ...] = list_of(uint(MAX_PORT), MAX_PUNCHED)
    cipher: str = text(32)
    token: ConnectionToken = one(ConnectionToken)


@dataclass(frozen=True, slots=True)
class Punched(Header):
    """The ports of the sender that belong to those of the receiver, in order; or why it does not dial."""

    host: str = text(MAX_HOST_CHARACTERS)
    ports: tuple[int, ...] = list_of(uint(MAX_PORT), MAX_PUNCHED)
    why: str = text(120)


MESSAGES = (TokenRequest, TokenGrant, DialBack, DialBackResult, WantSeen, SeenAt, Punch, Punched)
register(80, MESSAGES)
