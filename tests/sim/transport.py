"""`protocols.base.Transport` on the simulated network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from node.streams.serving import Access, OpenAccess
from protocols.base import BadPayload, Deadline, Handler, NotAccepted, PeerError, PeerId, Stream
from protocols.streams.framing import FramedStream, accepted, opened
from tests.sim.pipe import SimPipe

if TYPE_CHECKING:
    from tests.sim.network import Node, SimNetwork

OPENING_SECONDS = 10.0


class SimTransport:
    def __init__(self, network: SimNetwork, node: Node) -> None:
        self.network, self.node = network, node
        self.me = node.peer
        self.access: Access = OpenAccess()
        self._answering: list[PeerId] = []  # the openers of incoming streams
        self.refused: list[tuple[PeerId, str]] = []
        self.disguise: Callable[[str, FramedStream, SimPipe], Stream] = lambda method, stream, pipe: stream
        """Wraps each stream of a lying peer."""

    def serve(self, method: str, handler: Handler) -> None:
        if method in self.node.handlers:
            raise ValueError(f"{method} is served already")
        self.node.handlers[method] = handler

    def restrict(self, access: Access) -> None:
        self.access = access

    def served(self) -> set[PeerId]:
        """The peers that have streams open to this one."""
        return set(self._answering)

    def expel(self, peer: PeerId) -> None:
        """End all streams from and to a peer at once."""
        for end in [end for end in self.node.ends.values() if end.other.node.peer == peer]:
            end.sever()

    @asynccontextmanager
    async def open(self, peer: PeerId, method: str, deadline: Deadline) -> AsyncIterator[Stream]:
        await self.access.before(peer, method, deadline)
        try:
            end = await self.network.connect(self.node, peer, method, deadline)
        except NotAccepted:  # the peer may have started anew, and not know this one
            if not await self.access.refused(peer, method, deadline):
                raise
            end = await self.network.connect(self.node, peer, method, deadline)
        try:
            yield self.disguise(method, await opened(peer, end, deadline), end)
        except BaseException:
            end.reset()
            raise
        end.close()

    async def answer(self, peer: PeerId, method: str, end: SimPipe) -> None:
        """Serve one incoming stream; errors of handlers end here."""
        self._answering.append(peer)
        try:
            stream = await accepted(peer, end, OPENING_SECONDS, self._refuse)
            if stream is None:
                return end.reset()
            await self.node.handlers[method](peer, self.disguise(method, stream, end))
            end.close()
        except BadPayload as error:
            self._refuse(peer, error)
            end.reset()
        except PeerError:  # as over libp2p; any other error is a bug
            end.reset()
        except asyncio.CancelledError:
            end.reset()
            raise
        except Exception as error:  # noqa: BLE001 - the handler boundary; the bug fails the run
            self.network.bugs.append(error)
            end.reset()
        finally:
            self._answering.remove(peer)

    def _refuse(self, peer: PeerId, error: BadPayload) -> None:
        self.refused.append((peer, str(error)))
