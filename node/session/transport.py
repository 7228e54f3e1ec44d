"""The transport of a peer, as this machine's settings have it."""

from __future__ import annotations

from collections.abc import Iterable

from node.config.peer_config import PeerConfig
from node.network.daemon import known_relays
from node.network.libp2p import LibP2PTransport
from node.storage.statedir import StateDir
from node.streams.traffic import Traffic
from protocols.streams.framing import BULK_METHODS


def make_transport(
    config: PeerConfig, state: StateDir, known: Iterable[str], traffic: Traffic | None = None
) -> LibP2PTransport:
    """A peer's transport, with the identity and the ports of the state directory.

    Its relays are among the peers that the directory remembers, and those at these `known` multiaddrs.
    """
    return LibP2PTransport(
        state.identity,
        listen=config.listen,
        kept=state.listening(config.listen),
        announce=config.announce,
        nat=config.nat,
        relay=config.relay,
        relays=known_relays([*known, *state.addresses()], state.identity.peer_id),
        direct_methods=None if config.direct_port == "off" else BULK_METHODS,
        direct_port=0 if config.direct_port == "off" else config.direct_port,
        traffic=traffic,
    )
