"""What the proxies that the environment names are used for: downloads from the hub, but not other peers."""

from __future__ import annotations

import os
from importlib.util import find_spec

from node.runtime.program import install_package

_NAMES = ("HTTPS_PROXY", "ALL_PROXY", "HTTP_PROXY")


def _proxies() -> dict[str, str]:
    """By variable. Only the names are shown, because the values may hold passwords."""
    names = [each for name in _NAMES for each in (name, name.lower())]
    return {name: os.environ[name] for name in names if os.environ.get(name, "").strip()}


def named_proxies() -> tuple[str, ...]:
    """Names of the variables that name a proxy."""
    return tuple(_proxies())


def dialled_directly() -> str:
    """A line for a peer that cannot be reached; empty if no proxy is named."""
    names = named_proxies()
    return f"{names[0]} is set; peers are dialled directly, not through it" if names else ""


def download_remedy() -> str:
    """What to do about a failed download because of the proxies, as the end of a message; empty if none is named."""
    named = _proxies()
    socks = [name for name, value in named.items() if value.strip().lower().startswith("socks")]
    if socks and find_spec("socksio") is None:
        cure = install_package("socksio")
        return f"; {socks[0]} names a SOCKS proxy, for which the package socksio is missing: {cure}"
    return f"; {' and '.join(named)} {'is' if len(named) == 1 else 'are'} set: does the proxy work?" if named else ""
