"""Parameters that are divided among ranks: FSDP2 (`zero3`), tensor parallel, or both.

Each rank has a part of each parameter as a DTensor, and trains it. A part's place in the flat vector follows from its
DTensor, so the vector and the files know nothing of the ranks. Ranks that are `tensor_parallel` neighbours compute the
same microbatches together; the groups of these share a step's microbatches.

Sources: Zhao et al. 2023 (FSDP); Shoeybi et al. 2019 (Megatron-LM), section 3; Rajbhandari et al. 2020, section 5.3.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from node.ranks.division import RanksError, Unit, units
from node.ranks.group import RankGroup
from node.ranks.steps import KeptTensors, RankSteps, microbatches, take_from_first
from node.tasks.base import Batch, Task, extra, trained
from node.tasks.checkpointing import repeated_blocks
from node.tasks.flat import layout_of
from node.tasks.recipe import Recipe
from node.training.inner_optimizer import (
    InnerOptimizer,
    LossScale,
    Trained,
    adamw_of,
    is_decayed,
    is_hidden_matrix,
    own_decay,
    spans,
)
from node.training.muon import Muon, fast_dtype, orthogonalized
from node.training.task_learner import MicrobatchLoss, require_matrices
from node.training.trainer import distance
from protocols.base import Layout, Vector

DATA, TENSOR = "data", "tensor"
SUMMED = "replicated_with_grad_allreduce"
"""In a plan: each rank has the whole parameter, and only a part of its gradient."""
_STYLES: dict[str, type[ParallelStyle]] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}


@dataclass(slots=True, eq=False)
class Piece:
    """This rank's part of one parameter: where it is in the flat vector, and who else has it."""

    name: str
    shape: tuple[int, ...]  # of the whole parameter
    low: int  # of its first element in the vector
    parameter: nn.Parameter
    value: torch.Tensor  # local, shares its memory with the parameter
    window: tuple[slice, ...]  # in the whole parameter
    copies: int  # ranks that have the same part
    is_first: bool  # the one of these that writes it
    is_summed: bool  # over the tensor-parallel ranks

    def of(self, vector: Vector) -> torch.Tensor:
        return vector[self.low : self.low + math.prod(self.shape)].view(self.shape)[self.window]

    def gradient(self) -> torch.Tensor:
        found = self.parameter.grad
        if found is None:
            return torch.zeros_like(self.value)
        return found.to_local() if isinstance(found, DTensor) else found

    def places(self) -> list[int]:
        """Offsets in the whole parameter of this part's rows; a single one if it is in one piece."""
        if all(window == slice(0, size) for window, size in zip(self.window[1:], self.shape[1:], strict=True)):
            return [self.window[0].start * math.prod(self.shape[1:])] if self.shape else [0]
        strides = [math.prod(self.shape[at + 1 :]) for at in range(len(self.shape))]
        outer = product(*(range(window.start, window.stop) for window in self.window[:-1]))
        last = self.window[-1].start
        return [sum(at * stride for at, stride in zip(each, strides, strict=False)) + last for each in outer]


