"""Adapters (LoRA): which layers get them, which do not, and how peft puts them on."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from node.runtime.notes import note
from node.tasks.hf.settings import ALL_LINEAR, NEEDS, HfSettings, ModelError, foreign

_NEVER_ADAPTED = frozenset({"lm_head", "embed_out", "output_layer", "score", "gate", "router", "shared_expert_gate"})
"""Names of output layers and of the routers of experts."""


def adapted_layers(module: nn.Module, wanted: tuple[str, ...]) -> tuple[str, ...]:
    from transformers.pytorch_utils import Conv1D

    named = [(name.rpartition(".")[2], each) for name, each in module.named_modules()]
    layers = [(name, each) for name, each in named if isinstance(each, nn.Linear | Conv1D)]
    linear, experts = {name for name, _ in layers}, _experts(module)
    known = sorted(linear - _NEVER_ADAPTED)
    if wanted == (ALL_LINEAR,):
        return tuple(known)
    if missing := sorted(set(wanted) - linear - experts.keys()):
        have = ", ".join(known + sorted(experts))
        raise ModelError(f"hf.lora_targets: the model has no linear layer {missing[0]}: it has {have}")
    embedding = module.get_input_embeddings().weight  # type: ignore[operator]
    if tied := sorted(name for name, each in layers if name in wanted and each.weight is embedding):
        raise ModelError(
            f"hf.lora_targets: {tied[0]} shares its weights with the embedding in this model, and an adapter on it "
            "could not be merged into both: leave it out"
        )
    return tuple(sorted(set(wanted)))


def with_adapters(module: Any, settings: HfSettings, targets: Iterable[str]) -> Any:
    """The model with adapters, which alone take gradients."""
    try:
        import peft
    except ImportError:
        raise ModelError(f"adapters need peft: {NEEDS}; or set hf.train = full") from None
    from transformers.pytorch_utils import Conv1D

    experts = _experts(module)
    layers = sorted(each for each in targets if each not in experts)
    parameters = sorted(each for each in targets if each in experts)
    transposed = any(
        isinstance(each, Conv1D) and name.rpartition(".")[2] in layers for name, each in module.named_modules()
    )
    config = peft.LoraConfig(
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,
        target_modules=layers,
        target_parameters=parameters or None,
        lora_dropout=0.0,
        bias="none",
        fan_in_fan_out=transposed,
        task_type="CAUSAL_LM",
    )
    device = next(module.parameters()).device
    with foreign("this model takes no adapters"), warnings.catch_warnings(), torch.device(device):
        warnings.simplefilter("ignore", FutureWarning)  # of peft's own use of transformers
        warnings.simplefilter("ignore", RuntimeWarning)  # of what is refused below
        adapted = peft.get_peft_model(module, config)
    # In some models of experts, peft takes the names of dense layers for the experts' of older versions.
    if moved := sorted(set(layers) - set(config.target_modules or ())):
        rest = sorted(set(layers) - set(moved)) + parameters
        raise ModelError(
            f"of this model, peft puts the adapters of {', '.join(moved)} on the experts instead: "
            f"set hf.lora_targets = {rest}".replace("'", '"')
        )
    return adapted


def tell_frozen_experts(module: nn.Module, targets: Iterable[str]) -> None:
    """Tell the user which experts have no adapters, so that they stay as they are."""
    experts = _experts(module)
    if frozen := sorted(experts.keys() - set(targets)):
        count = sum(experts[each] for each in frozen)
        total = sum(each.numel() for name, each in module.named_parameters() if ".lora_" not in name)
        note(
            f"the experts have no adapters and stay as they are: {' and '.join(frozen)}, {count / 1e6:,.2f} of the "
            f"model's {total / 1e6:,.2f} million parameters; to train them, too, name them in hf.lora_targets"
        )


def _experts(module: nn.Module) -> dict[str, int]:
    """Parameters with a matrix for each expert."""
    found: dict[str, int] = {}
    for name, parameter in module.named_parameters():
        if parameter.dim() == 3:
            short = ".".join([each for each in name.split(".") if each != "base_layer"][-2:])  # of adapters' wrappers
            found[short] = found.get(short, 0) + parameter.numel()
    return found
