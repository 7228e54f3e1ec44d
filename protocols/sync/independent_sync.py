"""State sync without a chain: announces this peer's state, and fetches the state of another peer.

No two states are equal. So each peer signs those that it serves, with run, round and root. A joiner fetches a state
that one donor has signed. It chooses the donor, and never one that claims to be far ahead of most.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import torch

from protocols import wire
from protocols.aio import loop_time
from protocols.base import BadPayload, Deadline, Head, Header, Host, PeerId, RoundKey, Settings, Stream
from protocols.blobs.serving import BlobServer
from protocols.peers.estimates import DONOR_ROUND
from protocols.sync.context import SyncContext
from protocols.sync.requests import SignedStateRef, StateAdvert
from protocols.sync.service import SyncServiceBase
from protocols.sync.snapshot import Snapshot, Snapshots
from protocols.sync.snapshot_download import SnapshotDownload, StateUnavailable
from protocols.vectors.coding import require_finite

TIDY_SECONDS = 10.0
COMPLAIN_AFTER = 5  # consecutive failed attempts before a message to the operator; a few are normal when a run starts
DONORS = 8  # limit of donors that are tried one after the other before all are asked again
Order: TypeAlias = Callable[[Sequence[PeerId]], Sequence[PeerId]]
_TAG = b"starling state 1\n"


def sign_state_ref(key: RoundKey, round_number: int, root: bytes) -> bytes:
    return _TAG + wire.canonical_bytes(replace(key, round=round_number, lineage=root))


class IndependentStateSync(SyncServiceBase[StateAdvert]):
    """The sync service of a peer with independent state."""

    def __init__(
        self,
        host: Host,
        settings: Settings,
        *,
        snapshots: Snapshots,
        key: Callable[[], RoundKey],
        hints: Callable[[], Iterable[PeerId]],
        has_state: Callable[[], bool],
    ) -> None:
        """`has_state` says whether others may start from this peer's state; a joiner must first fetch one."""
        context = SyncContext(host, settings, snapshots, hints)
        super().__init__(context, StateAdvert, key, BlobServer(host))
        self._has_state, self._failed_fetches = has_state, 0
        self._signed: dict[tuple[int, bytes], bytes] = {}

    async def _look_around(self) -> None:
        await asyncio.sleep(TIDY_SECONDS)

    # -- announcing ---------------------------------------------------------------------------------------------------

    def _announcement(self) -> StateAdvert:
        kept = [(each.round, each.lineage) for each in self._context.snapshots.served()]
        sign = self._context.host.signer.sign
        self._signed = {each: self._signed.get(each) or sign(sign_state_ref(self._key(), *each)) for each in kept}
        states = tuple(SignedStateRef(root, number, signature) for (number, root), signature in self._signed.items())
        return StateAdvert(self._key(), self._context.me, states, self._has_state())

    async def _answer(self, stream: Stream, request: Header) -> None:
        self._admit(stream.peer, wire.expect(request, StateAdvert))
        await stream.send(self._announcement())

    def _admit(self, peer: PeerId, announcement: StateAdvert) -> None:
        super()._admit(peer, announcement)
        for each in announcement.states:
            signed = sign_state_ref(announcement.key, each.round, each.root)
            if not self._context.host.signer.verify(peer, signed, each.signature):
                raise BadPayload(f"a state before round {each.round + 1} with a wrong signature")

    # -- fetching a state ---------------------------------------------------------------------------------------------

    async def fetch(self, order: Order, deadline: Deadline) -> Snapshot:
        """Fetch the newest state of one donor: the first donor that sends it whole, in the order that `order` gives.

        Past the deadline, it continues while it makes progress. Raises `StateUnavailable`, and OSError if a state that
        was fetched cannot be read.
        """
        self.sync_progress.begin(0, 0)
        try:
            adverts = await self._exchange(self._context.peers.all_contacts(), deadline)
            snapshot = await self._from_one(eligible(adverts), order, deadline)
        except StateUnavailable as error:
            self._failed_fetches += 1
            if self._failed_fetches == COMPLAIN_AFTER:
                self._context.say(f"{error}: waiting for a peer that has one")
            raise
        finally:
            self.sync_progress.end()
        self._failed_fetches = 0
        return snapshot

    async def _from_one(self, donors: Mapping[PeerId, SignedStateRef], order: Order, deadline: Deadline) -> Snapshot:
        tried = 0
        due = order(sorted(donors, key=lambda donor: (-donors[donor].round, donor)))[:DONORS]
        for donor in due:
            if loop_time() >= deadline:
                break
            share = (deadline - loop_time()) / (len(due) - tried)  # leaves time for the next donor
            tried += 1
            if snapshot := await self._fetch_from(donor, donors[donor], loop_time() + share):
                return snapshot
        raise StateUnavailable(f"none of {tried} donors sent its state" if due else "no peer here has a state")

    async def _fetch_from(self, donor: PeerId, state: SignedStateRef, deadline: Deadline) -> Snapshot | None:
        """Fetch a donor's state. None if it does not arrive or is not finite; the donor is then reported."""
        key = replace(self._key(), round=state.round, lineage=state.root)
        head = Head(key, (), state.root, state.root)
        try:
            snapshot = await SnapshotDownload(self._context, head).fetch(lambda: [donor], deadline)
            await self._context.host.compute.run(partial(_refuse_non_finite, snapshot), 8 * self._context.elements)
        except StateUnavailable:
            self.accounting.name(donor, "did not send its state")
        except ValueError:  # no peer would average with such a state, and no sketch could measure it
            self._context.peers.distrust(donor)
            self.accounting.name(donor, "serves a state that is not finite")
        else:
            return snapshot
        return None


def eligible(standings: Mapping[PeerId, StateAdvert]) -> dict[PeerId, SignedStateRef]:
    """The donors whose newest state may be fetched: none that claims a later round than most peers with a state.

    If the claim were false, a joiner that believed it would leave the run's schedule.
    """
    newest = {peer: each.states[0] for peer, each in standings.items() if each.whole and each.states}
    latest = DONOR_ROUND.latest((state.round for state in newest.values()), len(newest))
    return {peer: state for peer, state in newest.items() if latest is not None and state.round <= latest}


def _refuse_non_finite(snapshot: Snapshot) -> None:
    """Raise ValueError if a number of a snapshot is not finite."""
    for chunk in range(len(snapshot.index.digests)):
        require_finite(torch.frombuffer(snapshot.chunk(chunk), dtype=torch.float32))
