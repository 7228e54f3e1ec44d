"""Vectors to average."""

from __future__ import annotations

import torch

from protocols.base import Vector


def equal_norm_vectors(count: int, elements: int, seed: int) -> list[Vector]:
    """Random vectors of one norm, so that clipping changes none."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(elements, generator=generator) for _ in range(count)]
    return [vector / vector.norm() * elements**0.5 for vector in drawn]


def noisy_contributions(count: int, size: int, seed: int, spread: float = 1.0) -> torch.Tensor:
    """Contributions around a common signal of norm 1, each with added noise of that norm times `spread`."""
    noise = torch.randn(count, size, generator=torch.Generator().manual_seed(seed))
    return (1 + spread * noise) / size**0.5
