"""How a round of exchanges mixes the peers' values, as a matrix, for each schedule of `protocols.pairwise.matching`.

The mixing matrices are those of the literature, for rounds in lockstep: x ← Wx, doubly stochastic, so that the mean
does not change. `pairwise` gives the effect of consecutive exchanges, which is what peers without a barrier get.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from protocols.base import PeerId
from protocols.pairwise.matching import hops_ahead, matched_order


def mixing_matrix(schedule: str, members: Sequence[PeerId], round_number: int, seed: str) -> torch.Tensor:
    """The mixing matrix W of one round in lockstep, float64 (n, n), over the sorted members."""
    everybody = tuple(sorted(set(members)))
    if schedule == "random":
        order = matched_order(everybody, round_number, seed)
        return pairwise(len(everybody), list(zip(order[::2], order[1::2], strict=False)))
    ahead, behind = hops_ahead(schedule, len(everybody), round_number), (-1,) if schedule == "ring" else ()
    return _circulant(len(everybody), (0, *ahead, *behind))


def pairwise(count: int, pairs: Sequence[tuple[int, int]]) -> torch.Tensor:
    """The mixing matrix of consecutive exchanges, each of which moves both ends to their mean. float64 (n, n)."""
    product = torch.eye(count, dtype=torch.float64)
    for one, other in pairs:
        product[[one, other]] = product[[one, other]].mean(0)
    return product


def _circulant(count: int, offsets: Sequence[int]) -> torch.Tensor:
    """The mixing matrix in which every peer takes the mean of the peers at these distances."""
    mixing = torch.zeros(count, count, dtype=torch.float64)
    rows = torch.arange(count)
    for offset in offsets:
        mixing[rows, (rows + offset) % count] += 1 / len(offsets)
    return mixing
