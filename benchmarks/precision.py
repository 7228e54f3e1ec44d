"""Held-out loss after training in float32, bfloat16 and float16, with equal weights and data.

    python -m benchmarks.precision [--preset w64] [--steps 500] [--seeds 3]

One peer without rounds, on one thread. Prints the table of RESULTS.md; the last column is of the scale in float16.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import mean

import torch

from node.tasks.gpt import GptTask
from node.tasks.gpt_presets import preset
from node.tasks.text import Text, load
from node.training.task_learner import TaskLearner
from tests.sim.arguments import Parser, at_least_one

PRECISIONS = (None, torch.bfloat16, torch.float16)
BOUND = 0.005


def trained(name: str, precision: torch.dtype | None, seed: int, steps: int, text: Text) -> tuple[TaskLearner, int]:
    """The learner after these steps, and how many of them were skipped."""
    given = preset(name)
    recipe = replace(given.recipe, inner_steps=steps, rounds=1)
    learner = TaskLearner(GptTask(given, text, seed), recipe, seed=seed, autocast=precision)
    return learner, sum(not learner.step(0, step).tokens for step in range(steps))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser("python -m benchmarks.precision", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--preset", default="w64", help="default %(default)s")
    parser.add_argument("--steps", type=at_least_one, default=500, help="default %(default)s")
    parser.add_argument("--seeds", type=at_least_one, default=3, help="default %(default)s")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    text, worst = load(), 0.0
    print("| precision | held-out loss, each seed | against float32 | ms of a step | skipped; last scale |")
    print("|---|---|---|---|---|")
    exact: list[float] = []
    for precision in PRECISIONS:
        losses, skips, scales, began = list[float](), 0, list[str](), time.process_time()
        for seed in range(options.seeds):
            learner, skipped = trained(options.preset, precision, seed, options.steps, text)
            losses.append(learner.evaluate())
            skips += skipped
            scales += [f"{float(learner.loss_scale.state[0]):.0f}"] if learner.loss_scale else []
        exact = exact or losses
        changes = [one / other - 1 for one, other in zip(losses, exact, strict=True)]
        worst = max(worst, abs(mean(changes)))
        cells = (
            str(precision or torch.float32).removeprefix("torch."),
            ", ".join(f"{each:.4f}" for each in losses),
            f"{100 * mean(changes):+.2f} % ({100 * min(changes):+.2f} to {100 * max(changes):+.2f})",
            f"{1000 * (time.process_time() - began) / options.steps / options.seeds:.0f}",
            f"{skips}; {', '.join(scales) or '–'}",
        )
        print(f"| {' | '.join(cells)} |", flush=True)
    print(f"bound {BOUND:.1%}: {'held' if worst <= BOUND else 'BROKEN'}")
    return int(worst > BOUND)


if __name__ == "__main__":
    sys.exit(main())
