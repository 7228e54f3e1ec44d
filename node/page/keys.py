"""The page's keys, and its link: token and port, which outlast restarts, so that an open page finds the peer again.

The token of the link proves that a browser and the peer know each other, and is never sent. Another program of this
machine may listen on the page's port while the peer is down, and an open page would then talk to it. So the page first
sends a nonce. The answer proves that the server knows the token, under the name by which the browser knows it; from the
same values both derive a session key that ends with this life of the peer. Prometheus, which cannot do that, gets a
token of its own, which opens nothing but the metrics.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Mapping
from pathlib import Path

from node.runtime.json_file import read_json, replace_private
from protocols.peers.estimates import RecentDict

MAX_SESSIONS = 64
_NONCE = re.compile(r"[0-9a-f]{32}")


class PageKeys:
    """Keys of one life of the page."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._sessions: RecentDict[str, None] = RecentDict(MAX_SESSIONS)
        self.metrics = metrics_token(token)

    def open_session(self, host: str, nonce: str) -> Mapping[str, str] | None:
        """Begin a session, and end the oldest if there are too many; None if the nonce is malformed (32 hex digits).

        `host` is the server's name and port, as the browser sent them.
        """
        if not _NONCE.fullmatch(nonce):
            return None
        salt = secrets.token_hex(16)
        self._sessions[self._code("session", host, nonce, salt)] = None
        return {"salt": salt, "proof": self._code("proof", host, nonce, salt)}

    def allows(self, path: str, key: str) -> bool:
        """Whether a key opens a path. The session in use becomes the latest."""
        if path == "/metrics":
            return hmac.compare_digest(key.encode(), self.metrics.encode())
        known = next((each for each in self._sessions if hmac.compare_digest(each.encode(), key.encode())), None)
        if known is None:
            return False
        self._sessions.move_to_end(known)
        return True

    def _code(self, purpose: str, host: str, nonce: str, salt: str) -> str:
        text = "|".join(("starling page 1", purpose, host, nonce, salt))
        return hmac.new(self._token.encode(), text.encode(), hashlib.sha256).hexdigest()


def metrics_token(token: str) -> str:
    """The token for the metrics that follows from the page's own."""
    return hmac.new(token.encode(), b"starling page 1|metrics", hashlib.sha256).hexdigest()


# -- the link ----------------------------------------------------------------------------------------------------------


TOKEN_FILE, METRICS_FILE, PAGE_FILE = "page.token", "metrics.token", "page.json"
_MAX_FILE_BYTES = 1024
_TOKEN = re.compile(r"[\w-]{43}")


def load_token(state_dir: Path) -> str:
    """The token in the state directory. The first call draws it: 256 bits, readable by this user only.

    The token for the metrics, which follows from it, is written beside it.
    """
    file = state_dir / TOKEN_FILE
    token = _read_token(file) or secrets.token_urlsafe(32)
    replace_private(file, f"{token}\n")
    replace_private(state_dir / METRICS_FILE, f"{metrics_token(token)}\n")
    return token


def last_port(state_dir: Path) -> int | None:
    """The port that the page had before; None if it had none."""
    try:
        port = read_json(state_dir / PAGE_FILE)["port"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return port if isinstance(port, int) and 1024 <= port <= 65_535 else None


def note_port(state_dir: Path, port: int) -> None:
    replace_private(state_dir / PAGE_FILE, json.dumps({"port": port}) + "\n")


def page_link(port: int, token: str) -> str:
    """The link to open in a browser. The fragment with the token is never sent to a server."""
    return f"http://127.0.0.1:{port}/#{token}"


def read_link(state_dir: Path) -> str | None:
    """The link of the page of a state directory; None if its peer never had a page."""
    port = last_port(state_dir)
    try:
        token = _read_token(state_dir / TOKEN_FILE)
    except OSError:
        return None
    return page_link(port, token) if port and token else None


def _read_token(file: Path) -> str:
    """The token in a file; empty if there is none, or it is damaged."""
    try:
        with file.open(errors="replace") as opened:
            token = opened.read(_MAX_FILE_BYTES).strip()
    except FileNotFoundError:
        return ""
    return token if _TOKEN.fullmatch(token) else ""
