"""Averaging on grids as arithmetic: groups, means, and the share of the variance that remains.

python -m tests.sim.grids [trials]
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Sequence

import torch

from protocols.moshpit.grid import Cell, GridShape, cell, line, next_cell

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


class Positions:
    """The rule of the Moshpit paper: a peer's position in its last group becomes its coordinate."""

    def __init__(self, count: int, shape: GridShape, rounds: int, rng: random.Random) -> None:
        self.shape = shape
        self.indices = [tuple(rng.randrange(places) for places in shape) for _ in range(count)]
        for _ in range(rounds):
            self(rng)

    def __call__(self, rng: random.Random) -> list[Groups]:
        plan = []
        for axis in range(len(self.shape)):
            plan.append(lines(self.indices, axis))
            for group in plan[-1]:
                for position, peer in enumerate(rng.sample(group, len(group))):
                    self.indices[peer] = next_cell(self.indices[peer], axis, position, self.shape)
        return plan


def lots(count: int, size: int, axes: int) -> Plan:
    """Random groups of a size, once for each axis; the last group may be smaller."""

    def plan(rng: random.Random) -> list[Groups]:
        return [
            [order[at : at + size] for at in range(0, count, size)]
            for order in (rng.sample(range(count), count) for _ in range(axes))
        ]

    return plan


def failing(plan: Plan, probability: float, again: bool) -> Plan:
    """Each member of a group dies while it averages, with this probability, and returns afterwards.

    A group with a dead member has no mean, or, with `again`, averages again without the dead member.
    """

    def drawn(rng: random.Random) -> list[Groups]:
        axes: list[Groups] = []
        for groups in plan(rng):
            living = [[peer for peer in group if rng.random() >= probability] for group in groups]
            pairs = zip(groups, living, strict=True)
            axes.append([left for group, left in pairs if left and (again or len(left) == len(group))])
        return axes

    return drawn


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


def table(trials: int) -> None:
    shape = (8, 8)
    print("peers  holes  positions  diagonal  seats  lots")
    for count in (64, 61, 53, 45, 40, 37, 29, 20):
        paper = Positions(count, shape, 2, random.Random(1))
        plans = (holes(count, shape), paper, diagonal(count, shape), seated(count, shape), lots(count, 8, 2))
        print(count, *(f"{left(count, plan, trials):.4f}" for plan in plans), flush=True)


def losses(trials: int) -> None:
    print("deaths  groups without a mean  left of the variance  left if such a group averages again")
    for probability in (0.001, 0.005, 0.01, 0.05):
        full, share = seated(64, (8, 8)), 1 - (1 - probability) ** 8
        ways = [left(64, failing(full, probability, again), trials) for again in (False, True)]
        print(probability, f"{share:.4f}", *(f"{way:.5f}" for way in ways), flush=True)


def contraction(trials: int) -> None:
    """Print the contraction by one round of N peers in r random groups, which is exactly (r - 1) / (N - 1)."""
    for count, size in ((16, 4), (24, 8), (36, 6)):
        found = left(count, lots(count, size, 1), trials)
        print(f"{count} peers in groups of {size}: {found:.5f}, exactly {(count // size - 1) / (count - 1):.5f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    trials = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    contraction(trials)
    losses(trials // 20)
    table(trials // 20)
