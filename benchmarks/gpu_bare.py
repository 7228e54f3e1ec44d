"""The bare loop beside which `benchmarks.gpu` measures: the model of a worker's specification, without Starling.

    python -m benchmarks.gpu_bare

It reads lines and answers each by one of JSON. The first is a `WorkerSpec`, or `device DEVICE`, which only describes
the device. Each later one is a number of steps to take. Parameters are float32 tensors of their own, under autocast for
bfloat16; AdamW is torch's, fused; nothing waits for the device before the last step.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch

from benchmarks.gpu_worker import memory, synchronize
from node.tasks.base import Task, count_targets, trained
from node.tasks.checkpointing import checkpoint_blocks
from node.tasks.gpt import GptTask
from node.tasks.gpt_presets import Preset
from node.tasks.hf.settings import HfValues
from node.tasks.spec import GptValues, WorkerSpec
from node.tasks.text import load
from node.training.build import device_of

MATRIX = {"cuda": 8192, "cpu": 512}
_PRODUCTS = 10


def describe(device: str) -> dict[str, Any]:
    """What the device is, and how fast it multiplies matrices."""
    found: dict[str, Any] = {
        "name": "cpu",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "memory_bytes": None,
    }
    if device == "cuda":
        about = torch.cuda.get_device_properties(0)
        found |= {"name": about.name, "memory_bytes": about.total_memory, "capability": [about.major, about.minor]}
    for dtype in (torch.bfloat16, torch.float32):
        found[f"measured_{str(dtype).removeprefix('torch.')}_flops"] = multiplied(device, dtype)
    return found


def multiplied(device: str, dtype: torch.dtype) -> float:
    """Floating point operations per second, of the product of two square matrices of random numbers."""
    size = MATRIX[device]
    one, other = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    for _ in range(3):
        one @ other
    synchronize()
    began = time.perf_counter()
    for _ in range(_PRODUCTS):
        one @ other
    synchronize()
    return _PRODUCTS * 2 * size**3 / (time.perf_counter() - began)


def make(spec: WorkerSpec, device: str) -> Task:
    data = spec.given_data(False)
    if isinstance(spec.values, HfValues):
        from node.tasks.hf.task import make_task

        task = make_task(
            spec.values, data, held_out=spec.held_out, device=device, dtype=torch.float32,
            checkpointing=spec.checkpointing, seed=spec.stream_seed, step_batches=spec.recipe.batches,
        )  # fmt: skip
        task.module.train()
        return task
    assert isinstance(spec.values, GptValues)
    text = load(spec.data, spec.held_out, data)
    gpt = GptTask(Preset(spec.values.shape, spec.values.rows, spec.recipe), text, spec.weights_seed, device)
    if spec.checkpointing:
        checkpoint_blocks(gpt.module.model.layers.values())
    return gpt


class Loop:
    def __init__(self, spec: WorkerSpec) -> None:
        device = device_of(spec.device)
        self._task, self._spec, self._position, self._steps = make(spec, device), spec, 0, 0
        self._parameters = [parameter for _, parameter in trained(self._task)]
        recipe = spec.recipe
        self._adamw = torch.optim.AdamW(
            self._parameters, recipe.learning_rate, recipe.betas, weight_decay=recipe.weight_decay, fused=True
        )
        self._autocast = torch.autocast(device, torch.bfloat16, enabled=spec.precision == "bfloat16")

    def run(self, steps: int) -> dict[str, Any]:
        synchronize()
        began, tokens, losses = time.perf_counter(), 0, []
        for _ in range(steps):
            for _ in range(self._spec.recipe.batches):
                batch = self._task.batch(self._spec.stream_seed, self._position)
                self._position += 1
                with self._autocast:
                    loss = self._task.loss(*batch)
                (loss / self._spec.recipe.batches).backward()  # type: ignore[no-untyped-call]
                losses.append(loss.detach())
                tokens += count_targets(self._task, batch)
            torch.nn.utils.clip_grad_norm_(self._parameters, self._spec.recipe.clip_norm)
            for group in self._adamw.param_groups:
                group["lr"] = self._spec.recipe.rate(self._steps)
            self._adamw.step()
            self._adamw.zero_grad()
            self._steps += 1
        loss_value = float(torch.stack(losses).mean())
        synchronize()
        return {"tokens": tokens, "seconds": time.perf_counter() - began, "loss": loss_value, **memory()}


def main() -> int:
    first = sys.stdin.readline()
    if first.startswith("device "):
        print(json.dumps(describe(first.split()[1])), flush=True)
        return 0
    spec = WorkerSpec.from_json(first)
    torch.set_num_threads(spec.thread_count())
    loop = Loop(spec)
    print("{}", flush=True)
    for line in sys.stdin:
        print(json.dumps(loop.run(int(line))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
