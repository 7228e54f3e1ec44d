"""Load a model and its tokenizer for training, put adapters on it, and check that its rows can be packed."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from node.runtime.extras import install
from node.tasks.base import Batch
from node.tasks.flat import layout_of, unfrozen
from node.tasks.hf.digests import config_digest, template_digest, tokenizer_digest, weights_digest, weights_size
from node.tasks.hf.foreign import foreign
from node.tasks.hf.rows import MASKED
from node.tasks.hf.settings import ALL_LINEAR, HfSettings, ModelError, ModelPins
from node.tasks.hf.source import ModelFolder, find_model
from protocols.base import Layout

NEEDS = install("hf")
_NEVER_ADAPTED = frozenset({"lm_head", "embed_out", "output_layer", "score", "gate", "router", "shared_expert_gate"})
"""Names of output layers and of the routers of experts."""
_PACKED_TOLERANCE = 0.1
"""Of the logits' deviation, as is the difference: of bfloat16 .01, of a model that mixes packed texts about 1."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready for training.

    Attributes:
        module: the model, with its adapters if it has some.
        pins: what it is, without the loss.
    """

    module: Any
    tokenizer: Any
    folder: ModelFolder
    pins: ModelPins


def load_tokenizer(folder: ModelFolder) -> Any:
    """The tokenizer of a model.

    Raises:
        ModelError: it cannot be loaded.
    """
    transformers = import_transformers()
    with foreign(f"{folder.path}: its tokenizer cannot be loaded"):
        return transformers.AutoTokenizer.from_pretrained(folder.path, trust_remote_code=False, local_files_only=True)


def load_model(
    model: str,
    settings: HfSettings,
    pins: ModelPins | None,
    device: str,
    dtype: torch.dtype,
    look: Callable[[Any], None] = lambda _: None,
) -> LoadedModel:
    """Find the model, check that it is the run's, and load it.

    Args:
        pins: of the run; None for a founder.
        look: called with the model before its weights take memory: its tensors have only shapes.

    Raises:
        ModelError: it is not the run's, or cannot be loaded or trained.
    """
    needs_weights = settings.train == "lora" or pins is None
    if pins and model == pins.base.rpartition("@")[0]:
        model = pins.base  # the run's commit of this repository, not the newest
    folder = find_model(model, needs_weights)
    if pins:  # before the libraries are loaded
        require_same(replace(pins, config=config_digest(folder.config)), pins, str(folder.path))
    tokenizer = load_tokenizer(folder)
    found = ModelPins(
        base=folder.base,
        weights=pins.weights if pins else weights_digest(folder.path),
        size=pins.size if pins else weights_size(folder.path),
        config=config_digest(folder.config),
        tokenizer=tokenizer_digest(folder.path, tokenizer),
        template=template_digest(tokenizer) if settings.format == "chat" else "",
    )
    if pins:
        require_same(found, pins, str(folder.path))
        if needs_weights:  # last, because it takes longest
            require_same(replace(found, weights=weights_digest(folder.path)), pins, str(folder.path))
    shapes = load_module(folder, False, "meta", dtype)
    require_fitting(shapes, tokenizer, settings)
    targets: tuple[str, ...] = ()
    if settings.train == "lora":
        targets = pins.targets if pins else adapted_layers(shapes, settings.lora_targets)
        shapes = with_adapters(shapes, settings, targets)
    look(shapes)
    module = load_module(folder, needs_weights, device, dtype)
    if settings.pack and not packs(module):
        raise ModelError("this model lets texts in one row see each other: set hf.pack = false")
    if settings.train == "lora":
        module = with_adapters(module, settings, targets)
    return LoadedModel(module, tokenizer, folder, replace(found, targets=targets))


def trained_layout(model: str, settings: HfSettings, pins: ModelPins) -> Layout:
    """Names and shapes of what a run trains, from the model's configuration, without memory for its weights.

    Raises:
        ModelError: it is not the run's configuration, or no such model can be built.
    """
    folder = find_model(model, weights=False)
    require_same(replace(pins, config=config_digest(folder.config)), pins, str(folder.path))
    module = load_module(folder, False, "meta", torch.float32)
    if settings.train == "lora":
        module = with_adapters(module, settings, pins.targets)
    return layout_of(unfrozen(module))


def require_same(found: ModelPins, pins: ModelPins, where: str) -> None:
    """Check that this machine's model is that of the run.

    Raises:
        ModelError: it differs; the line says in what, with both digests.
    """
    for name, words in (
        ("config", "another configuration"),
        ("tokenizer", "another tokenizer, or its library reads it in another way"),
        ("template", "another chat template"),
        ("weights", "other weights"),
    ):
        here, there = getattr(found, name), getattr(pins, name)
        if here != there:
            raise ModelError(
                f"{where} has {words} than the run's model ({name} {here[:16]}, the run's is {there[:16]}): "
                f"give the model that the founder calls {pins.base} by --model"
            )


def load_module(folder: ModelFolder, weights: bool, device: str, dtype: torch.dtype) -> Any:
    """The model on its device: with its weights, or with values that the run's will replace; on `meta`, with none.

    Raises:
        ModelError: it cannot be loaded.
    """
    transformers, missing = import_transformers(), []
    with foreign(f"{folder.path} cannot be loaded"):
        config = transformers.AutoConfig.from_pretrained(folder.path, trust_remote_code=False, local_files_only=True)
        config._attn_implementation = config._experts_implementation = None  # see `KERNELS`
        if weights:
            module, info = transformers.AutoModelForCausalLM.from_pretrained(
                folder.path, config=config, dtype=dtype, use_safetensors=True, trust_remote_code=False,
                local_files_only=True, output_loading_info=True,
            )  # fmt: skip
            missing = sorted(info["missing_keys"])
        else:
            with torch.device(device):
                module = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
        module.config.use_cache = False
        module = module.to(device)
    if missing:  # transformers would draw them at random
        raise ModelError(f"{folder.path} lacks {len(missing)} tensors, such as {missing[0]}: download the model again")
    return module


def require_fitting(module: Any, tokenizer: Any, settings: HfSettings) -> None:
    """Check that the rows and the tokens fit the model.

    Raises:
        ModelError: they do not.
    """
    longest = getattr(module.config, "max_position_embeddings", None)
    if longest and settings.context > longest:
        raise ModelError(f"hf.context is {settings.context}, and the model reads at most {longest} tokens: take less")
    if len(tokenizer) > module.get_input_embeddings().num_embeddings:
        raise ModelError(f"the tokenizer has {len(tokenizer)} tokens, more than the model: is it another model's?")


@torch.no_grad()
def packs(module: Any) -> bool:
    """Whether two texts in one row give the same logits as each in a row of its own."""
    device, was_training = module.get_input_embeddings().weight.device, module.training
    module.eval()
    ids = torch.arange(8, device=device)[None] % module.get_input_embeddings().num_embeddings
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]], device=device)
    together = module(input_ids=ids, position_ids=positions, use_cache=False).logits[:, 4:].float()
    alone = module(input_ids=ids[:, 4:], position_ids=positions[:, :4], use_cache=False).logits.float()
    module.train(was_training)
    return float((together - alone).std()) <= _PACKED_TOLERANCE * float(alone.std() + 1e-6)


def adapted_layers(module: nn.Module, wanted: tuple[str, ...]) -> tuple[str, ...]:
    """The names of the layers that get adapters, sorted.

    Raises:
        ModelError: the model has no layer of one of these names.
    """
    from transformers.pytorch_utils import Conv1D

    linear = {name.rpartition(".")[2] for name, each in module.named_modules() if isinstance(each, nn.Linear | Conv1D)}
    known = sorted(linear - _NEVER_ADAPTED)
    if wanted == (ALL_LINEAR,):
        return tuple(known)
    if missing := sorted(set(wanted) - linear):
        raise ModelError(f"hf.lora_targets: the model has no linear layer {missing[0]}: it has {', '.join(known)}")
    return tuple(sorted(set(wanted)))


def with_adapters(module: Any, settings: HfSettings, targets: Iterable[str]) -> Any:
    """The model with adapters, which alone take gradients.

    Raises:
        ModelError: peft is missing, or cannot adapt this model.
    """
    try:
        import peft
    except ImportError:
        raise ModelError(f"adapters need peft: {NEEDS}; or set hf.train = full") from None
    from transformers.pytorch_utils import Conv1D

    targets = list(targets)
    transposed = any(
        isinstance(each, Conv1D) and name.rpartition(".")[2] in targets for name, each in module.named_modules()
    )
    config = peft.LoraConfig(
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,
        target_modules=targets,
        lora_dropout=0.0,
        bias="none",
        fan_in_fan_out=transposed,
        task_type="CAUSAL_LM",
    )
    device = next(module.parameters()).device
    with foreign("this model takes no adapters"), warnings.catch_warnings(), torch.device(device):
        warnings.simplefilter("ignore", FutureWarning)  # of peft's own use of transformers
        return peft.get_peft_model(module, config)


def loss_of(call: Any, batch: Batch, device: torch.device) -> torch.Tensor:
    """Mean loss over a batch's targets."""
    tokens, positions, labels = (each.to(device) for each in batch)
    logits = call(input_ids=tokens, position_ids=positions, use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=MASKED)


def checkpoint_activations(module: Any) -> None:
    """Compute each layer's activations again in the backward pass instead of keeping them."""
    base = module.get_base_model() if hasattr(module, "get_base_model") else module
    # Older versions of transformers have only the second name.
    enable = getattr(base, "activation_checkpointing_enable", None) or base.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def import_transformers() -> Any:
    """The library, without its progress bars.

    Raises:
        ModelError: it is missing.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        import transformers
    except ImportError:
        raise ModelError(f"models of Hugging Face need transformers: {NEEDS}") from None
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    return transformers
