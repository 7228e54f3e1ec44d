"""What a step of one rank has in common with the others', however the parameters are divided."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from node.ranks.division import Unit
from node.ranks.group import RankGroup
from node.tasks.base import Batch, Step, Task, count_targets
from node.training.task_learner import MicrobatchLoss, StepLearner


class RankSteps(StepLearner):
    """Takes this rank's share of each step's microbatches. Sums over the ranks stand for those over microbatches."""

    _group: RankGroup
    _units: Sequence[Unit]

    def step_at(self, position: int, round_number: int, step: int) -> Step:
        self.position = position
        return self.step(round_number, step)

    def _microbatches(self) -> Iterator[tuple[Batch, int, float]]:
        position = self.position
        self.position += self._recipe.batches
        return microbatches(self._task, self._seed, position, self._units, self._by_token)

    def _mean(self, losses: Sequence[MicrobatchLoss]) -> float:
        values = torch.stack([each.loss for each in losses]).tolist() if losses else []
        weighted = sum(value * each.weight for value, each in zip(values, losses, strict=True))
        loss, weight = self._group.total(weighted, sum(each.weight for each in losses))
        return loss / weight


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
