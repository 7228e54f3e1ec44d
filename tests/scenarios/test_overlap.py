"""Simulated peers that train on while their rounds average: the golden trajectory, conservation, faults."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from node.outer.state import OuterSGD
from node.training.trainer import Learner
from tests.sim import crashes
from tests.sim.scenario import Scenario
from tests.sim.world import Outcome, World, play
from tests.support.inline_trainer import TOKENS, InlineTrainer, LinearLearner
from tests.support.long import long

STEP_SECONDS = 0.03
STEPS = tuple((-1.0) ** (torch.arange(10) // (index + 1)) / 8 for index in range(3))
"""What an inner step of each peer subtracts. No norm, of a part either, is larger than another, and clipped."""


class Steady(World):
    """Peers of equal speed whose steps are all equal, so that all sums are known."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.trainers: dict[int, InlineTrainer] = {}

    def learner(self, index: int) -> Learner:
        learner = LinearLearner()
        learner.step_size = STEPS[index]
        return learner

    def trainer(self, index: int) -> InlineTrainer:
        self.trainers[index] = made = super().trainer(index)
        return made

    def outer(self) -> OuterSGD:
        return OuterSGD(1.0, 0.0)


def steady(
    rounds: int, seed: int, overlaps: bool = True, fragments: int = 1, voters: int = 0
) -> tuple[Outcome, Steady]:
    """With `voters`, the others contribute through them."""
    worlds: list[Steady] = []

    def made(scenario: Scenario) -> Steady:
        worlds.append(Steady(scenario))
        return worlds[0]

    scenario = Scenario(peers=3, rounds=rounds, seed=seed, codec="fp32", elements=10, inner_steps=20, jitter=False)
    even = replace(scenario, uplinks=(1.25e6,) * 3, step_seconds=(STEP_SECONDS,) * 3)
    way = replace(even, overlaps=overlaps, fragments=fragments, voters=voters, clusters=voters > 0)
    return play(way, made), worlds[0]


@pytest.mark.parametrize(("seed", "fragments"), [(0, 3), *long((0, 1), (3, 1), (3, 2), (3, 4))])
def test_all_work_is_in_the_mean_or_in_a_peer(seed: int, fragments: int) -> None:
    """With an outer step of (1, 0), Σ work = N (θ_0 - θ) + Σ (θ - x_i): nothing is lost, and nothing counts twice.

    With these seeds, all peers have trained on as many tokens in each round.
    """
    outcome, world = steady(6 + fragments, seed, fragments=fragments)
    assert not outcome.violations
    reports = outcome.reports("committed")
    for lineage in {report["lineage"] for report in reports}:
        assert len({r["weight"] for r in reports if r["lineage"] == lineage}) == 1, "all weigh as much"
    assert sum(report["seconds_overlap"] > 0 for report in reports) > len(reports) / 2
    training = [world.trainers[index].local_training for index in range(3)]
    anchor = training[0].anchor
    assert all(torch.equal(each.anchor, anchor) for each in training)
    counts = [sum(report["tokens"] for report in outcome.histories[peer]) / TOKENS for peer in world.peers]
    work = sum(step * count for step, count in zip(STEPS, counts, strict=True))
    left = sum(anchor - each.learner.vector for each in training)
    torch.testing.assert_close(work, 3 * (1 - anchor) + left, rtol=1e-5, atol=1e-4)


def test_overlapped_run_takes_less_time() -> None:
    """By the time that it would have waited."""
    plain, overlapped = (steady(6, 0, overlaps)[0] for overlaps in (False, True))
    waited = sum(r["seconds_average"] + r["seconds_wait"] for r in plain.histories["p0"])
    ends = [outcome.histories["p0"][-1]["time"] for outcome in (plain, overlapped)]
    assert ends[0] - ends[1] > waited / 2


@pytest.mark.parametrize("fragments", [3, *long(1)])
def test_associate_trains_on_as_members_do(fragments: int) -> None:
    """From its first round with a lead on. Its work counts as theirs does."""
    outcome, _ = steady(9, 6, fragments=fragments, voters=2)
    assert not outcome.violations
    reports = outcome.reports("committed")
    late = [report for report in reports if report["round"] > 3]
    assert {report["contributors"] for report in late} == {3}
    counted = [sum(report["weight"] for report in late if report["peer"] == peer) for peer in ("p0", "p1", "p2")]
    assert min(counted) > 0.85 * max(counted)
    assert all(r["seconds_overlap"] > 0 for r in reports if r["peer"] == "p2" and 0 < r["round"] < 8)


def test_round_of_a_fragment_sends_its_share() -> None:
    def most_sent(fragments: int) -> int:
        scenario = Scenario(peers=3, rounds=6, codec="fp32", elements=100_000, chunk_elements=4096, fragments=fragments)
        outcome = play(replace(scenario, uplinks=(1.25e6,) * 3))
        return max(report["bytes_sent"] for report in outcome.reports("committed"))

    assert most_sent(4) < 1.1 / 4 * most_sent(1)


@pytest.mark.parametrize("kind", ["crash", *long("silence", "one-way", "stall")])
def test_overlapped_round_survives_a_fault_at_any_message(kind: str) -> None:
    """At every message: `python -m tests.sim.crashes --overlap --fragments 4`."""
    fragments = [] if kind == "stall" else ["--fragments", "4"]
    assert crashes.main(["--peers", "3", "--kind", kind, "--overlap", "--sample", "6", *fragments]) == 0
