"""Decides which requests the page answers. Pure: headers in, refusal out.

The page binds to the loopback interface, but a browser there also runs other people's pages. These must not read or
steer the peer:

- A name that a stranger's DNS points at this machine (DNS rebinding) fails at the `Host` header.
- A page of another origin fails at `Sec-Fetch-Site` and `Origin`.
- Another user or program of this machine lacks the keys (`node.page.keys`). They travel in a header, never in a cookie
  or a query, so that no browser sends them by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from node.page.keys import PageKeys
from node.runtime.program import typed

SECURITY_HEADERS = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
        b"trusted-types 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")
_NEEDS_KEY = ("/api/", "/metrics")


@dataclass(frozen=True, slots=True)
class AccessRules:
    """Which requests the page answers. `hosts`: further names under which a proxy of the user's own forwards to it."""

    port: int
    hosts: tuple[str, ...]
    keys: PageKeys

    def refusal(self, path: str, headers: Iterable[tuple[bytes, bytes]]) -> tuple[int, str] | None:
        """HTTP status and a line for the user if a request is not served. `headers` have names in lower case."""
        given: dict[bytes, list[bytes]] = {}
        for name, value in headers:
            given.setdefault(name, []).append(value)
        names = self._names()
        host = given.get(b"host", [])
        if len(host) != 1 or host[0].lower() not in names:
            return (421, "this page answers to 127.0.0.1 and localhost only: use the link that the peer printed")
        if any(site not in (b"none", b"same-origin") for site in given.get(b"sec-fetch-site", [])):
            return (403, "the request comes from another site")
        own = {scheme + b"://" + name for scheme in (b"http", b"https") for name in names}
        if any(origin.lower() not in own for origin in given.get(b"origin", [])):
            return (403, "the request comes from another origin")
        if path.startswith(_NEEDS_KEY) and not self._has_key(path, given.get(b"authorization", [])):
            return (401, f"the key is missing or wrong: use the link that `{typed('page')}` prints")
        return None

    def _names(self) -> frozenset[bytes]:
        own = [f"{name}:{self.port}" for name in LOOPBACK_NAMES]
        return frozenset(each.lower().encode() for each in (*own, *self.hosts))

    def _has_key(self, path: str, authorization: list[bytes]) -> bool:
        if len(authorization) != 1 or not authorization[0].startswith(b"Bearer "):
            return False
        return self.keys.allows(path, authorization[0].removeprefix(b"Bearer ").decode(errors="replace"))
