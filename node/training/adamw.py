"""AdamW on flat vectors: the optimiser, and the learner that trains a task's module with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from node.tasks.base import Recipe, Task, count_targets, trained
from node.tasks.flat import FlatParameters, flatten_parameters
from node.training.trainer import Step
from protocols.base import Layout, Vector

ADAPTER = "lora_"
"""In the names of an adapter's tensors, which are never decayed."""


class ClippedAdamW:
    """AdamW with gradient clipping and the recipe's learning rate, on a module's flat parameters and gradients."""

    def __init__(self, flat: FlatParameters, recipe: Recipe) -> None:
        self._gradients, self._recipe = flat.gradients, recipe
        # One parameter for each fragment: an optimiser step is a few passes over it, however many tensors it holds.
        parameters = [torch.nn.Parameter(vector) for vector in flat.vectors]
        for parameter, gradient in zip(parameters, flat.gradients, strict=True):
            parameter.grad = gradient
        self._decayed = decayed(flat.layout, flat.vectors) if recipe.decay else []
        self._adamw = torch.optim.AdamW(
            parameters,
            recipe.learning_rate,
            recipe.betas,
            weight_decay=0.0 if recipe.decay else recipe.weight_decay,
            fused=True,
        )

    def clear(self) -> None:
        """Set the gradients to zero. They stay views of their vectors."""
        for gradient in self._gradients:
            gradient.zero_()

    def step(self, round_number: int, step: int, divisor: int = 1) -> bool:
        """Take the step along the gradients, or change nothing and return False if they are not finite.

        Args:
            divisor: what the gradients are divided by first: the number of microbatches or targets whose sum they are.
        """
        if divisor != 1:
            for gradient in self._gradients:
                gradient.div_(divisor)
        norm = math.hypot(*(float(torch.linalg.vector_norm(gradient)) for gradient in self._gradients))
        if not math.isfinite(norm):
            return False
        for gradient in self._gradients:
            gradient.mul_(min(1.0, self._recipe.clip_norm / (norm + 1e-6)))
        rate = self._adamw.param_groups[0]["lr"] = self._rate(round_number, step)
        if self._decayed:
            torch._foreach_mul_(self._decayed, 1 - rate * self._recipe.weight_decay)
        self._adamw.step()
        return True

    def moments(self, make: bool = False) -> dict[str, torch.Tensor]:
        """`exp_avg`, `exp_avg_sq` and `step`; with several fragments, `exp_avg.0` and so on."""
        found: dict[str, torch.Tensor] = {}
        (group,) = self._adamw.param_groups
        for number, parameter in enumerate(group["params"]):
            state = self._adamw.state[parameter]
            if make and not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            suffix = f".{number}" if len(group["params"]) > 1 else ""
            found |= {f"{name}{suffix}": state[name] for name in ("exp_avg", "exp_avg_sq", "step") if name in state}
        return found

    def _rate(self, round_number: int, step: int) -> float:
        """The learning rate at the global step. Surplus steps keep the round's last rate, as the other peers do."""
        steps = self._recipe.inner_steps
        return self._recipe.rate(round_number * steps + min(step, steps - 1))


def decayed(layout: Layout, vectors: tuple[Vector, ...]) -> list[Vector]:
    """The parts of the vectors that `decay = "matrices"` applies to, as few views as possible."""
    views = []
    for vector, fragment in zip(vectors, layout.fragments, strict=True):
        begin = low = 0
        for name, shape in (*fragment, ("", ())):
            if len(shape) < 2 or ADAPTER in name:
                if begin < low:
                    views.append(vector[begin:low])
                begin = low + math.prod(shape)
            low += math.prod(shape)
    return views


class AdamWLearner:
    """Train a task's module by AdamW with warm-up, cosine decay and gradient clipping, on flat vectors.

    In a run whose recipe has `mean`, the module is in eval mode while it is evaluated, and else in train mode.

    Attributes:
        position: number of batches drawn so far. Together with the seed it is enough to resume the data.
    """

    def __init__(
        self,
        task: Task,
        recipe: Recipe,
        seed: int,
        allocate: Callable[[int], Vector] | None = None,
        resume: bool = False,
        autocast: torch.dtype | None = None,
    ) -> None:
        """
        Args:
            seed: of this peer's stream of data, different for each peer.
            allocate, resume: as in `flatten_parameters`.
            autocast: dtype of a step's forward pass, for the operations that torch considers safe; None: float32.
                Parameters, optimiser and evaluation are always float32.
        """
        self._flat = flat = flatten_parameters(trained(task), allocate, resume)
        self.layout, self.vectors = flat.layout, flat.vectors
        self.position = 0
        self._task, self._recipe, self._seed = task, recipe, seed
        self._optimizer = ClippedAdamW(flat, recipe)
        self._precision = torch.autocast(self.vectors[0].device.type, autocast, enabled=autocast is not None)

    def step(self, round_number: int, step: int) -> Step:
        """Take one optimiser step over `recipe.batches` batches; skip it if the gradient is not finite."""
        self._optimizer.clear()
        self._flat.refresh()
        if self._recipe.mean and not self._task.module.training:
            self._task.module.train()
        losses, counts = self._accumulate()
        count = sum(counts)
        if not losses or not self._optimizer.step(round_number, step, count if self._recipe.mean else 1):
            return Step(math.nan, 0)
        total, weights = 0.0, counts if self._recipe.mean else [1] * len(losses)
        for loss, weight in zip(torch.stack(losses).tolist(), weights, strict=True):
            total += loss * weight
        return Step(total / sum(weights), count)

    def _accumulate(self) -> tuple[list[torch.Tensor], list[int]]:
        """Add up the gradients of the step's batches; return the losses, still on the device, and the target counts."""
        losses, counts = [], []
        for _ in range(self._recipe.batches):
            batch = self._task.batch(self._seed, self.position)
            self.position += 1
            count = count_targets(self._task, batch) if self._recipe.mean else batch[-1].numel()
            if self._recipe.mean and not count:
                continue  # the mean over no targets is not a number
            with self._precision:
                loss = self._task.loss(*batch)
            share = loss * count if self._recipe.mean else loss / self._recipe.batches
            share.backward()  # type: ignore[no-untyped-call]
            self._flat.collect()
            losses.append(loss.detach())
            counts.append(count)
        return losses, counts

    def moments(self, make: bool = False) -> dict[str, torch.Tensor]:
        """The optimiser's tensors by name; see `ClippedAdamW.moments`."""
        return self._optimizer.moments(make)

    def evaluate(self) -> float:
        """The task's own evaluation."""
        with self.evaluating():
            return self._task.evaluate()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """The module computes with the vectors' present values and, in a run whose recipe has `mean`, in eval mode."""
        self._flat.refresh()
        if self._recipe.mean:
            self._task.module.eval()
        yield
