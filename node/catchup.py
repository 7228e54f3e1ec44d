"""From where a peer stands to the head of a judged chain: which state to start from, and the means since.

Everything happens on a copy: until the last step is taken, the peer's own state stays as it is, and goes on being its
state if the way turns out to be barred.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from node.state import OuterState
from protocols.base import Deadline, Vector
from protocols.chain import UNSETTLED, Chain
from protocols.download import Unavailable
from protocols.snapshot import Snapshot
from protocols.sync import Sync


@dataclass(frozen=True, slots=True)
class Reached:
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

    Attributes:
        chain: judged, and not necessarily the peer's own.
        own: the peer's state, at `lineage`.
        snapshots: that it kept, of this chain or another.
        scratch: room for a mean, float32 (n); destroyed.
    """

    sync: Sync
    chain: Chain
    own: OuterState
    lineage: bytes
    snapshots: Sequence[Snapshot]
    scratch: Vector
    deadline: Deadline

    async def run(self) -> Reached | None:
        """Try the cheaper way first, then the other; None if neither leads there."""
        ways: list[tuple[int, Callable[[], Awaitable[Reached]]]] = []
        if offered := self.sync.offered(self.chain):
            ways.append((8 * len(self.scratch) + self._cost_bytes(offered[0].key.lineage), self._from_others))
        if start := self._nearest():
            ways.append((self._cost_bytes(start[1]), lambda: self._from_own(*start)))
        for _, way in sorted(ways, key=lambda each: each[0]):
            try:
                return await way()
            except Unavailable:
                continue
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

    def _cost_bytes(self, lineage: bytes) -> int:
        rounds = sum(link.record.averaged for link in self.chain.since(lineage))
        return rounds * self.sync.mean_bytes(len(self.scratch))

    async def _from_own(self, start: OuterState | Snapshot, lineage: bytes) -> Reached:
        return await self._replay(await self._copy(start), lineage)

    async def _from_others(self) -> Reached:
        snapshot = await self.sync.download(self.chain, len(self.scratch), self.deadline)
        return await self._replay(await self._copy(snapshot), snapshot.lineage, snapshot)

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
                raise Unavailable(f"a snapshot cannot be read: {error.strerror or error}") from error
        return state

    async def _replay(self, state: OuterState, lineage: bytes, snapshot: Snapshot | None = None) -> Reached:
        """Take the steps since a lineage again.

        Raises:
            Unavailable: a mean is not to be had, or we come to another state than the others did.
        """
        replayed, finite = 0, True
        for link in self.chain.since(lineage):
            record = link.record
            if state.root(record.round) != record.state_root:
                raise Unavailable(f"the state before round {record.round} is not the one that was decided on")
            if record.averaged:
                await self.sync.mean(link, self.scratch, self.deadline)
                finite = await state.step(self.scratch) and finite
                replayed += 1
        return Reached(state, replayed, finite, snapshot)
