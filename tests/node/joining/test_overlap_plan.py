"""The founder's choice of `recipe.overlap` and `recipe.fragments`, where the user makes none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from node.config.run_config import RunConfig, load_run
from node.joining.overlap_plan import choose_overlap
from protocols.registry import INDEPENDENT_PROTOCOLS, REPLICATED_PROTOCOLS

PACED = """
task = "paced"
[paced]
elements = 1_000_000
step_seconds = 0.2
[recipe]
inner_steps = 50
rounds = 20
inner_optimizer = "muon"
"""
"""With int8 a mean of four takes 1.5 MB of each line, a round 10 s."""


def config(tmp_path: Path, text: str) -> RunConfig:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return load_run(path, {}, (*REPLICATED_PROTOCOLS, *INDEPENDENT_PROTOCOLS))


@pytest.mark.parametrize(
    ("megabytes", "overlap", "fragments", "inner_steps", "rounds", "said"),
    [
        (1e3, "keep", None, 50, 20, "take 0.5 s, 50 inner steps 10.0 s: training continues meanwhile"),
        (0.4, "keep", None, 50, 20, "take 4.4 s, 50 inner steps 10.0 s: training continues meanwhile"),
        (0.2, "keep", 4, 13, 80, "so there are 80 rounds of 13 inner steps"),
    ],
)
def test_choice_follows_from_the_line_and_the_steps(
    tmp_path: Path, megabytes: float, overlap: str, fragments: int | None, inner_steps: int, rounds: int, said: str
) -> None:
    found, line = choose_overlap(config(tmp_path, PACED), megabytes * 1e6, lambda: 0.0)
    recipe = found.recipe
    assert (recipe.overlap, recipe.fragments, recipe.inner_steps, recipe.rounds) == (
        *(overlap, fragments, inner_steps, rounds),
    )
    assert said in line and "a mean of 1.0 MB" in line


def test_long_rounds_wait_for_a_short_mean(tmp_path: Path) -> None:
    found, line = choose_overlap(config(tmp_path, PACED.replace("= 50", "= 500")), 12.5e6, lambda: 0.0)
    assert not found.recipe.overlaps and line.endswith("training waits for it")


def test_late_means_of_adamw_are_of_fragments(tmp_path: Path) -> None:
    found, _ = choose_overlap(config(tmp_path, PACED.replace("muon", "adamw")), 0.4e6, lambda: 0.0)
    assert (found.recipe.overlap, found.recipe.fragments) == ("keep", 4)


def test_short_rounds_are_not_cut(tmp_path: Path) -> None:
    found, line = choose_overlap(config(tmp_path, PACED.replace("= 50", "= 30")), 1e5, lambda: 0.0)
    assert found.recipe.overlaps and found.recipe.fragments is None and "30 inner steps 6.0 s" in line


@pytest.mark.parametrize(
    "text",
    [
        PACED + 'overlap = "off"\n',
        PACED + 'overlap = "keep"\n',
        PACED + "fragments = 2\n",
        'protocol = "gossip"\n' + PACED,
        "stages = 2\n" + PACED,
    ],
)
def test_nothing_is_chosen_for_the_user(tmp_path: Path, text: str) -> None:
    given = config(tmp_path, text)
    assert choose_overlap(given, 1e5, lambda: 0.0) == (given, "")


def test_model_is_timed(tmp_path: Path) -> None:
    ticks = iter(range(10**6))
    given = config(tmp_path, '[recipe]\ninner_steps = 20\n[gpt]\npreset = "w64"\n')
    found, line = choose_overlap(given, 1e6, lambda: float(next(ticks)))
    assert "20 inner steps 120.0 s" in line, "each of six blocks takes a second"
    assert found == replace(given, recipe=replace(given.recipe, overlap="off"))
