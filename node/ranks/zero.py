"""ZeRO on the flat vector, for any module: each rank has the whole module, and trains a part of its vector.

    zero1     the optimiser's moments are divided
    zero2     so are the gradients: a bucket's are freed as soon as their sum has reached the ranks that train them

On the CPU all ranks' parameters are one copy, in the memory that they share with the peer.

Source: Rajbhandari et al. 2020 (ZeRO), sections 5.1 and 5.2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from node.ranks.collectives import GradientSum, fastest
from node.ranks.division import cuts, units
from node.ranks.group import RankGroup
from node.ranks.steps import KeptTensors, RankSteps, take_from_first
from node.tasks.base import Task
from node.tasks.extra import find
from node.tasks.flat import FlatParameters, View
from node.tasks.name import TaskError
from node.tasks.recipe import Recipe
from node.tasks.user_task import OwnTask
from node.training.inner_optimizer import FlatOptimizer, InnerOptimizer, matrices
from node.training.task_learner import MicrobatchLoss, TaskLearner
from node.training.trainer import distance
from protocols.base import Layout, Vector


class ZeroLearner(RankSteps, TaskLearner):
    """One rank's learner. `keeps_gradients`: zero1, whose gradients are as long as the parameters on each rank.

    `is_shared`: the parameters are the vector that is shared with the peer, and not on a device of their own.
    """

    needs_all = False  # whether all ranks have to evaluate together
    as_first = staticmethod(nullcontext)

    def __init__(
        self,
        task: Task,
        recipe: Recipe,
        *,
        seed: int,
        group: RankGroup,
        keeps_gradients: bool,
        offload: bool,
        resume: bool,
        autocast: torch.dtype | None = None,
    ) -> None:
        self._group, self._keeps_gradients, self._offload = group, keeps_gradients, offload
        rows = getattr(task, "independent_rows", None)
        self._units = units(recipe.batches, rows, group.rank, group.size, even=not keeps_gradients)
        # not with cpu:0, which stands for a GPU in tests
        self.is_shared = group.device == torch.device("cpu") and group.far is None
        super().__init__(
            task,
            recipe,
            seed=seed,
            allocate=group.allocate if self.is_shared else None,
            resume=resume and self.is_shared,
            autocast=autocast,
            gradients=keeps_gradients,
        )
        self.kept = KeptTensors(task)
        self._is_reduced = autocast == torch.bfloat16 or self._flat.compute is not None
        if not self.is_shared and group.founds:
            group.shared(len(self.vector)).local.copy_(self.vector)

    def begin(self) -> None:
        """The ranks start from the same tensors, those of rank 0 that are in no vector included."""
        module = self._task.module
        others = [*module.buffers()]
        if isinstance(self._task, OwnTask):  # the frozen parameters of a model are pinned by their hash
            others += [each for each in module.parameters() if not each.requires_grad]
        for tensor in others:
            take_from_first(tensor)
        torch.manual_seed(self._seed + self._group.rank)  # of dropout
        self._add = fastest(self._group, self._cuts, self._is_reduced)
        if not self._keeps_gradients:
            self._buckets = GradientBuckets([*self._flat.views], self._add, self._group.rank, self._gradient)

    # -- a step ------------------------------------------------------------------------------------------------------

    def _optimizer_of(self, flat: FlatParameters) -> InnerOptimizer:
        group, recipe = self._group, self._recipe
        borders = [end for matrix in matrices(flat.layout) for end in matrix[:2]]
        self._cuts = cuts(len(flat.vector), group.size, borders if recipe.inner_optimizer == "muon" else None)
        self._low, self._high = self._cuts[group.rank : group.rank + 2]
        if self._keeps_gradients:
            gradient = flat.gradient[self._low : self._high]
        else:
            gradient = torch.zeros(self._high - self._low, dtype=torch.float32, device=flat.vector.device)
        self._gradient = gradient
        part = flat.vector[self._low : self._high]
        more: dict[str, Any] = {"gradient": gradient, "recipe": recipe, "low": self._low, "loss_scale": self.loss_scale}
        if self._offload and not self.is_shared:
            host = group.allocate(len(self.vector))[self._low : self._high]
            return _HostOptimizer(flat.layout, host, group, part=part, **more)
        return _PartOptimizer(flat.layout, part, group, **more)

    def _clear(self) -> None:
        self._optimizer.clear()
        self._flat.gradient.zero_()

    def _accumulate(self) -> list[MicrobatchLoss]:
        if self._keeps_gradients:
            return super()._accumulate()
        losses: list[MicrobatchLoss] = []
        for batch, count, weight in self._microbatches():
            if count:
                losses.append(MicrobatchLoss(self._differentiate(batch, weight, is_first=not losses), count, weight))
            self._buckets.finish()  # also without a gradient: each rank takes part in each sum
        return losses

    def _gather(self, losses: Sequence[MicrobatchLoss]) -> int:
        (count,) = self._group.total(sum(each.count for each in losses))
        if self._keeps_gradients:
            self._add(self._flat.gradient, 0)
        return round(count)

    def _mean(self, losses: Sequence[MicrobatchLoss]) -> float:
        """After the optimiser's step: no rank returns before all parts of the vector are written."""
        mean = super()._mean(losses)
        if not self.is_shared:
            for owner in range(self._group.size):
                dist.broadcast(self._flat.vector[self._cuts[owner] : self._cuts[owner + 1]], owner)
        return mean

    def _store_extra(self) -> None:
        """Every rank has its own running statistics: their mean counts."""
        for name in self._extra_names or ():
            tensor = find(self._task.module, name)
            assert tensor is not None
            mean = tensor.detach().double() / self._group.size
            dist.all_reduce(mean)
            tensor.detach().copy_(mean)
        if self._group.rank == 0 or not self.is_shared:
            self._extra.store()

    def _after_loss(self, is_first: bool) -> None:
        super()._after_loss(is_first)
        if not self._keeps_gradients:
            self._buckets.begin()

    # -- the vectors of a device, apart from the shared ones -----------------------------------------------------------

    def take(self) -> None:
        """The shared vectors were written."""
        if not self.is_shared:
            shared = self._group.shared(len(self.vector))
            if self._group.far:
                self._group.far.spread(shared)
            self.vector.copy_(shared.local)
            self._anchor = shared.anchor[self._part].to(self.vector.device, copy=True)

    def publish(self) -> None:
        """Write this rank's part into the shared vector."""
        self.kept.share()
        if not self.is_shared:
            with self._group.publishing(len(self.vector)) as local:
                local[self._part].copy_(self.vector[self._part])

    def distance(self, start: int, stop: int) -> float:
        """L2 norm of these elements of the pseudo-gradient."""
        own = self._part
        low = min(max(start, own.start), own.stop)
        high = max(low, min(stop, own.stop))
        anchor = self._anchor[low - own.start : high - own.start]
        return math.sqrt(self._group.total(distance(anchor, self.vector[low:high]) ** 2)[0])

    def enter_outer(self) -> None:
        self._aside = self.vector.clone()
        self.vector.copy_(self._group.shared(len(self.vector)).anchor)

    def leave_outer(self) -> None:
        self.vector.copy_(self._aside)
        del self._aside

    @property
    def _part(self) -> slice:
        """This rank's part of the whole vector. The last one's includes the extra tensors."""
        return slice(self._low, self._high if self._group.rank < self._group.size - 1 else len(self.vector))


