"""Catching up: who stands where, what was decided without us, and the state that goes with it.

One method serves all. Peers greet each other with their heads; who sees a head that it does not know asks for the
certificates that lead there, and judges them itself (`protocols.history.fork_choice`). No contact is trusted: one that
shows what it cannot prove is named and left, the others are asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import reduce

from protocols import wire
from protocols.aio import task_group
from protocols.base import (
    BadPayload,
    Deadline,
    Header,
    Host,
    Member,
    PeerError,
    PeerGone,
    PeerId,
    RoundKey,
    Settings,
    Stream,
)
from protocols.butterfly.part_cache import PartCache
from protocols.consensus import record as records
from protocols.control_channel import RoundAccounting
from protocols.gate import Gate
from protocols.history.chain import Chain
from protocols.history.fork_choice import Branch, ForkChoice
from protocols.history.round_log import Archive, ListArchive
from protocols.sync.head_verifier import TRAIL_SECONDS, HeadVerifier
from protocols.sync.progress import SyncProgress
from protocols.sync.requests import MAX_TRAIL, SYNC, Certificates, CertificatesRequest, HeadAnnouncement
from protocols.sync.snapshot import Snapshots
from protocols.sync.snapshot_server import SnapshotServer
from protocols.sync.state_fetcher import StateFetcher
from protocols.sync.sync_peers import SyncPeers
from protocols.sync.sync_server import SyncServer

DIAL_SECONDS = 10.0
GREET_SECONDS = 5.0
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
        part_cache: parts of reduced vectors that this peer holds; None: it holds none.
        make_archive: returns an archive for certificates that are being verified.
        on_better: called when a branch that beats this peer's was found and verified.
    """

    part_cache: PartCache | None = None
    make_archive: Callable[[], Archive] = ListArchive
    on_better: Callable[[Branch], None] = _ignore_branch


