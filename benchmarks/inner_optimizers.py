"""What a step costs with Muon, beside AdamW: processor time of the presets' steps, taken in turn on one thread.

    python -m benchmarks.inner_optimizers [--steps N]

For a CPU without AVX-512, set `ATEN_CPU_CAPABILITY=avx2` and `ONEDNN_MAX_CPU_ISA=AVX2`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import torch

from node.tasks.base import InnerOptimizerName
from node.tasks.gpt import GptTask, preset
from node.tasks.text import Text, load
from node.training.muon import fast_dtype
from node.training.task_learner import TaskLearner
from tests.sim.arguments import Parser, at_least_one

OPTIMIZERS: tuple[InnerOptimizerName, ...] = (None, "muon")
WARM_UP = 2


def learner(name: str, optimizer: InnerOptimizerName, text: Text) -> TaskLearner:
    given = preset(name)
    recipe = replace(given.recipe, inner_optimizer=optimizer)
    return TaskLearner(GptTask(replace(given, recipe=recipe), text), recipe, seed=1)


def milliseconds(name: str, steps: int, text: Text) -> list[float]:
    """Median processor time of a step with each of `OPTIMIZERS`."""
    learners = [learner(name, optimizer, text) for optimizer in OPTIMIZERS]
    took: list[list[float]] = [[] for _ in learners]
    for step in range(WARM_UP + steps):
        for one, found in zip(learners, took, strict=True):
            began = time.process_time()
            one.step(0, step)
            found.append(1000 * (time.process_time() - began))
    return [median(found[WARM_UP:]) for found in took]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser("python -m benchmarks.inner_optimizers", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=at_least_one, default=20, help="of each (default %(default)s)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    text = load()
    print(f"Muon iterates in {fast_dtype(torch.device('cpu'))}.\n")
    print("| preset | AdamW | Muon | ratio |\n|---|---|---|---|")
    for name in ("w64", "w128", "w256"):
        adamw, muon = milliseconds(name, options.steps, text)
        print(f"| {name} | {adamw:.0f} ms | {muon:.0f} ms | {muon / adamw:.2f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