class ShardedLearner(RankSteps):
    """One rank's learner of a module whose parameters are divided. All ranks evaluate together."""

    needs_all, is_shared = True, False

    def __init__(
        self,
        task: Task,
        recipe: Recipe,
        *,
        seed: int,
        group: RankGroup,
        mesh: DeviceMesh,
        offload: str,
        resume: bool,
        autocast: torch.dtype | None = None,
    ) -> None:
        self._group, self._mesh = group, mesh
        parameters = trained(task)
        if names := extra(task):
            raise RanksError(
                f"training changes {names[0]}, which zero3 and tensor parallel cannot average: --shard zero2"
            )
        if scalars := [name for name, parameter in parameters if not parameter.dim()]:
            raise RanksError(f"parameter {scalars[0]} has no dimension to divide: --shard zero2")
        self._units = units(
            recipe.batches,
            getattr(task, "independent_rows", None),
            mesh[DATA].get_local_rank(),
            mesh[DATA].size(),
            even=True,
        )
        self.layout = self.trained_layout = layout_of(parameters)
        require_matrices(self.layout, recipe)
        shared = group.shared(sum(self.layout.sizes()))
        if group.founds:
            _write(parameters, shared.local)
        self.kept = KeptTensors(task)
        owners = [*_owners(task.module, parameters)]
        computes = _keep_in_float32(parameters)
        summed = divide(task, mesh, computes, offload == "parameters")
        if hasattr(task, "device"):
            task.device = group.device  # where its batches go
        if mesh[DATA].size() == 1:
            autocast = autocast or computes
        super().__init__(task, recipe, seed=seed, device=group.device.type, autocast=autocast)
        now = [part._parameters[key] for part, key in owners]
        self._pieces = [*_pieces(self.layout, now, mesh, {id(part) for part in summed}, owners)]
        self._optimizer = ShardOptimizer(
            self._pieces,
            self.layout,
            recipe=recipe,
            group=group,
            mesh=mesh,
            loss_scale=self.loss_scale,
            offload=offload == "optimizer",
        )

    def begin(self) -> None:
        for buffer in self._task.module.buffers():
            take_from_first(buffer)
        torch.manual_seed(self._seed + self._mesh[DATA].get_local_rank())  # of dropout

    # -- a step ------------------------------------------------------------------------------------------------------

    def _clear(self) -> None:
        for piece in self._pieces:
            piece.parameter.grad = None

    def _accumulate(self) -> list[MicrobatchLoss]:
        """Each rank takes part in each collective. So for a microbatch that does not count, another is repeated with
        weight 0: its own loss may not be a number, and no weight makes zero of that.
        """
        losses, ranks = list[MicrobatchLoss](), self._mesh[DATA].size()
        position, missing = self.position, 0
        counted: Batch | None = None
        for batch, count, weight in self._microbatches():
            if not count:
                missing += 1
                continue
            loss = self._differentiate(batch, weight * ranks, is_first=not losses)  # FSDP takes the mean over ranks
            losses.append(MicrobatchLoss(loss, count, weight))
            counted = batch
        for _ in range(missing):
            counted = counted or self._counted(position)
            self._differentiate(counted, 0.0, is_first=not losses)
        return losses

    def _counted(self, position: int) -> Batch:
        """A microbatch of the step that has targets, of any rank; without one the step does not count."""
        parts = self._units[0].parts
        every = [Unit(batch, part, parts) for batch in range(self._recipe.batches) for part in range(parts)]
        drawn = microbatches(self._task, self._seed, position, every, self._by_token)
        return next((batch for batch, count, _ in drawn if count), None) or self._task.batch(self._seed, position)

    def _gather(self, losses: Sequence[MicrobatchLoss]) -> int:
        (count,) = self._group.total(sum(each.count for each in losses))
        return round(count / self._mesh[TENSOR].size())

    @contextmanager
    def as_first(self) -> Iterator[None]:
        """All ranks continue a text by what the first one's model says: another's, which rounds otherwise, might end it
        earlier, while the others wait for it.
        """

        def share(module: nn.Module, given: Any, found: Any) -> None:
            take_from_first((found if isinstance(found, torch.Tensor) else found.logits)[:, -1])

        hook = self._task.module.register_forward_hook(share)
        try:
            yield
        finally:
            hook.remove()

    # -- the shared vectors --------------------------------------------------------------------------------------------

    def take(self) -> None:
        """The shared vectors were written."""
        shared = self._group.shared(sum(self.layout.sizes()))
        if self._group.far:
            self._group.far.spread(shared)
        self._set([piece.of(shared.local) for piece in self._pieces])
        self._anchor = [piece.of(shared.anchor).to(piece.value.device, copy=True) for piece in self._pieces]

    def publish(self) -> None:
        """Write this rank's parts into the shared vector."""
        self.kept.share()
        with self._group.publishing(sum(self.layout.sizes())) as local:
            for piece in self._pieces:
                if piece.is_first:
                    piece.of(local).copy_(piece.value)

    def distance(self, start: int, stop: int) -> float:
        """L2 norm of these elements of the pseudo-gradient. A parameter that is cut counts by its share of elements."""
        squares = 0.0
        for piece, anchor in zip(self._pieces, self._anchor, strict=True):
            size = max(1, math.prod(piece.shape))
            share = max(0, min(stop, piece.low + size) - max(start, piece.low)) / size
            if piece.is_first and share:
                squares += share * distance(anchor.reshape(-1), piece.value.reshape(-1)) ** 2
        return math.sqrt(self._group.total(squares)[0])

    def enter_outer(self) -> None:
        self._aside = [piece.value.clone() for piece in self._pieces]
        self._set(self._anchor)

    def leave_outer(self) -> None:
        self._set(self._aside)
        del self._aside

    def _set(self, values: Sequence[torch.Tensor]) -> None:
        """After a forward pass without a backward pass, FSDP2 keeps the root's parameters gathered, and computes with
        these until it is told that they are old.
        """
        for part in self._task.module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()
        for piece, value in zip(self._pieces, values, strict=True):
            piece.value.copy_(value)


logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # it warns of what Muon needs


