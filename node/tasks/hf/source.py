"""Find a model's folder: a path on this machine, or a repository on the hub, whose files are downloaded.

Digests of its weights, configuration and tokenizer tell peers that theirs are the same. Only safetensors, configuration
and tokenizer are ever read: no pickles, and no code that comes with a model.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from node.runtime.directories import cache_directory, cached_file
from node.runtime.notes import note, warn
from node.runtime.proxies import download_remedy
from node.tasks.hf.settings import ModelError, foreign

MODEL_TYPES = (
    *("cohere", "cohere2", "falcon", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "granite", "helium"),
    *("llama", "ministral", "mistral", "mixtral", "olmo", "olmo2", "olmo3", "olmoe", "phi", "phi3"),
    *("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "stablelm", "starcoder2"),
)
"""Language models that transformers contains. What trains with others was not considered."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
                   "added_tokens.json", "chat_template.jinja", "chat_template.json", "vocab.json", "vocab.txt",
                   "merges.txt", "generation_config.json")  # fmt: skip
TEMPLATES = "additional_chat_templates"  # folder of further chat templates, by name
PATTERNS = (
    *("model*.safetensors", "model.safetensors.index.json", "config.json", f"{TEMPLATES}/*.jinja"),
    *TOKENIZER_FILES,
)
"""What is downloaded. Repositories also hold the weights in other forms, such as consolidated.safetensors."""
KERNELS = ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")
"""Of config.json: they choose how a model is computed, and may name code on the hub. The choice is transformers'."""
PIECE_BYTES = 256 << 10
_MAX_HEADER_BYTES = 100 << 20
_IGNORED = frozenset({"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", *KERNELS})
"""Of config.json: where it came from and how it is run, not what the model computes."""
PROBE = "The quick brown fox, naïvely: 1234567890 + 0.5%\n\tdef f(x):\n        return x ** 2  # ≠ ∑ 你好 🙂 <s></s>"
"""Tokenised for the digest: another version of a library may read the same files in another way."""
_MAX_JSON_BYTES = 64 << 20
_COMMIT = re.compile("[0-9a-f]{40}")
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+(@[\w./-]+)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model's files on this machine. `base` says to other people where they came from."""

    path: Path
    base: str
    config: dict[str, Any]


def find_model(model: str, weights: bool = True) -> ModelFolder:
    """The folder of a model, which is downloaded if `model` names a repository on the hub."""
    path = Path(model).expanduser()
    if path.is_dir():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        base = "".join(each for each in path.resolve().name if each.isascii() and each.isprintable())[:100] or "model"
        return ModelFolder(path, base, read_config(path, weights))
    if model.startswith((".", "/", "~")) or not HUB_NAME.fullmatch(model):
        raise ModelError(f"there is no folder {model[:200]!r}: give a model's folder, or ORG/NAME@REVISION on the hub")
    path, revision = _download(model, weights)
    return ModelFolder(path, f"{model.partition('@')[0]}@{revision}", read_config(path, weights))


def _download(model: str, weights: bool) -> tuple[Path, str]:
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    cache_directory()  # before the hub's library looks for its own
    import huggingface_hub
    from huggingface_hub.utils import disable_progress_bars

    name, _, revision = model.partition("@")
    patterns = [each for each in PATTERNS if weights or "safetensors" not in each]
    disable_progress_bars()
    try:
        remedy = f"{download_remedy()}; download it, and give its folder"
        with foreign(f"{model} cannot be fetched from the hub", remedy):
            place = _from_hub(name, revision or None, patterns)
    except ModelError as error:
        place = Path()  # what an earlier download has left, so that a peer starts again while the hub is away
        with suppress(ModelError), foreign(name):
            kept = huggingface_hub.snapshot_download(
                name, revision=revision or None, allow_patterns=patterns, local_files_only=True, token=False
            )
            place = Path(kept)
        if not _COMMIT.fullmatch(place.name):
            raise
        warn(f"{error}; the copy in this machine's cache is used")
    huggingface_hub.constants.HF_HUB_OFFLINE = True
    return place, place.name


def _from_hub(name: str, revision: str | None, patterns: list[str]) -> Path:
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    about = huggingface_hub.HfApi(token=False).model_info(name, revision=revision, files_metadata=True)
    commit = about.sha or ""
    if not _COMMIT.fullmatch(commit):
        raise ModelError(f"{name}: the hub names no commit: download the model, and give its folder")
    wanted = filter_repo_objects(about.siblings or [], allow_patterns=patterns, key=lambda each: each.rfilename)
    size = sum(each.size or 0 for each in wanted)
    note(f"{name}@{commit}: {size / 1e9:.2f} GB to have on this machine")
    return Path(huggingface_hub.snapshot_download(name, revision=commit, allow_patterns=patterns, token=False))


