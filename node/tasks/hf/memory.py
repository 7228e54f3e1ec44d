"""Estimates how much memory training needs, before it begins. Only training itself shows the truth.

What a batch needs is counted in a forward pass of the model with fake tensors, which have shapes and no content.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.func import functional_call

from node.runtime.metrics import available_memory_bytes
from node.runtime.notes import note, warn
from node.tasks.hf.foreign import foreign
from node.tasks.hf.model import loss_of
from node.tasks.hf.settings import HfSettings, HfValues, ModelError
from node.training.cgroup import memory_group, memory_limit_bytes

PROCESS_BYTES = 720_000_000
"""Of the processes before they hold a model: worker 320 MB, peer 200, p2pd 65, libraries 130."""
TRAINED_BYTES = 34
"""Of a trained parameter: parameter and anchor 8, gradient 4, AdamW's moments 8; in the peer momentum, pseudo-gradient
and mean 12, encoded parts 2."""
_EVALUATION_BYTES = 4
"""Of a trained parameter: its copy during an evaluation."""
HEAP_BLOCK_BYTES, _HEAP_FACTOR = 32 << 20, 2
"""glibc takes smaller blocks from a heap that never shrinks. Its holes grow to the size of what a step uses; without
the heap, a step takes a third more processor time."""
_COMPUTE_BYTES = 4
"""Of a trained parameter that computes in bfloat16: its copy and its gradient."""


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """What training needs, in bytes.

    Attributes:
        frozen: of the parameters that are not trained.
        trained: of those that are, with everything that belongs to them.
        activations: kept from a forward pass for the backward pass, and the logits; or the copy for an evaluation.
    """

    frozen: int
    trained: int
    activations: int

    @property
    def total(self) -> int:
        return PROCESS_BYTES + self.frozen + self.trained + self.activations

    def line(self, available: int, has_checkpointing: bool) -> str:
        """One line for the user, with advice if it is too much."""
        told = (
            f"training needs about {self.total / 1e9:.1f} GB ({self.trained / 1e9:.1f} for what is trained, "
            f"{self.frozen / 1e9:.1f} for the rest of the model, {self.activations / 1e9:.1f} for a batch)"
        )
        if self.total <= available:
            return f"{told}, {available / 1e9:.1f} GB are free"
        advice = "a smaller model, or hf.train = lora"
        if self.activations > self.trained + self.frozen:
            advice = "a run with fewer hf.rows or a shorter hf.context" if has_checkpointing else "--checkpointing"
        return f"{told}, but only {available / 1e9:.1f} GB are free: try {advice}"


@dataclass(slots=True)
class BlockBytes:
    """Bytes of tensors in small blocks, which are in the heap, and in large ones, which are not."""

    small: int = 0
    large: int = 0

    def add(self, *sizes: int) -> None:
        for size in sizes:
            if size < HEAP_BLOCK_BYTES:
                self.small += size
            else:
                self.large += size


@dataclass(slots=True)
class SavedBytes:
    """What autograd keeps of one forward pass.

    Attributes:
        layers: of all layers.
        rest: outside of them: embeddings, the last norm, logits.
        inputs: of the layers' inputs alone, which are what checkpointing keeps.
        count: number of layers.
    """

    layers: BlockBytes = field(default_factory=BlockBytes)
    rest: BlockBytes = field(default_factory=BlockBytes)
    inputs: BlockBytes = field(default_factory=BlockBytes)
    count: int = 0


def memory_need(module: Any, settings: HfSettings, checkpointing: bool, on_cpu: bool = True) -> MemoryNeed:
    """Estimate what training this model needs.

    Args:
        module: the model, in train mode. Shapes are enough.
    """
    trained = frozen = copied = 0
    for parameter in module.parameters():
        if parameter.requires_grad:
            half = parameter.dtype != torch.float32
            trained += parameter.numel() * (TRAINED_BYTES + (_COMPUTE_BYTES if half else 0))
            copied += parameter.numel() * _EVALUATION_BYTES
        else:
            frozen += parameter.numel() * parameter.element_size()
    logits = 4 * settings.rows * settings.context * int(module.config.vocab_size)
    saved, evaluation = saved_bytes(module, settings), BlockBytes()
    saved.rest.add(logits, logits)  # in the backward pass, the gradients that the loss and the softmax return
    evaluation.add(copied, logits, logits)
    kept = saved.layers
    if checkpointing and saved.count:  # and one layer, which is computed again
        small, large = (saved.layers.small // saved.count, saved.layers.large // saved.count)
        kept = BlockBytes(saved.inputs.small + small, saved.inputs.large + large)
    heap = (_HEAP_FACTOR if on_cpu else 1) * (kept.small + saved.rest.small)
    return MemoryNeed(frozen, trained, heap + max(kept.large + saved.rest.large, evaluation.large))


def saved_bytes(module: Any, settings: HfSettings) -> SavedBytes:
    """Count what autograd keeps of the forward pass of a batch, besides the parameters: a pass with fake tensors."""
    with FakeTensorMode():
        fakes = {name: _fake(each) for name, each in (*module.named_parameters(), *module.named_buffers())}
        return _saved_bytes(module, fakes, settings)


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", requires_grad=tensor.requires_grad)


def _saved_bytes(module: Any, fakes: dict[str, torch.Tensor], settings: HfSettings) -> SavedBytes:
    from transformers.modeling_layers import GradientCheckpointingLayer

    found, inside = SavedBytes(), [False]
    seen = {each.untyped_storage()._cdata for each in fakes.values()}
    alive: list[torch.Tensor] = []  # else the number of a storage could be used again

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            alive.append(tensor)
            (found.layers if inside[0] else found.rest).add(storage.nbytes())
        return tensor

    def enter(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        inside[0], hidden = True, (*arguments, *named.values())[0]
        found.count += 1
        found.inputs.add(hidden.untyped_storage().nbytes())

    def leave(*_: Any) -> None:
        inside[0] = False

    layers = [each for each in module.modules() if isinstance(each, GradientCheckpointingLayer)]
    hooks = [each.register_forward_pre_hook(enter, with_kwargs=True) for each in layers]
    hooks += [each.register_forward_hook(leave) for each in layers]
    shape = (settings.rows, settings.context)
    tokens = torch.zeros(shape, dtype=torch.long)
    positions = torch.arange(settings.context).expand(shape) % max(1, settings.context // 2)  # two texts in each row
    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            call = lambda **inputs: functional_call(module, fakes, (), inputs)  # noqa: E731
            loss_of(call, (tokens, positions, tokens), torch.device("cpu"))
    finally:
        for hook in hooks:
            hook.remove()
    return found


def tell_memory(values: HfValues, device: str, module: Any) -> None:
    """Tell the user how much memory training needs, and how much is free.

    Args:
        module: the model. Shapes are enough.
    """
    checkpointing = values.machine.checkpointing
    try:
        with foreign("it is not known how much memory training needs"):
            need = memory_need(module.train(), values.settings, checkpointing, device == "cpu")
        available = available_bytes(torch.device(device))
        (note if need.total <= available else warn)(need.line(available, checkpointing))
    except ModelError as error:
        note(str(error))


def available_bytes(device: torch.device) -> int:
    """Memory of the device that training may take: what is free, and what this process has already."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) + int(torch.cuda.memory_reserved(device))
    limit = memory_limit_bytes(memory_group())
    return min(available_memory_bytes(), limit) if limit else available_memory_bytes()
