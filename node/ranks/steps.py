"""What a step of one rank has in common with the others', however the parameters are divided."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from node.ranks.division import Unit
from node.ranks.group import RankGroup
from node.tasks.base import Batch, Step, Task, count_targets
from node.tasks.extra import find, overwrite
from node.tasks.user_task import OwnTask
from node.training.task_learner import MicrobatchLoss, StepLearner


class RankSteps(StepLearner):
    """Takes this rank's share of each step's microbatches. Sums over the ranks stand for those over microbatches."""

    _group: RankGroup
    _units: Sequence[Unit]
    kept: KeptTensors

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


class KeptTensors:
    """What training changes in a user's module, and no vector holds: of the ranks, the first one's counts."""

    def __init__(self, task: Task) -> None:
        names = {*task.kept, *task.private} if isinstance(task, OwnTask) else ()
        self._module = task.module
        self._like = {name: self._form(name) for name in sorted(names)}

    @property
    def names(self) -> list[str]:
        return [*self._like]

    def share(self) -> None:
        """All ranks call it together. A tensor that has another form by now, on any rank, is left alone."""
        if not self._like:
            return
        same = torch.tensor([self._form(name) == form for name, form in self._like.items()], dtype=torch.uint8)
        dist.all_reduce(same, dist.ReduceOp.MIN)
        for name, is_same in zip(self._like, same.tolist(), strict=True):
            if is_same and (tensor := find(self._module, name)) is not None:
                take_from_first(tensor)

    def _form(self, name: str) -> object:
        tensor = find(self._module, name)
        return None if tensor is None else (type(tensor), tensor.shape, tensor.dtype)


def take_from_first(tensor: torch.Tensor) -> None:
    """All ranks call it together. Bytes travel, because the backends do not know every dtype."""
    tensor = tensor.detach()
    held = tensor.contiguous()
    dist.broadcast(held.view(-1).view(torch.uint8), 0)
    if held.data_ptr() != tensor.data_ptr():
        overwrite(tensor, held)


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
