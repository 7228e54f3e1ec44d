"""The outer state of a peer: parameters, momentum, and their digests, which other peers can check."""

from __future__ import annotations

import logging

import torch

from node.outer.noloco import NoLoCo
from node.outer.sgd import OuterSGD
from protocols.base import Compute, RoundKey, Vector
from protocols.sync.snapshot import Snapshot, SnapshotIndex, Snapshots

log = logging.getLogger(__name__)


class OuterState:
    """Outer parameters θ (`anchor`) and momentum m (`velocity`), float32 (n), their digests, and the outer step."""

    def __init__(
        self, anchor: Vector, outer: OuterSGD | NoLoCo, compute: Compute, velocity: Vector | None = None
    ) -> None:
        """Owns the vectors from now on. By default, the momentum is zero."""
        self.anchor, self.outer, self.compute = anchor, outer, compute
        self.velocity = torch.zeros_like(anchor) if velocity is None else velocity
        self.index = SnapshotIndex(len(anchor), ())

    def root(self, round_number: int) -> bytes:
        return self.index.state_root(round_number)

    async def hash(self) -> None:
        self.index = await self.compute.run(lambda: SnapshotIndex.of(self.anchor, self.velocity), 8 * len(self.anchor))

    async def step(self, delta: Vector, trained: int) -> bool:
        """Step along a mean pseudo-gradient, after `trained` rounds. Returns whether all parameters are finite."""
        finite = await self.advance(delta, trained)
        await self.hash()
        return finite

    async def advance(self, delta: Vector, trained: int) -> bool:
        """Like `step`, but without hashing. With NoLoCo, `delta` is the result of its `offer`."""
        outer = self.outer.at(trained)
        return await self.compute.run(lambda: outer.step(self.anchor, self.velocity, delta), 12 * len(self.anchor))

    async def copy(self) -> OuterState:
        def clone() -> OuterState:
            return OuterState(self.anchor.clone(), self.outer, self.compute, self.velocity.clone())

        other = await self.compute.run(clone, 16 * len(self.anchor))
        other.index = self.index
        return other

    async def take(self, source: OuterState | Snapshot) -> None:
        """Copy vectors and digests. If a snapshot's file cannot be read (OSError), the vectors are undefined."""

        def copy() -> None:
            if isinstance(source, Snapshot):
                source.copy(self.anchor, self.velocity)
            else:
                self.anchor.copy_(source.anchor)
                self.velocity.copy_(source.velocity)

        await self.compute.run(copy, 16 * len(self.anchor))
        self.index = source.index

    async def keep(self, snapshots: Snapshots, key: RoundKey) -> Snapshot | None:
        """Add a copy to the snapshots, as the state before a round; None if its file cannot be written."""

        def fill() -> Snapshot:
            snapshot = snapshots.new(key.lineage, key.round, self.index)
            snapshot.fill(self.anchor, self.velocity)
            return snapshot

        try:
            snapshot = await self.compute.run(fill, 16 * len(self.anchor))
        except OSError as error:
            log.warning("no snapshot is kept before round %d: %s", key.round + 1, error.strerror or error)
            return None
        snapshots.put(snapshot)
        return snapshot
