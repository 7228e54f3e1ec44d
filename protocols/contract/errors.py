"""What may go wrong between peers: a small tree, in which the name says whether a peer may have counted us."""

from __future__ import annotations

from protocols.contract.values import PeerId


class ProtocolError(Exception):
    """Root of all errors that cross the contract."""


class PeerError(ProtocolError):
    """An error about one peer.

    Attributes:
        peer: whom it is about.
        why: one line for a person.
    """

    def __init__(self, peer: PeerId, why: str) -> None:
        super().__init__(f"{peer}: {why}")
        self.peer = peer
        self.why = why


class PeerGone(PeerError):
    """Definite: not a byte reached the peer, or it refused explicitly."""


class PeerSilent(PeerError):
    """Indefinite: the peer may have received and counted what was sent before the stream ended."""


class BadPayload(ProtocolError):
    """Received bytes break the rules (schema, size, codec, finiteness, signature, binding to the round)."""
