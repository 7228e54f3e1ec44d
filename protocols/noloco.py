"""NoLoCo's outer step: momentum that pulls a pair together, without an average of the momenta. Pure.

Source: Kolehmainen et al. 2025 (arXiv 2506.10911), in the signs of DiLoCo (Δ = φ − θ, the pseudo-gradient of a peer's
own round). With the means over the pair, Δ̄ and φ̄:

    δ ← αδ + βΔ̄ + γ(φ − φ̄)
    φ ← φ − δ

What has to be exchanged is (Δ, φ), not the stepped state: a peer keeps its momentum δ to itself, and both come nearer
to φ̄ by the last term alone, through their momenta. As much travels as with (parameters, momentum). Two peers that
always meet each other come together if and only if 0 < γ < 2(1 + α), for 0 <= α < 1: their difference follows
e'' = (1 + α − γ)e' − αe, and then the roots of that are inside the unit circle.

How a round would use it: `session.mean([delta, phi], work, into)`, with nothing lent, and then `step` with what came
into `into`. There is nothing to lend before a round's work is done, so both of a pair have to be in `mean` at about the
same time: who finds its partner training is told that it is busy, asks others, and in the end takes the step with its
own Δ and φ. That is the paper's setting (rounds of equal length, in lockstep), not that of unequal volunteers, for whom
stepped states are what can be averaged while one of them trains.
"""

from __future__ import annotations

import math

import torch

from protocols.base import Vector

_PIECE_ELEMENTS = 1 << 18


class NoLoCo:
    """δ ← αδ + βΔ̄ + γ(φ − φ̄); φ ← φ − δ."""

    def __init__(self, momentum: float, learning_rate: float, pull: float) -> None:
        """
        Args:
            momentum: α.
            learning_rate: β.
            pull: γ.

        Raises:
            ValueError: α outside [0, 1), β not positive and finite, or γ outside (0, 2(1 + α)).
        """
        if not 0 <= momentum < 1:
            raise ValueError(f"outer momentum must be in [0, 1), not {momentum}")
        if not (math.isfinite(learning_rate) and learning_rate > 0):
            raise ValueError(f"outer learning rate must be positive and finite, not {learning_rate}")
        if not 0 < pull < 2 * (1 + momentum):
            raise ValueError(f"the pull must be in (0, {2 * (1 + momentum):g}) for this momentum, not {pull}")
        self.momentum, self.learning_rate, self.pull = momentum, learning_rate, pull

    def step(self, phi: Vector, velocity: Vector, mean_delta: Vector, mean_phi: Vector) -> bool:
        """Take one outer step in place, piece by piece, in separate multiplications and additions.

        Args:
            phi: φ, the parameters that the round began with, float32 (n); changed.
            velocity: δ, float32 (n); changed. Never exchanged.
            mean_delta: Δ̄ over the pair, one's own included; alone: one's own. Unchanged, as is the next.
            mean_phi: φ̄ over the pair; alone: φ itself.

        Returns:
            Whether every new parameter is finite.
        """
        scratch = torch.empty(min(_PIECE_ELEMENTS, len(phi)))
        finite = True
        for low in range(0, len(phi), _PIECE_ELEMENTS):
            piece = slice(low, low + _PIECE_ELEMENTS)
            mine, momentum = phi[piece], velocity[piece]
            work = scratch[: len(mine)]
            momentum.mul_(self.momentum)
            momentum.add_(torch.mul(mean_delta[piece], self.learning_rate, out=work))
            momentum.add_(torch.sub(mine, mean_phi[piece], out=work).mul_(self.pull))
            mine.sub_(momentum)
            finite = finite and all(math.isfinite(float(end)) for end in mine.aminmax())
        return finite
