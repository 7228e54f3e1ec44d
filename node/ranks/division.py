"""How the work of a step and the flat vector are divided among ranks. Decisions only: no I/O, no processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class RanksError(ValueError):
    """These ranks cannot train this. The message is one line."""


@dataclass(frozen=True, slots=True)
class Unit:
    """What a rank computes at once: a batch of the step, or some rows of it (part `part` of `parts`)."""

    batch: int
    part: int
    parts: int
    is_repeated: bool = False  # another rank counts it: this rank only takes part in the collectives


def units(batches: int, rows: int | None, rank: int, ranks: int, even: bool = False) -> list[Unit]:
    """The units of one rank in a step. `rows`: of each batch, if they can be computed apart.

    All units are of the same number of batches, or parts of batches, so that the ranks need as long as each other.
    `even`: all ranks have equally many, the last of them repeated if need be. Raises `RanksError` if there are fewer
    than ranks.
    """
    parts = -(-ranks // batches) if rows else 1
    if batches * parts < ranks or (rows and parts > rows):
        each = f" of {rows} rows" if rows else ", which cannot be divided"
        raise RanksError(
            f"{ranks} devices, and a step has {batches} batch{'es' * (batches != 1)}{each}: give fewer devices, or "
            "found a run with a higher recipe.batches"
        )
    total = batches * parts
    mine = [Unit(at // parts, at % parts, parts) for at in range(rank, total, ranks)]
    if even and len(mine) < -(-total // ranks):
        mine.append(Unit(0, 0, parts, is_repeated=True))
    return mine


def cuts(elements: int, ranks: int, borders: Sequence[int] | None = None) -> list[int]:
    """Where the parts of the flat vector begin, and its end: `ranks` + 1 numbers, about equally far apart.

    With `borders` (the ends of tensors that may not be divided), each is one of these.
    """
    ideal = [elements * rank // ranks for rank in range(ranks + 1)]
    if borders is None:
        return ideal
    allowed = sorted({0, elements, *borders})
    return [0, *(min(allowed, key=lambda each, at=at: abs(each - at)) for at in ideal[1:-1]), elements]  # type: ignore[misc]
