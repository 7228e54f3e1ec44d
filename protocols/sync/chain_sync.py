"""Catching up: who stands where, what was decided without us, and the state that goes with it.

One method serves all. Peers greet each other with their heads; who sees a head that it does not know asks for the
certificates that lead there, and judges them itself (`protocols.history.fork_choice`). No contact is trusted: one that
shows what it cannot prove is named and left, the others are asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce

from protocols.aio import loop_time, task_group
from protocols.base import BadPayload, Deadline, Header, Host, PeerGone, PeerId, RoundKey, Settings, Stream
from protocols.butterfly.part_cache import PartCache
from protocols.consensus import record as records
from protocols.history.chain import Chain
from protocols.history.fork_choice import Branch, ForkChoice
from protocols.history.round_log import Archive, ListArchive
from protocols.sync.context import SyncContext
from protocols.sync.head_verifier import TRAIL_SECONDS, HeadVerifier
from protocols.sync.requests import MAX_TRAIL, Certificates, CertificatesRequest, HeadAnnouncement
from protocols.sync.service import ANNOUNCE_SECONDS, SyncServiceBase
from protocols.sync.snapshot import Snapshots
from protocols.sync.snapshot_server import SnapshotServer
from protocols.sync.state_fetcher import StateFetcher

DIAL_SECONDS = 10.0
HASTE_SECONDS = 1.0
"""Between two looks at news, however many greetings bring them."""
GRACE_SECONDS = 1.0
"""A certificate that is on its way to us arrives: who is a moment behind need not leave its round."""
PROOFS_AT_ONCE = 8


def _ignore_branch(branch: Branch) -> None:
    """For a peer that looks for better branches only between its rounds."""


@dataclass(frozen=True, slots=True)
class ChainSyncOptions:
    """What a `ChainSync` works with beyond what every peer has.

    Attributes:
        part_cache: parts of reduced vectors that this peer holds.
        make_archive: returns an archive for certificates that are being verified.
        on_better: called when a branch that beats this peer's was found and verified.
    """

    part_cache: PartCache
    make_archive: Callable[[], Archive] = ListArchive
    on_better: Callable[[Branch], None] = _ignore_branch


class ChainSync(SyncServiceBase[HeadAnnouncement]):
    """What one peer asks others, and answers them, about the chain.

    Attributes:
        rules: what decides in this run.
        fetcher: what others hand out to us.
        stranded: whether this peer has been undecided for so long that it might fork itself: see `ForkChoice.beating`.
    """

    described = "a greeting"

    def __init__(
        self,
        host: Host,
        chain: Chain,
        settings: Settings,
        snapshots: Snapshots,
        hints: Callable[[], Iterable[PeerId]],
        options: ChainSyncOptions,
    ) -> None:
        """
        Args:
            chain: this peer's; the outer loop that moves it shares it.
            snapshots: those that this peer hands out.
            hints: peers that may know more: bootstrap addresses, hints of a directory. Any of them may lie.
        """
        context, part_cache = SyncContext(host, settings, snapshots, hints, chain), options.part_cache
        donor = SnapshotServer(snapshots, host.compute, part_cache.gate, self._has_rounds_since)
        super().__init__(context, HeadAnnouncement, lambda: chain.head.key, donor)
        self.rules = ForkChoice(context.me, host.signer, settings.quorum, settings.fork_peers)
        self.fetcher, self.stranded = StateFetcher(context, part_cache), False
        self._chain, self._part_cache, self._on_better = chain, part_cache, options.on_better
        self._verifier = HeadVerifier(context, chain, self.rules, options.make_archive)
        self._news = asyncio.Event()

    def hear(self, peer: PeerId) -> None:
        """A peer seems to stand where we do not: look into it."""
        if self._context.peers.called(peer):
            self._news.set()

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
        """Send the certificates that follow a lineage, a few at a time: they come from a disk, and others wait."""
        after = self._chain.count_since(lineage)
        left = min(after, MAX_TRAIL)
        await stream.send(Certificates(lineage, left, after > left))
        while left:
            found = self._chain.certificates(lineage)[:left]
            if not found:
                raise PeerGone(stream.peer, "we have left the branch that it asks for")
            for certificate in found:
                await stream.send(certificate)
            lineage, left = records.lineage(found[-1].record), left - len(found)
            await asyncio.sleep(0)

    def _announcement(self) -> HeadAnnouncement:
        return HeadAnnouncement(self._key(), self.rules.me, self._donor.kept())

    def _has_rounds_since(self, lineage: bytes) -> bool:
        """Whether we hold all means since: else a snapshot of that state leads nowhere."""
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
        """Dial the peers that are not in the roster, and look into every head that we do not know."""
        began, news = loop_time(), self._news.is_set()
        self._news.clear()
        if not news:
            here = self.rules.me in self._chain.head.roster
            peers = self._context.peers.outsiders() if here else self._context.peers.everybody()
            heads = await self._exchange(peers, began + DIAL_SECONDS)
            news = any(self._unknown(head.key) for head in heads.values())
        news = news and not self.sync_progress.active  # then it asks again when it is there
        if news and (branch := await self.better(loop_time() + ANNOUNCE_SECONDS + TRAIL_SECONDS)):
            if branch.ancestor.key == self._chain.head.key:
                await asyncio.sleep(GRACE_SECONDS)
            if self._unknown(branch.head.key) and branch.ancestor.key.lineage in self._chain:
                self._on_better(branch)
        await asyncio.sleep(HASTE_SECONDS)
        with suppress(TimeoutError):
            async with asyncio.timeout_at(began + DIAL_SECONDS):
                await self._news.wait()

    async def better(self, deadline: Deadline) -> Branch | None:
        """Ask all contacts; the best branch that could be proved, and beats ours, if there is one.

        Args:
            deadline: for contacts that bring nothing; who proves its head, round by round, has more time.
        """
        heads = await self._exchange(self._context.peers.everybody(), deadline)
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
    """The branches that are proved. Once one is, nobody holds up what as many others show: who shows another head,
    and is not more, has as long again to prove it.

    Args:
        proofs: each with how many show that head.
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
