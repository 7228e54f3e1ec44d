"""Find a model's folder: a path on this machine, or a repository on the hub, whose files are downloaded.

Only safetensors, configuration and tokenizer are ever read: no pickles, and no code that comes with a model.
"""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from node.tasks.hf.settings import ModelError

MODEL_TYPES = (
    *("cohere", "cohere2", "falcon", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "granite", "helium"),
    *("llama", "ministral", "mistral", "mixtral", "olmo", "olmo2", "olmo3", "olmoe", "phi", "phi3"),
    *("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "stablelm", "starcoder2"),
)
"""Language models that transformers contains. What trains with others was not considered."""
PATTERNS = ("*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "tokenizer*",
            "special_tokens_map.json", "chat_template*", "vocab.*", "merges.txt")  # fmt: skip
_MAX_JSON_BYTES = 64 << 20
_HUB = re.compile(r"[\w-][\w.-]*/[\w.-]+(@[\w./-]+)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model's files on this machine.

    Attributes:
        base: where they came from, for other people.
        config: the content of config.json.
    """

    path: Path
    base: str
    config: dict[str, Any]


def find_model(model: str, weights: bool = True) -> ModelFolder:
    """The folder of a model, which is downloaded if `model` names a repository on the hub.

    Args:
        weights: whether the model's weights are needed, besides its configuration and tokenizer.

    Raises:
        ModelError: there is none, or it is not of a kind that can be trained.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        base = "".join(each for each in path.resolve().name if each.isascii() and each.isprintable())[:100] or "model"
        return ModelFolder(path, base, read_config(path, weights))
    if model.startswith((".", "/", "~")) or not _HUB.fullmatch(model):
        raise ModelError(f"there is no folder {model[:200]!r}: give a model's folder, or ORG/NAME@REVISION on the hub")
    path, revision = _download(model, weights)
    return ModelFolder(path, f"{model.partition('@')[0]}@{revision}", read_config(path, weights))


def _download(model: str, weights: bool) -> tuple[Path, str]:
    """The local folder of a repository at a revision, and that revision as a commit."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    from huggingface_hub.utils import disable_progress_bars, filter_repo_objects  # type: ignore[attr-defined]

    name, _, revision = model.partition("@")
    patterns = [each for each in PATTERNS if weights or "safetensors" not in each]
    disable_progress_bars()
    try:
        about = huggingface_hub.HfApi(token=False).model_info(name, revision=revision or None, files_metadata=True)
        commit = about.sha or ""
        wanted = filter_repo_objects(about.siblings or [], allow_patterns=patterns, key=lambda each: each.rfilename)
        size = sum(each.size or 0 for each in wanted)
        print(f"{name}@{commit}: {size / 1e9:.2f} GB to have on this machine", file=sys.stderr, flush=True)
        place = huggingface_hub.snapshot_download(name, revision=commit, allow_patterns=patterns, token=False)
    except (HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
        why = " ".join(str(error).split())[:200]
        raise ModelError(f"{model} cannot be fetched from the hub: {why}; download it, and give its folder") from None
    if not re.fullmatch("[0-9a-f]{40}", commit):
        raise ModelError(f"{model}: the hub names no commit: download the model, and give its folder")
    huggingface_hub.constants.HF_HUB_OFFLINE = True
    return Path(place), commit


def read_config(path: Path, weights: bool = True) -> dict[str, Any]:
    """The content of a model's config.json, after checking that such a model can be trained.

    Raises:
        ModelError: it cannot.
    """
    if not (path / "config.json").exists() and (path / "adapter_config.json").exists():
        raise ModelError(f"{path} is an adapter: give the folder of its base, or of one made by export --merge")
    config = read_json(path / "config.json")
    for name in ("config.json", "tokenizer_config.json"):
        if (path / name).exists() and "auto_map" in read_json(path / name):
            raise ModelError(f"{path / name} names code of its own (auto_map), which is never run: take another model")
    kind = str(config.get("model_type"))
    if kind not in MODEL_TYPES:
        raise ModelError(f"{path} is of type {kind[:60]!a}: known are {', '.join(MODEL_TYPES)}")
    if config.get("quantization_config"):
        raise ModelError(f"{path} is quantised: take the version that is not")
    if weights and not weight_files(path):
        other = " (only pickles, which are never read)" if any(path.glob("*.bin")) else ""
        raise ModelError(f"{path} contains no safetensors{other}: convert the model, or take a version that has them")
    return config


def weight_files(path: Path) -> list[Path]:
    """The files that hold the model's tensors."""
    index = path / "model.safetensors.index.json"
    if index.exists():
        names = sorted({str(each) for each in read_json(index).get("weight_map", {}).values()})
        if not all(re.fullmatch(r"[\w.-]+\.safetensors", each, re.ASCII) for each in names):
            raise ModelError(f"{index} names files that are not safetensors beside it")
        return [path / name for name in names]
    return [each for each in [path / "model.safetensors"] if each.exists()]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object in a file.

    Raises:
        ModelError: there is none.
    """
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(_MAX_JSON_BYTES))
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}): is this the folder of a model?") from None
    except (ValueError, RecursionError):
        raise ModelError(f"{path} is not JSON: download the model again") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object: download the model again")
    return content
