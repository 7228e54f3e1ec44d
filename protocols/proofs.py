"""Having a peer prove the head that it shows: its certificates from where our chains part, each of them judged."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from protocols import wire
from protocols.base import BadPayload, Deadline, Host, PeerError, PeerGone, PeerId, RoundKey, Stream
from protocols.branches import Branch, Rules
from protocols.chain import Chain, Link
from protocols.contacts import Contacts
from protocols.post import Ledger
from protocols.requests import SYNC, Trail, WantTrail
from protocols.votes import Certificate

TRAIL_SECONDS = 20.0
"""A contact has so long to prove its head."""
VERIFY_BYTES = 1 << 16
"""What judging one certificate costs, as bytes of `Compute`: some signatures."""
KEEP_CERTIFICATES = 4096
_LIMIT = 256


class Proofs:
    """Asks for certificates, and trusts nobody who gives them."""

    def __init__(self, host: Host, chain: Chain, rules: Rules, ledger: Ledger, contacts: Contacts) -> None:
        self._host, self._chain, self._rules, self._ledger, self._contacts = host, chain, rules, ledger, contacts

    async def of(self, claims: Sequence[tuple[PeerId, RoundKey]], stranded: bool, deadline: Deadline) -> Branch | None:
        """Have one of those who show the same head prove it; None if it does not beat ours, or none of them can.

        Args:
            stranded: as for `Rules.beating`.
        """
        for peer, key in claims:
            until = min(deadline, asyncio.get_running_loop().time() + TRAIL_SECONDS)
            try:
                async with (
                    self._host.transport.open(peer, SYNC, until) as stream,
                    self._ledger.counting(stream),
                ):
                    return await self._trail(stream, key, stranded)
            except BadPayload:
                self._contacts.distrust(peer)
            except PeerError as error:
                self._ledger.name(peer, f"lost as a contact: {error.why}")
        return None

    async def _trail(self, stream: Stream, key: RoundKey, stranded: bool) -> Branch | None:
        """Follow a peer's certificates from where we part to the head that it has shown.

        Raises:
            BadPayload: one of them is not right, or they do not lead there.
        """
        chain, locator = self._chain.copy(), self._chain.locator()
        ancestor, branch = b"", None
        links: list[Link] = []
        while len(links) < KEEP_CERTIFICATES:
            trail, batch = await self._batch(stream, locator)
            if not links:
                ancestor = trail.ancestor
            head = links[-1].head if links else chain.at(ancestor)
            assert head
            links += await self._host.compute.run(partial(self._rules.verify, head, batch), VERIFY_BYTES * len(batch))
            branch = self._rules.beating(chain, ancestor, links, stranded)
            if not branch and any(link.lineage not in chain for link in links):
                return None  # it has lost, or may not be followed, however it goes on
            if not trail.more or not batch:
                break
            locator = (links[-1].lineage,)
        if not links or links[-1].head.key.round < key.round:
            raise BadPayload(f"does not prove the head at round {key.round} that it shows")
        return branch

    async def _batch(self, stream: Stream, locator: tuple[bytes, ...]) -> tuple[Trail, list[Certificate]]:
        await stream.send(WantTrail(locator))
        trail = wire.expect(await stream.receive(_LIMIT), Trail)
        if trail.ancestor not in locator:
            if trail.ancestor == bytes(32) and not trail.count:
                raise PeerGone(stream.peer, "keeps nothing back to where we stand")
            raise BadPayload("certificates that follow none of the lineages they were asked from")
        found = [await stream.receive(wire.MAX_HEADER_BYTES) for _ in range(trail.count)]
        return trail, [wire.expect(each, Certificate) for each in found]
