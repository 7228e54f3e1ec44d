"""The model of a run of the task hf: its tensors put back into this machine's copy of the model.

It needs that copy: of adapters for the weights that the run never trained, of a whole model for its configuration and
its tokenizer. Both are checked against the run's manifest.
"""

from __future__ import annotations

import codecs
import json
import math
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from node.config.manifest import Manifest
from node.export.checking import TEXT, Expected, difference, probe, require_numbers
from node.export.trained_model import TrainedModel
from node.tasks.files import select
from node.tasks.gpt import Gpt
from node.tasks.hf.chat import Encoder
from node.tasks.hf.corpus import Document, joined, read_documents
from node.tasks.hf.model import LoadedModel, load_model, trained_layout
from node.tasks.hf.rows import Rows, rows_of
from node.tasks.hf.settings import HfSettings, ModelError, ModelPins, foreign
from node.tasks.hf.source import HUB_NAME, TEMPLATES, TOKENIZER_FILES, weight_files
from node.tasks.hf.task import evaluate_rows, parse_sample, read_sample, stream
from protocols.base import Layout

MAX_EVALUATED_DOCUMENTS = 10_000
NO_HUB = "(a folder: see README.md)"
"""In place of a base's name on the hub. It cannot be one, so that no other model is loaded."""
_PATHS = frozenset(
    {"_name_or_path", "name_or_path", "tokenizer_file", "special_tokens_map_file", "vocab_file", "merges_file"}
)
"""Keys of configurations that only say where something was."""
_ABSOLUTE = re.compile(r"(/|~/|[A-Za-z]:[/\\])[^/\\]+[/\\]")
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}


@dataclass(frozen=True, slots=True)
class FineTuned:
    """A trained model that can be used: on the CPU, float32, in eval mode."""

    loaded: LoadedModel
    settings: HfSettings
    on_hub: str = ""  # the base's ORG/NAME@REVISION, from this machine's copy or the founder's
    has_template: bool = False  # the chat template is not the base's own

    @property
    def module(self) -> Any:
        return self.loaded.module

    def write(self, place: Path, merge: bool) -> Expected:
        """Write the model or its adapters as transformers or peft load them. The module cannot be used afterwards."""
        ids, logits = probe(self.module)
        require_numbers(logits, "the trained model")
        if self.settings.train == "lora" and not merge:
            with foreign("the adapters cannot be written"):
                self.module.save_pretrained(place, save_embedding_layers=False)
            (place / "README.md").unlink(missing_ok=True)
            _name_base(place / "adapter_config.json", self.on_hub)
            expected = Expected(logits, ids, base=self.loaded.folder.path)
        else:
            tokens = self.loaded.tokenizer(TEXT, verbose=False)["input_ids"]
            expected = Expected(self._write_whole(place, logits), ids, tokens)
        if self.has_template:  # transformers prefers this file to what the tokenizer's configuration says
            (place / "chat_template.jinja").write_text(self.loaded.tokenizer.chat_template, encoding="utf-8")
        remove_paths(place)
        return expected

    def _write_whole(self, place: Path, logits: torch.Tensor) -> torch.Tensor:
        """Write a model without adapters: merged in the dtypes of its base, trained as a whole in float32, as it is."""
        module, folder, is_merged = self.module, self.loaded.folder.path, self.settings.train == "lora"
        if is_merged:
            with foreign("the adapters cannot be merged"):
                module = module.merge_and_unload()
            if gap := difference(probe(module)[1], logits):
                raise ModelError(
                    "with the adapters merged into it, the model computes something else (its logits differ by "
                    f"{gap:.2g}): export the adapters without --merge"
                )
        with foreign("the model cannot be written"):
            if is_merged:
                _round(module, folder)
            _save(module, folder, place)
        dtype = str(module.dtype).removeprefix("torch.")
        _, rounded = probe(module.float())
        require_numbers(rounded, f"rounded to the {dtype} of its base, the merged model")
        return rounded

    def continue_text(self, prompt: str, tokens: int, temperature: float, seed: int) -> Iterator[str]:
        """Pieces of text that continue a prompt or, in a chat, answer it."""
        tokenizer, found, shown = self.loaded.tokenizer, [], ""
        ids = Encoder(tokenizer, self.settings.format == "chat").prompt(prompt)
        for token in stream(self.module, tokenizer, ids, tokens, temperature, seed):
            found.append(token)
            text = str(tokenizer.decode(found, skip_special_tokens=True))
            if text.startswith(shown) and not text.endswith("\ufffd"):  # else a character is not complete yet
                yield text[len(shown) :]
                shown = text
        yield str(tokenizer.decode(found, skip_special_tokens=True))[len(shown) :]

    def losses(self, rows: Rows) -> tuple[float, float]:
        """Loss over the targets of these rows, and that of the base model; the base's is nan without adapters."""
        loss = evaluate_rows(self.module, rows, self.settings.rows, len(rows))
        if self.settings.train == "full":
            return loss, math.nan
        with self.module.disable_adapter():
            return loss, evaluate_rows(self.module, rows, self.settings.rows, len(rows))

    def rows(self, data: Path | None, sample: Path) -> Rows:
        """Rows to evaluate on: of a file, else of the run's sample."""
        is_chat = self.settings.format == "chat"
        documents: Iterable[Document]
        if data is not None:
            documents = islice(
                joined(read_documents(select(data, splits=False).files, is_chat)), MAX_EVALUATED_DOCUMENTS
            )
        elif sample.exists():
            documents = parse_sample(read_sample(sample), self.settings)
        else:
            raise ModelError("this run has no held-out sample: give texts to evaluate on by --data")
        rows = rows_of(documents, Encoder(self.loaded.tokenizer, is_chat), self.settings)
        if not len(rows):
            raise ModelError(f"{data or sample} contains nothing to evaluate on")
        return rows


