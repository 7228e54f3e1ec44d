"""From where a peer stands to the head of a judged chain: which state to start from, and the means since.

Everything happens on a copy: until the last step is taken, the peer's own state stays as it is, and goes on being its
state if the way turns out to be barred.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from node.storage.state import OuterState
from protocols.aio import task_group
from protocols.allreduce.parts import ReducedPart
from protocols.base import Deadline, Vector
from protocols.history.chain import UNSETTLED, Chain, DecidedRound
from protocols.limits import SLOWEST_BYTES_PER_SECOND
from protocols.sync.snapshot import Snapshot
from protocols.sync.snapshot_download import STALL_SECONDS, StateUnavailable
from protocols.sync.state_fetcher import StateFetcher

log = logging.getLogger(__name__)

VOUCHED_SECONDS = 30.0
"""For a state that records vouch for, where former members have a later one."""


@dataclass(frozen=True, slots=True)
class CatchUpResult:
    """The state at the head of the chain.

    Attributes:
        snapshot: the one that was downloaded for it, if one was.
        finite: whether its parameters were, after every step.
    """

    state: OuterState
    replayed_rounds: int
    finite: bool
    snapshot: Snapshot | None = None


@dataclass(frozen=True, slots=True)
class CatchUp:
    """One attempt to reach the head of `chain`.

    The state comes first, then the rounds since, the oldest first; what was decided meanwhile is for the next attempt,
    which has so much less to do.

    Attributes:
        chain: judged, and not necessarily the peer's own.
        own: the peer's state, at `lineage`.
        snapshots: that it kept, of this chain or another.
        scratch: room for a mean, float32 (n); destroyed.
        deadline: past it, it goes on only while it moves.
    """

    fetcher: StateFetcher
    chain: Chain
    own: OuterState
    lineage: bytes
    snapshots: Sequence[Snapshot]
    scratch: Vector
    deadline: Deadline

    async def run(self) -> CatchUpResult | None:
        """Try the cheaper way first, then the other, then the last resort; None if none leads there."""
        fetcher, loop = self.fetcher, asyncio.get_running_loop()
        ways: list[tuple[int, Callable[[], Awaitable[CatchUpResult]]]] = []
        if offered := fetcher.offered(self.chain):
            ways.append((fetcher.cost_bytes(self.chain, offered[0]), self._from_others))
        if start := self._nearest():
            ways.append((fetcher.mean_bytes * self.chain.count_since(start[1]), lambda: self._from_own(*start)))
        goal = self.chain.head.key.round
        if line := fetcher.trend.begins(loop.time(), goal, fetcher.sync_progress.fetched_bytes, fetcher.mean_bytes):
            fetcher.on_slow(line)
        try:
            last_resort = bool(fetcher.former_donors(self.chain.head))
            for way in (*(way for _, way in sorted(ways, key=lambda each: each[0])), self._from_former):
                try:  # where there is another way, one that leads nowhere may not take the time of all
                    async with asyncio.timeout(VOUCHED_SECONDS if last_resort and way != self._from_former else None):
                        reached = await way()
                except (StateUnavailable, TimeoutError) as error:
                    log.info("the state before round %d is not reached: %s", goal + 1, error)
                    continue
                fetcher.trend.ends(loop.time())
                fetcher.caught_up()
                return reached
        finally:
            fetcher.sync_progress.end()
        return None

    def _nearest(self) -> tuple[OuterState | Snapshot, bytes] | None:
        """The latest state of ours that the chain vouches for, and its lineage."""
        states: list[tuple[OuterState | Snapshot, bytes]] = [(self.own, self.lineage)]
        states += [(snapshot, snapshot.lineage) for snapshot in self.snapshots]
        sound = []
        for state, lineage in states:
            head = self.chain.at(lineage)
            if head and head.state_root != UNSETTLED and state.index.state_root(head.key.round) == head.state_root:
                sound.append((head.key.round, state, lineage))
        return max(sound, key=lambda each: each[0])[1:] if sound else None

    async def _from_own(self, start: OuterState | Snapshot, lineage: bytes) -> CatchUpResult:
        self.fetcher.sync_progress.begin(self.chain.count_since(lineage), self.fetcher.mean_bytes)
        return await self._replayer(await self._copy(start), lineage)

    async def _from_others(self) -> CatchUpResult:
        sync_progress, offered = self.fetcher.sync_progress, self.fetcher.offered(self.chain)
        since = self.chain.count_since(offered[0].key.lineage) if offered else 0
        sync_progress.begin(since, self.fetcher.mean_bytes)
        snapshot = await self.fetcher.download(self.chain, self.deadline)
        sync_progress.rounds_whole = self.chain.count_since(snapshot.lineage)
        return await self._replayer(await self._copy(snapshot), snapshot.lineage, snapshot)

    async def _from_former(self) -> CatchUpResult:
        """The last resort: see `StateFetcher.from_former`."""
        self.fetcher.sync_progress.begin(0, self.fetcher.mean_bytes)
        snapshot = await self.fetcher.from_former(self.chain, self._until())
        return CatchUpResult(await self._copy(snapshot), 0, True, snapshot)

    async def _copy(self, source: OuterState | Snapshot) -> OuterState:
        """A state of its own that is what `source` is.

        Raises:
            Unavailable: the file of a snapshot fails.
        """
        state = await self.own.copy()
        if source is not self.own:
            try:
                await state.take(source)
            except OSError as error:
                raise StateUnavailable(f"a snapshot cannot be read: {error.strerror or error}") from error
        return state

    async def _replayer(self, state: OuterState, lineage: bytes, snapshot: Snapshot | None = None) -> CatchUpResult:
        """Take the steps since a lineage again.

        Raises:
            Unavailable: a mean is not to be had, or we come to another state than the others did.
        """
        replayed, finite = 0, True
        links = self.chain.since(lineage)
        async with task_group() as group:
            ahead = group.create_task(self._parts(links[0])) if links else None
            for number, link in enumerate(links):
                assert ahead is not None
                if state.root(link.record.round) != link.record.state_root:
                    raise StateUnavailable(
                        f"the state before round {link.record.round} is not the one that was decided on"
                    )
                parts = await ahead
                if number + 1 < len(links):  # on its way while this step is taken
                    ahead = group.create_task(self._parts(links[number + 1]))
                if link.record.averaged:
                    await self.fetcher.decode(parts, self.scratch)
                    finite = await state.step(self.scratch) and finite
                    replayed += 1
                self.fetcher.sync_progress.rounds_here += 1
        return CatchUpResult(state, replayed, finite, snapshot)

    async def _parts(self, link: DecidedRound) -> list[ReducedPart]:
        return await self.fetcher.parts(link, self._until()) if link.record.averaged else []

    def _until(self) -> Deadline:
        """For one mean: a long replay is not over as long as each of its rounds comes."""
        slowest_seconds = STALL_SECONDS + self.fetcher.mean_bytes / SLOWEST_BYTES_PER_SECOND
        return max(self.deadline, asyncio.get_running_loop().time() + slowest_seconds)
