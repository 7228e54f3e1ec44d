"""The membership of a peer that enters a run, filled with the peers that it already knows.

These are the roster, the peer that answered its bootstrap request, and the peers that it met before a restart.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from node.joining.bootstrap import reach
from node.membership.handshake import LocalPeer
from node.membership.membership import DialPolicy, Membership, MembershipCallbacks
from node.outer.round_history import RoundHistory
from protocols.base import Clock, Deadline, Member, PeerId, Signer, Transport
from protocols.wire import MAX_ROSTER


class DialingTransport(Transport, Protocol):
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


@dataclass(frozen=True, slots=True)
class KnownPeers:
    """Peers that are dialled first."""

    bootstrap: Mapping[PeerId, str]  # each peer that let this one in, and the multiaddr that led there
    unanswered: Sequence[str]  # multiaddrs that the user gave and where no peer answered; they are dialled on
    remembered: Mapping[PeerId, Sequence[str]]  # peers of this peer's last session in the run, and their addresses


def local_peer(me: Member, nickname: str, addresses: Callable[[], Sequence[str]], history: RoundHistory) -> LocalPeer:
    return LocalPeer(
        me=me,
        run=history.head.key.run,
        nonce=secrets.randbits(63),
        nickname=nickname,
        addresses=lambda: [address.rpartition("/p2p/")[0] for address in addresses()],
        round=lambda: history.head.key.round,
    )


def build_membership(
    transport: DialingTransport,
    clock: Clock,
    signer: Signer,
    local: LocalPeer,
    history: RoundHistory,
    known: KnownPeers,
    callbacks: MembershipCallbacks,
) -> Membership:
    """The membership of a run, beginning with the peers that this peer knows."""
    silent = {peer: address for address, _, peer in (each.rpartition("/p2p/") for each in known.unanswered)}

    def wanted() -> list[PeerId]:
        return [*(member.peer for member in history.members(MAX_ROSTER) if member != local.me), *silent]

    dialing = DialPolicy(wanted, partial(reach, transport.connect), transport.forget)
    membership = Membership(transport, clock, signer, local, dialing, callbacks)
    for peer, address in silent.items():
        membership.hint(peer, (address,))
    for peer, address in known.bootstrap.items():
        membership.hint(peer, (address.rpartition("/p2p/")[0],))
    for peer, addresses in known.remembered.items():
        membership.hint(peer, addresses)
    return membership
