"""What a step costs with Muon and with torch's own, beside AdamW: processor time of the presets' steps.

They take turns on one thread.

    python -m benchmarks.inner_optimizers [--steps N]

For a CPU without AVX-512, set `ATEN_CPU_CAPABILITY=avx2` and `ONEDNN_MAX_CPU_ISA=AVX2`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from statistics import median
from unittest import mock

import torch

from node.tasks.gpt import GptTask
from node.tasks.gpt_presets import preset
from node.tasks.text import Text, load
from node.training import inner_optimizer
from node.training.muon import fast_dtype
from node.training.task_learner import TaskLearner
from tests.sim.arguments import Parser, at_least_one

OPTIMIZERS = ("AdamW", "Muon", "torch's Muon")
WARM_UP = 2


def _torchs_muon(parameters: Sequence[torch.nn.Parameter], rate: float, weight_decay: float) -> torch.optim.Optimizer:
    return torch.optim.Muon(parameters, rate, weight_decay, adjust_lr_fn="match_rms_adamw")


def learner(name: str, optimizer: str, text: Text) -> TaskLearner:
    """A learner of a preset with one of `OPTIMIZERS`."""
    given = preset(name)
    recipe = replace(given.recipe, inner_optimizer="adamw" if optimizer == "AdamW" else "muon")
    theirs = mock.patch.object(inner_optimizer, "Muon", _torchs_muon) if optimizer == OPTIMIZERS[-1] else nullcontext()
    with theirs:
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
    print(f"| preset | {' | '.join(OPTIMIZERS)} |\n|---|{'---|' * len(OPTIMIZERS)}")
    for name in ("w64", "w128", "w256"):
        took = milliseconds(name, options.steps, text)
        cells = [f"{took[0]:.0f} ms", *(f"{each:.0f} ms, {each / took[0]:.2f} x" for each in took[1:])]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
