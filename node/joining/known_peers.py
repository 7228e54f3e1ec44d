"""The membership of a peer that enters a run, filled with the peers that it already knows."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

from node.membership.handshake import LocalPeer
from node.membership.membership import Membership
from node.outer.round_history import RoundHistory
from protocols.base import Clock, Deadline, Member, PeerError, PeerId, Signer, Transport
from protocols.wire import MAX_ROSTER


class DialingTransport(Transport, Protocol):
    async def connect(self, address: str, deadline: Deadline) -> PeerId: ...

    async def forget(self, peer: PeerId, deadline: Deadline) -> None: ...


async def reach(
    connect: Callable[[str, Deadline], Awaitable[PeerId]], peer: PeerId, addresses: Sequence[str], deadline: Deadline
) -> None:
    """Connect to a peer at the first of its addresses that works. If none does, libp2p may still find a route."""
    tries = [asyncio.ensure_future(connect(f"{address}/p2p/{peer}", deadline)) for address in addresses]
    try:
        for each in asyncio.as_completed(tries):
            with suppress(PeerError, ValueError):
                await each
                return
    finally:
        for left in tries:
            left.cancel()


def add_candidates(membership: Membership) -> Callable[[Sequence[str]], None]:
    """A callback for the multiaddrs in a file of addresses: it has them tried while no other peer is live."""

    def add(addresses: Sequence[str]) -> None:
        if len(membership.live()) > 1:
            return
        for where, _, peer in (each.rpartition("/p2p/") for each in addresses):
            membership.add_candidate(peer, (where,))

    return add


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
    local: LocalPeer,
    *,
    clock: Clock,
    signer: Signer,
    history: RoundHistory,
    met: Mapping[PeerId, str],
    unanswered: Sequence[str],
    remembered: Mapping[PeerId, Sequence[str]],
    on_duplicate_identity: Callable[[str], None],
    say: Callable[[str], None],
) -> Membership:
    """The membership of a run, beginning with the peers that this peer knows.

    `met`: each peer that let this one in, and the multiaddr that led there. `unanswered`: multiaddrs that the user
    gave; they are dialled again and again. `remembered`: peers of the last session in the run, and their addresses.
    """
    silent = {peer: address for address, _, peer in (each.rpartition("/p2p/") for each in unanswered)}

    def wanted() -> list[PeerId]:
        return [*(member.peer for member in history.members(MAX_ROSTER) if member != local.me), *silent]

    membership = Membership(
        transport,
        local,
        clock=clock,
        signer=signer,
        wanted=wanted,
        reach=partial(reach, transport.connect),
        drop=transport.forget,
        on_duplicate_identity=on_duplicate_identity,
        say=say,
    )
    for peer, address in silent.items():
        membership.add_candidate(peer, (address,))
    for peer, address in met.items():
        membership.add_candidate(peer, (address.rpartition("/p2p/")[0],))
    for peer, addresses in remembered.items():
        membership.add_candidate(peer, addresses)
    return membership
