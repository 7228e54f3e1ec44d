"""Messages that set up direct connections. They travel over libp2p, which has authenticated both peers.

asker                           answerer
TokenRequest             ->
                         <-     TokenGrant              (the asker may now dial)

DialBack                 ->     dials the asker
                         <-     DialBackResult
"""

from __future__ import annotations

from dataclasses import dataclass

from node.direct.records import token_id
from protocols.base import Header
from protocols.wire import blob, flag, many, one, real, register, text, uint

METHOD = "starling/direct/1"
HEADER_LIMIT = 2048
SECRET_BYTES = 32
MAX_TOKENS, MAX_TOKEN_SECONDS = 8, 3600.0
MIN_PORT, MAX_PORT = 1024, 65_535
"""Ports below 1024 are never dialled: they belong to other services of the peer's machine or network."""


@dataclass(frozen=True, slots=True)
class ConnectionToken:
    """Permits one connection. The secret keys it."""

    secret: bytes = blob(SECRET_BYTES, SECRET_BYTES)

    @property
    def id(self) -> bytes:
        """What the client shows, in clear."""
        return token_id(self.secret)


@dataclass(frozen=True, slots=True)
class TokenRequest(Header):
    """Asks for tokens.

    Attributes:
        fast_aes: AES is faster than ChaCha20 on the sender's machine.
    """

    fast_aes: bool = flag()


@dataclass(frozen=True, slots=True)
class TokenGrant(Header):
    """Answers with tokens; none if the sender listens on no port.

    Attributes:
        port: TCP port of the sender; 0 if it listens on none. Its host is that of the libp2p connection.
        cipher: for all connections with these tokens.
        seconds: how long the tokens are valid.
    """

    port: int = uint(MAX_PORT)
    cipher: str = text(32)
    seconds: float = real(0, MAX_TOKEN_SECONDS)
    tokens: tuple[ConnectionToken, ...] = many(one(ConnectionToken), MAX_TOKENS)


@dataclass(frozen=True, slots=True)
class DialBack(Header):
    """Asks the other peer to dial this one, because this one cannot dial it. Over the connection, this one opens."""

    port: int = uint(MAX_PORT)
    cipher: str = text(32)
    token: ConnectionToken = one(ConnectionToken)


@dataclass(frozen=True, slots=True)
class DialBackResult(Header):
    """Whether the dial succeeded, and if not, why."""

    why: str = text(120)


MESSAGES = (TokenRequest, TokenGrant, DialBack, DialBackResult)
register(80, MESSAGES)
