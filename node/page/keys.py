"""The page's keys. The token of the link proves that a browser and the peer know each other, and is never sent.

Another program of this machine may listen on the page's port while the peer is down, and an open page would then talk
to it. So the page first sends a nonce. The answer proves that the server knows the token, under the name by which the
browser knows it; from the same values both derive a session key that ends with this life of the peer. Prometheus,
which cannot do that, gets a token of its own, which opens nothing but the metrics.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections import OrderedDict
from collections.abc import Mapping

MAX_SESSIONS = 64
_NONCE = re.compile(r"[0-9a-f]{32}")


class PageKeys:
    """Keys of one life of the page."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._sessions: OrderedDict[str, None] = OrderedDict()
        self.metrics = metrics_token(token)

    def open_session(self, host: str, nonce: str) -> Mapping[str, str] | None:
        """Begin a session; None if the nonce, 32 hex digits from the browser, is malformed. The oldest ends if there
        are too many.

        `host` is the server's name and port, as the browser sent them.
        """
        if not _NONCE.fullmatch(nonce):
            return None
        salt = secrets.token_hex(16)
        self._sessions[self._code("session", host, nonce, salt)] = None
        while len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
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
