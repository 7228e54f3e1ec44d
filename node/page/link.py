"""The page's link: its token and its port, which outlast restarts of the peer, so that an open page finds it again."""

from __future__ import annotations

import json
import os
import re
import secrets
from pathlib import Path

from node.page.keys import metrics_token

TOKEN_FILE, METRICS_FILE, PAGE_FILE = "page.token", "metrics.token", "page.json"
_MAX_FILE_BYTES = 1024
_TOKEN = re.compile(r"[\w-]{43}")


def load_token(state_dir: Path) -> str:
    """The token in the state directory. The first call draws it: 256 bits, readable by this user only.

    The token for the metrics, which follows from it, is written beside it.
    """
    file = state_dir / TOKEN_FILE
    token = _read_token(file) or secrets.token_urlsafe(32)
    _write(file, f"{token}\n")
    _write(state_dir / METRICS_FILE, f"{metrics_token(token)}\n")
    return token


def last_port(state_dir: Path) -> int | None:
    """The port that the page had before; None if it had none."""
    try:
        with (state_dir / PAGE_FILE).open() as opened:
            port = json.loads(opened.read(_MAX_FILE_BYTES))["port"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return port if isinstance(port, int) and 1024 <= port <= 65_535 else None


def note_port(state_dir: Path, port: int) -> None:
    _write(state_dir / PAGE_FILE, json.dumps({"port": port}) + "\n")


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


def _write(file: Path, text: str) -> None:
    draft = file.with_name(f".{file.name}.new")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
        opened.write(text)
    draft.replace(file)
