"""Export a peer's model with its model card: gpt in Hugging Face's Llama format, other models as safetensors.

The language model has the tensor names, the halves of rotary pairs and the order of operations of `LlamaForCausalLM`,
so its tensors are not converted. Its tokens are bytes: the tokenizer is GPT-2's byte level without merges.
"""

from __future__ import annotations

import gc
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from node.config.task_tables import GptTable
from node.export.checking import TEXT, Expected, probe_ids, require_loading, why_unchecked
from node.export.fine_tuned import load_fine_tuned
from node.export.trained_model import TrainedModel
from node.runtime import tensors
from node.tasks.extra import trained_elements
from node.tasks.gpt import RMS_EPS, ROPE_THETA, Gpt
from node.tasks.gpt_presets import VOCABULARY
from node.tasks.hf.settings import ModelError

MODEL = "model.safetensors"
_LOADING_WHOLE = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # this one
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
```
"""
_ABOUT = "Trained by the peers of a Starling run: volunteers' machines, without a central server."


def export(
    model: TrainedModel,
    out: Path,
    base: str | None = None,
    merge: bool = False,
    is_checked: bool = True,
    template: str = "",
) -> str:
    """Create the directory, atomically, once a process of its own has loaded it and computed the same.

    Returns why it was not loaded again; empty if it was.
    """
    if out.is_symlink() or (out.exists() and not (out.is_dir() and not any(out.iterdir()))):
        raise ModelError(f"{out} exists already and is not overwritten: name another directory by --out")
    draft = out.absolute().with_name(f".{out.absolute().name}.new-{os.getpid()}")
    try:
        draft.mkdir(parents=True)
        try:
            expected = _fill(model, draft, base, merge, template)
            for each in draft.iterdir():
                each.chmod(0o644)  # the libraries keep weights from other users
            why = why_unchecked(expected) if is_checked else "--no-check"
            if not why:
                gc.collect()  # the model in this process, before another has it in memory
                require_loading(draft, expected)
            draft.replace(out)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    except OSError as error:
        where = error.filename or out
        raise ModelError(f"{where} cannot be written ({error.strerror}): give a directory by --out that can") from None
    return why


def _fill(model: TrainedModel, place: Path, base: str | None, merge: bool, template: str) -> Expected:
    if model.manifest.config.hf or base:
        tuned = load_fine_tuned(model, base, template)
        expected = tuned.write(place, merge)
        (place / "README.md").write_text(card(model, merge, tuned.on_hub), encoding="utf-8")
        return expected
    tensors.write(place / MODEL, model.tensors, {"format": "pt"})
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
    return _expected_of_gpt(model, gpt) if gpt else Expected.of_tensors(model.tensors)


@torch.no_grad()
def _expected_of_gpt(model: TrainedModel, gpt: GptTable) -> Expected:
    module, ids = Gpt(gpt.shape), probe_ids(VOCABULARY, gpt.context)
    module.load_state_dict(dict(model.tensors))
    return Expected(module(ids), ids, list(TEXT.encode()))


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


def card(model: TrainedModel, merge: bool = False, on_hub: str = "") -> str:
    """`README.md` of the model: where it comes from, and how to load it."""
    manifest = model.manifest
    config, count = manifest.config, sum(trained_elements(each.layout) for each in model.checkpoints)
    loss, unit = model.held_out_loss, " nats per byte" if config.gpt else ""
    name, called = _plain(config.name) or "starling", _plain(manifest.model.base if manifest.model else "")
    rows = {
        "run": f"{name}, `{manifest.run_id}`",
        "founder": f"`{manifest.founder.peer}`",
        "task": f"`{config.task}`",
        "rounds": f"{model.rounds[0]} of {config.recipe.rounds}",
        **_origins(model),
        **({"base": f"{called}, weights `{manifest.model.weights[:16]}`"} if manifest.model else {}),
        "held-out loss": f"{loss:.4f}{unit}" if math.isfinite(loss) else "not measured",
        "parameters": f"{count:,}, float32",
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    head = "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags: [starling, llama]\n---\n\n"
    about = f"# {name}\n\n{_ABOUT}\n\n| | |\n|---|---|\n{table}\n\n"
    if config.hf and manifest.model:
        is_adapter = config.hf.train == "lora" and not merge
        return about + (_loading_adapter(on_hub, called) if is_adapter else _LOADING_WHOLE)
    return (head if config.gpt else "") + about + _loading(config.own_task, config.gpt)


def _plain(text: str) -> str:
    """A founder's text without what has a meaning in Markdown."""
    return "".join(each for each in text if each.isalnum() or each in " -_./@").strip()


def _origins(model: TrainedModel) -> dict[str, str]:
    lineages = [f"`{checkpoint.lineage.hex()}`" for checkpoint in model.checkpoints]
    if model.manifest.stages is None:
        return {"lineage": lineages[0]}
    rounds = "" if model.is_of_one_round else ", after {} rounds"
    return {
        f"lineage of stage {stage}": lineage + rounds.format(model.rounds[stage])
        for stage, lineage in enumerate(lineages)
    }


def _loading_adapter(on_hub: str, called: str) -> str:
    """How to load an adapter: its base is on the hub, or in a folder that each user has elsewhere."""
    name, _, revision = on_hub.partition("@")
    where = f'base = "{name}"' if name else 'base = "PATH/OF/THE/BASE"  # its folder on your machine'
    at = f', revision="{revision}"' if revision else ""
    return (
        f"These are adapters: they need their base, the model `{called}` with the weights named above.\n\n"
        "```python\n"
        "from peft import PeftModel\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f"{where}\n"
        'folder = "."  # this one\n'
        f"tokenizer = AutoTokenizer.from_pretrained(base{at})\n"
        f"model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base{at}), folder)\n"
        "```\n"
    )


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
