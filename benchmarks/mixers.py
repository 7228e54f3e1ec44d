"""How fast averaging protocols mix, over vectors in memory: no peers, no network, only who averages with whom.

A mixer takes one round: the round's number, who is up in it (bool, n) and everybody's values (float64, n × elements)
come in, the new values go out. Who is down neither gives nor takes, and keeps what it has. Failures, first values and
every protocol's own draws come from the trial's seed alone, so that all protocols meet the same failures.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from protocols.moshpit.grid import GridShape, cell, line, shape_for
from protocols.pairwise import matching
from tests.support.mixing_matrices import mixing_matrix

Mixer = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]
Maker = Callable[[int, random.Random], Mixer]
"""A mixer for so many peers, with a source of draws of its own."""


class TooMany(ValueError):
    """There are more peers than there is room for."""


def group_means(labels: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Everybody's mean over its group; `labels` (n) are small whole numbers, equal in a group."""
    count = int(labels.max()) + 1
    sums = torch.zeros(count, values.shape[1], dtype=values.dtype).index_add_(0, labels, values)
    return (sums / torch.bincount(labels, minlength=count).clamp(min=1)[:, None])[labels]


def among(up: torch.Tensor, labels: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """As `group_means`, among those that are up; the others keep what they have."""
    mixed = values.clone()
    if bool(up.any()):
        mixed[up] = group_means(labels[up], values[up])
    return mixed


def all_reduce(peers: int, rng: random.Random) -> Mixer:
    """One mean for all, or none: a single failure spoils the round."""

    def mix(number: int, up: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return values.mean(0, keepdim=True).expand_as(values).clone() if bool(up.all()) else values

    return mix


def random_groups(size: int) -> Maker:
    """Everybody who is up, in groups of `size` drawn afresh each round; who is left over joins one of them.

    Without failures, and if `size` divides N, the variance is multiplied by (N/size − 1) / (N − 1) in expectation.
    """

    def make(peers: int, rng: random.Random) -> Mixer:
        draw = torch.Generator().manual_seed(rng.getrandbits(63))

        def mix(number: int, up: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            here = torch.nonzero(up)[:, 0]
            groups = max(1, len(here) // size)
            labels = torch.zeros(peers, dtype=torch.int64)
            labels[here[torch.randperm(len(here), generator=draw)]] = torch.arange(len(here)) % groups
            return among(up, labels, values)

        return mix

    return make


# -- gossip -----------------------------------------------------------------------------------------------------------


def taken(mixing: torch.Tensor, up: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """x ← Wx among those that are up: in the place of what somebody down would have brought one takes one's own.

    Where W is symmetric the mean stays where it is.
    """
    here = up[:, None].to(values.dtype)
    return torch.where(up[:, None], mixing @ (values * here) + (mixing @ (1 - here)) * values, values)


def pushed(pushing: torch.Tensor, up: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """x ← Px, P's columns being what each gives away, among those that are up: what finds nobody is kept."""
    here = up[:, None].to(mass.dtype)
    return torch.where(up[:, None], pushing @ (mass * here) + (pushing.T @ (1 - here)) * mass, mass)


def gossip(schedule: str) -> Maker:
    """Rounds in lockstep by the matrices of `tests.support.mixing_matrices`."""

    def make(peers: int, rng: random.Random) -> Mixer:
        members, seed = names(peers), str(rng.getrandbits(63))

        def mix(number: int, up: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            return taken(_matrix(schedule, members, number, seed), up, values)

        return mix

    return make


def pairs(peers: int, rng: random.Random) -> Mixer:
    """As `gossip("random")`, but who finds its partner down asks another: pairs are drawn among those that are up."""
    members, seed = names(peers), str(rng.getrandbits(63))

    def mix(number: int, up: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        here = [name for name, is_up in zip(members, up.tolist(), strict=True) if is_up]
        mixed = values.clone()
        mixed[up] = mixing_matrix("random", here, number, seed) @ values[up]
        return mixed

    return mix


def torus(peers: int, rng: random.Random) -> Mixer:
    """A fifth each for oneself and one's four neighbours, on the torus nearest to a square."""
    rows = next(side for side in range(math.isqrt(peers), 0, -1) if peers % side == 0)
    across, along = (_neighbours(side) for side in (rows, peers // rows))
    mixing = torch.kron(across, torch.eye(peers // rows, dtype=torch.float64))
    mixing = (torch.eye(peers, dtype=torch.float64) + mixing + torch.kron(torch.eye(rows).double(), along)) / 5

    def mix(number: int, up: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return taken(mixing, up, values)

    return mix


def _neighbours(count: int) -> torch.Tensor:
    one = torch.eye(count, dtype=torch.float64).roll(1, 0)
    return one + one.T


def push_sum(peers: int, rng: random.Random) -> Mixer:
    """Half of value and weight is pushed 1, 2, 4, … places on; a share whose receiver is down stays with its giver."""
    members, seed = names(peers), str(rng.getrandbits(63))
    weights = torch.ones(peers, 1, dtype=torch.float64)

    def mix(number: int, up: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        nonlocal weights
        pushing = _matrix("one-peer-exponential", members, number, seed).T
        sums, weights = pushed(pushing, up, values * weights), pushed(pushing, up, weights)
        return sums / weights

    return mix


@cache
def names(peers: int) -> tuple[str, ...]:
    return tuple(f"{index:05}" for index in range(peers))


_static: dict[tuple[str, int, int], torch.Tensor] = {}


def _matrix(schedule: str, members: Sequence[str], number: int, seed: str) -> torch.Tensor:
    """`mixing_matrix`; those that come again and again are made once."""
    if schedule == "random":
        return mixing_matrix(schedule, members, number, seed)
    key = (schedule, len(members), number % len(matching.hops(len(members))))
    if key not in _static:
        _static[key] = mixing_matrix(schedule, members, number, seed)
    return _static[key]


# -- Moshpit ----------------------------------------------------------------------------------------------------------


@cache
def _lines(shape: GridShape) -> tuple[torch.Tensor, ...]:
    """For each axis: the line, as a number, of the n-th cell."""
    found = []
    for axis in range(len(shape)):
        seen: dict[GridShape, int] = {}
        at = (line(cell(number, shape), axis) for number in range(math.prod(shape)))
        found.append(torch.tensor([seen.setdefault(each, len(seen)) for each in at]))
    return tuple(found)


def moshpit_cells(shape: GridShape) -> Maker:
    """Cells by lot, once and for all, holes as they fall: what the paper simulates."""

    def make(peers: int, rng: random.Random) -> Mixer:
        if peers > math.prod(shape):
            raise TooMany(f"{peers} peers on {math.prod(shape)} cells")
        cells = torch.tensor(rng.sample(range(math.prod(shape)), peers))

        def mix(number: int, up: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            return among(up, _lines(shape)[number % len(shape)][cells], values)

        return mix

    return make


def moshpit_seats(most: int) -> Maker:
    """Seats without gaps on the grid that `protocols.moshpit.grid` lays out, in an order drawn anew after each pass."""

    def make(peers: int, rng: random.Random) -> Mixer:
        shape = shape_for(peers, most)
        seats = torch.empty(0, dtype=torch.int64)

        def mix(number: int, up: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            nonlocal seats
            axis = number % len(shape)
            if axis == 0:
                seats = torch.tensor(rng.sample(range(peers), peers))
            return among(up, _lines(shape)[axis][seats], values)

        return mix

    return make


MIXERS: dict[str, Maker] = {
    "all-reduce": all_reduce,
    "ring": gossip("ring"),
    "torus": torus,
    "exponential": gossip("exponential"),
    "one-peer exponential": gossip("one-peer-exponential"),
    "random matching": gossip("random"),
    "push-sum": push_sum,
    "groups of 32": random_groups(32),
    "Moshpit 32 x 32": moshpit_cells((32, 32)),
    "Moshpit 8 x 8 x 8": moshpit_cells((8, 8, 8)),
    "Moshpit seats of 32": moshpit_seats(32),
    "Moshpit seats of 8": moshpit_seats(8),
}


# -- trials -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Trial:
    """What one simulation came to.

    Attributes:
        variances: over the peers, mean over the elements, before the first round and after each.
        drift: how far the mean over the peers has moved, in units of one peer's first deviation.
    """

    variances: tuple[float, ...]
    drift: float

    def rounds_to(self, bound: float) -> int:
        """Rounds until the variance is below the bound; all that were simulated, if it never is."""
        return next((number for number, v in enumerate(self.variances) if v < bound), len(self.variances) - 1)


def simulate(make: Maker, peers: int, failure: float, rounds: int, seed: int, elements: int, until: float) -> Trial:
    """Mix normal values for at most `rounds` rounds, or until the variance is below `until`.

    Args:
        failure: the probability with which a peer is down in a round, drawn for each round.
    """
    start = torch.Generator().manual_seed(seed)
    values = torch.randn(peers, elements, dtype=torch.float64, generator=start)
    mix, mean = make(peers, random.Random(f"{seed}/draws")), values.mean(0)
    variances = [_variance(values)]
    for number in range(rounds):
        if variances[-1] < until:
            break
        up = torch.rand(peers, dtype=torch.float64, generator=start) >= failure
        values = mix(number, up, values)
        variances.append(_variance(values))
    return Trial(tuple(variances), float((values.mean(0) - mean).square().mean().sqrt()))


def _variance(values: torch.Tensor) -> float:
    return float(values.var(0, correction=0).mean())


def mean_rounds(trials: Sequence[Trial], bound: float) -> float:
    return sum(trial.rounds_to(bound) for trial in trials) / len(trials)
