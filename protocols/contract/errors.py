"""Errors between peers. The name says whether the other peer may have counted what was sent to it."""

from __future__ import annotations

from protocols.contract.values import PeerId


class ProtocolError(Exception):
    """Base class of all errors that protocols raise."""


class PeerError(ProtocolError):
    """An error about one peer.

    Attributes:
        peer: id of the peer.
        why: user-facing message of one line.
    """

    def __init__(self, peer: PeerId, why: str) -> None:
        super().__init__(f"{peer}: {why}")
        self.peer = peer
        self.why = why


class PeerGone(PeerError):
    """Definite: no byte reached the peer, or it refused explicitly."""


class PeerSilent(PeerError):
    """Indefinite: the peer may have received and counted what was sent before the stream ended."""


class StoppedHere(PeerSilent):
    """The stream ended because of a limit of this peer's own: the other peer is not to blame."""


class BadPayload(ProtocolError):
    """Received bytes break the rules (schema, size, codec, finiteness, signature, binding to the round)."""
