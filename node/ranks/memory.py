"""How much memory a rank needs, computed; and which division of the training fits. Decisions only: no I/O."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.func import functional_call

from node.ranks.collectives import BUCKETS
from node.tasks.base import Task, extra, trained
from node.tasks.checkpointing import first_kept, repeated_blocks
from node.tasks.saved_tensors import saved_tensors
from node.tasks.spec import WorkerSpec
from node.training.inner_optimizer import is_hidden_matrix

SHARED_BYTES = 8
"""On the host for each parameter, once for the peer and all ranks: parameters and anchor."""
PEER_BYTES = 14
"""Of the peer's own: momentum, pseudo-gradient and mean, encoded parts."""
_BUCKETS = 3  # of zero2 that are in memory at once, as measured, with the gradients that they are filled from
_GATHERED_BYTES = 24  # of a block's parameter, with zero3: two blocks are gathered, twice; a gradient, and its sum
AUTOMATIC = ("zero1", "zero2", "zero3")
"""What `--shard auto` chooses from, the cheapest first."""


@dataclass(frozen=True, slots=True)
class RankBytes:
    """Bytes for each trained parameter in one rank's own memory, on its device."""

    parameters: float = 0.0
    gradient: float = 0.0
    moments: float = 0.0
    anchor: float = 0.0
    rounded: float = 0.0  # copies in bfloat16, of the parameters and perhaps of the gradient
    host: float = 0.0  # not on the device
    outer: float = 0.0  # more, while the outer parameters are in place: for an evaluation, or to generate text

    @property
    def device(self) -> float:
        return self.parameters + self.gradient + self.moments + self.anchor + self.rounded


def rank_bytes(
    shard: str,
    ranks: int,
    *,
    is_shared: bool = False,
    bfloat16: bool = False,
    offload: str = "",
    moments: float = 8.0,
    whole: float = 0.0,
) -> RankBytes:
    """`shard` is also `one` (a single device) or `tensor`. `is_shared`: on the CPU, in the peer's own vectors.

    `moments` are 8 bytes with AdamW; Muon has 4 of each hidden matrix. `whole` is the share of the parameters that
    tensor parallel does not divide. `bfloat16`: the module computes with rounded copies, as those of Hugging Face do.
    """
    if shard in ("one", "zero1", "zero2"):
        part, aside = 1 / ranks, 4.0
        gradient = 4 * part if shard == "zero2" else 4.0
        kept = 0.0 if is_shared else 4.0
        copies = (2.0 if shard == "zero2" else 4.0) * bfloat16
        on_host = (moments + 4) * part if offload else 0.0
        has = 0.0 if offload else moments * part
        # In the CPU's memory only rank 0 evaluates, for all.
        return RankBytes(kept, gradient, has, kept * part, copies, on_host, aside / ranks if is_shared else aside)
    part = (1 - whole) / ranks + whole
    if offload == "parameters":
        return RankBytes(host=(12 + moments) * part)
    on_host = (moments + 8) * part if offload else 0.0
    return RankBytes(4 * part, 4 * part, 0.0 if offload else moments * part, 4 * part, 0.0, on_host, 4 * part)


@dataclass(frozen=True, slots=True)
class Model:
    """What the need of memory follows from."""

    elements: int  # that are trained
    frozen_bytes: int
    block: int  # elements of the largest block
    moments: float  # bytes for each element
    bfloat16: bool
    activations: int  # bytes of one microbatch; 0: not known


def model_of(
    task: Task,
    inner_optimizer: str,
    checkpointing: bool,
    parts: int,
    on_cpu: bool,
    autocast: torch.dtype | None = None,
) -> Model:
    """`parts` are those that a batch is divided into."""
    parameters = trained(task)
    elements = sum(each.numel() for _, each in parameters)
    own = {id(each) for _, each in parameters}
    frozen = sum(each.numel() * each.element_size() for each in task.module.parameters() if id(each) not in own)
    moments = 8.0
    if inner_optimizer == "muon":
        hidden = sum(each.numel() for name, each in parameters if is_hidden_matrix(name, tuple(each.shape)))
        moments -= 4 * hidden / elements
    blocks = [sum(each.numel() for each in block.parameters()) for block in repeated_blocks(task.module)]
    bfloat16 = any(each.dtype == torch.bfloat16 for _, each in parameters)
    saved = activation_bytes(task, checkpointing, on_cpu, autocast) // parts
    return Model(elements, frozen, max(blocks, default=elements), moments, bfloat16, saved)


