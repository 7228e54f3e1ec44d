"""The outer state of a peer: parameters, momentum, and their digests, which other peers can check; and its step.

The outer step of DiLoCo is Nesterov SGD over flat vectors (Douillard et al. 2023, algorithm 1; the update rule is
PyTorch's SGD(nesterov=True)), with the same bits on every machine. Separate multiplications and additions only, in
float32 on the CPU: `add(alpha=)`, `lerp` and `addcmul` may or may not be fused, depending on the processor.
"""

from __future__ import annotations

import logging
import math

import torch

from node.outer.noloco import NoLoCo
from protocols.base import ALL, Compute, RoundKey, Vector
from protocols.sync.snapshot import Snapshot, SnapshotIndex, Snapshots
from protocols.vectors.views import norm

_PIECE_ELEMENTS = 1 << 18


class OuterSGD:
    """m ← μm + Δ; θ ← θ − η(Δ + μm), with Δ the mean pseudo-gradient."""

    def __init__(
        self,
        learning_rate: float,
        momentum: float,
        rounds: int = 0,
        decay: float = 0.0,
        extra: int = 0,
        fragments: int = 1,
    ) -> None:
        """The step goes in equal parts to a plain mean of the peers' parameters (learning rate 1, momentum 0) in the
        last training rounds of a run, a share `decay` of its `rounds`, alike for all `fragments`. For the last `extra`
        elements it is that mean in all rounds (`node.tasks.extra`). Raises ValueError for a rate that is not positive
        and finite, or a momentum outside [0, 1).
        """
        if not (math.isfinite(learning_rate) and learning_rate > 0):
            raise ValueError(f"outer learning rate must be positive and finite, not {learning_rate}")
        if not 0 <= momentum < 1:
            raise ValueError(f"outer momentum must be in [0, 1), not {momentum}")
        self.learning_rate = learning_rate
        self.momentum = momentum
        self._rounds, self._decay, self._extra, self._fragments = rounds, decay, extra, fragments

    def at(self, trained: int) -> OuterSGD:
        if not self._decay * self._rounds:
            return self
        done = (trained // self._fragments + 1) * self._fragments / self._rounds
        left = max(0.0, (1 - done) / self._decay)
        if left >= 1:
            return self
        return OuterSGD(left * self.learning_rate + (1 - left), left * self.momentum, extra=self._extra)

    def step(self, anchor: Vector, velocity: Vector, delta: Vector, part: slice = ALL) -> bool:
        """Apply a mean pseudo-gradient Δ to θ and m in place, to all of them or to a part, of which Δ then is.

        Returns whether every new parameter is finite.
        """
        start, stop, _ = part.indices(len(anchor))
        trained = min(max(start, len(anchor) - self._extra), stop) - start  # without extra elements
        anchor, velocity = anchor[part], velocity[part]
        scratch = torch.empty(min(_PIECE_ELEMENTS, len(anchor)))
        means = anchor[trained:].sub_(delta[trained:])
        finite = not len(means) or math.isfinite(norm([means]))
        for low in range(0, trained, _PIECE_ELEMENTS):
            piece = slice(low, min(low + _PIECE_ELEMENTS, trained))
            theta, m, d = anchor[piece], velocity[piece], delta[piece]
            update = scratch[: len(theta)]
            m.mul_(self.momentum)
            m.add_(d)
            torch.mul(m, self.momentum, out=update)
            update.add_(d)
            update.mul_(self.learning_rate)
            theta.sub_(update)
            low_value, high_value = theta.aminmax()
            finite = finite and math.isfinite(low_value) and math.isfinite(high_value)
        return finite


def pseudo_gradient(anchor: Vector, local: Vector, into: Vector) -> None:
    """Δ_i = θ − θ_i; `into` may be `local`."""
    torch.sub(anchor, local, out=into)


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

    async def hash(self, part: slice = ALL) -> None:
        """Compute the digests of both vectors; with `part`, after a change of that part only."""
        vectors = self.anchor, self.velocity

        def index() -> SnapshotIndex:
            return SnapshotIndex.of(*vectors) if part == ALL else self.index.after(*vectors, part)

        self.index = await self.compute.run(index, 8 * len(self.anchor[part]))

    async def step(self, delta: Vector, trained: int, part: slice = ALL) -> bool:
        """Step along a mean pseudo-gradient, after `trained` rounds. Returns whether all its parameters are finite.

        With `part`, the pseudo-gradient is that of a fragment, and all else stays as it is.
        """
        outer = self.outer.at(trained)
        assert isinstance(outer, OuterSGD), "peers that pull each other have no mean to step along"
        finite = await self.compute.run(lambda: outer.step(self.anchor, self.velocity, delta, part), 12 * len(delta))
        await self.hash(part)
        return finite

    async def advance(self, delta: Vector, trained: int) -> bool:
        """Step without hashing. With NoLoCo, `delta` is the result of its `offer`."""
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