def load_fine_tuned(trained: TrainedModel, model: str | None, template: str = "") -> FineTuned:
    """Put a run's tensors into this machine's copy of the model."""
    settings, pins, model = _of_run(trained.manifest, model)
    loaded = load_model(model, settings, pins, "cpu", torch.float32, template=template)
    found = {name: each for name, each in loaded.module.named_parameters() if each.requires_grad}
    if {name: each.shape for name, each in found.items()} != {n: each.shape for n, each in trained.tensors.items()}:
        raise ModelError("this machine's model has other tensors: use the versions of transformers and peft of the run")
    with torch.no_grad():
        for name, parameter in found.items():
            parameter.copy_(trained.tensors[name])
    loaded.module.eval()
    on_hub = next((each for each in (loaded.folder.base, pins.base) if HUB_NAME.fullmatch(each)), "")
    return FineTuned(loaded, settings, on_hub, bool(template))


def fine_tuned_layout(manifest: Manifest, model: str | None) -> Layout:
    """Layout of what a run trains, by this machine's copy of the model."""
    settings, pins, model = _of_run(manifest, model)
    return trained_layout(model, settings, pins)


def _of_run(manifest: Manifest, model: str | None) -> tuple[HfSettings, ModelPins, str]:
    settings, pins = manifest.config.hf, manifest.model
    if settings is None or pins is None:
        raise ModelError(f"this run trains {manifest.config.task}: leave --model and NODE_MODEL out")
    if model is None:
        raise ModelError(f"the model of this run needs its base on this machine: give {pins.base} by --model")
    return settings, pins, model


def _name_base(path: Path, on_hub: str) -> None:
    """Write into the adapter's configuration where its base is. The path of a folder would mean nothing elsewhere."""
    fields, (name, _, revision) = json.loads(path.read_bytes()), on_hub.partition("@")
    fields["base_model_name_or_path"], fields["revision"] = name or NO_HUB, revision or None
    path.write_text(json.dumps(fields, indent=2) + "\n")


def _round(module: Any, folder: Path) -> None:
    """Give a merged model's tensors the dtypes that they have in the files of its base."""
    dtypes: dict[str, torch.dtype] = {}
    sizes: Counter[torch.dtype] = Counter()
    for file in weight_files(folder):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                part = opened.get_slice(name)
                if dtype := _DTYPES.get(part.get_dtype()):
                    dtypes[name] = dtype
                    sizes[dtype] += math.prod(part.get_shape())
    most = sizes.most_common(1)[0][0]  # for tensors that have other names in the module, such as experts
    for name, tensor in module.state_dict(keep_vars=True).items():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtypes.get(name, most))


def _save(module: Any, folder: Path, place: Path) -> None:
    module.config.use_cache = True
    if (folder / "generation_config.json").is_file():  # copied below: transformers writes fewer than it reads
        module.generation_config = type(module.generation_config)()
    module.save_pretrained(place)
    for name in TOKENIZER_FILES:
        if (file := folder / name).is_file():
            shutil.copyfile(file, place / name)
    if (folder / TEMPLATES).is_dir():
        shutil.copytree(folder / TEMPLATES, place / TEMPLATES)


def remove_paths(place: Path) -> None:
    """Remove from all configurations where their files were, on this machine or on that of the base's author."""
    for file in place.glob("*config*.json"):
        fields = json.loads(file.read_text(encoding="utf-8"))
        if (kept := _without_paths(fields)) != fields:
            file.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _without_paths(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {
        key: _without_paths(each)
        for key, each in value.items()
        if key not in _PATHS and not (isinstance(each, str) and _ABSOLUTE.match(each))
    }


_OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]")
"""Control characters of a terminal, except tab and newline."""


def write(
    model: TrainedModel,
    prompt: bytes,
    tokens: int,
    temperature: float,
    seed: int,
    base: str | None = None,
    template: str = "",
) -> Iterator[str]:
    """Continue a prompt by `tokens` bytes or tokens: the likeliest at temperature 0, otherwise drawn with a seed."""
    gpt = model.manifest.config.gpt
    if not prompt:
        raise ModelError("the prompt is empty: give the beginning of a text")
    if model.manifest.config.hf:
        tuned = load_fine_tuned(model, base, template)
        yield from map(harmless, tuned.continue_text(prompt.decode(errors="replace"), tokens, temperature, seed))
        return
    if gpt is None:
        task = model.manifest.config.task
        raise ModelError(f"this run trains {task}, which generates no text: only gpt and hf do")
    module = Gpt(gpt.shape)
    module.load_state_dict(dict(model.tensors))
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for byte in module.stream(prompt, tokens, temperature, seed):
        yield harmless(decoder.decode(bytes([byte])))
    yield harmless(decoder.decode(b"", final=True))


def harmless(text: str) -> str:
    """Replace all control characters of a terminal."""
    return _OBEYED.sub("\ufffd", text)
