"""Load a model and its tokenizer for training, put adapters on it, and check that its rows can be packed."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from node.runtime.notes import warn
from node.tasks.base import Batch
from node.tasks.flat import layout_of, unfrozen
from node.tasks.hf.adapters import adapted_layers, with_adapters
from node.tasks.hf.rows import MASKED
from node.tasks.hf.settings import NEEDS, HfSettings, ModelError, ModelPins, foreign
from node.tasks.hf.source import (
    PROBE,
    ModelFolder,
    config_digest,
    find_model,
    template_digest,
    tokenizer_digest,
    weights_digest,
    weights_size,
)
from protocols.base import Layout

MAX_TEMPLATE_BYTES = 1 << 20
_PACKED_TOLERANCE = 0.1
"""Of the logits' deviation, as is the difference: of bfloat16 .01, of a model that mixes packed texts about 1."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready for training, with its adapters if it has some."""

    module: Any
    tokenizer: Any
    folder: ModelFolder
    pins: ModelPins


def load_tokenizer(folder: ModelFolder, template: str = "") -> Any:
    transformers = import_transformers()
    with foreign(f"{folder.path}: its tokenizer cannot be loaded"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            folder.path, trust_remote_code=False, local_files_only=True
        )
        require_faithful(tokenizer, folder.path / "tokenizer.json")
    if template:
        tokenizer.chat_template = read_template(Path(template).expanduser())
    return tokenizer


def read_template(path: Path) -> str:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_TEMPLATE_BYTES + 1).decode("utf-8-sig")
    except OSError as error:
        raise ModelError(f"the chat template {path} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ModelError(f"the chat template {path} is not text in UTF-8: convert it") from None
    if not text.strip() or len(text) > MAX_TEMPLATE_BYTES:
        raise ModelError(f"the chat template {path} is empty, or has more than {MAX_TEMPLATE_BYTES >> 20} MiB")
    return text


def require_faithful(tokenizer: Any, file: Path) -> None:
    """Check that the library reads a tokenizer as its own file says, and say if it does not keep all texts."""
    from tokenizers import Tokenizer

    if not tokenizer.is_fast:
        raise ModelError(f"{file.parent}: its tokenizer has no fast form, which training needs: convert it")
    ids = tokenizer(PROBE, add_special_tokens=False, verbose=False)["input_ids"]
    if file.exists() and ids != Tokenizer.from_file(str(file)).encode(PROBE, add_special_tokens=False).ids:
        raise ModelError(
            f"{file}: this version of transformers reads it in another way than it says, so the model would train on "
            "other tokens: use the version that the model was made with"
        )
    plain = PROBE.removesuffix(" <s></s>")
    ids = tokenizer(plain, add_special_tokens=False, verbose=False)["input_ids"]
    if 2 * ids.count(tokenizer.unk_token_id) > len(ids):
        raise ModelError(f"{file.parent}: its tokenizer knows next to nothing of a text: is it complete?")
    decoded = str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))
    if decoded.strip() != plain:
        at = next((at for at, pair in enumerate(zip(decoded, plain, strict=False)) if len(set(pair)) > 1), 0)
        here, there = plain[max(0, at - 8) : at + 12], decoded[max(0, at - 8) : at + 12]
        warn(f"the tokenizer does not keep all texts as they are: {here!a} becomes {there!a}")
    if tokenizer.eos_token_id is None:
        warn("the tokenizer has no eos_token: the model does not learn where a text ends")


def load_model(
    model: str,
    settings: HfSettings,
    pins: ModelPins | None,
    device: str,
    dtype: torch.dtype,
    look: Callable[[Any], None] = lambda _: None,
    template: str = "",
) -> LoadedModel:
    """Find the model, check that it is the run's, and load it."""
    needs_weights = settings.train == "lora" or pins is None
    if pins and model == pins.base.rpartition("@")[0]:
        model = pins.base  # the run's commit of this repository, not the newest
    folder = find_model(model, needs_weights)
    if pins:  # before the libraries are loaded
        require_same(replace(pins, config=config_digest(folder.config)), pins, str(folder.path))
    tokenizer = load_tokenizer(folder, template)
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
    if needs_weights:
        require_finite(module, str(folder.path))
    if settings.pack and not packs(module):
        raise ModelError("this model lets texts in one row see each other: set hf.pack = false")
    if settings.train == "lora":
        module = with_adapters(module, settings, targets)
    return LoadedModel(module, tokenizer, folder, replace(found, targets=targets))


def trained_layout(model: str, settings: HfSettings, pins: ModelPins) -> Layout:
    """Names and shapes of what a run trains, from the model's configuration, without memory for its weights."""
    folder = find_model(model, weights=False)
    require_same(replace(pins, config=config_digest(folder.config)), pins, str(folder.path))
    module = load_module(folder, False, "meta", torch.float32)
    if settings.train == "lora":
        module = with_adapters(module, settings, pins.targets)
    return layout_of(unfrozen(module))


def require_same(found: ModelPins, pins: ModelPins, where: str) -> None:
    for name, words in (
        ("config", "another configuration"),
        ("tokenizer", "another tokenizer, or its library reads it in another way"),
        ("template", "another chat template"),
        ("weights", "other weights"),
    ):
        here, there = getattr(found, name), getattr(pins, name)
        if here != there:
            other = "the founder's by hf.template or --template or, if it gave none, " if name == "template" else ""
            raise ModelError(
                f"{where} has {words} than the run's model ({name} {here[:16]}, the run's is {there[:16]}): "
                f"give {other}the model that the founder calls {pins.base} by --model"
            )


def load_module(folder: ModelFolder, weights: bool, device: str, dtype: torch.dtype) -> Any:
    """The model on its device: with its weights, or with values that the run's will replace; on `meta`, with none."""
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
    longest = getattr(module.config, "max_position_embeddings", None)
    if longest and settings.context > longest:
        raise ModelError(f"hf.context is {settings.context}, and the model reads at most {longest} tokens: take less")
    highest, count = max(tokenizer.get_vocab().values()), module.get_input_embeddings().num_embeddings
    if highest >= count:
        raise ModelError(
            f"the tokenizer has a token {highest}, the model's last is {count - 1}: is it another model's tokenizer?"
        )


@torch.no_grad()
def require_finite(module: Any, where: str) -> None:
    """Check that the model's weights are numbers, and that it computes numbers from them."""
    for name, tensor in module.state_dict(keep_vars=True).items():
        # The extremes are NaN if a value is. Unlike `isfinite`, they take no memory.
        if tensor.is_floating_point() and tensor.numel() and not all(map(torch.isfinite, torch.aminmax(tensor))):
            raise ModelError(
                f"{where}: the tensor {name} holds NaN or infinity, so training would only spread that: download "
                "the model again, or take another"
            )
    embedding = module.get_input_embeddings()
    ids = torch.arange(8, device=embedding.weight.device)[None] % embedding.num_embeddings
    if not module(input_ids=ids, use_cache=False).logits.isfinite().all():
        raise ModelError(
            f"{where}: the model computes NaN or infinity, though its weights are finite: is its config.json that of "
            "these weights? Download it again, or take another precision"
        )


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


def loss_of(call: Any, batch: Batch, device: torch.device) -> torch.Tensor:
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
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        import transformers
    except ImportError:
        raise ModelError(f"models of Hugging Face need transformers: {NEEDS}") from None
    transformers.utils.logging.disable_progress_bar()
    return transformers
