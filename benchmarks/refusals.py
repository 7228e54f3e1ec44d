"""How long a peer takes to refuse another model than the run's, and how fast it hashes weights.

    python -m benchmarks.refusals [--passes 3] [--gigabytes 1]

A refusal is timed from the start of the worker process to its line. Each pass has an empty cache, so the weights are
hashed where that is needed: they are a few hundred kilobytes. Hashing is timed on another file, which the page cache
holds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from node.config.run_config import load_run
from node.runtime.compute import ThreadCompute
from node.tasks.hf.model import load_model
from node.tasks.hf.settings import HfMachine, HfSettings, HfValues
from node.tasks.hf.source import weights_digest
from node.tasks.spec import WorkerSpec
from node.training.remote import RemoteTrainer, WorkerError
from tests.support.small_models import CHAT_WITH_MARKS, conversations, write_model, write_tokenizer

SETTINGS = HfSettings(context=64, format="chat")


def changed(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


SPOILT: dict[str, Callable[[Path], object]] = {
    "weights": lambda folder: write_model(folder, seed=1),
    "tokenizer": lambda folder: write_tokenizer(folder, vocabulary=380),
    "template": lambda folder: write_tokenizer(folder, template=CHAT_WITH_MARKS),
    "config": lambda folder: changed(folder, rms_norm_eps=1e-5),
    "remote code": lambda folder: changed(folder, auto_map={"AutoModel": "evil.py"}),
    "pickle": lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
}


async def refusal(spec: WorkerSpec) -> tuple[float, str]:
    """Seconds until the worker refuses, and its line."""
    began = time.perf_counter()
    async with ThreadCompute() as compute:
        try:
            async with RemoteTrainer(spec, compute):
                raise SystemExit("the worker took another model")
        except WorkerError as error:
            return time.perf_counter() - began, str(error)


def refusals(home: Path, passes: int) -> dict[str, float]:
    """Median seconds of each kind of refusal."""
    base = write_model(home / "base")
    (home / "chat.jsonl").write_text(conversations(40))
    pins = load_model(str(base), SETTINGS, None, "cpu", torch.float32).pins
    found = {}
    for kind, spoil in SPOILT.items():
        folder, times = Path(shutil.copytree(base, home / kind)), []
        spoil(folder)
        values = HfValues(SETTINGS, HfMachine(str(folder)), pins)
        spec = WorkerSpec(values, load_run(None, {"task": "hf"}, ["butterfly"]).recipe, 1, data=home / "chat.jsonl")
        for _ in range(passes):
            shutil.rmtree(home / "cache", ignore_errors=True)
            seconds, line = asyncio.run(refusal(spec))
            times.append(seconds)
        found[kind] = median(times)
        print(f"{kind}: {found[kind]:.2f} s, {line}", flush=True)
    return found


def hashing(home: Path, gigabytes: float, passes: int) -> float:
    """Gigabytes that are hashed in a second of the clock."""
    import safetensors.torch

    home.mkdir()
    elements = int(gigabytes * 1e9) // 64
    tensors = {f"t{number}": torch.zeros(elements, dtype=torch.float32) + number for number in range(16)}
    safetensors.torch.save_file(tensors, home / "model.safetensors")
    del tensors
    times = []
    for _ in range(passes + 1):  # the first reads the disk
        shutil.rmtree(home.parent / "cache", ignore_errors=True)
        began = time.perf_counter()
        weights_digest(home)
        times.append(time.perf_counter() - began)
    return (home / "model.safetensors").stat().st_size / 1e9 / median(times[1:])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.refusals", description=__doc__)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        os.environ["XDG_CACHE_HOME"] = f"{place}/cache"
        refusals(Path(place), given.passes)
        print(f"hashing: {hashing(Path(place) / 'large', given.gigabytes, given.passes):.2f} GB/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
