"""Check an export before it counts as done: a process of its own loads it, and computes what the run's model computes.

The logits are compared in float32. Where weights were rounded to the base's dtype, so were those that the expected
logits are computed with.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from node.export import load_again
from node.runtime.child_process import ChildProcess
from node.tasks.hf.settings import ModelError

TEXT = "The quick brown fox, naïvely: 1234567890\n\tdef f(x):\n        return x ** 2  # ≠ 你好"
PROBE_TOKENS = 16
START_SECONDS, BYTES_PER_SECOND = 180.0, 10e6
"""How long the process may take: to import the libraries, and to read the weights from a slow disk."""
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True, slots=True)
class Expected:
    """What an export must load as: a model with these logits, or plain tensors."""

    logits: torch.Tensor | None = None  # of `probe_ids`, in float32; None for a module whose code is not known
    ids: torch.Tensor | None = None
    tokens: Sequence[int] = ()  # of `TEXT`; empty if the export has no tokenizer
    base: Path | None = None  # folder of an adapter's base
    tensors: Mapping[str, str] = field(default_factory=dict)  # digests by name, where there are no logits

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> Expected:
        return cls(tensors={name: load_again.digest(each) for name, each in tensors.items()})


def probe_ids(vocabulary: int, longest: int | None) -> torch.Tensor:
    """Tokens from all parts of the vocabulary, of shape (1, up to 16)."""
    return torch.arange(11, 11 + 7919 * min(PROBE_TOKENS, longest or PROBE_TOKENS), 7919)[None] % vocabulary


@torch.no_grad()
def probe(module: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, and a transformers model's logits for them."""
    vocabulary = module.get_input_embeddings().num_embeddings
    ids = probe_ids(vocabulary, getattr(module.config, "max_position_embeddings", None))
    return ids, module(input_ids=ids, use_cache=False).logits.float()


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference of logits; 0 if they are equal but for the arithmetic's rounding in float32."""
    gap, scale = float((found - wanted).abs().max()), max(1.0, float(wanted.abs().max()))
    return 0.0 if gap <= load_again.TOLERANCE * scale else gap


def require_numbers(logits: torch.Tensor, what: str) -> None:
    if not logits.isfinite().all():
        raise ModelError(f"{what} computes NaN or infinity, so that it is of no use")


def why_unchecked(expected: Expected) -> str:
    """Why this export cannot be checked; empty if it can."""
    if expected.logits is not None and importlib.util.find_spec("transformers") is None:
        return "transformers is not installed"
    return ""


def require_loading(folder: Path, expected: Expected) -> None:
    """Check that an export loads as it should."""
    if found := problems([(folder, expected)])[0]:
        raise ModelError(
            f"the export was loaded again, and {found}: it was removed; try other versions of transformers and peft"
        )


def problems(exports: Sequence[tuple[Path, Expected]]) -> list[str]:
    """What is wrong with each of these exports; empty where nothing is. One process loads them one after the other."""
    with tempfile.TemporaryDirectory(prefix="starling-check-") as place:
        jobs = [write_job(Path(place), number, *each) for number, each in enumerate(exports)]
        size = sum(_size(folder) + (_size(each.base) if each.base else 0) for folder, each in exports)
        lines = asyncio.run(_answers(jobs, START_SECONDS + size / BYTES_PER_SECOND))
    return [str(json.loads(each)["problem"]) for each in lines]


def write_job(place: Path, number: int, folder: Path, expected: Expected) -> Path:
    """Write what to check. The folders are known by other paths there, as on another machine."""
    fields: dict[str, Any] = {"folder": str(_linked(place / f"export-{number}", folder)), "base": ""}
    if expected.logits is None or expected.ids is None:
        fields["tensors"] = dict(expected.tensors)
    else:
        logits = place / f"logits-{number}.safetensors"
        save_file({"ids": expected.ids, "logits": expected.logits.contiguous()}, logits)
        fields |= {"expected": str(logits), "tokens": list(expected.tokens), "text": TEXT if expected.tokens else ""}
        if expected.base:
            fields["base"] = str(_linked(place / f"base-{number}", expected.base))
    job = place / f"job-{number}.json"
    job.write_text(json.dumps(fields), encoding="utf-8")
    return job


def _linked(link: Path, folder: Path) -> Path:
    link.symlink_to(folder.resolve(), target_is_directory=True)
    return link


def _size(folder: Path) -> int:
    return sum(each.stat().st_size for each in folder.glob("*.safetensors"))


async def _answers(jobs: Sequence[Path], seconds: float) -> list[str]:
    lines: list[str] = []

    def heard(line: str | None) -> None:
        if line and line.startswith('{"problem": '):
            lines.append(line)

    command = [sys.executable, "-P", load_again.__file__, *map(str, jobs)]
    child = await ChildProcess.start("loading the export again", command, heard, _ENVIRONMENT)
    try:
        async with asyncio.timeout(seconds):
            ended = await child.ended()
    except TimeoutError:
        raise ModelError(
            f"loading the export again has not ended after {seconds:.0f} s, so it was removed: try again on an idle "
            "machine, or write it without the check by --no-check"
        ) from None
    finally:
        killed = child.is_killed
        await child.kill()
    if killed:
        raise ModelError(
            "the process that loads the export again was killed, probably because memory ran out, so the export was "
            "removed: free memory, or write it without the check by --no-check"
        )
    if len(lines) != len(jobs):
        raise ModelError(f"loading the export again failed ({ended}), so it was removed")
    return lines
