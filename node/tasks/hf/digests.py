"""Digests of a model's weights, configuration and tokenizer, by which peers know that theirs are the same."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from node.runtime.directories import cache_directory
from node.tasks.hf.settings import ModelError
from node.tasks.hf.source import KERNELS, read_json, weight_files

PIECE_BYTES = 256 << 10
_MAX_HEADER_BYTES = 100 << 20
_IGNORED = frozenset({"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", *KERNELS})
"""Of config.json: where it came from and how it is run, not what the model computes."""
PROBE = "The quick brown fox, naïvely: 1234567890 + 0.5%\n\tdef f(x):\n        return x ** 2  # ≠ ∑ 你好 🙂 <s></s>"
"""Tokenised for the digest: another version of a library may read the same files in another way."""


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
        _keep(cached, digest)
    return digest


def file_state(path: Path) -> tuple[str, int, int, int]:
    """What changes when a file's content does. A copy may keep the time of modification, but not that of the inode."""
    state = path.stat()
    return str(path.resolve()), state.st_size, state.st_mtime_ns, state.st_ctime_ns


def weights_size(path: Path) -> int:
    """Bytes of the files that hold a model's tensors."""
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
            tensors: list[tuple[str, str, list[int], int, int]] = [
                (str(name), str(each["dtype"]), list(map(int, each["shape"])), *_range(each["data_offsets"]))
                for name, each in fields.items()
                if name != "__metadata__"
            ]
            if not all(0 <= first <= last <= os.fstat(file.fileno()).st_size for *_, first, last in tensors):
                raise damaged
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


def _range(offsets: list[Any]) -> tuple[int, int]:
    first, last = offsets
    return int(first), int(last)


def _keep(path: Path, text: str) -> None:
    """Write a small file atomically: other peers on this machine may be writing it, too."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, fresh = tempfile.mkstemp(dir=path.parent)
    try:
        with open(descriptor, "w") as file:
            file.write(text)
        os.replace(fresh, path)
    except OSError:
        os.unlink(fresh)
        raise


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
