"""NoLoCo's outer step: momentum pulls the peers of a pair together without averaging their states. No I/O.

Source: Kolehmainen et al. 2025 (arXiv 2506.10911), in the signs of DiLoCo (Δ = φ − θ, the pseudo-gradient of a peer's
own round). With the means over the pair, Δ̄ and φ̄:

    δ ← αδ + βΔ̄ + γ(φ − φ̄)
    φ ← φ − δ

Each peer keeps its momentum δ to itself. The step only needs the mean of one vector of each peer, u = βΔ − γφ, which is
half the size of a state: δ ← αδ + γφ + ū.

The step is linear in ū. If a partner's vector arrives later, during the next round's training, the peer adds the change
in ū to its step. Both peers then have the parameters that they would have if they had met before the step, so neither
has to wait for the other's work.

The pulls γ that keep peers together, for 0 <= α < 1:

- Two peers that always meet each other: 0 < γ < 2(1 + α), since their difference follows e'' = (1 + α − γ)e' − αe.
- Partners drawn at random, with a partner found in a share p of all rounds: 0 < γ < 2(1 − α²)/(1 + α(1 − p)), because
  momentum continues a pull while no partner corrects it. This is 2(1 − α²) with a partner in every round, and
  2(1 − α), the bound used here, for any p.

With a partner in every round, γ = 1 − α² limits best the divergence that work causes: in the long run the squares of
φ − mean are 1/((1 − α)²(1 + α)) times those of β(Δ − mean). All this is for many peers with independent partners and
work. It follows from three linear recurrences, of the second moments of φ − mean and δ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from node.tasks.recipe import most_pull
from protocols.base import Vector

_PIECE_ELEMENTS = 1 << 18


class NoLoCo:
    """δ ← αδ + γφ + ū; φ ← φ − δ: piece by piece, in separate multiplications and additions."""

    def __init__(self, momentum: float, learning_rate: float, pull: float, extra: int = 0) -> None:
        """α, β and γ. For the last `extra` elements, the new value is the pair's plain mean: α = 0, β = γ = 1
        (`node.tasks.extra`). Raises ValueError for α outside [0, 1), β not positive and finite, or γ outside (0,
        2(1 − α)).
        """
        if not 0 <= momentum < 1:
            raise ValueError(f"outer momentum must be in [0, 1), not {momentum}")
        if not (math.isfinite(learning_rate) and learning_rate > 0):
            raise ValueError(f"outer learning rate must be positive and finite, not {learning_rate}")
        if not 0 < pull < most_pull(momentum):
            raise ValueError(f"the pull must be in (0, {most_pull(momentum):g}) for this momentum, not {pull}")
        self.momentum, self.learning_rate, self.pull = momentum, learning_rate, pull
        self._extra = extra

    def at(self, trained: int) -> NoLoCo:
        return self

    def offer(self, phi: Vector, delta: Vector, into: Vector) -> None:
        """Compute a peer's contribution, u = βΔ − γφ, of float32 (n); `into` may be `delta`."""
        scratch = torch.empty(min(_PIECE_ELEMENTS, len(phi)))
        for piece, (_, rate, pull) in self._pieces(len(phi)):
            mine, brought = phi[piece], into[piece]
            torch.mul(delta[piece], rate, out=brought)
            brought.sub_(torch.mul(mine, pull, out=scratch[: len(mine)]))

    def step(self, phi: Vector, velocity: Vector, mean: Vector) -> bool:
        """Take one outer step in place, of φ and δ (`velocity`, never exchanged). Returns whether every parameter is
        finite.

        `mean` is ū over the pair, including this peer's u; without a partner, u.
        """
        scratch, finite = torch.empty(min(_PIECE_ELEMENTS, len(phi))), True
        for piece, (kept, _, pull) in self._pieces(len(phi)):
            mine, momentum = phi[piece], velocity[piece]
            # γφ + ū first: without a partner the much larger γφ cancels here, and βΔ remains.
            update = torch.mul(mine, pull, out=scratch[: len(mine)]).add_(mean[piece])
            momentum.mul_(kept).add_(update)
            mine.sub_(momentum)
            finite = finite and all(math.isfinite(float(end)) for end in mine.aminmax())
        return finite

    def amend(self, phi: Vector, velocity: Vector, change: Vector) -> None:
        """Correct the last step for a mean that differs by `change`, float32 (n)."""
        velocity.add_(change)
        phi.sub_(change)

    def _pieces(self, elements: int) -> Iterator[tuple[slice, tuple[float, float, float]]]:
        """Each piece, and (α, β, γ) of it."""
        trained = elements - self._extra
        yield from ((piece, (self.momentum, self.learning_rate, self.pull)) for piece in _pieces(0, trained))
        yield from ((piece, (0.0, 1.0, 1.0)) for piece in _pieces(trained, elements))


def _pieces(low: int, high: int) -> Iterator[slice]:
    return (slice(start, min(start + _PIECE_ELEMENTS, high)) for start in range(low, high, _PIECE_ELEMENTS))
