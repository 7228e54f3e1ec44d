"""Hosts for peers of any world: the world's transport, and everything else simulated."""

from __future__ import annotations

from protocols.base import Host, Member, PeerId, StaticMembers, Transport
from tests.conformance.worlds import Peers
from tests.sim.host import DirectoryFaults, SimClock, SimCompute, SimDirectory, SimSigner
from tests.support.fake_rounds import SEED


def host(peers: Peers, index: int) -> Host:
    """The host of one of these peers, which all consider each other live."""
    transport, clock = peers.transports[index], SimClock()
    return Host(
        transport=transport,
        directory=SimDirectory({}, transport.me, clock, DirectoryFaults()),
        members=StaticMembers(Member(other.me) for other in peers.transports),
        compute=SimCompute(),
        clock=clock,
        signer=SimSigner(transport.me, SEED),
        seed=SEED,
    )


class Network:
    """The peers of a world as a network for `tests.support.sync_cluster`."""

    def __init__(self, peers: Peers) -> None:
        members = StaticMembers(Member(transport.me) for transport in peers.transports)
        self.contacts = self
        self.views = {transport.me: members for transport in peers.transports}
        self._transports = {transport.me: transport for transport in peers.transports}

    def join(self, peer: PeerId) -> Transport:
        return self._transports[peer]
