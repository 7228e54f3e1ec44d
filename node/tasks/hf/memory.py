"""How much memory training needs, told before it begins. An estimate: only training itself shows the truth."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch

from node.runtime.metrics import available_memory_bytes
from node.tasks.hf.settings import HfSettings, HfValues
from node.training.cgroup import memory_group, memory_limit_bytes

PEER_BYTES = 1 << 30
"""Of the processes themselves, with the libraries that they load."""
TRAINED_BYTES = 44
"""Of a trained parameter: parameter, anchor, gradient, AdamW's moments, and the peer's copies while it averages."""
_COMPUTE_BYTES = 4
"""Of a trained parameter that computes in bfloat16: its copy and its gradient."""
_KEPT = 16
"""Activations of the model's width that a layer keeps for the backward pass; its wider inner ones are in it."""


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """What training needs, in bytes.

    Attributes:
        frozen: of the parameters that are not trained.
        trained: of those that are, with everything that belongs to them.
        activations: kept from a forward pass for the backward pass, and the logits.
    """

    frozen: int
    trained: int
    activations: int

    @property
    def total(self) -> int:
        return PEER_BYTES + self.frozen + self.trained + self.activations

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
        return f"warning: {told}, but only {available / 1e9:.1f} GB are free: try {advice}"


def memory_need(module: Any, settings: HfSettings, checkpointing: bool) -> MemoryNeed:
    """Estimate what training this model needs."""
    trained = frozen = 0
    for parameter in module.parameters():
        if parameter.requires_grad:
            half = parameter.dtype != torch.float32
            trained += parameter.numel() * (TRAINED_BYTES + (_COMPUTE_BYTES if half else 0))
        else:
            frozen += parameter.numel() * parameter.element_size()
    config, tokens = module.config, settings.rows * settings.context
    width = int(getattr(config, "hidden_size", 0) or 0)
    layers, inner = int(getattr(config, "num_hidden_layers", 0) or 0), int(getattr(config, "intermediate_size", 0) or 0)
    size = next(module.parameters()).element_size()
    layer = (_KEPT * width + 4 * max(inner, 4 * width)) * size
    kept = layers * width * size + layer if checkpointing else layers * layer
    logits = 3 * 4 * int(getattr(config, "vocab_size", 0) or 0)
    return MemoryNeed(frozen, trained, tokens * (kept + logits))


def tell_memory(values: HfValues, device: str, module: Any) -> None:
    """Tell the user how much memory training needs, and how much is free.

    Args:
        module: the model; shapes are enough.
    """
    need = memory_need(module, values.settings, values.machine.checkpointing)
    print(need.line(available_bytes(torch.device(device)), values.machine.checkpointing), file=sys.stderr, flush=True)


def available_bytes(device: torch.device) -> int:
    """Memory of the device that training may take: what is free, and what this process has already."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) + int(torch.cuda.memory_reserved(device))
    limit = memory_limit_bytes(memory_group())
    return min(available_memory_bytes(), limit) if limit else available_memory_bytes()
