"""Who meets whom: peers as cells of a grid, groups as its lines (Ryabinin et al. 2021, Moshpit SGD, section 3). Pure.

A peer's index has one coordinate for each axis. In a round it averages once along every axis: its group there are all
peers that share every coordinate but that one. On a full grid of d axes everybody holds the exact mean after d groups.

**Where the index comes from.** A peer that knows the others takes its place among them in an order that each round
draws anew (`assign_cell`): there is no assigner, and a peer that joins or leaves opens no hole. A peer that knows too
few others keeps an index of its own, and its position in a group becomes its coordinate along that axis (`next_cell`),
as in the paper.

**Which grid.** As few axes as groups of at most `GROUP_MOST` allow, then as little spare room as can be: 4 x 3 for
twelve peers, not 4 x 4. A peer keeps the grid that others stand on as long as it is not too empty or too full for how
many it sees (`choose_grid`). Two who see about the same number agree; while they do not, both have smaller groups.

**Grids with holes.** What is left of the variance after one round of two axes, for so many peers on a grid of 8 x 8
(`python -m tests.sim.grids`, 1,000 draws; `lots`: two rounds of groups of eight drawn by lot, which need no grid):

    peers                                     64     53     45     37     29     20
    cells drawn by lot, holes as they fall    0      .0038  .0091  .0205  .0403  .0984
    positions, the third round                .0019  .0042  .0079  .0136  .0110  .0198
    dealt along the diagonals, without gaps   0      .0040  .0093  .0204  .0441  .1195
    seats: row by row, without gaps           0      .0011  .0014  .0020  .0035  .0084
    lots                                      .0129  .0135  .0131  .0116  .0105  .0103

Half empty, a grid with holes does worse than lots. So seats are dealt row by row: full rows, one short row, columns
that differ by one. That is better than lots down to a third; below `EMPTY` of its cells a grid is given up all the
same, since the next one is nearly full again, and shorter. Positions heal themselves, since a group counts from zero:
without knowing anybody, they come near seats after two rounds.

**What travels along.** A group leaves its members Σwx / Σw and the mean of their w, so that Σwx and Σw over all peers
stay what they were. On a full grid that is the exact mean by tokens; where lines differ in length, to carry the sum of
w instead would leave half as much variance, and shift the mean of all by .1 to .4 % of it in each round, for good.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from protocols.base import PeerId

GridShape: TypeAlias = tuple[int, ...]
"""Places along each axis."""
Cell: TypeAlias = tuple[int, ...]
"""A cell: one coordinate for each axis."""

GROUP_MOST = 8
"""Places along an axis: a larger group costs hardly more bytes, and one lost member costs it more often."""
EMPTY = 0.5
"""A grid is given up when fewer of its cells have a peer, or when there are more peers than cells."""
MAX_AXES = 8
MAX_PLACES = 32


@dataclass(frozen=True, slots=True, order=True)
class Grid:
    """Attributes:
    since: the round in which somebody laid it out; 0: nobody insists on it.
    """

    since: int
    shape: GridShape

    @property
    def cells(self) -> int:
        return math.prod(self.shape)

    def suits(self, count: int) -> bool:
        """Whether so many peers may stay on it."""
        least = EMPTY * self.cells if len(self.shape) > 1 else 0.0  # with one axis, all are in one group anyway
        return least <= count <= self.cells


def shape_for(count: int, most: int = GROUP_MOST) -> GridShape:
    """The grid for so many peers: the fewest axes, the fewest cells, longer axes first.

    Raises:
        ValueError: no peers, or groups of one.
    """
    if count < 1 or most < 2:
        raise ValueError(f"a grid for {count} peers in groups of {most}")
    axes = 1
    while most**axes < count:
        axes += 1
    if axes == 1:
        return (most,)
    places = [next(side for side in range(2, most + 1) if side**axes >= count)] * axes
    for axis in reversed(range(axes)):
        shorter = [*places[:axis], places[axis] - 1, *places[axis + 1 :]]
        if shorter[axis] >= 2 and math.prod(shorter) >= count:
            places = shorter
    return tuple(places)


def choose_grid(count: int, round: int, told: Iterable[Grid], most: int = GROUP_MOST) -> Grid:
    """The grid to stand on: of those that peers stand on, the latest that suits; a new one where none does.

    Args:
        count: peers in sight, this one included.
        told: the grids of all of them, this one's included if it has one.
        most: places along an axis, for all peers of a run: a shape that nobody's count would give is nobody's grid.
    """
    known = [grid for grid in told if grid.suits(count) and grid.shape == shape_for(grid.cells, most)]
    return max(known, default=Grid(round, shape_for(count, most)))


def seeded_order(seed: bytes, peers: Iterable[PeerId]) -> list[PeerId]:
    """An order of peers that nobody chose: the same for all who name the same seed."""
    return sorted(peers, key=lambda peer: hashlib.sha256(seed + peer.encode()).digest())


def assign_cell(peer: PeerId, peers: Sequence[PeerId], shape: GridShape, seed: bytes) -> Cell:
    """A peer's cell among `peers`, of which it is one, in the order of that seed."""
    return cell(seeded_order(seed, peers).index(peer), shape)


def cell(number: int, shape: GridShape) -> Cell:
    """The cell of the number-th peer: row by row, so that all lines but one are full, or short by one."""
    index: list[int] = []
    for places in reversed(shape):
        number, coordinate = divmod(number, places)
        index.insert(0, coordinate)
    return tuple(index)


def default_cell(peer: PeerId, shape: GridShape, seed: bytes) -> Cell:
    """Where a peer that knows nobody begins."""
    drawn_bytes = hashlib.sha256(seed + peer.encode()).digest()
    return tuple(drawn_bytes[axis] % places for axis, places in enumerate(shape))


def next_cell(index: Cell, axis: int, position: int, shape: GridShape) -> Cell:
    """The index after a group along `axis`: the position in the group becomes the coordinate."""
    return (*index[:axis], position % shape[axis], *index[axis + 1 :])


def line(index: Cell, axis: int) -> Cell:
    """The key of a peer's group along an axis: all coordinates but that one."""
    return index[:axis] + index[axis + 1 :]
