"""A model of Hugging Face, fine-tuned by two peers that average every H steps, and by one peer with twice the rows.

    python -m benchmarks.fine_tuning --model DIR --data PATH [--train full] [--seeds 0:3] [--rounds 6] [--json FILE]

With `--train lora` adapters are trained, with `--train full` the whole model. Both arms see the same number of tokens.
The rounds are those of DiLoCo, in one process and without a network: the mean of the pseudo-gradients, and the outer
step of the recipe. It prints the held-out losses before and after, and by how much the two peers are behind.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from node.config.run_config import load_run
from node.outer.state import OuterSGD, pseudo_gradient
from node.tasks.hf.settings import HfMachine, HfSettings, HfValues
from node.tasks.recipe import Recipe
from node.tasks.spec import WorkerSpec
from node.training.build import build
from node.training.trainer import Learner

Train = Literal["lora", "full"]
LEARNING_RATES: dict[Train, float] = {"lora": 2e-3, "full": 5e-4}


def learner_of(model: str, data: Path, settings: HfSettings, recipe: Recipe, seeds: tuple[int, int]) -> Learner:
    """A learner on the model or its adapters.

    Args:
        seeds: of the initial adapters, and of the stream.
    """
    values = HfValues(settings, HfMachine(model))
    spec = WorkerSpec(values, recipe, seeds[1], seeds[0], data, device="cpu", threads=1)
    return build(spec, torch.empty, False).learner


def trained_alone(learner: Learner, recipe: Recipe) -> float:
    """Held-out loss after all steps, one after the other."""
    for number in range(recipe.rounds):
        for step in range(recipe.inner_steps):
            learner.step(number, step)
    return learner.evaluate()


def trained_together(learners: list[Learner], recipe: Recipe) -> float:
    """Held-out loss of the outer parameters after all rounds."""
    outer = OuterSGD(recipe.outer_learning_rate, recipe.outer_momentum)
    anchor = learners[0].vector.clone()
    velocity, delta = torch.zeros_like(anchor), torch.empty_like(anchor)
    for number in range(recipe.rounds):
        mean = torch.zeros_like(anchor)
        for learner in learners:
            learner.vector.copy_(anchor)
            for step in range(recipe.inner_steps):
                learner.step(number, step)
            pseudo_gradient(anchor, learner.vector, delta)
            mean.add_(delta, alpha=1 / len(learners))
        outer.step(anchor, velocity, mean)
    learners[0].vector.copy_(anchor)
    return learners[0].evaluate()


def compare(model: str, data: Path, train: Train, seed: int, rounds: int, inner_steps: int) -> dict[str, float]:
    """One seed of the comparison."""
    settings = HfSettings(train, lora_rank=8, lora_alpha=16, context=128, rows=4)
    recipe = load_run(None, {"task": "hf"}, ["butterfly"]).recipe
    recipe = replace(recipe, inner_steps=inner_steps, rounds=rounds, learning_rate=LEARNING_RATES[train])
    alone = learner_of(model, data, settings, replace(recipe, batches=2), (seed, 100 * seed))
    before = alone.evaluate()
    peers = [learner_of(model, data, settings, recipe, (seed, 100 * seed + index)) for index in (1, 2)]
    one, two = trained_alone(alone, recipe), trained_together(peers, recipe)
    return {"seed": seed, "before": before, "one_peer": one, "two_peers": two, "behind": two / one - 1}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fine_tuning", description="Two peers against one.")
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--train", choices=[*LEARNING_RATES], default="lora")
    parser.add_argument("--seeds", default="0:3", metavar="FROM:TO")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--inner-steps", type=int, default=50)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    low, high = map(int, given.seeds.split(":"))
    every = json.loads(given.json.read_text()) if given.json and given.json.exists() else {}
    results = every[given.train] = []
    for seed in range(low, high):
        results.append(compare(given.model, given.data, given.train, seed, given.rounds, given.inner_steps))
        print("  ".join(f"{name} {value:.4f}" for name, value in results[-1].items()), flush=True)
        if given.json:
            given.json.write_text(json.dumps(every) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