def read_config(path: Path, weights: bool = True) -> dict[str, Any]:
    """The content of a model's config.json, after checking that such a model can be trained."""
    if (path / "adapter_config.json").exists():  # transformers would load it with the model, and no digest knows it
        what = "has an adapter beside the model" if (path / "config.json").exists() else "is an adapter"
        raise ModelError(f"{path} {what}: give the folder of its base, or of one made by export --merge")
    config = read_json(path / "config.json")
    if "transformers_weights" in config:
        raise ModelError(f"{path / 'config.json'} names other files of weights (transformers_weights): take them out")
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
    whole, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if whole.exists() or not index.exists():  # of the two, transformers loads the first
        return [whole] if whole.exists() else []
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict):
        raise ModelError(f"{index} is damaged: download the model again")
    if not all(re.fullmatch(r"[\w.-]+\.safetensors", str(each), re.ASCII) for each in names.values()):
        raise ModelError(f"{index} names files that are not safetensors beside it")
    return [path / name for name in sorted(set(names.values()))]


def read_json(path: Path) -> dict[str, Any]:
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


def config_digest(config: Mapping[str, Any]) -> str:
    return _digest({key: value for key, value in config.items() if key not in _IGNORED})


def tokenizer_digest(path: Path, tokenizer: Any) -> str:
    """Digest of the tokenizer's file, of the tokens added to it, and of those that it makes of a fixed text."""
    file = path / "tokenizer.json"
    content = read_json(file) if file.exists() else json.loads(tokenizer.backend_tokenizer.to_str())
    specials = {str(name): str(token) for name, token in tokenizer.special_tokens_map.items()}
    added = sorted(tokenizer.get_added_vocab().items())
    return _digest([content, specials, added, tokenizer(PROBE)["input_ids"]])


def template_digest(tokenizer: Any) -> str:
    return _digest(tokenizer.chat_template)


def weights_digest(path: Path) -> str:
    """Digest of all tensors of a model, the same however they are divided into files. Cached by the files' states."""
    files = weight_files(path)
    try:
        cached = cache_directory() / f"{_digest(list(map(file_state, files)))}.weights"
        if cached.exists() and re.fullmatch(b"[0-9a-f]{64}", known := cached.read_bytes()):
            return known.decode()
        found = sorted(entry for file in files for entry in _entries(file))
    except OSError as error:
        raise ModelError(f"{error.filename or path} cannot be read ({error.strerror}): download it again") from None
    if len({name for name, *_ in found}) < len(found):
        raise ModelError(f"{path} has a tensor twice, in two files: download it again")
    digest = _digest(found)
    with suppress(OSError):  # it is computed again then
        cached_file(cached.name, lambda file: file.write(digest.encode()))
    return digest


def file_state(path: Path) -> tuple[str, int, int, int]:
    """What changes when a file's content does. A copy may keep the time of modification, but not that of the inode."""
    state = path.stat()
    return str(path.resolve()), state.st_size, state.st_mtime_ns, state.st_ctime_ns


def weights_size(path: Path) -> int:
    return sum(each.stat().st_size for each in weight_files(path) if each.exists())


def _entries(path: Path) -> list[tuple[str, str, list[int], str]]:
    """(name, dtype, shape, digest of the bytes) of each tensor of a file."""
    with path.open("rb", buffering=0) as file:
        length = int.from_bytes(file.read(8), "little")
        damaged = ModelError(f"{path} is damaged: download it again")
        if not 2 <= length <= _MAX_HEADER_BYTES:
            raise damaged
        try:
            fields = json.loads(file.read(length))
            fields.pop("__metadata__", None)
            size, tensors = os.fstat(file.fileno()).st_size, []
            for name, each in fields.items():
                first, last = map(int, each["data_offsets"])
                if not 0 <= first <= last <= size:
                    raise damaged
                tensors.append((str(name), str(each["dtype"]), list(map(int, each["shape"])), first, last))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
            raise damaged from None
        buffer, found = memoryview(bytearray(PIECE_BYTES)), []
        for name, dtype, shape, first, last in tensors:
            file.seek(8 + length + first)
            hashed, left = hashlib.sha256(), last - first
            while left > 0:
                count = file.readinto(buffer[: min(left, PIECE_BYTES)])
                if not count:
                    raise damaged
                hashed.update(buffer[:count])
                left -= count
            found.append((name, dtype, shape, hashed.hexdigest()))
        return found


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
