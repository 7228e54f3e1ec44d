"""Examples of signed directory records."""

from __future__ import annotations

import dataclasses

from node.network.directory_records import DirectoryRecord
from node.runtime.clock import WallClock
from node.runtime.identity import Identity

RUN = bytes(range(32))
TTL = 60.0


def sealed(
    key: Identity, scope: str = "all", value: bytes = b"v", ttl: float = TTL, run: bytes = RUN
) -> DirectoryRecord:
    """A record that its peer signed, valid for `ttl` seconds."""
    draft = DirectoryRecord(key.peer_id, scope, WallClock().wall() + ttl, value)
    return dataclasses.replace(draft, signature=key.sign(draft.message(run)))
