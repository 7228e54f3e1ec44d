"""The microbatches of one rank in a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from node.ranks.division import Unit
from node.tasks.base import Batch, Task, count_targets


def microbatches(
    task: Task, seed: int, position: int, mine: Sequence[Unit], by_token: bool
) -> Iterator[tuple[Batch, int, float]]:
    """Each with its number of targets, and the weight of its loss in the step's; `position` is the step's first.

    A repeated one has weight 0. So has one without targets, whose loss is not a number.
    """
    found: tuple[int, Batch] | None = None  # the latest batch that was drawn
    for unit in mine:
        at = position + unit.batch
        if found is None or found[0] != at:
            found = at, task.batch(seed, at)
        whole = found[1]
        batch = tuple(torch.tensor_split(each, unit.parts)[unit.part] for each in whole) if unit.parts > 1 else whole
        if by_token:
            count = count_targets(task, batch)
            weight = float(count)
        else:
            count = batch[-1].numel()
            weight = count / whole[-1].numel()
        yield (batch, 0, 0.0) if unit.is_repeated else (batch, count, weight)