def make_mesh(group: RankGroup, tensor_parallel: int) -> DeviceMesh:
    """All ranks call it together."""
    grid, own = torch.arange(group.size).view(-1, tensor_parallel), list[Any]()
    for lines in (grid.T.tolist(), grid.tolist()):
        made = [(line, group.new_group(line)) for line in lines]
        own += [each for line, each in made if group.rank in line]
    return DeviceMesh.from_group(own, group.device.type, grid, mesh_dim_names=(DATA, TENSOR))


def _keep_in_float32(parameters: Sequence[tuple[str, nn.Parameter]]) -> torch.dtype | None:
    """What is trained is kept in float32. Returns the dtype in which a step computes with it, if that is another."""
    found = None
    for _, parameter in parameters:
        if parameter.dtype != torch.float32:
            found, parameter.data = parameter.dtype, parameter.data.float()
    return found


def divide(task: Task, mesh: DeviceMesh, computes: torch.dtype | None, offload: bool) -> list[nn.Module]:
    """Divide the module's parameters. Returns the modules whose gradients are to be summed over the tensor ranks."""
    module, summed = task.module, list[nn.Module]()
    if mesh[TENSOR].size() > 1:
        plan, summed = plan_of(task, mesh[TENSOR].size())
        parallelize_module(module, mesh[TENSOR], plan, src_data_rank=None)
    if mesh[DATA].size() == 1:
        module.to(mesh.device_type)
        return summed
    policies: dict[str, Any] = {
        "mesh": mesh[DATA],
        "mp_policy": MixedPrecisionPolicy(param_dtype=computes, reduce_dtype=torch.float32 if computes else None),
        "offload_policy": CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if offload else OffloadPolicy(),
    }
    for block in repeated_blocks(module):
        fully_shard(block, **policies)
    fully_shard(module, **policies)
    return summed


def plan_of(task: Task, ranks: int) -> tuple[dict[str, ParallelStyle], list[nn.Module]]:
    """What `parallelize_module` takes, and the modules whose gradients are to be summed."""
    named = getattr(task, "tensor_parallel_plan", None)
    if named is None:
        raise RanksError(
            "this task has no plan for tensor parallel: leave out --tensor-parallel, and give --shard zero3"
        )
    wanted: Mapping[str, str] = named(ranks)
    plan: dict[str, ParallelStyle] = {}
    summed: list[nn.Module] = []
    for pattern, style in wanted.items():
        matching = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
        for name, part in task.module.named_modules():
            if not matching.fullmatch(name):
                continue
            if style == SUMMED:
                summed.append(part)
            elif style in _STYLES:
                plan[name] = _STYLES[style]()
            else:
                raise RanksError(
                    f"the model's plan for tensor parallel has {style}, which is not supported: --shard zero3"
                )
    return plan, summed


def _write(parameters: Sequence[tuple[str, nn.Parameter]], vector: Vector) -> None:
    low = 0
    for _, parameter in parameters:
        high = low + parameter.numel()
        vector[low:high].view(parameter.shape).copy_(parameter.detach())
        low = high


def _owners(module: nn.Module, parameters: Sequence[tuple[str, nn.Parameter]]) -> Iterator[tuple[nn.Module, str]]:
    """A module that holds each parameter, and its name there: FSDP replaces parameters, and leaves the modules."""
    holding = {
        id(parameter): (part, key)
        for part in module.modules()
        for key, parameter in part._parameters.items()
        if parameter is not None
    }
    for name, parameter in parameters:
        if id(parameter) not in holding:
            raise RanksError(f"parameter {name} is not in the task's module, so it cannot be divided: --shard zero2")
        yield holding[id(parameter)]


def _pieces(
    layout: Layout,
    parameters: Sequence[Any],
    mesh: DeviceMesh,
    summed: set[int],
    owners: Sequence[tuple[nn.Module, str]],
) -> Iterator[Piece]:
    low, size = 0, mesh.size()
    for (name, shape), parameter, (part, _) in zip(layout.fragments[0], parameters, owners, strict=True):
        value, window, divided = parameter.detach(), tuple(slice(0, each) for each in shape), dict[str, int]()
        if isinstance(parameter, DTensor):
            value = parameter.to_local().detach()
            found, offset = compute_local_shape_and_global_offset(
                parameter.shape, parameter.device_mesh, parameter.placements
            )
            window = tuple(slice(at, at + each) for at, each in zip(offset, found, strict=True))
            names = parameter.device_mesh.mesh_dim_names or ()
            # a strided shard is not a `Shard`, and is divided all the same
            placed = zip(names, parameter.placements, strict=True)
            divided = {dim: mesh[dim].size() for dim, placement in placed if not placement.is_replicate()}
        whole = [dim for dim in (DATA, TENSOR) if dim not in divided]
        yield Piece(
            name,
            shape,
            low,
            parameter,
            value,
            window,
            copies=size // math.prod(divided.values()),
            is_first=all(mesh[dim].get_local_rank() == 0 for dim in whole),
            is_summed=id(part) in summed,
        )
        low += math.prod(shape)


