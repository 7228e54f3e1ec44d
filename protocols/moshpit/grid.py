"""The grid of peers and its groups (Ryabinin et al. 2021, Moshpit SGD, section 3). No I/O.

A peer occupies one cell. In a round it averages once along each axis, with the peers that share every coordinate but
that one. On a full grid of d axes, every peer has the exact mean after d groups.

**Cells.** A peer that knows the others sorts all of them in an order that each round draws anew; its index in that
order gives its cell (`assign_cell`), row by row. No peer assigns cells to others, and a peer that joins or leaves makes
no hole. A peer that knows too few others keeps its own cell. Its position in a group becomes its coordinate along that
axis (`next_cell`), as in the paper.

**Shape.** The shape has the fewest axes that groups of at most `GROUP_MOST` allow, then the fewest empty cells: 4 x 3
for twelve peers, not 4 x 4. A peer keeps the grid that the others use while it is neither too empty nor too full for
the peers that it sees (`choose_grid`). Until peers agree on a grid, their groups are smaller.

**Weights.** A group leaves its members with Σwx / Σw and the mean of their weights w, so Σwx and Σw over all peers do
not change. On a full grid, this gives the exact mean weighted by tokens.

Figures, and what was turned down: docs/decisions/0023-moshpit-grid-and-weights.md.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from protocols.base import PeerId

GridShape: TypeAlias = tuple[int, ...]  # the number of places along each axis
Cell: TypeAlias = tuple[int, ...]  # one coordinate for each axis

GROUP_MOST = 8
"""The number of places along an axis. A larger group costs hardly more bytes, but loses a member more often."""
EMPTY = 0.5  # a grid is given up when a smaller share of its cells has a peer, or when there are more peers than cells
MAX_AXES = 8
MAX_PLACES = 32


@dataclass(frozen=True, slots=True, order=True)
class Grid:
    """A grid in use. `since` is the round in which a peer chose it, 0 if that was its first; the latest prevails."""

    since: int
    shape: GridShape

    @property
    def cells(self) -> int:
        return math.prod(self.shape)

    def suits(self, count: int) -> bool:
        least = EMPTY * self.cells if len(self.shape) > 1 else 0.0  # with one axis, all peers are in one group anyway
        return least <= count <= self.cells


def shape_for(count: int, most: int = GROUP_MOST) -> GridShape:
    """The shape for `count` peers: the fewest axes, then the fewest cells, longer axes first."""
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


def choose_grid(count: int, round: int, grids: Iterable[Grid], most: int = GROUP_MOST) -> Grid:
    """The latest of the peers' grids that suits `count` peers, this one included; a new one if none does.

    A shape that no count gives is ignored. `most`, the places along an axis, is the same for all peers of a run.
    """
    known = [grid for grid in grids if grid.suits(count) and grid.shape == shape_for(grid.cells, most)]
    return max(known, default=Grid(round, shape_for(count, most)))


def seeded_order(seed: bytes, peers: Iterable[PeerId]) -> list[PeerId]:
    """Sort peers in a pseudo-random order, which is the same at all peers that use the same seed."""
    return sorted(peers, key=lambda peer: hashlib.sha256(seed + peer.encode()).digest())


def assign_cell(peer: PeerId, peers: Sequence[PeerId], shape: GridShape, seed: bytes) -> Cell:
    """The cell of `peer` if `peers`, which include it, fill the grid in the order of this seed."""
    return cell(seeded_order(seed, peers).index(peer), shape)


def cell(number: int, shape: GridShape) -> Cell:
    """The cell with this number, counted row by row from 0."""
    index: list[int] = []
    for places in reversed(shape):
        number, coordinate = divmod(number, places)
        index.insert(0, coordinate)
    return tuple(index)


def default_cell(peer: PeerId, shape: GridShape, seed: bytes) -> Cell:
    """The first cell of a peer that does not know the others: a pseudo-random one."""
    drawn_bytes = hashlib.sha256(seed + peer.encode()).digest()
    return tuple(drawn_bytes[axis] % places for axis, places in enumerate(shape))


def next_cell(index: Cell, axis: int, position: int, shape: GridShape) -> Cell:
    """The cell after a group along `axis`: the peer's position in the group becomes its coordinate."""
    return (*index[:axis], position % shape[axis], *index[axis + 1 :])


def line(index: Cell, axis: int) -> Cell:
    """What the members of a group along `axis` have in common: all coordinates but that one."""
    return index[:axis] + index[axis + 1 :]
