"""The founder's choice, if the user makes none: training waits for a mean, continues, or averages a part in each round.

It follows from the line that this machine declares, the model's size and the inner steps of a round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from node.config.run_config import MAX_ROUNDS, RunConfig
from node.tasks.gpt_stage import measure
from protocols.allreduce.plan import expected_seconds, shares
from protocols.vectors.codec import codec

MEMBERS = 4
"""Of the round that is expected, with lines like the founder's."""
VOTE_SECONDS = 0.5
SHORT, LONG, LONG_ADAMW = 0.05, 0.5, 0.1
"""Shares of a round that averaging takes. Below the first, waiting costs little; above the second, the mean of a
fragment is better, which is late by fewer steps (docs/decisions/0058-the-founder-chooses-overlap.md).
"""
FRAGMENTS, LEAST_STEPS, LEAST_SECONDS = 4, 20, 8.0
"""Shorter rounds are not cut: a fragment's round would be mostly votes."""


def choose_overlap(config: RunConfig, bytes_per_second: float, timer: Callable[[], float]) -> tuple[RunConfig, str]:
    """The configuration with a choice, and why, in one line; empty if there is nothing to choose.

    Times the model for a moment: call it outside the event loop.
    """
    recipe = config.recipe
    is_open = recipe.overlap is None and recipe.fragments is None and config.protocol == "butterfly"
    is_open &= config.stages == 1  # with stages, neither is possible
    if not is_open or not config.elements or not (step_seconds := _step_seconds(config, timer)):
        return config, ""
    size = codec(config.codec).encoded_bytes(config.elements)
    lines = [bytes_per_second] * MEMBERS
    mean_seconds = expected_seconds(shares(lines, [True] * MEMBERS), lines, size) + VOTE_SECONDS
    round_seconds = recipe.inner_steps * step_seconds
    what = (
        f"a mean of {size / 1e6:.1f} MB at {bytes_per_second / 1e6:.3g} MB/s is expected to take {mean_seconds:.1f} s, "
        f"{recipe.inner_steps} inner steps {round_seconds:.1f} s"
    )
    if mean_seconds < SHORT * round_seconds:
        return replace(config, recipe=replace(recipe, overlap="off")), f"{what}: training waits for it"
    is_long = recipe.inner_steps >= LEAST_STEPS and round_seconds >= LEAST_SECONDS
    may_cut = is_long and recipe.rounds <= MAX_ROUNDS // FRAGMENTS and config.elements >= FRAGMENTS
    most = LONG if recipe.inner_optimizer == "muon" else LONG_ADAMW
    if mean_seconds <= most * round_seconds or not may_cut:
        chosen = replace(recipe, overlap="keep")
        return replace(config, recipe=chosen), f'{what}: training continues meanwhile (recipe.overlap = "keep")'
    steps, rounds = -(-recipe.inner_steps // FRAGMENTS), recipe.rounds * FRAGMENTS
    chosen = replace(recipe, overlap="keep", fragments=FRAGMENTS, inner_steps=steps, rounds=rounds)
    return replace(config, recipe=chosen), (
        f"{what}: training continues meanwhile, and each round averages a quarter of the parameters, so there are "
        f'{rounds} rounds of {steps} inner steps (recipe.fragments = {FRAGMENTS}; recipe.overlap = "off" prevents it)'
    )


def _step_seconds(config: RunConfig, timer: Callable[[], float]) -> float:
    """About how long an inner step takes on this machine's CPU; 0 if that is not known before a task is loaded."""
    if config.paced:
        return config.paced.step_seconds
    if config.gpt is None:
        return 0.0
    return config.recipe.batches * sum(cost.backward_seconds for cost in measure(config.preset(), timer))
