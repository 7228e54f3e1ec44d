"""Whom a peer knows when it enters a run: who is in the roster, who let it in, whom it met when it was last here."""

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
    """A transport that is told where peers are."""

    async def connect(self, address: str, deadline: Deadline) -> PeerId: ...

    async def forget(self, peer: PeerId, deadline: Deadline) -> None: ...


def hinted(membership: Membership) -> Callable[[Sequence[str]], None]:
    """What becomes of the multiaddrs in a file once a run is entered: they are tried while no other peer is live."""

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
    """Who is here, beginning with whom this peer knows.

    Args:
        status_tracker: has this peer's name and addresses.
        met: who let it in, and the multiaddr that led there.
        unanswered: multiaddrs that the user gave and where nobody was; they are dialled on.
    """
    who = LocalPeer(
        me=Member(state.identity.peer_id, state.incarnation),
        run=chain.head.key.run,
        life=secrets.randbits(63),
        nickname=status_tracker.nickname,
        addresses=lambda: [address.rpartition("/p2p/")[0] for address in status_tracker.addresses()],
        round=lambda: chain.head.key.round,
    )
    silent = {peer: address for address, _, peer in (each.rpartition("/p2p/") for each in unanswered)}

    def wanted() -> list[PeerId]:
        return [*(member.peer for member in chain.members(MAX_ROSTER) if member != who.me), *silent]

    made = Membership(
        transport, clock, state.identity, who, wanted, partial(reach, transport.connect), transport.forget
    )
    for peer, address in silent.items():
        made.hint(peer, (address,))
    for peer, address in met.items():
        made.hint(peer, (address.rpartition("/p2p/")[0],))
    for peer, addresses in state.peers().items():
        made.hint(peer, addresses)
    return made
