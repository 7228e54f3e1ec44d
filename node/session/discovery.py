"""Finds peers of the run through its directory, and lets others find this one there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from node.membership.hello import sound
from node.membership.membership import Membership
from protocols.base import Deadline, Directory, PeerId

ANNOUNCED_SECONDS = 180.0
FIND_SECONDS = 20.0
QUIET_FIND_SECONDS = 60.0  # after two looks that found no change: all met, none lost, none new
FIRST_SECONDS = 5.0
MEET_SECONDS = 3.0
SETTLE_SECONDS = 2.0  # Time after a suspend until the clock's offset and p2pd's addresses are known again
SCOPE = "run"
MAX_FOUND = 64


class IntroducedDirectory(Directory, Protocol):
    """A directory that learns of peers from this one."""

    async def meet(self, peer: PeerId, deadline: Deadline) -> bool: ...


async def discover(
    membership: Membership, directory: IntroducedDirectory, me: PeerId, addresses: Callable[[], Sequence[str]]
) -> None:
    """Announce this peer's addresses in the directory, and look for other peers there, until cancelled."""
    loop = asyncio.get_running_loop()
    met: set[PeerId] = set()
    quiet_looks = 0
    while True:
        began = loop.time()
        # the directory learns of peers from the membership
        await membership.changed(0, loop.time() + FIRST_SECONDS)
        here = {member.peer for member in membership.live()} - {me}
        for peer in sorted(here - met):
            if await directory.meet(peer, loop.time() + MEET_SECONDS):
                met.add(peer)
        is_quiet = bool(here) and here == met  # all are met, and none of them is lost
        met &= here
        value = json.dumps([address.rpartition("/p2p/")[0] for address in addresses()][:8]).encode()
        await directory.announce(SCOPE, value, ANNOUNCED_SECONDS, began + FIND_SECONDS)
        for peer, found in await directory.find(SCOPE, MAX_FOUND, began + FIND_SECONDS):
            is_quiet &= peer == me or membership.contact(peer) is not None
            membership.add_candidate(peer, _addresses(found))
        quiet_looks = quiet_looks + 1 if is_quiet else 0
        # Wait less if this machine slept or moved: others may have its old addresses.
        announce_again = membership.host_monitor.announce_again
        with suppress(TimeoutError):
            async with asyncio.timeout_at(began + (QUIET_FIND_SECONDS if quiet_looks > 1 else FIND_SECONDS)):
                await announce_again.wait()
                announce_again.clear()
                await asyncio.sleep(SETTLE_SECONDS)


def _addresses(value: bytes) -> tuple[str, ...]:
    """The addresses in a directory entry, which any peer may have written; none if the entry is malformed."""
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return ()
    return sound(found) if isinstance(found, list) else ()
