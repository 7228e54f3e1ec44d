"""How fast averaging protocols mix vectors in memory: only which peer averages with which, without peers or a network.

A mixer computes one round. It takes the round's number, which peers are up (bool, n) and the values of all peers
(float64, n × elements); it returns the new values. A peer that is down neither sends nor receives, and keeps its value.
Failures, initial values and each protocol's own draws depend on the trial's seed alone. So all protocols meet the same
failures.
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
"""(number of peers, generator) -> a mixer that draws from that generator."""


class TooMany(ValueError):
    """There are more peers than cells."""


def group_means(labels: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The mean of each peer's group. `labels` (n) are small whole numbers, equal within a group."""
    count = int(labels.max()) + 1
    sums = torch.zeros(count, values.shape[1], dtype=values.dtype).index_add_(0, labels, values)
    return (sums / torch.bincount(labels, minlength=count).clamp(min=1)[:, None])[labels]


def among(up: torch.Tensor, labels: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """As `group_means`, among the peers that are up; the others keep their values."""
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
    """All peers that are up, in random groups of `size`, drawn anew each round. Peers left over join one of them.

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
    """x ← Wx among the peers that are up. A peer uses its own value in place of one from a peer that is down.

    If W is symmetric the mean stays the same.
    """
    here = up[:, None].to(values.dtype)
    return torch.where(up[:, None], mixing @ (values * here) + (mixing @ (1 - here)) * values, values)


def pushed(pushing: torch.Tensor, up: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """x ← Px among the peers that are up. P's columns are what each sends; it keeps what a down peer would receive."""
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
    """As `gossip("random")`, but pairs are drawn among the peers that are up, as if a peer asked again."""
    members, seed = names(peers), str(rng.getrandbits(63))

    def mix(number: int, up: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        here = [name for name, is_up in zip(members, up.tolist(), strict=True) if is_up]
        mixed = values.clone()
        mixed[up] = mixing_matrix("random", here, number, seed) @ values[up]
        return mixed

    return mix


def torus(peers: int, rng: random.Random) -> Mixer:
    """A weight of one fifth each for a peer and its four neighbours, on the torus nearest to a square."""
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
    """A peer pushes half of its value and weight 1, 2, 4, … places on; if the receiver is down, it keeps the share."""
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
    """`mixing_matrix`, which caches the matrices that recur."""
    if schedule == "random":
        return mixing_matrix(schedule, members, number, seed)
    key = (schedule, len(members), number % len(matching.hops(len(members))))
    if key not in _static:
        _static[key] = mixing_matrix(schedule, members, number, seed)
    return _static[key]


# -- Moshpit ----------------------------------------------------------------------------------------------------------


@cache
def _lines(shape: GridShape) -> tuple[torch.Tensor, ...]:
    """For each axis: the number of the line that the n-th cell is on."""
    found = []
    for axis in range(len(shape)):
        seen: dict[GridShape, int] = {}
        at = (line(cell(number, shape), axis) for number in range(math.prod(shape)))
        found.append(torch.tensor([seen.setdefault(each, len(seen)) for each in at]))
    return tuple(found)


def moshpit_cells(shape: GridShape) -> Maker:
    """Random cells, drawn once, with holes at random places, as the paper simulates."""

    def make(peers: int, rng: random.Random) -> Mixer:
        if peers > math.prod(shape):
            raise TooMany(f"{peers} peers on {math.prod(shape)} cells")
        cells = torch.tensor(rng.sample(range(math.prod(shape)), peers))

        def mix(number: int, up: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            return among(up, _lines(shape)[number % len(shape)][cells], values)

        return mix

    return make


def moshpit_seats(most: int) -> Maker:
    """Cells without gaps on the grid of `protocols.moshpit.grid`, in an order drawn anew after each pass."""

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
    """The result of one simulation.

    Attributes:
        variances: over the peers, averaged over the elements, before the first round and after each round.
        drift: how far the mean over the peers has moved, in units of one peer's initial deviation.
    """

    variances: tuple[float, ...]
    drift: float

    def rounds_to(self, bound: float) -> int:
        """Rounds until the variance is below the bound; the number of simulated rounds if it never is."""
        return next((number for number, v in enumerate(self.variances) if v < bound), len(self.variances) - 1)


def simulate(make: Maker, peers: int, failure: float, rounds: int, seed: int, elements: int, until: float) -> Trial:
    """Mix normal values for at most `rounds` rounds, or until the variance is below `until`.

    Args:
        failure: the probability that a peer is down, drawn anew in each round.
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
