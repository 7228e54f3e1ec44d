"""The grid: exact after one pass if it is full, which grid peers choose, and their cells as peers come and go."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest
import torch

from protocols.moshpit.grid import (
    Cell,
    Grid,
    GridShape,
    assign_cell,
    cell,
    choose_grid,
    default_cell,
    line,
    next_cell,
    seeded_order,
    shape_for,
)

Groups = list[list[int]]
Plan = Callable[[random.Random], list[Groups]]
"""The groups of one round, axis by axis."""


def lines(indices: Sequence[Cell], axis: int) -> Groups:
    groups: dict[Cell, list[int]] = {}
    for peer, index in enumerate(indices):
        groups.setdefault(line(index, axis), []).append(peer)
    return list(groups.values())


def average(values: torch.Tensor, weights: torch.Tensor, groups: Groups) -> tuple[torch.Tensor, torch.Tensor]:
    """Each group's (mean of w, Σwx / Σw), float64: values (n, k) and weights (n)."""
    values, weights = values.clone(), weights.clone()
    for group in groups:
        mass = weights[group]
        if float(mass.sum()) > 0:
            values[group] = (mass[:, None] * values[group]).sum(0) / mass.sum()
            weights[group] = mass.mean()
    return values, weights


def seated(count: int, shape: GridShape) -> Plan:
    """Cells without gaps, row by row, in an order that each round draws."""

    def plan(rng: random.Random) -> list[Groups]:
        indices: list[Cell] = [()] * count
        for number, peer in enumerate(rng.sample(range(count), count)):
            indices[peer] = cell(number, shape)
        return [lines(indices, axis) for axis in range(len(shape))]

    return plan


def diagonal(count: int, shape: GridShape) -> Plan:
    """Cells without gaps along the diagonals of a square, so that all lines are equally short."""

    def plan(rng: random.Random) -> list[Groups]:
        indices: list[Cell] = [()] * count
        for number, peer in enumerate(rng.sample(range(count), count)):
            low, high = number % shape[0], number // shape[0]
            indices[peer] = (low, (low + high) % shape[1])
        return [lines(indices, axis) for axis in range(len(shape))]

    return plan


def holes(count: int, shape: GridShape) -> Plan:
    """Random cells, with holes anywhere."""
    cells = [cell(number, shape) for number in range(math.prod(shape))]

    def plan(rng: random.Random) -> list[Groups]:
        indices = rng.sample(cells, count)
        return [lines(indices, axis) for axis in range(len(shape))]

    return plan


def lots(count: int, size: int, axes: int) -> Plan:
    """Random groups of a size, once for each axis; the last group may be smaller."""

    def plan(rng: random.Random) -> list[Groups]:
        return [
            [order[at : at + size] for at in range(0, count, size)]
            for order in (rng.sample(range(count), count) for _ in range(axes))
        ]

    return plan


def left(count: int, plan: Plan, trials: int, seed: int = 0) -> float:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    total = 0.0
    for _ in range(trials):
        values = torch.randn(count, 8, dtype=torch.float64, generator=generator)
        weights = torch.ones(count, dtype=torch.float64)
        mean, before = values.mean(0), values.var(0, unbiased=False).sum()
        for groups in plan(rng):
            values, weights = average(values, weights, groups)
        total += float(((values - mean) ** 2).mean(0).sum() / before)
    return total / trials


def test_seats_beat_random_groups_and_holes_lose() -> None:
    """With half of the cells filled. This is the reason for filling cells without gaps."""
    by_lot = left(29, lots(29, 8, 2), 80)
    assert left(29, seated(29, (8, 8)), 80) < 0.6 * by_lot
    assert left(29, holes(29, (8, 8)), 80) > 2 * by_lot
    assert left(29, diagonal(29, (8, 8)), 80) > 2 * by_lot


# -- choosing a grid --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "count, shape",
    ((1, (8,)), (8, (8,)), (9, (3, 3)), (12, (4, 3)), (16, (4, 4)), (17, (5, 4)), (64, (8, 8)), (65, (5, 4, 4))),
)
def test_grid_has_few_axes_and_little_spare_room(count: int, shape: tuple[int, ...]) -> None:
    assert shape_for(count) == shape


