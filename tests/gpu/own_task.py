"""A task of a user's own with BatchNorm, whose statistics are averaged with the parameters."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from node.tasks.base import Batch, TaskContext


class Points:
    def __init__(self, device: str) -> None:
        torch.manual_seed(1)
        self.module: nn.Module = nn.Sequential(
            nn.Linear(8, 32, bias=False),  # the gradient of a bias here would be rounding errors only
            nn.BatchNorm1d(32),
            nn.ReLU(),
            nn.Linear(32, 2),
        )
        self.module.to(device)
        self._device = device

    def batch(self, seed: int, position: int) -> Batch:
        points = torch.randn(64, 8, generator=torch.Generator().manual_seed(1000 * seed + position))
        return points, (points.prod(dim=1) > 0).long()

    def loss(self, *batch: torch.Tensor) -> torch.Tensor:
        points, classes = (each.to(self._device) for each in batch)
        return functional.cross_entropy(self.module(points), classes)

    def evaluate(self) -> float:
        with torch.no_grad():
            return float(self.loss(*self.batch(99, 0)))


def make(given: TaskContext) -> Points:
    return Points(given.device)