class ShardOptimizer(InnerOptimizer):
    """Of one rank's pieces."""

    def __init__(
        self,
        pieces: Sequence[Piece],
        layout: Layout,
        *,
        recipe: Recipe,
        group: RankGroup,
        mesh: DeviceMesh,
        loss_scale: LossScale | None,
        offload: bool,
    ) -> None:
        self._pieces, self._group, self._tensor_group = pieces, group, mesh[TENSOR].get_group()
        self._on_host = offload and group.device != torch.device("cpu")
        device = torch.device("cpu") if self._on_host else None
        self._parameters = [
            nn.Parameter(piece.value.to(device, copy=True) if device else piece.value) for piece in pieces
        ]
        muon = recipe.inner_optimizer == "muon"
        hidden = [muon and is_hidden_matrix(piece.name, piece.shape) for piece in pieces]
        held = zip(pieces, self._parameters, strict=True)
        decayed = [each.data for p, each in held if recipe.decay == "matrices" and is_decayed(p.name, p.shape)]
        super().__init__(
            recipe, [*self._trained_of(layout, hidden, recipe)], gradients=[], decayed=decayed, loss_scale=loss_scale
        )

    def _trained_of(self, layout: Layout, hidden: Sequence[bool], recipe: Recipe) -> Iterator[Trained]:
        matrices = [at for at, each in enumerate(hidden) if each]
        if matrices:
            muon = ShardMuon([(self._parameters[at], self._pieces[at]) for at in matrices], recipe)
            for number, at in enumerate(matrices):
                piece = self._pieces[at]
                yield Trained(muon, self._parameters[at], number, len(matrices), piece.shape, piece.places())
        runs = spans(layout, lambda *tensor: not (recipe.inner_optimizer == "muon" and is_hidden_matrix(*tensor)))
        others = [at for at, each in enumerate(hidden) if not each]
        if others:
            adamw = adamw_of([self._parameters[at] for at in others], recipe)
            for at in others:
                piece = self._pieces[at]
                number = next(number for number, (low, high) in enumerate(runs) if low <= piece.low < high)
                begin, end = runs[number]
                places = [piece.low - begin + each for each in piece.places()]
                yield Trained(adamw, self._parameters[at], number, len(runs), (end - begin,), places)

    def step(self, round_number: int, step: int, divisor: int = 1) -> bool:
        self._gradients.clear()
        for parameter, piece in zip(self._parameters, self._pieces, strict=True):
            gradient = piece.gradient()
            if piece.is_summed:
                dist.all_reduce(gradient, group=self._tensor_group)
            parameter.grad = gradient.cpu() if self._on_host else gradient
            self._gradients.append(parameter.grad)
            if self._on_host:
                parameter.data.copy_(piece.value)  # the peer may have written it
        taken = super().step(round_number, step, divisor)
        if self._on_host and taken:
            for parameter, piece in zip(self._parameters, self._pieces, strict=True):
                piece.value.copy_(parameter.data)
        return taken

    def norm(self) -> float:
        norms = torch.stack(torch._foreach_norm(self._gradients)).double().square()
        copies = torch.tensor([piece.copies for piece in self._pieces], device=norms.device)
        return math.sqrt(self._group.total(float((norms / copies).sum()))[0])


class ShardMuon(Muon):
    """Muon on parts of matrices: the momentum is divided, and each matrix is whole for its own iterations only."""

    def __init__(self, parts: Sequence[tuple[nn.Parameter, Piece]], recipe: Recipe) -> None:
        super().__init__([parameter for parameter, _ in parts], recipe.learning_rate, own_decay(recipe))
        self._piece = {id(parameter): piece for parameter, piece in parts}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        for parameter in group["params"]:
            piece, direction = self._piece[id(parameter)], self._direction(parameter)
            whole = _whole(piece, direction)
            found = orthogonalized(whole[None], fast_dtype(whole.device))[0][piece.window]
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            # which is on the host if that takes the step, while a matrix is put together on the device
            parameter.add_(found.to(parameter.device), alpha=-self.length(group["lr"], whole.shape))


def _whole(piece: Piece, part: torch.Tensor) -> torch.Tensor:
    if not isinstance(piece.parameter, DTensor):
        return part
    like = piece.parameter
    divided = DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return divided.full_tensor()
