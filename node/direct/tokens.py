"""The tokens that a peer has issued: who may connect, once each, and until when. Pure but for randomness."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from node.direct.messages import SECRET_BYTES, ConnectionToken
from node.runtime.bounded import renew
from protocols.base import PeerId

TOKEN_SECONDS = 600.0
MAX_TOKENS_PER_PEER = 32
MAX_TOKENS, MAX_HOSTS = 2048, 512


@dataclass(frozen=True, slots=True)
class IssuedToken:
    """Permits one connection of one peer."""

    peer: PeerId
    cipher: str
    token: ConnectionToken
    expires: float  # time of the event loop
    dialled_back: bool = False  # this peer asked to be dialled, and opens the streams; else the dialling peer does


class TokenIssuer:
    """Issues tokens, and redeems each at most once. Of too many, the oldest are void."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._issued: dict[bytes, IssuedToken] = {}
        self._hosts: dict[str, float] = {}  # host -> when the last token of a peer there expires

    def __len__(self) -> int:
        return len(self._issued)

    def issue(self, peer: PeerId, host: str, cipher: str, count: int) -> Sequence[ConnectionToken]:
        """Tokens for connections that a peer at this host will open streams over."""
        return [self._add(peer, host, cipher, dialled_back=False).token for _ in range(count)]

    def issue_for_dial_back(self, peer: PeerId, host: str, cipher: str) -> IssuedToken:
        """A token for one connection that this peer will open streams over."""
        return self._add(peer, host, cipher, dialled_back=True)

    def redeem(self, token_id: bytes) -> IssuedToken | None:
        """Take back a token; None if it is unknown, was used already, or has expired."""
        issued = self._issued.pop(token_id, None)
        return issued if issued and self._now() < issued.expires else None

    def void(self, peer: PeerId) -> None:
        self._issued = {key: each for key, each in self._issued.items() if each.peer != peer}

    def expects(self, host: str) -> bool:
        """Whether a peer that was at this host has got a token that has not expired."""
        return self._now() < self._hosts.get(host, 0.0)

    def _add(self, peer: PeerId, host: str, cipher: str, *, dialled_back: bool) -> IssuedToken:
        token = ConnectionToken(secrets.token_bytes(SECRET_BYTES))
        expires = self._now() + TOKEN_SECONDS
        mine = [key for key, each in self._issued.items() if each.peer == peer]
        for key in mine[: max(0, len(mine) + 1 - MAX_TOKENS_PER_PEER)]:
            del self._issued[key]
        issued = IssuedToken(peer, cipher, token, expires, dialled_back)
        renew(self._issued, token.id, issued, MAX_TOKENS)
        renew(self._hosts, host, expires, MAX_HOSTS)
        return issued
