"""Export a peer's model: the language model in Hugging Face's Llama format, all other models as safetensors.

A model of Hugging Face that was fine-tuned is written by `node.export.fine_tuned`.

The language model has the tensor names, the halves of rotary pairs and the order of operations of `LlamaForCausalLM`,
so its tensors are not converted. Its tokens are bytes: the tokenizer is GPT-2's byte level without merges.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

from node.config.task_tables import GptTable
from node.export.fine_tuned import load_fine_tuned
from node.export.trained_model import TrainedModel
from node.storage import tensors
from node.tasks.extra import trained_elements
from node.tasks.gpt import RMS_EPS, ROPE_THETA, VOCABULARY

MODEL = "model.safetensors"


class ExportError(ValueError):
    """The model cannot be written. The message says in one line what happened, why, and what to do."""


def export(model: TrainedModel, out: Path, base: str | None = None, merge: bool = False) -> None:
    """Create the directory, atomically.

    Args:
        base: this machine's copy of the model that a run of the task hf fine-tunes.
        merge: whether to write the whole model instead of its adapters.

    Raises:
        TrainedError: `base` is missing or another model, or is given for a run of another task.
        ExportError: it exists already and is not empty, or cannot be written.
    """
    if out.is_symlink() or (out.exists() and not (out.is_dir() and not any(out.iterdir()))):
        raise ExportError(f"{out} exists already and is not overwritten: name another directory by --out")
    tuned = load_fine_tuned(model, base) if model.manifest.config.hf or base else None
    draft = out.absolute().with_name(f".{out.absolute().name}.new-{os.getpid()}")
    try:
        draft.mkdir(parents=True)
        try:
            if tuned:
                tuned.write(draft, merge)
                (draft / "README.md").write_text(card(model, merge), encoding="utf-8")
            else:
                _fill(model, draft)
            draft.replace(out)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    except OSError as error:
        where = error.filename or out
        raise ExportError(f"{where} cannot be written ({error.strerror}): give a directory by --out that can") from None


def _fill(model: TrainedModel, place: Path) -> None:
    tensors.write(place / MODEL, model.tensors, {"format": "pt"})
    os.chmod(place / MODEL, 0o644)
    texts: dict[str, str] = {"README.md": card(model)}
    if gpt := model.manifest.config.gpt:
        files = {
            "config.json": llama(gpt),
            "tokenizer.json": tokenizer(),
            "tokenizer_config.json": {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_max_length": gpt.context,
                "clean_up_tokenization_spaces": False,
            },
        }
        texts |= {name: json.dumps(content, indent=2, ensure_ascii=False) + "\n" for name, content in files.items()}
    for name, text in texts.items():
        (place / name).write_text(text, encoding="utf-8")


def llama(gpt: GptTable) -> dict[str, Any]:
    """`config.json` of a model of `node.tasks.gpt`."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": gpt.width,
        "intermediate_size": gpt.shape.hidden,
        "num_hidden_layers": gpt.layers,
        "num_attention_heads": gpt.heads,
        "num_key_value_heads": gpt.heads,
        "head_dim": gpt.width // gpt.heads,
        "max_position_embeddings": gpt.context,
        "hidden_act": "silu",
        "rms_norm_eps": RMS_EPS,
        "rope_theta": ROPE_THETA,  # for transformers before 5; version 5 reads the next one
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "dtype": "float32",
        "torch_dtype": "float32",
    }


def tokenizer() -> dict[str, Any]:
    """`tokenizer.json` of a tokenizer in which the token of a byte is the byte itself."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {letter: byte for byte, letter in enumerate(_letters())},
            "merges": [],
        },
    }


def _letters() -> list[str]:
    """The character of each byte at GPT-2's byte level: the byte itself if printable, otherwise one from 256 on."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in seen]
    return [chr(byte if byte in seen else 256 + hidden.index(byte)) for byte in range(256)]


def card(model: TrainedModel, merge: bool = False) -> str:
    """`README.md` of the model: where it comes from, and how to load it."""
    manifest = model.manifest
    config, count = manifest.config, sum(trained_elements(each.layout) for each in model.checkpoints)
    loss, unit = model.held_out_loss, " nats per byte" if config.gpt else ""
    name = "".join(each for each in config.name if each.isalnum() or each in " -_.").strip() or "starling"
    rows = {
        "run": f"{name}, `{manifest.run_id}`",
        "founder": f"`{manifest.founder.peer}`",
        "task": f"`{config.task}`",
        "rounds": f"{model.rounds[0]} of {config.recipe.rounds}",
        **_origins(model),
        **({"base": f"{manifest.model.base}, weights `{manifest.model.weights[:16]}`"} if manifest.model else {}),
        "held-out loss": f"{loss:.4f}{unit}" if math.isfinite(loss) else "not measured",
        "parameters": f"{count:,}, float32",
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    head = "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags: [starling, llama]\n---\n\n"
    about = f"# {name}\n\n{_ABOUT}\n\n| | |\n|---|---|\n{table}\n\n"
    if config.hf:
        return about + _loading_fine_tuned(config.hf.train == "lora" and not merge)
    return (head if config.gpt else "") + about + _loading(config.own_task, config.gpt)


def _origins(model: TrainedModel) -> dict[str, str]:
    """Rows of the card: the lineage of the model, or of each of its stages."""
    lineages = [f"`{checkpoint.lineage.hex()}`" for checkpoint in model.checkpoints]
    if model.manifest.stages is None:
        return {"lineage": lineages[0]}
    rounds = "" if model.is_of_one_round else ", after {} rounds"
    return {
        f"lineage of stage {stage}": lineage + rounds.format(model.rounds[stage])
        for stage, lineage in enumerate(lineages)
    }


_ABOUT = "Trained by the peers of a Starling run: volunteers' machines, without a central server."


def _loading_fine_tuned(is_adapter: bool) -> str:
    lines = ["from transformers import AutoModelForCausalLM", "", 'model = AutoModelForCausalLM.from_pretrained(".")']
    if is_adapter:
        lines = [
            "from peft import AutoPeftModelForCausalLM",
            "",
            'model = AutoPeftModelForCausalLM.from_pretrained(".")',
        ]
    return "\n".join(["```python", *lines, "```", ""])


def _loading(own_task: str, gpt: GptTable | None) -> str:
    if gpt:
        return (
            f"A language model over bytes: a token is a byte, and the context is {gpt.context} bytes. It has no\n"
            "tokens for the beginning or the end of a text.\n\n"
            "```python\n"
            "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            'tokenizer = AutoTokenizer.from_pretrained(".")\n'
            'model = AutoModelForCausalLM.from_pretrained(".")\n'
            'prompt = tokenizer("def ", return_tensors="pt")\n'
            "print(tokenizer.decode(model.generate(**prompt, do_sample=True, max_new_tokens=100)[0]))\n"
            "```\n"
        )
    module = f"the module that `{own_task}` makes" if own_task else "the task"
    return (
        f"`{MODEL}` contains the trained parameters of {module}, and the buffers that training changes,\n"
        "under their own names.\n\n"
        "```python\n"
        "from safetensors.torch import load_file\n\n"
        f'module.load_state_dict(load_file("{MODEL}"), strict=False)\n'
        "```\n"
    )
