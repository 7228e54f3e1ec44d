"""What a parameter server does with displacements that arrive one by one, each from another point. Pure."""

from __future__ import annotations

import torch

from protocols.base import Vector


class DelayedNesterov:
    """The parameters, and what arrivals make of them.

    Each counts 1/N at once. With momentum it is delayed (Liu et al. 2024, "Asynchronous Local-SGD Training for Language
    Modeling", algorithm 3, Delayed Nesterov, with c = 0): N arrivals are gathered, the momentum takes up their mean,
    and makes one step of its own. Momentum with each arrival would take every stale step N times over.

    Attributes:
        parameters: float32 (n).
    """

    def __init__(self, parameters: Vector, momentum: float = 0.0) -> None:
        """
        Raises:
            ValueError: a momentum outside [0, 1).
        """
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), not {momentum}")
        self.parameters, self._momentum = parameters, momentum
        self._gathered, self._velocity = (torch.zeros(len(parameters) if momentum else 0) for _ in range(2))
        self._arrived = 0

    def apply(self, displacement: Vector, count: int) -> None:
        """θ ← θ − δ/N; after N of them m ← βm + Σδ/N and θ ← θ − βm.

        Args:
            displacement: δ, float32 (n): by how much a worker would lower the parameters; destroyed.
            count: N, how many take part.
        """
        self.parameters.sub_(displacement.div_(count))
        if not self._momentum:
            return
        self._gathered.add_(displacement)
        self._arrived += 1
        if self._arrived >= count:
            self._velocity.mul_(self._momentum).add_(self._gathered)
            self.parameters.sub_(torch.mul(self._velocity, self._momentum, out=self._gathered))
            self._gathered.zero_()
            self._arrived = 0