class _PartOptimizer(FlatOptimizer):
    """Of one rank's part of the vector. The norm is the whole gradient's."""

    def __init__(self, layout: Layout, vector: Vector, group: RankGroup, **more: Any) -> None:
        super().__init__(layout, vector, **more)
        self._group = group

    def norm(self) -> float:
        return math.sqrt(self._group.total(super().norm() ** 2)[0])


class _HostOptimizer(_PartOptimizer):
    """The moments are on the host, and the step is the host's: on the shared vector, which is copied to the device.

    Source: Ren et al. 2021 (ZeRO-Offload), section 4.
    """

    def __init__(
        self, layout: Layout, vector: Vector, group: RankGroup, *, part: Vector, gradient: Vector, **more: Any
    ) -> None:
        super().__init__(layout, vector, group, gradient=torch.empty_like(vector), **more)
        self._vector, self._part, self._device_gradient = vector, part, gradient

    def clear(self) -> None:
        self._device_gradient.zero_()

    def step(self, round_number: int, step: int, divisor: int = 1) -> bool:
        self._gradients[0].copy_(self._device_gradient)
        taken = super().step(round_number, step, divisor)
        if taken:
            self._part.copy_(self._vector)
        return taken


_IN_PARTS = (
    "gets its gradient in several parts in one backward pass (reentrant checkpointing?), the later ones after zero2 "
    "has summed it over the ranks: --shard zero1"
)


