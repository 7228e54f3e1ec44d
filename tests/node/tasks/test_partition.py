"""Cutting blocks into stages: the dynamic programme finds what trying every cut finds."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.tasks.partition import BlockCost, cut

costs = st.builds(BlockCost, st.just("block"), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))


def worth(blocks: tuple[BlockCost, ...], bounds: tuple[int, ...]) -> tuple[float, int]:
    """The costliest stage's seconds, and the largest stage's bytes."""
    stages = [blocks[low:high] for low, high in pairwise(bounds)]
    return (
        max(sum(block.seconds for block in stage) for stage in stages),
        max(sum(block.parameter_bytes for block in stage) for stage in stages),
    )


@given(blocks=st.lists(costs, min_size=1, max_size=7), data=st.data())
def test_cut_is_best_of_all_cuts(blocks: list[BlockCost], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(blocks)))
    limit = data.draw(st.none() | st.integers(0, 30))
    whole = tuple(blocks)
    cuts = [(0, *inner, len(whole)) for inner in combinations(range(1, len(whole)), stages - 1)]
    allowed = [worth(whole, bounds) for bounds in cuts if limit is None or worth(whole, bounds)[1] <= limit]
    if not allowed:
        with pytest.raises(ValueError, match="no cut into"):
            cut(blocks, stages, limit)
        return
    found = cut(blocks, stages, limit)
    assert worth(whole, found.bounds)[0] == min(allowed)[0]
    assert found.stages == stages and all(found.of(stage) for stage in range(stages))


@pytest.mark.parametrize("stages", [0, 4])
def test_impossible_number_of_stages_is_refused(stages: int) -> None:
    with pytest.raises(ValueError, match="take 1 to 3"):
        cut([BlockCost(name, 1.0, 2.0, 4) for name in "abc"], stages)


def test_table_names_blocks_and_costs_of_each_stage() -> None:
    found = cut([BlockCost("embed", 0.001, 0.002, 4_000_000), BlockCost("layer 0", 0.002, 0.004, 2_000_000)], 2)
    first, second = found.table().splitlines()[1:]
    assert first.split() == ["0", "embed", "3.00", "50%", "4.00"]
    assert second.split() == ["1", "layer", "0", "6.00", "100%", "2.00"]
