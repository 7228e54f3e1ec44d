"""Whom the page answers: its own origin with the token, and nobody else."""

from __future__ import annotations

import hmac

import pytest

from node.page.guard import AccessRules
from node.page.keys import MAX_SESSIONS, PageKeys

KEYS = PageKeys("t" * 43)
RULES = AccessRules(7717, ("box.example.net", "box.example.net:8443"), KEYS)
NONCE = "0" * 32


def session(keys: PageKeys) -> str:
    """The key of a new session."""
    opened = keys.open_session("127.0.0.1:7717", NONCE)
    assert opened
    text = "|".join(("starling page 1", "session", "127.0.0.1:7717", NONCE, opened["salt"]))
    return hmac.new(b"t" * 43, text.encode(), "sha256").hexdigest()


KEY = session(KEYS)
BEARER = ("authorization", f"Bearer {KEY}")
HOST = ("host", "127.0.0.1:7717")

REFUSED: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "no host": ("/", []),
    "two hosts": ("/", [HOST, HOST]),
    "a name that leads here": ("/", [("host", "evil.example:7717")]),
    "a name that begins like ours": ("/", [("host", "127.0.0.1.evil.example:7717")]),
    "another port": ("/", [("host", "127.0.0.1:7718")]),
    "no port": ("/", [("host", "localhost")]),
    "another address of this machine": ("/", [("host", "192.168.1.5:7717")]),
    "a user name before the host": ("/", [("host", "127.0.0.1:7717@evil.example")]),
    "another site": ("/", [HOST, ("sec-fetch-site", "cross-site")]),
    "another port's page": ("/", [HOST, ("sec-fetch-site", "same-site")]),
    "two sites": ("/", [HOST, ("sec-fetch-site", "none"), ("sec-fetch-site", "cross-site")]),
    "another origin": ("/", [HOST, ("origin", "https://evil.example")]),
    "an opaque origin": ("/api/do", [HOST, BEARER, ("origin", "null")]),
    "the origin of another port": ("/api/do", [HOST, BEARER, ("origin", "http://127.0.0.1:3000")]),
    "no token for the stream": ("/api/stream", [HOST]),
    "no token for a command": ("/api/do", [HOST]),
    "no token for the metrics": ("/metrics", [HOST]),
    "the link's token itself": ("/api/do", [HOST, ("authorization", "Bearer " + "t" * 43)]),
    "the metrics' token for a command": ("/api/do", [HOST, ("authorization", f"Bearer {KEYS.metrics}")]),
    "a session's key for the metrics": ("/metrics", [HOST, BEARER]),
    "a key without its scheme": ("/api/do", [HOST, ("authorization", KEY)]),
    "two keys": ("/api/do", [HOST, BEARER, ("authorization", "Bearer x")]),
    "a key that is not text": ("/api/do", [HOST, ("authorization", "Bearer \xff")]),
}


def encoded(headers: list[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode("latin-1")) for name, value in headers]


@pytest.mark.parametrize("case", REFUSED)
def test_foreign_request_is_refused(case: str) -> None:
    path, headers = REFUSED[case]
    assert RULES.refusal(path, encoded(headers)) is not None


@pytest.mark.parametrize(
    "host", ["127.0.0.1:7717", "localhost:7717", "LOCALHOST:7717", "[::1]:7717", "box.example.net"]
)
def test_own_request_is_answered(host: str) -> None:
    headers = [("host", host), BEARER, ("sec-fetch-site", "same-origin"), ("origin", f"http://{host}")]
    assert RULES.refusal("/api/do", encoded(headers)) is None
    assert RULES.refusal("/", encoded([("host", host), ("sec-fetch-site", "none")])) is None


def test_sessions_are_bounded_and_end_with_the_peer() -> None:
    keys = PageKeys("t" * 43)
    first = session(keys)
    for _ in range(MAX_SESSIONS - 1):
        session(keys)
    assert keys.allows("/api/do", first)
    assert keys.open_session("127.0.0.1:7717", "g" * 32) is None
    last = session(keys)
    assert keys.allows("/api/do", first) and keys.allows("/api/do", last)  # the oldest that nobody used has ended
    assert not PageKeys("t" * 43).allows("/api/do", last)
