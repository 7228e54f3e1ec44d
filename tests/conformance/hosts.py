"""Hosts for peers of any world: its transport, and everything else by hand."""

from __future__ import annotations

from protocols.base import Host, Member, PeerId, Transport
from protocols.static_members import StaticMembers
from tests.conformance.worlds import Peers
from tests.sim.host import Hearsay, SimClock, SimCompute, SimDirectory, SimSigner
from tests.support.fake_rounds import SEED


def host(peers: Peers, index: int) -> Host:
    """The host of one of these peers, who all believe each other alive."""
    transport, clock = peers.transports[index], SimClock()
    return Host(
        transport=transport,
        directory=SimDirectory({}, transport.me, clock, Hearsay()),
        members=StaticMembers(Member(other.me) for other in peers.transports),
        compute=SimCompute(),
        clock=clock,
        signer=SimSigner(transport.me, SEED),
        seed=SEED,
    )


class Network:
    """What `tests.support.sync_cluster` asks of a network, of a world's peers."""

    def __init__(self, peers: Peers) -> None:
        members = StaticMembers(Member(transport.me) for transport in peers.transports)
        self.contacts = self
        self.views = {transport.me: members for transport in peers.transports}
        self._transports = {transport.me: transport for transport in peers.transports}

    def join(self, peer: PeerId) -> Transport:
        return self._transports[peer]
