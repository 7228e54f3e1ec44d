"""How a step and the flat vector are divided among ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from node.ranks.division import RanksError, cuts, units
from node.ranks.steps import microbatches

BATCHES, ROWS, RANKS = st.integers(1, 12), st.none() | st.integers(1, 9), st.integers(1, 16)


@given(BATCHES, ROWS, RANKS, st.booleans())
def test_each_part_of_a_step_is_counted_once(batches: int, rows: int | None, ranks: int, even: bool) -> None:
    most = batches * (rows or 1)
    if ranks > most:
        with pytest.raises(RanksError, match=f"^{ranks} devices, and a step has {batches} batch"):
            units(batches, rows, 0, ranks, even)
        return
    each = [units(batches, rows, rank, ranks, even) for rank in range(ranks)]
    counted = Counter((unit.batch, unit.part) for mine in each for unit in mine if not unit.is_repeated)
    (parts,) = {unit.parts for mine in each for unit in mine}
    assert counted == Counter((batch, part) for batch in range(batches) for part in range(parts))
    lengths = [len(mine) for mine in each]
    assert min(lengths) >= 1 and max(lengths) - min(lengths) <= (0 if even else 1)
    assert all(unit.batch <= later.batch for mine in each for unit, later in pairwise(mine) if not later.is_repeated)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30), RANKS, st.booleans())
def test_vector_is_cut_in_order_and_only_at_borders(sizes: list[int], ranks: int, has_borders: bool) -> None:
    total, borders = sum(sizes), [*accumulate(sizes)]
    found = cuts(total, ranks, borders if has_borders else None)
    assert len(found) == ranks + 1 and found == sorted(found) and (found[0], found[-1]) == (0, total)
    if has_borders:
        assert {*found} <= {0, *borders}
    longest = total / ranks + (2 * max(sizes) if has_borders else 1)
    assert max(high - low for low, high in pairwise(found)) <= longest


@dataclass
class Rows:
    """A task whose batch at a position is that many rows; some of them are no targets."""

    rows: int
    module: nn.Module

    def batch(self, seed: int, position: int) -> tuple[torch.Tensor, ...]:
        return torch.arange(self.rows) + 100 * position, torch.arange(self.rows) % 3

    def targets(self, batch: tuple[torch.Tensor, ...]) -> int:
        return int((batch[-1] > 0).sum())

    def loss(self, *batch: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def evaluate(self) -> float:
        raise NotImplementedError


@given(st.integers(1, 6), st.integers(1, 7), st.integers(1, 9), st.booleans(), st.booleans())
def test_weights_are_those_of_the_whole_step(batches: int, rows: int, ranks: int, by_token: bool, even: bool) -> None:
    ranks = min(ranks, batches * rows)
    task = Rows(rows, nn.Identity())
    found = [
        part
        for rank in range(ranks)
        for part in microbatches(task, 1, 10, units(batches, rows, rank, ranks, even), by_token)
    ]
    seen = sorted(int(row) for batch, count, weight in found if weight for row in batch[0])
    counted = [batch for batch, count, _ in found if count]
    targets = batches * (task.targets(task.batch(1, 0)) if by_token else rows)
    assert sum(count for _, count, _ in found) == targets
    whole = sum(Fraction(weight).limit_denominator(1000) for _, _, weight in found)
    assert whole == (targets if by_token else batches)
    everything = [100 * position + row for position in range(10, 10 + batches) for row in range(rows)]
    if by_token:
        assert {*seen} <= {*everything} and len(seen) == len({*seen})
    else:
        assert seen == everything == sorted(int(row) for batch in counted for row in batch[0])