class GradientBuckets:
    """Sums gradients during the backward pass, from the end of the vector on, and frees them.

    All ranks sum the buckets in the same order, whatever the order of their gradients.
    """

    def __init__(self, views: Sequence[View], add: GradientSum, rank: int, into: Vector) -> None:
        self._add, self._into = add, into
        self._own = add.bounds[rank], add.bounds[rank + 1]
        self._buckets = [*_buckets(views, add.bucket)]
        self._of = {id(view): number for number, bucket in enumerate(self._buckets) for view, _ in bucket}
        self._buffers: dict[int, Vector] = {}
        self._missing = [len(bucket) for bucket in self._buckets]
        self._next, self._is_open = 0, False
        for number, bucket in enumerate(self._buckets):
            for view, at in bucket:
                view.parameter.register_post_accumulate_grad_hook(self._hook(number, view, at))  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Take the gradients of the next backward pass. Those of others, as loss() may have, do not count."""
        self._is_open = True

    def finish(self) -> None:
        """After that backward pass: parameters without a gradient count as zero."""
        self._is_open = False
        while self._next < len(self._buckets):
            self._sum(self._next)
        self._next, self._missing = 0, [len(bucket) for bucket in self._buckets]

    def _hook(self, number: int, view: View, at: int) -> Any:
        def take(parameter: torch.Tensor) -> None:
            if not self._is_open:
                return
            if number < self._next:
                raise TaskError(f"parameter {view.name} {_IN_PARTS}")
            gradient, parameter.grad = parameter.grad, None
            assert gradient is not None
            low = at - self._buckets[number][0][1]
            dense = gradient.to_dense() if gradient.is_sparse else gradient
            self._buffer(number)[low : low + dense.numel()].view(dense.shape).add_(dense)
            self._missing[number] -= 1
            while self._next < len(self._buckets) and self._missing[self._next] <= 0:
                self._sum(self._next)

        return take

    def _buffer(self, number: int) -> Vector:
        if number not in self._buffers:
            bucket = self._buckets[number]
            size = bucket[-1][1] + bucket[-1][0].value.numel() - bucket[0][1]
            self._buffers[number] = torch.zeros(size, dtype=torch.float32, device=self._into.device)
        return self._buffers[number]

    def _sum(self, number: int) -> None:
        self._next = number + 1
        low, part = self._buckets[number][0][1], self._buffer(number)
        self._add(part, low)
        begin, end = max(self._own[0], low), min(self._own[1], low + len(part))
        if begin < end:
            self._into[begin - self._own[0] : end - self._own[0]].add_(part[begin - low : end - low])
        del self._buffers[number]


def _buckets(views: Iterable[View], elements: int) -> Iterator[list[tuple[View, int]]]:
    """Neighbours, each with its place in the vector, from the end on."""
    placed, at = list[tuple[View, int]](), 0
    for view in views:
        placed.append((view, at))
        at += view.value.numel()
    bucket, size = list[tuple[View, int]](), 0
    for view, low in reversed(placed):
        bucket.insert(0, (view, low))
        size += view.value.numel()
        if size >= elements:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket
