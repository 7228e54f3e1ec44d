"""The model of a run of the task hf: its tensors put back into this machine's copy of the model.

It needs that copy: of adapters for the weights that the run never trained, of a whole model for its configuration and
its tokenizer. Both are checked against the run's manifest.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from node.config.manifest import Manifest
from node.export.trained_model import TrainedError, TrainedModel
from node.tasks.hf.chat import Encoder
from node.tasks.hf.corpus import Document, data_files, read_documents
from node.tasks.hf.model import LoadedModel, load_model, trained_layout
from node.tasks.hf.rows import Rows, rows_of
from node.tasks.hf.settings import HfSettings, ModelError, ModelPins
from node.tasks.hf.source import TOKENIZER_FILES
from node.tasks.hf.task import evaluate_rows, parse_sample, prompt_ids, read_sample, stream
from protocols.base import Layout

MAX_EVALUATED_DOCUMENTS = 10_000


@dataclass(frozen=True, slots=True)
class FineTuned:
    """A trained model that can be used.

    Attributes:
        module: on the CPU, float32, in eval mode.
    """

    loaded: LoadedModel
    settings: HfSettings

    @property
    def module(self) -> Any:
        return self.loaded.module

    def write(self, place: Path, merge: bool) -> None:
        """Write the model, or its adapters, as files that transformers or peft load."""
        module = self.module
        if self.settings.train == "lora" and not merge:
            module.save_pretrained(place)
            (place / "README.md").unlink(missing_ok=True)
            _name_base(place / "adapter_config.json", self.loaded)
            return
        if self.settings.train == "lora":
            module = module.merge_and_unload()
        module.config.use_cache = True
        module.save_pretrained(place)
        for name in TOKENIZER_FILES:
            if (file := self.loaded.folder.path / name).is_file():
                shutil.copyfile(file, place / name)

    def continue_text(self, prompt: str, tokens: int, temperature: float, seed: int) -> Iterator[str]:
        """Pieces of text that continue a prompt or, in a chat, answer it.

        Raises:
            ValueError: the prompt is empty.
        """
        tokenizer, found, shown = self.loaded.tokenizer, [], ""
        ids = prompt_ids(tokenizer, prompt, self.settings.format == "chat")
        for token in stream(self.module, tokenizer, ids, tokens, temperature, seed):
            found.append(token)
            text = str(tokenizer.decode(found, skip_special_tokens=True))
            if text.startswith(shown) and not text.endswith("\ufffd"):  # else a character is not complete yet
                yield text[len(shown) :]
                shown = text
        yield str(tokenizer.decode(found, skip_special_tokens=True))[len(shown) :]

    def losses(self, rows: Rows) -> tuple[float, float]:
        """Loss over the targets of these rows, and that of the base model; the base's is nan if it is not here."""
        loss = evaluate_rows(self.module, rows, self.settings.rows, len(rows))
        if self.settings.train == "full":
            return loss, math.nan
        with self.module.disable_adapter():
            return loss, evaluate_rows(self.module, rows, self.settings.rows, len(rows))

    def rows(self, data: Path | None, sample: Path) -> Rows:
        """Rows to evaluate on: of a file, else of the run's sample.

        Raises:
            ModelError: there are none.
        """
        encoder = Encoder(self.loaded.tokenizer, self.settings.format == "chat")
        if data is None and not sample.exists():
            raise ModelError("this run has no held-out sample: give texts to evaluate on by --data")
        documents = parse_sample(read_sample(sample), self.settings) if data is None else _first(data, self.settings)
        rows = rows_of(documents, encoder, self.settings)
        if not len(rows):
            raise ModelError(f"{data or sample} contains nothing to evaluate on")
        return rows


def load_fine_tuned(trained: TrainedModel, model: str | None) -> FineTuned:
    """Put a run's tensors into this machine's copy of the model.

    Raises:
        TrainedError: the run's task is another, no copy is named, or it is not that of the run.
    """
    settings, pins, model = _of_run(trained.manifest, model)
    try:
        loaded = load_model(model, settings, pins, "cpu", torch.float32)
    except ModelError as error:
        raise TrainedError(str(error)) from None
    found = {name: each for name, each in loaded.module.named_parameters() if each.requires_grad}
    if {name: each.shape for name, each in found.items()} != {n: each.shape for n, each in trained.tensors.items()}:
        raise TrainedError("here the model has other tensors: use the versions of transformers and peft of the run")
    with torch.no_grad():
        for name, parameter in found.items():
            parameter.copy_(trained.tensors[name])
    loaded.module.eval()
    return FineTuned(loaded, settings)


def fine_tuned_layout(manifest: Manifest, model: str | None) -> Layout:
    """Layout of what a run trains, by this machine's copy of the model.

    Raises:
        TrainedError: no copy is named, or its configuration is not that of the run.
    """
    settings, pins, model = _of_run(manifest, model)
    try:
        return trained_layout(model, settings, pins)
    except ModelError as error:
        raise TrainedError(str(error)) from None


def _of_run(manifest: Manifest, model: str | None) -> tuple[HfSettings, ModelPins, str]:
    settings, pins = manifest.config.hf, manifest.model
    if settings is None or pins is None:
        raise TrainedError(f"this run trains {manifest.config.task}: leave --model and NODE_MODEL out")
    if model is None:
        raise TrainedError(f"the model of this run needs its base on this machine: give {pins.base} by --model")
    return settings, pins, model


def _first(data: Path, settings: HfSettings) -> list[Document]:
    return [
        document
        for _, document in zip(
            range(MAX_EVALUATED_DOCUMENTS), read_documents(data_files(data), settings.format == "chat"), strict=False
        )
    ]


def _name_base(path: Path, loaded: LoadedModel) -> None:
    """Write into the adapter's configuration where its base is: on the hub, or on this machine."""
    fields = json.loads(path.read_bytes())
    base = loaded.folder.base
    name, _, revision = base.rpartition("@") if "/" in base else ("", "", "")  # a folder's name has no slash
    fields["base_model_name_or_path"] = name or str(loaded.folder.path.resolve())
    fields["revision"] = revision or None
    path.write_text(json.dumps(fields, indent=2) + "\n")