@pytest.mark.parametrize("most", (2, 3, 8, 32))
def test_every_peer_count_has_a_grid(most: int) -> None:
    for count in range(1, 400):
        shape = shape_for(count, most)
        assert math.prod(shape) >= count and max(shape) <= most
        assert Grid(0, shape).suits(count) or count < 4
    with pytest.raises(ValueError):
        shape_for(0)
    with pytest.raises(ValueError):
        shape_for(4, most=1)


def test_grid_stays_while_it_fits() -> None:
    """A count of peers that changes around a boundary does not change the grid each time."""
    grid = choose_grid(16, 3, ())
    assert grid == Grid(3, (4, 4))
    wider = choose_grid(17, 4, [grid])
    assert wider == Grid(4, (5, 4))
    for round, count in enumerate((16, 17, 15, 20, 10, 16, 17), 5):
        assert choose_grid(count, round, [wider]) == wider
    assert choose_grid(9, 20, [wider]) == Grid(20, (3, 3))


def test_peers_with_different_counts_agree_on_a_grid() -> None:
    """One peer sees seventeen, the others sixteen. Its later grid suits them too, and they adopt it."""
    old = Grid(3, (4, 4))
    new = choose_grid(17, 9, [old] * 16)
    assert {choose_grid(count, 9, [old] * 15 + [new]) for count in (16, 17)} == {new}


def test_newcomer_adopts_the_others_grid() -> None:
    """A newcomer has no grid of its own to keep. A grid that does not suit is never adopted, however late it claims."""
    assert choose_grid(13, 0, ()) == Grid(0, (4, 4))
    assert choose_grid(13, 0, [Grid(7, (5, 4)), Grid(0, (4, 4))]) == Grid(7, (5, 4))
    assert choose_grid(13, 5, [Grid(7, (5, 4)), Grid(1 << 40, (8, 8, 8))]) == Grid(7, (5, 4))
    assert choose_grid(13, 5, [Grid(7, (5, 4)), Grid(1 << 40, (13,))]) == Grid(7, (5, 4)), (
        "larger groups than the run's"
    )


def test_implausible_grid_is_ignored() -> None:
    """Otherwise one liar could make all peers meet in pairs for ever, because the latest grid wins."""
    assert choose_grid(8, 3, [Grid(0, (8,)), Grid(1 << 40, (2, 2, 2))]) == Grid(0, (8,))
    for count in range(1, 200):
        shape = shape_for(count)
        assert choose_grid(count, 3, [Grid(2, shape)]) == Grid(2, shape)


# -- cells ------------------------------------------------------------------------------------------------------------


def test_seats_are_distinct_and_redrawn_each_seed() -> None:
    peers = [f"p{number}" for number in range(12)]
    first, second = ({peer: assign_cell(peer, peers, (4, 3), seed) for peer in peers} for seed in (b"1", b"2"))
    assert len(set(first.values())) == len(set(second.values())) == 12
    assert first != second
    assert seeded_order(b"1", peers) == seeded_order(b"1", reversed(peers)) != seeded_order(b"2", peers)


def test_missing_peer_shortens_groups_without_holes() -> None:
    """All groups along the last axis but one are full, and those along the first differ by one."""
    indices = [cell(number, (4, 4)) for number in range(14)]
    assert sorted(len(group) for group in lines(indices, 1)) == [2, 4, 4, 4]
    assert sorted(len(group) for group in lines(indices, 0)) == [3, 3, 4, 4]


def test_group_position_becomes_the_coordinate() -> None:
    assert next_cell((1, 2, 3), 1, 0, (4, 4, 4)) == (1, 0, 3)
    assert next_cell((1, 2, 3), 0, 5, (4, 4, 4)) == (1, 2, 3), "a group that is too large wraps round"
    assert line((1, 2, 3), 1) == (1, 3)
    assert line((1,), 0) == ()


def test_peer_without_contacts_gets_a_default_cell() -> None:
    homes = [default_cell(f"p{number}", (4, 3), b"seed") for number in range(200)]
    assert set(homes) == {cell(number, (4, 3)) for number in range(12)}
