"""State sync with a chain: learns the heads of other peers, has them proved, and fetches the state.

A peer that sees an unknown head asks for the certificates that lead to it, and verifies them itself
(`protocols.history.fork_choice`). A peer that cannot prove its head is reported and dropped; the others are asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from functools import reduce

from protocols.aio import loop_time, task_group
from protocols.base import BadPayload, Deadline, Header, Host, PeerGone, PeerId, RoundKey, Settings, Stream
from protocols.blobs.parts import PartCache
from protocols.consensus import record as records
from protocols.history.chain import Chain
from protocols.history.fork_choice import Branch, ForkChoice
from protocols.history.round_log import Archive, ListArchive
from protocols.sync.context import SyncContext
from protocols.sync.head_verifier import TRAIL_SECONDS, HeadVerifier
from protocols.sync.requests import MAX_TRAIL, Certificates, CertificatesRequest, HeadAnnouncement
from protocols.sync.service import ANNOUNCE_SECONDS, SyncServiceBase
from protocols.sync.snapshot import Snapshots
from protocols.sync.state_fetcher import StateFetcher

DIAL_SECONDS = 10.0
HASTE_SECONDS = 1.0  # least time between two checks for unknown heads, however many announcements arrive
GRACE_SECONDS = 1.0
"""Time for a certificate that is on its way, so that a peer that is slightly behind need not leave its round."""
PROOFS_AT_ONCE = 8


def _ignore_branch(branch: Branch) -> None:
    """For a peer that looks for better branches only between its rounds."""


async def _keep_nothing() -> None:
    """For a peer without a state."""


class ChainSync(SyncServiceBase[HeadAnnouncement]):
    """The sync service of a peer with a chain."""

    def __init__(
        self,
        host: Host,
        settings: Settings,
        *,
        chain: Chain,
        snapshots: Snapshots,
        part_cache: PartCache,
        hints: Callable[[], Iterable[PeerId]],
        make_archive: Callable[[], Archive] = ListArchive,
        on_better: Callable[[Branch], None] = _ignore_branch,
    ) -> None:
        """The outer loop extends `chain`. `hints` are peers that may know more; any of them may lie.

        `make_archive` is for certificates that are being verified. `on_better` gets a verified branch that beats our
        chain.
        """
        context = SyncContext(host, settings, snapshots, hints, chain)
        super().__init__(context, HeadAnnouncement, lambda: chain.head.key, part_cache.blobs)
        snapshots.is_replayable = self._has_rounds_since
        self.rules = ForkChoice(
            context.me, host.signer, settings.quorum, settings.fork_peers, host.removed, settings.voters
        )
        self.fetcher, self.stranded = StateFetcher(context, part_cache), False
        self._chain, self._part_cache, self._on_better = chain, part_cache, on_better
        self._verifier = HeadVerifier(context, chain, self.rules, make_archive, self._still_shows)
        self._new_heads = asyncio.Event()
        self.keep_state: Callable[[], Awaitable[None]] = _keep_nothing  # set by the outer loop

    def hear(self, peer: PeerId) -> None:
        """Note that a peer seems to have another head, and wake the check for unknown heads."""
        if self._context.peers.called(peer):
            self._new_heads.set()

    # -- answering ----------------------------------------------------------------------------------------------------

    async def _answer(self, stream: Stream, request: Header) -> None:
        if isinstance(request, HeadAnnouncement):
            self._admit(stream.peer, request)
            await stream.send(self._announcement())
            if self._unknown(request.key):
                self.hear(stream.peer)
        elif isinstance(request, CertificatesRequest):
            await self._lead(stream, self._chain.common(request.locator) or bytes(32))
        else:
            raise BadPayload(f"{type(request).__name__} as a request")

    async def _lead(self, stream: Stream, lineage: bytes) -> None:
        """Send the certificates that follow a lineage, a few at a time: other requests are served in between."""
        after = self._chain.count_since(lineage)
        left = min(after, MAX_TRAIL)
        await stream.send(Certificates(lineage, left, after > left))
        while left:
            found = self._chain.certificates(lineage)[:left]
            if not found:
                raise PeerGone(stream.peer, "this peer has left the branch that was asked for")
            for certificate in found:
                await stream.send(certificate)
            lineage, left = records.lineage(found[-1].record), left - len(found)
            await asyncio.sleep(0)

    def _announcement(self) -> HeadAnnouncement:
        return HeadAnnouncement(self._key(), self.rules.me, self._context.snapshots.served())

    def _has_rounds_since(self, lineage: bytes) -> bool:
        """Whether this peer has all means since that lineage, without which a snapshot of its state is useless."""
        chain, parts = self._chain, self._part_cache
        return lineage in chain and all(
            part.digest in parts for link in chain.since(lineage) for part in link.record.parts
        )

    def _admit(self, peer: PeerId, announcement: HeadAnnouncement) -> None:
        super()._admit(peer, announcement)
        self._context.peers.has(peer, announcement.kept)

    def _unknown(self, key: RoundKey) -> bool:
        return key.lineage not in self._chain

    # -- asking -------------------------------------------------------------------------------------------------------

    async def _look_around(self) -> None:
        """Ask some peers for their heads, and pass on a better branch if unknown heads lead to one."""
        began, new_heads = loop_time(), self._new_heads.is_set()
        self._new_heads.clear()
        if self._is_last_holder():
            await self.keep_state()
        if not new_heads:
            here = self.rules.me in self._chain.head.roster
            peers = self._context.peers.outsiders() if here else self._context.peers.all_contacts()
            heads = await self._exchange(self._context.peers.some(peers), began + DIAL_SECONDS)
            new_heads = any(self._unknown(head.key) for head in heads.values())
        new_heads = new_heads and not self.sync_progress.active  # if active, this peer asks again once it has caught up
        if new_heads and (branch := await self.better(loop_time() + ANNOUNCE_SECONDS + TRAIL_SECONDS)):
            if branch.ancestor.key == self._chain.head.key:
                await asyncio.sleep(GRACE_SECONDS)
            if self._unknown(branch.head.key) and branch.ancestor.key.lineage in self._chain:
                self._on_better(branch)
        await asyncio.sleep(HASTE_SECONDS)
        with suppress(TimeoutError):
            async with asyncio.timeout_at(began + DIAL_SECONDS):
                await self._new_heads.wait()

    def _is_last_holder(self) -> bool:
        """Whether perhaps no other peer has this one's state, and none could fetch it.

        No other member is live, and a mean is missing here since each snapshot: this peer has only caught up.
        """
        others = set(self._chain.head.roster) - {self.rules.me}
        if not others.isdisjoint(self._context.host.members.live()):
            return False
        return not any(self._has_rounds_since(each.lineage) for each in self._context.snapshots.held())

    async def _still_shows(self, peer: PeerId, key: RoundKey) -> bool:
        heads = await self._exchange([peer], loop_time() + ANNOUNCE_SECONDS)
        return peer in heads and heads[peer].key == key

    async def better(self, deadline: Deadline) -> Branch | None:
        """Ask all sync peers for their heads. Returns the best proved branch that beats this peer's, or None.

        The deadline is for peers that send nothing. A peer that proves its head round by round has more time.
        """
        heads = await self._exchange(self._context.peers.all_contacts(), deadline)
        claims: dict[bytes, list[PeerId]] = {}
        for peer, head in sorted(heads.items(), key=lambda item: -item[1].key.round):
            if self._unknown(head.key):
                claims.setdefault(head.key.lineage, []).append(peer)
        turn = asyncio.Semaphore(PROOFS_AT_ONCE)

        async def one(peers: Sequence[PeerId]) -> Branch | None:
            async with turn:
                return await self._verifier.verify([(peer, heads[peer].key) for peer in peers], self.stranded, deadline)

        async with task_group() as group:
            claimants = sorted(claims.values(), key=lambda peers: -len(peers))
            branches = await _most_shown({group.create_task(one(peers)): len(peers) for peers in claimants})
        return reduce(self.rules.better, branches) if branches else None


async def _most_shown(proofs: dict[asyncio.Task[Branch | None], int]) -> list[Branch]:
    """Wait for proofs, each with the number of peers that show its head, and return the proved branches.

    Once a branch is proved, the other proofs get as much time again. Then those are cancelled whose head is shown by no
    more peers than that of a proved branch.
    """
    began, until = loop_time(), None
    waiting, most, proved = set(proofs), 0, list[Branch]()
    while waiting:
        left = None if until is None else max(0.0, until - loop_time())
        done, waiting = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        for each in done:
            if branch := each.result():
                proved.append(branch)
                most = max(most, proofs[each])
                until = until or loop_time() + max(TRAIL_SECONDS, loop_time() - began)
        if until is not None and loop_time() >= until:
            late = {each for each in waiting if proofs[each] <= most}
            for each in late:
                each.cancel()
            waiting, until = waiting - late, None
    return proved