def activation_bytes(task: Task, checkpointing: bool, on_cpu: bool, autocast: torch.dtype | None = None) -> int:
    """Of a batch, kept for the backward pass, by a forward pass with fake tensors; 0: not known.

    With checkpointing, one block's are there while they are computed again. Some tasks count their own: a user's could
    keep a fake tensor.
    """
    estimate: Any = getattr(task, "activation_bytes", None)
    if estimate:
        try:
            return int(estimate(checkpointing, on_cpu))
        except ValueError:  # the model's code does not compute with fake tensors
            return 0
    sizes, module, batch = list[int](), _Loss(task), task.batch(0, 0)
    with FakeTensorMode() as mode:
        # Not the real tensors, which torch would keep.
        fakes = {
            name: torch.empty(each.shape, dtype=each.dtype, device=each.device, requires_grad=each.requires_grad)
            for name, each in (*module.named_parameters(), *module.named_buffers())
        }
        kind = next(iter(fakes.values())).device.type
        precision = torch.autocast(kind, autocast, enabled=autocast is not None)
        with first_kept(repeated_blocks(task.module)), saved_tensors(fakes.values(), sizes.append), precision:
            functional_call(module, fakes, tuple(mode.from_tensor(each) for each in batch))
    return sum(sizes)


class _Loss(nn.Module):
    """A task's loss as a module, whose parameters can be replaced."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.module, self._loss = task.module, task.loss

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        return self._loss(*batch)


def need_bytes(model: Model, shard: str, ranks: int, *, is_shared: bool, offload: str, is_fresh: bool) -> int:
    """Of one rank on its device. On the CPU also its part of the vectors that all share, if they are to be made."""
    each = rank_bytes(
        shard, ranks, is_shared=is_shared, bfloat16=model.bfloat16, offload=offload, moments=model.moments
    )
    if shard == "zero3":
        passing = _GATHERED_BYTES * model.block + model.frozen_bytes // ranks
    else:
        buckets = 4 * _BUCKETS * min(BUCKETS[-1], model.elements) if shard == "zero2" else 0
        passing = buckets + model.frozen_bytes
    state = each.device + (each.host if is_shared else 0) + (SHARED_BYTES / ranks if is_shared and is_fresh else 0)
    return math.ceil(state * model.elements) + passing + max(model.activations, math.ceil(each.outer * model.elements))


@dataclass(frozen=True, slots=True)
class Choice:
    shard: str
    fits: bool
    line: str


def choose(needs: Mapping[str, int], free: int, advice: str = "") -> Choice:
    """The first that fits, else the one that needs least. Bytes on each device; `advice` is for when none fits."""
    shard = next((each for each, need in needs.items() if need <= free), min(needs, key=lambda each: needs[each]))
    fits = needs[shard] <= free
    line = f"{shard} needs about {_size(needs[shard])} on each device"
    line += f", {_size(free)} are free" if fits else f", but only {_size(free)} are free{advice and f': {advice}'}"
    others = [f"{each} would need {_size(need)}" for each, need in needs.items() if each != shard and need > free]
    return Choice(shard, fits, "; ".join([line, *others]))


def choice(
    task: Task,
    spec: WorkerSpec,
    free: int,
    *,
    is_shared: bool,
    is_fresh: bool,
    autocast: torch.dtype | None = None,
) -> Choice:
    """How to divide the training of a task, with `free` bytes for each rank; `is_fresh`: nothing is shared yet."""
    groups = spec.ranks // spec.tensor_parallel  # that share the microbatches of a step
    parts = -(-groups // spec.recipe.batches) if getattr(task, "independent_rows", None) else 1
    model = model_of(task, spec.recipe.inner_optimizer, spec.checkpointing, parts, is_shared, autocast)
    shards: tuple[str, ...] = (spec.shard,) if spec.shard != "auto" else AUTOMATIC
    if spec.tensor_parallel > 1:
        shards = ("zero3",)
    elif spec.shard == "auto" and (extra(task) or any(not each.dim() for _, each in trained(task))):
        shards = AUTOMATIC[:2]  # the third would refuse this task
    needs = {
        each: need_bytes(model, each, spec.ranks, is_shared=is_shared, offload=spec.offload, is_fresh=is_fresh)
        for each in shards
    }
    options = {"--checkpointing": not spec.checkpointing, "--offload optimizer": not (spec.offload or is_shared)}
    advice = " or ".join([each for each, helps in options.items() if helps])
    return choose(needs, free, f"try {advice}" if advice else "take more devices, or a smaller model")


def _size(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
