"""How a parameter server applies displacements that arrive one by one, each from other parameters. No I/O."""

from __future__ import annotations

import torch

from protocols.base import Vector


class DelayedNesterov:
    """The server's parameters, which each arriving displacement moves by 1/N of its length at once.

    Momentum is delayed (Liu et al. 2024, "Asynchronous Local-SGD Training for Language Modeling", algorithm 3, Delayed
    Nesterov, with c = 0). After N arrivals, their mean updates the momentum, which then takes one step of its own.
    Momentum applied at each arrival would take every stale step N times.

    Attributes:
        parameters: float32 (n).
    """

    def __init__(self, parameters: Vector, momentum: float = 0.0) -> None:
        """Begin with these parameters, which `apply` changes in place.

        Raises:
            ValueError: the momentum is outside [0, 1).
        """
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), not {momentum}")
        self.parameters, self._momentum = parameters, momentum
        self._gathered, self._velocity = (torch.zeros(len(parameters) if momentum else 0) for _ in range(2))
        self._arrived = 0

    def apply(self, displacement: Vector, count: int) -> None:
        """Apply a displacement: θ ← θ − δ/N. After N of them, m ← βm + Σδ/N and θ ← θ − βm.

        Args:
            displacement: δ, float32 (n): what a worker would subtract from the parameters. It is overwritten.
            count: N, the number of peers that take part.
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
