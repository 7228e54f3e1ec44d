"""Byzantine trainers: peers that keep to the protocol and contribute a pseudo-gradient that harms the mean.

    reversed    -1000 times its own pseudo-gradient, with the norm declared correctly
    understated -10 times it, with the norm of the unchanged one declared; a factor of 1000 would be refused
    alie        the honest mean less z standard deviations in each coordinate, with z as large as stays undetected
                (Baruch et al. 2019, arXiv 1902.06156, algorithm 3)
    ipm         -0.5 times the honest mean (Xie et al. 2019, arXiv 1903.03936)

In the last two attacks, all liars know the honest contributions, and send the same vector.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import NormalDist

import torch

from node.training.trainer import Learner, LocalTraining
from protocols.base import ALL, LocalProgress, RoundKey, Vector
from tests.support.inline_trainer import InlineTrainer

FACTOR = -1000.0
FACTORS = {"reversed": FACTOR, "understated": -10.0}
"""Attacks that multiply the liar's own pseudo-gradient; the others start from those of the honest peers."""
IPM_SHARE = 0.5
ATTACKS = ("reversed", "understated", "alie", "ipm")


def alie(honest: torch.Tensor, liars: int) -> Vector:
    """Honest contributions (m, d) -> the contribution (d) of each liar, against the sign of the mean."""
    count = len(honest) + liars
    needed = count // 2 + 1 - liars
    z = NormalDist().inv_cdf((len(honest) - needed) / len(honest))
    mean, deviation = honest.mean(0), honest.std(0, unbiased=False)
    return mean - z * deviation * mean.sign()


def ipm(honest: torch.Tensor) -> Vector:
    return -IPM_SHARE * honest.mean(0)


def pseudo_gradient(shift: LocalTraining) -> Vector:
    with shift.outer():
        anchor = shift.learner.vector.clone()
    return anchor - shift.learner.vector


class PoisonedTrainer(InlineTrainer):
    """Contributes what its attack makes of its own pseudo-gradient, or of those of the honest peers."""

    def __init__(
        self,
        learner: Learner,
        inner_steps: int,
        step_seconds: float,
        attack: str,
        liars: int,
        honest: Callable[[], Sequence[LocalTraining]],
    ) -> None:
        super().__init__(learner, inner_steps, step_seconds)
        if attack not in ATTACKS:
            raise ValueError(f"no attack {attack!r}: there are {', '.join(ATTACKS)}")
        self._attack, self._liars, self._honest = attack, liars, honest

    async def train(
        self, key: RoundKey, cut: asyncio.Event, progress: Callable[[LocalProgress], None], surplus: bool = True
    ) -> LocalProgress:
        """Train honestly; `reversed` declares the norm that it contributes, the others that of honest work."""
        factor = abs(FACTOR) if self._attack == "reversed" else 1.0

        def declared(work: LocalProgress) -> LocalProgress:
            return replace(work, norm=factor * work.norm)

        return declared(await super().train(key, cut, lambda work: progress(declared(work)), surplus))

    async def read(self, into: Vector, part: slice = ALL) -> None:
        """The parameters that would give the forged pseudo-gradient."""
        forged = self.local_training.learner.vector + pseudo_gradient(self.local_training) - self._forged()
        into.copy_(forged[part])

    def _forged(self) -> Vector:
        if factor := FACTORS.get(self._attack):
            return factor * pseudo_gradient(self.local_training)
        honest = torch.stack([pseudo_gradient(shift) for shift in self._honest()])
        return alie(honest, self._liars) if self._attack == "alie" else ipm(honest)