class ChainSync:
    """What one peer asks others, and answers them, about the chain.

    Attributes:
        rules: what decides in this run.
        accounting: who was named, and the bytes that crossed, since it was last taken.
        snapshots: what we hand out.
        proofs: how others prove their heads to us.
        fetcher: what others hand out to us.
        stranded: whether this peer has been undecided for so long that it might fork itself: see `branches`.
    """

    def __init__(
        self,
        host: Host,
        chain: Chain,
        settings: Settings,
        snapshots: Snapshots,
        contacts: Callable[[], Iterable[PeerId]],
        options: ChainSyncOptions = ChainSyncOptions(),
    ) -> None:
        """
        Args:
            chain: this peer's, shared with who moves it.
            contacts: peers that may know more: bootstrap addresses, hints of a directory. Any of them may lie.
        """
        self.rules = ForkChoice(
            Member(host.me, settings.incarnation), host.signer, settings.quorum, settings.fork_peers
        )
        self.accounting, self.snapshots, self.stranded = RoundAccounting(), snapshots, False
        self._on_better, self._part_cache = options.on_better, options.part_cache
        self._host, self._chain = host, chain
        self._contacts = SyncPeers(host.me, host.members, chain, contacts, _now)
        self.fetcher = StateFetcher(host, self.accounting, settings, snapshots, self._contacts, self._part_cache)
        self._donor = SnapshotServer(
            snapshots, host.compute, self._part_cache.gate if self._part_cache else Gate(), self._has_rounds_since
        )
        self.proofs = HeadVerifier(host, chain, self.rules, self.accounting, self._contacts, options.make_archive)
        self._news = asyncio.Event()
        self._server = SyncServer(host, self.accounting, self._donor, self._answer)

    @property
    def sync_progress(self) -> SyncProgress:
        """How far this peer is with catching up."""
        return self.fetcher.sync_progress

    def complain_to(self, say: Callable[[str], None]) -> None:
        """Tell a person, in one line, if catching up comes no nearer."""
        self.fetcher.on_slow = say

    def hear(self, peer: PeerId) -> None:
        """A peer seems to stand where we do not: look into it."""
        if self._contacts.called(peer):
            self._news.set()

    # -- answering ----------------------------------------------------------------------------------------------------

    async def _answer(self, stream: Stream, request: Header) -> None:
        if isinstance(request, HeadAnnouncement):
            self._meet(stream.peer, request)
            await stream.send(self._greeting())
            if self._unknown(request.key) and self._contacts.called(stream.peer):
                self._news.set()
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

    def _greeting(self) -> HeadAnnouncement:
        return HeadAnnouncement(self._chain.head.key, self.rules.me, self._donor.kept())

    def _has_rounds_since(self, lineage: bytes) -> bool:
        """Whether we hold all means since: else a snapshot of that state leads nowhere."""
        part_cache, chain = self._part_cache, self._chain
        if part_cache is None or lineage not in chain:
            return False
        return all(part.digest in part_cache for link in chain.since(lineage) for part in link.record.parts)

    def _meet(self, peer: PeerId, greet: HeadAnnouncement) -> None:
        """Note what a peer says of itself.

        Raises:
            BadPayload: it is in another run, or speaks for another peer.
        """
        ours, theirs = self._chain.head.key, greet.key
        if (theirs.run, theirs.scope, theirs.fragment) != (ours.run, ours.scope, ours.fragment):
            raise BadPayload("a greeting of another run")
        if greet.sender.peer != peer:
            raise BadPayload(f"a greeting in the name of {greet.sender.peer}")
        self._contacts.has(peer, greet.kept)

    def _unknown(self, key: RoundKey) -> bool:
        return key.lineage not in self._chain

    # -- asking -------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Heal, for ever: dial those who are not in the roster, look into every head that we do not know."""
        while True:
            self._donor.tidy()
            began, news = _now(), self._news.is_set()
            self._news.clear()
            if not news:
                here = self.rules.me in self._chain.head.roster
                peers = self._contacts.outsiders() if here else self._contacts.everybody()
                heads = await self._greet(peers, began + DIAL_SECONDS)
                news = any(self._unknown(key) for key in heads.values())
            news = news and not self.fetcher.sync_progress.active  # then it asks again when it is there
            if news and (branch := await self.better(_now() + GREET_SECONDS + TRAIL_SECONDS)):
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
        heads = await self._greet(self._contacts.everybody(), deadline)
        claims: dict[bytes, list[PeerId]] = {}
        for peer, key in sorted(heads.items(), key=lambda item: -item[1].round):
            if self._unknown(key):
                claims.setdefault(key.lineage, []).append(peer)
        turn = asyncio.Semaphore(PROOFS_AT_ONCE)

        async def one(peers: Sequence[PeerId]) -> Branch | None:
            async with turn:
                return await self.proofs.verify([(peer, heads[peer]) for peer in peers], self.stranded, deadline)

        async with task_group() as group:
            claimants = sorted(claims.values(), key=lambda peers: -len(peers))
            branches = await _most_shown({group.create_task(one(peers)): len(peers) for peers in claimants})
        return reduce(self.rules.better, branches) if branches else None

    async def _greet(self, peers: Sequence[PeerId], deadline: Deadline) -> dict[PeerId, RoundKey]:
        """Exchange heads with those of these peers that answer."""
        deadline = min(deadline, _now() + GREET_SECONDS)
        found: dict[PeerId, RoundKey] = {}

        async def one(peer: PeerId) -> None:
            try:
                async with self._open(peer, deadline) as stream:
                    await stream.send(self._greeting())
                    greet = wire.expect(await stream.receive(wire.MAX_HEADER_BYTES), HeadAnnouncement)
                    self._meet(peer, greet)
                    found[peer] = greet.key
            except BadPayload:
                self._contacts.distrust(peer)
            except PeerError:
                pass

        async with task_group() as group:
            for peer in peers:
                group.create_task(one(peer))
        return {peer: found[peer] for peer in peers if peer in found}

    def take_bytes(self) -> tuple[int, int]:
        """Bytes of snapshots, and of parts, fetched since the last call."""
        return self.fetcher.take_bytes()

    # -- contacts -----------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _open(self, peer: PeerId, deadline: Deadline) -> AsyncIterator[Stream]:
        async with self._host.transport.open(peer, SYNC, deadline) as stream, self.accounting.counting(stream):
            yield stream


async def _most_shown(proofs: dict[asyncio.Task[Branch | None], int]) -> list[Branch]:
    """The branches that are proved. Once one is, nobody holds up what as many others show: who shows another head,
    and is not more, has as long again to prove it.

    Args:
        proofs: each with how many show that head.
    """
    began, until = _now(), None
    waiting, most, proved = set(proofs), 0, list[Branch]()
    while waiting:
        left = None if until is None else max(0.0, until - _now())
        done, waiting = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        for each in done:
            if branch := each.result():
                proved.append(branch)
                most = max(most, proofs[each])
                until = until or _now() + max(TRAIL_SECONDS, _now() - began)
        if until is not None and _now() >= until:
            late = {each for each in waiting if proofs[each] <= most}
            for each in late:
                each.cancel()
            waiting, until = waiting - late, None
    return proved


def _now() -> float:
    return asyncio.get_running_loop().time()
