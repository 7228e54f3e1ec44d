"""The membership of a peer that enters a run, filled with the peers that it already knows.

These are the roster, the peer that answered its bootstrap request, and the peers that it met before a restart.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from node.joining.bootstrap import reach
from node.membership.handshake import LocalPeer
from node.membership.membership import Membership
from node.outer.round_history import RoundHistory
from node.storage.statedir import StateDir
from node.ui.status_tracker import StatusTracker
from protocols.base import Clock, Deadline, Member, PeerId, Transport
from protocols.wire import MAX_ROSTER


class DialingTransport(Transport, Protocol):
    """A transport that also connects to given addresses."""

    async def connect(self, address: str, deadline: Deadline) -> PeerId: ...

    async def forget(self, peer: PeerId, deadline: Deadline) -> None: ...


def hinted(membership: Membership) -> Callable[[Sequence[str]], None]:
    """A callback for the multiaddrs in a file of addresses: it has them tried while no other peer is live."""

    def hint(addresses: Sequence[str]) -> None:
        if len(membership.live()) > 1:
            return
        for where, _, peer in (each.rpartition("/p2p/") for each in addresses):
            membership.hint(peer, (where,))

    return hint


def build_membership(
    transport: DialingTransport,
    clock: Clock,
    state: StateDir,
    status_tracker: StatusTracker,
    chain: RoundHistory,
    met: Mapping[PeerId, str],
    unanswered: Sequence[str] = (),
) -> Membership:
    """Build the membership, with the peers that this peer already knows.

    Args:
        status_tracker: has this peer's name and addresses.
        met: peer that answered the bootstrap request -> multiaddr that led to it.
        unanswered: multiaddrs that the user gave and at which no peer answered; the membership goes on dialling them.
    """
    local = LocalPeer(
        me=Member(state.identity.peer_id, state.incarnation),
        run=chain.head.key.run,
        life=secrets.randbits(63),
        nickname=status_tracker.nickname,
        addresses=lambda: [address.rpartition("/p2p/")[0] for address in status_tracker.addresses()],
        round=lambda: chain.head.key.round,
    )
    silent = {peer: address for address, _, peer in (each.rpartition("/p2p/") for each in unanswered)}

    def wanted() -> list[PeerId]:
        return [*(member.peer for member in chain.members(MAX_ROSTER) if member != local.me), *silent]

    made = Membership(
        transport, clock, state.identity, local, wanted, partial(reach, transport.connect), transport.forget
    )
    for peer, address in silent.items():
        made.hint(peer, (address,))
    for peer, address in met.items():
        made.hint(peer, (address.rpartition("/p2p/")[0],))
    for peer, addresses in state.peers().items():
        made.hint(peer, addresses)
    return made
