"""The direct data plane of one peer: streams over encrypted TCP connections instead of libp2p.

libp2p proves who a peer is, and at which host. Over it, peers grant each other connection tokens. Then one dials the
other's direct port, and streams go over that connection, one after another, encrypted. If the peer cannot be dialled,
it is asked to dial back. Whatever fails before it has accepted a stream, `open` returns None, and the caller takes
libp2p. docs/threat-model.md says what this protects against.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from node.direct.inbound import Inbound
from node.direct.link import Libp2pLink
from node.direct.messages import METHOD
from node.direct.outbound import Outbound
from node.direct.pipe import DirectPipe
from node.direct.routes import Route
from protocols.base import Deadline, PeerId

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DirectConfig:
    """For which methods streams go directly if they can, and the TCP port to listen on; 0 takes a free one."""

    methods: Container[str]
    port: int = 0


class DirectPlane:
    """Opens streams directly, and serves those that others open."""

    def __init__(self, me: PeerId, config: DirectConfig, link: Libp2pLink) -> None:
        self._config = config
        self._inbound = Inbound(me, link)
        self._outbound = Outbound(me, link, self._inbound)
        link.serving.serve(METHOD, self._inbound.answer)

    def start(self, hosts: Sequence[str]) -> None:
        """Listen on these IP addresses. If the port is taken, this peer still dials others."""
        try:
            self._inbound.listener.start(hosts, self._config.port)
        except OSError as error:
            log.warning("no direct port: others send their data over libp2p (%s)", error.strerror or error)

    async def close(self) -> None:
        self._inbound.close()
        self._outbound.close()

    @property
    def port(self) -> int:
        """0 if this peer listens on none."""
        return self._inbound.listener.port

    @property
    def routes(self) -> Mapping[PeerId, Route]:
        return self._outbound.routes

    async def open(self, peer: PeerId, method: str, deadline: Deadline) -> DirectPipe | None:
        """Open a stream that the peer has accepted. None if the method goes over libp2p, or has to for now."""
        if method not in self._config.methods:
            return None
        return await self._outbound.open(peer, method, deadline)

    def forget(self, peer: PeerId) -> None:
        """Abort the connections with a peer, and void all tokens."""
        self._inbound.forget(peer)
        self._outbound.forget(peer)
