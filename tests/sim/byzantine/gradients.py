"""Peers that train as all do, and hand in something else: attacks on the mean itself, by the rules of the protocol.

    reversed    -1000 times its own pseudo-gradient, its norm declared as it is
    understated -10 times it, its norm declared as that of its own work; were it 1000 times that, nothing would be taken
    alie        the honest mean less z standard deviations in each coordinate, z as large as hides among the honest ones
                (Baruch et al. 2019, arXiv 1902.06156, algorithm 3)
    ipm         -0.5 times the honest mean (Xie et al. 2019, arXiv 1903.03936)

The last two know what the honest peers will hand in, and all say the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import NormalDist

import torch

from node.training.trainer import InlineTrainer, Learner, LocalTraining
from protocols.base import LocalProgress, RoundKey, Vector

FACTOR = -1000.0
FACTORS = {"reversed": FACTOR, "understated": -10.0}
"""What some make of their own work; the others make theirs of that of the honest."""
IPM_SHARE = 0.5
ATTACKS = ("reversed", "understated", "alie", "ipm")


def alie(honest: torch.Tensor, liars: int) -> Vector:
    """(m, d) of the honest -> (d) of each of the liars, against the sign of the mean."""
    count = len(honest) + liars
    needed = count // 2 + 1 - liars
    z = NormalDist().inv_cdf((len(honest) - needed) / len(honest))
    mean, deviation = honest.mean(0), honest.std(0, unbiased=False)
    return mean - z * deviation * mean.sign()


def ipm(honest: torch.Tensor) -> Vector:
    """(m, d) of the honest -> (d) of each of the liars."""
    return -IPM_SHARE * honest.mean(0)


def pseudo_gradient(shift: LocalTraining) -> Vector:
    """What a peer would hand in as it stands."""
    with shift.outer():
        anchor = shift.learner.vectors[0].clone()
    return anchor - shift.learner.vectors[0]


class PoisonedTrainer(InlineTrainer):
    """Hands in what its attack makes of its own work, or of that of the honest."""

    def __init__(
        self,
        learner: Learner,
        inner_steps: int,
        step_seconds: float,
        attack: str,
        liars: int,
        honest: Callable[[], Sequence[LocalTraining]],
    ) -> None:
        """
        Args:
            honest: the shifts of the honest peers, once there are any.

        Raises:
            ValueError: there is no such attack.
        """
        super().__init__(learner, inner_steps, step_seconds)
        if attack not in ATTACKS:
            raise ValueError(f"no attack {attack!r}: there are {', '.join(ATTACKS)}")
        self._attack, self._liars, self._honest = attack, liars, honest

    async def train(
        self, key: RoundKey, cut: asyncio.Event, progress: Callable[[LocalProgress], None], surplus: bool = True
    ) -> LocalProgress:
        """As the honest do. What is declared is true of what `reversed` hands in; to the others it is of no use."""
        factor = abs(FACTOR) if self._attack == "reversed" else 1.0

        def declared(work: LocalProgress) -> LocalProgress:
            return replace(work, norm=factor * work.norm)

        return declared(await super().train(key, cut, lambda work: progress(declared(work)), surplus))

    async def read(self, into: Vector, fragment: int = 0) -> None:
        """The parameters at which the peer would be, had it trained what it hands in."""
        into.copy_(
            self.local_training.learner.vectors[fragment] + pseudo_gradient(self.local_training) - self._forged()
        )

    def _forged(self) -> Vector:
        if factor := FACTORS.get(self._attack):
            return factor * pseudo_gradient(self.local_training)
        honest = torch.stack([pseudo_gradient(shift) for shift in self._honest()])
        return alie(honest, self._liars) if self._attack == "alie" else ipm(honest)
