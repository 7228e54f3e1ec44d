"""What the direct data plane needs of libp2p."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from node.direct.connection import DirectConnection
from node.direct.records import RecordError
from node.network.serving import Serving
from protocols.base import Deadline, PeerId, Stream


@dataclass(frozen=True, slots=True)
class Libp2pLink:
    """What the direct data plane needs of libp2p."""

    open: Callable[[PeerId, str, Deadline], AbstractAsyncContextManager[Stream]]
    host_of: Callable[[PeerId], str | None]
    serving: Serving

    def refuse(self, who: str, why: str) -> None:
        """Count something that was refused: `who` is a peer, or the host of a stranger."""
        self.serving.refuse(who, why)

    def note_failure(self, peer: PeerId, connection: DirectConnection) -> None:
        """Count a connection that ended with a record that was not genuine."""
        if isinstance(connection.failure, RecordError):
            self.refuse(peer, "sent a record over a direct connection that was not genuine")
