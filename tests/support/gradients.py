"""Contributions of peers to a mean, as tests of averaging rules need them."""

from __future__ import annotations

import torch


def noisy_contributions(count: int, size: int, seed: int, spread: float = 1.0) -> torch.Tensor:
    """Contributions around a common signal of norm 1, each with added noise of that norm times `spread`."""
    noise = torch.randn(count, size, generator=torch.Generator().manual_seed(seed))
    return (1 + spread * noise) / size**0.5
