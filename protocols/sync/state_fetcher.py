"""Where a state comes from: the snapshots that others hand out, and the means of the rounds since."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from protocols.aio import loop_time, task_group
from protocols.allreduce.parts import ReducedPart
from protocols.base import Deadline, Head, PeerError, PeerId, Vector
from protocols.butterfly.part_cache import PartCache
from protocols.history.chain import UNSETTLED, Chain, DecidedRound
from protocols.sync.context import SyncContext
from protocols.sync.progress import CatchUpTrend
from protocols.sync.round_replayer import RoundReplayer
from protocols.sync.snapshot import Snapshot, SnapshotIndex
from protocols.sync.snapshot_download import SnapshotDownload, StateUnavailable, shown_index

INDEX_SECONDS = 10.0
"""Former members have so long to show which state they hold."""
MAX_FAILED = 16


class StateFetcher:
    """Fetches what leads from a state that this peer has, or another peer hands out, to the head of a chain.

    Attributes:
        sync_progress: how far this peer is with catching up.
        trend: whether it comes nearer.
    """

    def __init__(self, context: SyncContext, part_cache: PartCache) -> None:
        self.sync_progress, self.trend = context.sync_progress, CatchUpTrend()
        self._context, self._replayer = context, RoundReplayer(context, part_cache)
        self._begun: SnapshotDownload | None = None
        self._failed: set[bytes] = set()  # roots that no former member brought a state of

    def on_slow(self, line: str) -> None:
        """Tell a person that catching up comes no nearer."""
        self._context.say(line)

    # -- means --------------------------------------------------------------------------------------------------------

    async def parts(self, link: DecidedRound, deadline: Deadline) -> list[ReducedPart]:
        """The parts of the mean of a judged round, one that has some.

        Raises:
            Unavailable: they are not to be had.
        """
        voters = [vote.voter.peer for vote in link.certificate.votes]  # each of them held all parts when it voted
        sources = self._context.peers.others(voters, self._context.peers.everybody())
        live = {member.peer for member in self._context.host.members.live()}
        sources = [peer for peer in sources if peer in live] or sources  # who is silent would take its time
        return await self._replayer.parts(link.record, self._context.elements, sources, deadline)

    async def decode(self, parts: Sequence[ReducedPart], into: Vector) -> None:
        """Put the mean that these parts make up, float32 (n), into `into`.

        Raises:
            Unavailable: it does not decode; `into` is then undefined.
        """
        await self._replayer.decode(parts, into)

    @property
    def mean_bytes(self) -> int:
        """About what fetching the mean of one round costs."""
        return self._replayer.encoded_bytes(self._context.elements)

    # -- snapshots ----------------------------------------------------------------------------------------------------

    def offered(self, chain: Chain) -> list[Head]:
        """Heads of a judged chain whose state can be had and whose root is vouched for, the least costly first.

        What a snapshot costs is what is missing of it, and the means since. So one that was begun is gone on with,
        until that is dearer than a newer one from its first byte.
        """
        lineages = [*self._context.peers.stock(), *([self._begun.at.key.lineage] if self._begun else [])]
        heads = [head for lineage in dict.fromkeys(lineages) if (head := chain.at(lineage))]
        sound = [head for head in heads if head.state_root != UNSETTLED]
        return sorted(sound, key=lambda head: (self.cost_bytes(chain, head), -head.key.round))

    def cost_bytes(self, chain: Chain, head: Head) -> int:
        """About what has to be fetched to come from a snapshot at this head to the head of the chain."""
        if self._begun and self._begun.at == head:
            missing_bytes = self._begun.missing_bytes
        else:
            missing_bytes = 8 * self._context.elements
            if self._context.snapshots.has_begun(head.key.lineage, head.key.round):
                missing_bytes //= 2  # nobody knows how much of it a former life has left
        return missing_bytes + self.mean_bytes * (chain.head.key.round - head.key.round)

    async def download(self, chain: Chain, deadline: Deadline) -> Snapshot:
        """Fetch the first snapshot that is `offered`, or else the next; what came of one is there the next time.

        Args:
            deadline: past it, it goes on only while it moves.

        Raises:
            Unavailable: nobody has one, or can bring it.
        """
        offered = self.offered(chain)
        for tried, head in enumerate(offered):
            download = self._download(head)
            share = (deadline - loop_time()) / (len(offered) - tried)  # leaves time for the next
            try:
                return await download.run(lambda: self._donors(head), loop_time() + share)  # noqa: B023 - awaited here
            except StateUnavailable:
                continue
            finally:
                self._begun = download if download.begun else self._begun
        raise StateUnavailable("nobody brought a snapshot of this chain")

    async def from_former(self, chain: Chain, deadline: Deadline) -> Snapshot:
        """The state at the head of a chain, on the word of a former member or an heir: no record vouches for it yet.

        Where the last members are gone, others have to go on from there, and one of them may be alone in holding it. A
        FORK of a majority of them then vouches for it (`protocols.consensus.vote_tally`).

        Raises:
            Unavailable: we are neither of them, a member of the roster is here, or nobody brings it.
        """
        donors = self.former_donors(chain.head)
        roots = await self._roots(chain.head, donors, min(deadline, loop_time() + INDEX_SECONDS))
        if not roots:
            raise StateUnavailable("nobody here who was a member has the state at the head of the chain")
        # Whoever asks these donors takes the same state, also where one of them is wrong: else nobody agrees on a FORK.
        root = min(roots, key=lambda root: (root in self._failed, -len(roots[root]), root))
        head = replace(chain.head, state_root=root)
        try:
            return await SnapshotDownload(self._context, head).run(lambda: roots[root], deadline)
        except StateUnavailable:
            self._failed = {*self._failed, root} if len(self._failed) < MAX_FAILED else {root}
            raise

    async def _roots(self, head: Head, donors: Sequence[PeerId], deadline: Deadline) -> dict[bytes, list[PeerId]]:
        """State roots that these show for the head of the chain, and who shows them."""
        found: dict[bytes, list[PeerId]] = {}

        async def one(donor: PeerId) -> None:
            with suppress(PeerError, StateUnavailable):
                async with self._context.open(donor, deadline) as stream:
                    index = await shown_index(stream, head.key.lineage, self._context.elements)
                if isinstance(index, SnapshotIndex):
                    found.setdefault(index.state_root(head.key.round), []).append(donor)

        async with task_group() as group:
            for donor in donors:
                group.create_task(one(donor))
        return found

    def former_donors(self, head: Head) -> list[PeerId]:
        """Whom to ask for a state that no record vouches for, of the latest roster that has one: see `from_former`."""
        live = self._context.host.members.live()
        rosters = [{member.peer for member in each} for each in (head.roster, *head.former)]
        if not set(head.roster).isdisjoint(live) or not any(self._context.host.me in each for each in rosters):
            return []
        offering = set(self._donors(head)) & {member.peer for member in live}
        return next((sorted(offering & each) for each in rosters if offering & each), [])

    def _download(self, head: Head) -> SnapshotDownload:
        if self._begun and self._begun.at == head:
            return self._begun
        return SnapshotDownload(self._context, head)

    def _donors(self, head: Head) -> list[PeerId]:
        return self._context.peers.stock().get(head.key.lineage, [])

    def caught_up(self) -> None:
        """What was fetched is in use."""
        self._begun = None
