"""The learner that trains a task's module on a flat vector."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from node.runtime.notes import warn
from node.tasks.base import Batch, Step, Task, count_targets, extra, trained
from node.tasks.bystanders import Bystanders
from node.tasks.extra import ExtraTensors
from node.tasks.flat import FlatParameters, flatten_parameters
from node.tasks.recipe import Recipe
from node.training.inner_optimizer import FlatOptimizer, InnerOptimizer, LossScale, Moment, matrices
from protocols.base import Layout, Vector


@dataclass(frozen=True, slots=True, eq=False)
class MicrobatchLoss:
    loss: torch.Tensor  # on the device
    count: int  # of targets
    weight: float


class StepLearner:
    """The steps of a task, with warm-up, cosine decay and gradient clipping, wherever its parameters are.

    If the recipe takes the mean over tokens, the module is in eval mode while it is evaluated, and else in train mode.
    `autocast` is the dtype of a step's forward pass; parameters, optimiser and evaluation are always float32. With
    float16 the loss is scaled.
    """

    trained_layout: Layout  # without extra tensors
    _optimizer: InnerOptimizer

    def __init__(self, task: Task, recipe: Recipe, *, seed: int, device: str, autocast: torch.dtype | None) -> None:
        self.position = 0  # batches drawn so far: with the seed, enough to resume the data
        self._task, self._recipe, self._seed = task, recipe, seed
        self._by_token = recipe.mean == "token"
        if self._by_token:
            task.module.train()  # all of it: parts may be in eval mode while the module itself is not
        self.loss_scale = LossScale(self._by_token) if autocast == torch.float16 else None
        self._precision = torch.autocast(device, autocast, enabled=autocast is not None)

    def step(self, round_number: int, step: int) -> Step:
        """Take one optimiser step over `recipe.batches` batches; skip it if the gradient is not finite."""
        self._clear()
        self._refresh()
        if self._by_token and not self._task.module.training:
            self._task.module.train()
        losses = self._accumulate()
        count = self._gather(losses)
        if step == 0:
            self._tell_news()
        if not count or not self._optimizer.step(round_number, step, count if self._by_token else 1):
            return Step(math.nan, 0)
        self._store_extra()
        return Step(self._mean(losses), count)

    def _clear(self) -> None:
        self._optimizer.clear()

    def _refresh(self) -> None:
        """Let the module compute with the present values of the parameters."""

    def _tell_news(self) -> None:
        """Tell the user what else has changed in the module."""

    def _store_extra(self) -> None:
        """Keep the extra tensors with the parameters."""

    def _accumulate(self) -> list[MicrobatchLoss]:
        losses: list[MicrobatchLoss] = []
        for batch, count, weight in self._microbatches():
            if count:  # the mean over no targets is not a number
                losses.append(MicrobatchLoss(self._differentiate(batch, weight, is_first=not losses), count, weight))
        return losses

    def _microbatches(self) -> Iterator[tuple[Batch, int, float]]:
        """Each with its number of targets, and the weight of its loss in the step's."""
        for _ in range(self._recipe.batches):
            batch = self._task.batch(self._seed, self.position)
            self.position += 1
            count = count_targets(self._task, batch) if self._by_token else batch[-1].numel()
            yield batch, count, count if self._by_token else 1

    def _gather(self, losses: Sequence[MicrobatchLoss]) -> int:
        """The number of targets of the whole step, whose gradient is complete then."""
        return sum(each.count for each in losses)

    def _mean(self, losses: Sequence[MicrobatchLoss]) -> float:
        values = torch.stack([each.loss for each in losses]).tolist()
        weighted = sum(value * each.weight for value, each in zip(values, losses, strict=True))
        return float(weighted / sum(each.weight for each in losses))

    @torch.enable_grad()
    def _differentiate(self, batch: Batch, weight: float, is_first: bool) -> torch.Tensor:
        self._before_loss()
        with self._precision:
            loss = self._task.loss(*batch)
        self._after_loss(is_first)
        share = loss * weight if self._by_token else loss * weight / self._recipe.batches
        if self.loss_scale:
            share = share * self.loss_scale.factor
        share.backward()  # type: ignore[no-untyped-call]
        self._after_backward()
        return loss.detach()

    def _before_loss(self) -> None: ...

    def _after_loss(self, is_first: bool) -> None: ...

    def _after_backward(self) -> None: ...

    def moments(self, make: bool = False) -> dict[str, torch.Tensor]:
        return self._optimizer.moments(make)

    def placed_moments(self, make: bool = False) -> list[Moment]:
        return self._optimizer.placed_moments(make)

    def evaluate(self) -> float:
        with self.evaluating():
            return self._task.evaluate()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """The module computes with the vectors' present values and, in a run whose recipe has `mean`, in eval mode."""
        self._refresh()
        if self._by_token:
            self._task.module.eval()
        yield


class TaskLearner(StepLearner):
    """Trains a task's module on a flat vector. Raises `ValueError` for Muon and a module without hidden matrices."""

    def __init__(
        self,
        task: Task,
        recipe: Recipe,
        *,
        seed: int,
        allocate: Callable[[int], Vector] | None = None,
        resume: bool = False,
        autocast: torch.dtype | None = None,
        gradients: bool = True,
    ) -> None:
        parameters, self._extra_names = trained(task), extra(task)
        on_device = partial(torch.empty, dtype=torch.float32, device=parameters[0][1].device)
        count = sum(parameter.numel() for _, parameter in parameters)
        self._extra = ExtraTensors(task.module, self._extra_names or (), count)
        place = self._extra.allocate(allocate or on_device, resume)
        self._flat = flat = flatten_parameters(parameters, place, resume, gradients)
        flat.views.watch(task.module, getattr(task, "name", ""))
        self._bystanders = None if self._extra_names is None else Bystanders(task.module, parameters)
        self.trained_layout = flat.layout
        self.layout = Layout((flat.layout.fragments[0] + self._extra.fragment,))
        self.vector: Vector = self._extra.vector
        super().__init__(task, recipe, seed=seed, device=self.vector.device.type, autocast=autocast)
        require_matrices(flat.layout, recipe)
        self._optimizer = self._optimizer_of(flat)

    def _optimizer_of(self, flat: FlatParameters) -> InnerOptimizer:
        return FlatOptimizer(
            flat.layout, flat.vector, gradient=flat.gradient, recipe=self._recipe, loss_scale=self.loss_scale
        )

    def _store_extra(self) -> None:
        self._extra.store()

    def _before_loss(self) -> None:
        self._flat.views.before_loss()

    def _after_loss(self, is_first: bool) -> None:
        self._flat.views.after_loss(is_first)

    def _after_backward(self) -> None:
        self._flat.views.after_backward()
        self._flat.collect()

    def _refresh(self) -> None:
        self._flat.refresh()
        self._extra.load()

    def _tell_news(self) -> None:
        if self._bystanders:
            for line in self._bystanders.news((*(self._extra_names or ()), *getattr(self._task, "kept", ()))):
                warn(line)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        with super().evaluating():
            yield
        self._flat.views.restore()


def require_matrices(layout: Layout, recipe: Recipe) -> None:
    if recipe.inner_optimizer == "muon" and not matrices(layout):
        raise ValueError("the inner optimiser muon trains hidden matrices, and this model has none")
