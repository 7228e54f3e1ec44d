"""Which way bulk data goes to each peer, and why not directly. Pure: the caller passes the time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from node.direct.messages import MIN_PORT, ConnectionToken, TokenGrant
from node.direct.records import is_known

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 60.0, 3600.0
SPARE_TOKENS = 2  # with no more tokens than these left, new ones are asked for in the background


class RouteKind(StrEnum):
    UNTRIED = ""
    DIRECT = "direct"
    DIALLED_BACK = "dialled back"
    PUNCHED = "punched"
    LIBP2P = "libp2p"


class NotDirect(ConnectionError):
    """A peer cannot be reached directly now; the message says why, and continues "not directly: "."""


@dataclass(slots=True)
class Attempts:
    """When something may be tried again: after a failure not for a minute, then for twice as long each time."""

    failures: int = 0
    not_before: float = 0.0
    why: str = ""

    def may_try(self, now: float) -> bool:
        return now >= self.not_before

    def require(self, now: float) -> None:
        """Raise the last failure if it is too early for the next attempt."""
        if not self.may_try(now):
            raise NotDirect(self.why)

    def failed(self, now: float, why: str) -> NotDirect:
        """Note a failure, and return it as an error to raise. Failures at the same time are one."""
        if self.may_try(now):
            pause = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0**self.failures)
            self.failures, self.not_before = min(self.failures + 1, 16), now + pause
        self.why = why
        return NotDirect(why)

    def succeeded(self) -> None:
        self.failures, self.not_before, self.why = 0, 0.0, ""


@dataclass(slots=True)
class Route:
    kind: RouteKind = RouteKind.UNTRIED  # of the latest bulk stream
    why: str = ""  # why it did not go directly
    asking: Attempts = field(default_factory=Attempts)
    dialling: Attempts = field(default_factory=Attempts)
    dialled_back: Attempts = field(default_factory=Attempts)
    punching: Attempts = field(default_factory=Attempts)
    cipher: str = ""  # empty until the peer has answered a request for tokens, if only that it has none
    _where: tuple[str, int] = ("", 0)
    _tokens: list[ConnectionToken] = field(default_factory=list)
    _expires: float = 0.0

    def attempts(self, kind: RouteKind) -> Attempts:
        """Those that lead to connections of this kind."""
        return {RouteKind.DIALLED_BACK: self.dialled_back, RouteKind.PUNCHED: self.punching}.get(kind, self.dialling)

    def granted(self, grant: TokenGrant, host: str, now: float) -> None:
        if not is_known(grant.cipher):
            raise self.asking.failed(now, "it asks for a cipher that this peer does not know")
        self.asking.succeeded()
        self.cipher, self._where = grant.cipher, (host, grant.port)
        self._tokens, self._expires = list(grant.tokens), now + grant.seconds

    def tokens_left(self, now: float) -> int:
        return len(self._tokens) if now < self._expires else 0

    def take_token(self, now: float) -> tuple[tuple[str, int], ConnectionToken]:
        if not self.tokens_left(now):
            raise NotDirect("it has no direct port")
        if self._where[1] < MIN_PORT:
            raise NotDirect(f"its direct port is below {MIN_PORT}")
        return self._where, self._tokens.pop(0)

    def drop_tokens(self) -> None:
        self._tokens = []

    def record(self, kind: RouteKind, why: str = "") -> None:
        self.kind, self.why = kind, why


def host_of(address: str) -> str | None:
    """The IP address at the other end of a libp2p connection with this multiaddr; None if it is a relay's, or none."""
    parts = address.split("/")
    if is_relayed(address) or len(parts) < 3 or parts[1] not in ("ip4", "ip6"):
        return None
    return parts[2]


def is_relayed(address: str) -> bool:
    return "p2p-circuit" in address.split("/")


def hosts_of(listen: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(host for address in listen if (host := host_of(address))))
