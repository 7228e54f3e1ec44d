"""Brings a peer's outer state to the head of a verified chain: a start state, and the means of the rounds since.

Everything happens on a copy: if the head is not reached, the peer's own state stays as it was.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from node.outer.state import OuterState
from protocols.aio import task_group
from protocols.allreduce.parts import ReducedPart
from protocols.base import SLOWEST_BYTES_PER_SECOND, Deadline, Vector
from protocols.blobs.download import STALL_SECONDS
from protocols.history.chain import UNSETTLED, Chain, DecidedRound
from protocols.sync.snapshot import Snapshot
from protocols.sync.snapshot_download import StateUnavailable
from protocols.sync.state_fetcher import StateFetcher

log = logging.getLogger(__name__)

VOUCHED_SECONDS = 30.0
"""For an attempt that starts from a state in the chain's records, where former members may have a later state."""


@dataclass(frozen=True, slots=True)
class CatchUpResult:
    state: OuterState
    replayed_rounds: int
    finite: bool  # its parameters, after every step
    snapshot: Snapshot | None = None  # the one that was downloaded for it


@dataclass(frozen=True, slots=True)
class CatchUp:
    """One attempt to reach the head of `chain`, which is verified, and not necessarily the peer's own.

    The state comes first, then the rounds since, the oldest first. Rounds that were decided meanwhile are left to the
    next attempt.
    """

    fetcher: StateFetcher
    chain: Chain
    own: OuterState  # the peer's state, at `lineage`
    lineage: bytes
    snapshots: Sequence[Snapshot]  # that the peer kept, of this chain or another
    scratch: Vector  # memory for the mean of the largest fragment
    fragment: Callable[[int], slice]  # number of a fragment -> its slice of the vector
    deadline: Deadline  # past it, the attempt continues only while it makes progress

    async def run(self) -> CatchUpResult | None:
        """Start from the cheaper state, then from the other, then from a former member's; None if all fail."""
        fetcher, loop = self.fetcher, asyncio.get_running_loop()
        attempts: list[tuple[int, Callable[[], Awaitable[CatchUpResult]]]] = []
        if offered := fetcher.offered(self.chain):
            attempts.append((fetcher.cost_bytes(self.chain, offered[0]), self._from_others))
        if start := self._nearest():
            attempts.append((fetcher.mean_bytes * self.chain.count_since(start[1]), lambda: self._from_own(*start)))
        goal = self.chain.head.key.round
        if line := fetcher.trend.begins(loop.time(), goal, fetcher.sync_progress.fetched_bytes, fetcher.mean_bytes):
            fetcher.on_slow(line)
        try:
            last_resort = bool(fetcher.former_donors(self.chain.head))
            cheapest_first = [attempt for _, attempt in sorted(attempts, key=lambda each: each[0])]
            for attempt in (*cheapest_first, self._from_former):
                limit_seconds = VOUCHED_SECONDS if last_resort and attempt != self._from_former else None
                try:  # where a former member may help, an attempt that fails must not take all the time
                    async with asyncio.timeout(limit_seconds):
                        reached = await attempt()
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
        """The latest of this peer's states that the chain has on record, and its lineage."""
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
        return await self._replay(start, lineage)

    async def _from_others(self) -> CatchUpResult:
        sync_progress, offered = self.fetcher.sync_progress, self.fetcher.offered(self.chain)
        since = self.chain.count_since(offered[0].key.lineage) if offered else 0
        sync_progress.begin(since, self.fetcher.mean_bytes)
        snapshot = await self.fetcher.download(self.chain, self.deadline)
        sync_progress.rounds_whole = self.chain.count_since(snapshot.lineage)
        try:
            return await self._replay(snapshot, snapshot.lineage, snapshot)
        except StateUnavailable:
            self.fetcher.leads_nowhere(snapshot.lineage)
            raise

    async def _from_former(self) -> CatchUpResult:
        self.fetcher.sync_progress.begin(0, self.fetcher.mean_bytes)
        snapshot = await self.fetcher.from_former(self.chain, self._until())
        return CatchUpResult(await self._copy(snapshot), 0, True, snapshot)

    async def _copy(self, source: OuterState | Snapshot) -> OuterState:
        state = await self.own.copy()
        if source is not self.own:
            try:
                await state.take(source)
            except OSError as error:
                raise StateUnavailable(f"a snapshot cannot be read: {error.strerror or error}") from error
            if self.chain.head.fragments > 1:  # steps of fragments would not notice that other bytes are damaged
                await state.hash()
        return state

    async def _replay(
        self, start: OuterState | Snapshot, lineage: bytes, snapshot: Snapshot | None = None
    ) -> CatchUpResult:
        """Copy a state, and replay the outer steps since its lineage."""
        replayed, finite = 0, True
        links = self.chain.since(lineage)
        trained = [self.chain.trained_at(link.record.parent) for link in links]  # now: the chain may move on meanwhile
        async with task_group() as group:
            ahead = group.create_task(self._parts(links[0])) if links else None  # on its way during the copy, too
            state = await self._copy(start)
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
                    fragment = self.fragment(link.certificate.key.fragment)
                    mean = self.scratch[: len(state.anchor[fragment])]
                    await self.fetcher.decode(parts, mean)
                    finite = await state.step(mean, trained[number], fragment) and finite
                    replayed += 1
                self.fetcher.sync_progress.rounds_here += 1
        return CatchUpResult(state, replayed, finite, snapshot)

    async def _parts(self, link: DecidedRound) -> list[ReducedPart]:
        return await self.fetcher.parts(link, self._until()) if link.record.averaged else []

    def _until(self) -> Deadline:
        """The deadline for one mean: a long replay continues as long as each mean arrives in time."""
        slowest_seconds = STALL_SECONDS + self.fetcher.mean_bytes / SLOWEST_BYTES_PER_SECOND
        return max(self.deadline, asyncio.get_running_loop().time() + slowest_seconds)
