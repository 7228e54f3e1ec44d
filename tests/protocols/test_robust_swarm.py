"""Robust rules in a swarm: a group averages by its rule with identical bits, and blames the liars."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch

from node.training.trainer import LocalTraining
from protocols.allreduce import all_reduce
from protocols.base import Outcome, Vector
from protocols.vectors import robust
from protocols.vectors.robust import RULES
from protocols.vectors.views import norm
from tests.sim.averaging import Averaged, ButterflyHarness
from tests.sim.byzantine.gradients import ATTACKS, PoisonedTrainer
from tests.sim.scenario import Scenario
from tests.sim.world import Outcome as Played
from tests.sim.world import World, play
from tests.support.example_vectors import noisy_contributions
from tests.support.inline_trainer import InlineTrainer
from tests.support.long import long


def averaged(name: str, rows: torch.Tensor, codec: str = "fp32", declared: dict[int, float] | None = None) -> Averaged:
    count = len(rows)
    options: dict[str, Any] = {"codec": codec, "chunk_elements": 1024, "robust": name, "declared": declared}
    return ButterflyHarness(list(rows), [1000] * count, [1e7] * count, **options).average()


def by_the_rule(name: str, rows: torch.Tensor) -> Vector:
    """The expected mean of a group with equal tokens: norms clipped to the median, then the rule, part by part."""
    count, size = rows.shape
    norms = rows.norm(dim=1)
    clipped = rows * (norms.sort().values[(count - 1) // 2] / norms).clamp(max=1)[:, None]
    into = torch.empty(size)
    bounds = [round(part * size / count) for part in range(count + 1)]
    for low, high in pairwise(bounds):
        RULES[name](clipped[:, low:high].clone(), [1.0] * count, into[low:high])
    return into


def follows(name: str, rows: torch.Tensor) -> bool:
    """Whether all members of a group commit, with the same bits, what the rule makes of these vectors."""
    result = averaged(name, rows)
    assert {mean.outcome for mean in result.means} == {Outcome.COMMITTED}
    assert len({each.numpy().tobytes() for each in result.results}) == 1
    return torch.allclose(result.results[0], by_the_rule(name, rows), atol=1e-5)


@pytest.mark.parametrize("scale", (1.0, 1.39, 1.405, 3.0))
def test_estimated_norms_do_not_decide_bits(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """One contribution is scaled to the limit of what is clipped. Estimates are wrong by as much as they may be."""
    rows = noisy_contributions(5, 8000, 3)
    rows[2] *= scale
    declared = dict.fromkeys(range(5), 1.0)
    results = set()
    for error in (0.0, -robust.ESTIMATE_ERROR, robust.ESTIMATE_ERROR):
        factors = itertools.cycle((1 + error, 1 - error, 1.0))

        def estimated(vector: Vector, factors: Iterator[float] = factors) -> float:
            return norm([vector]) * next(factors)

        monkeypatch.setattr(all_reduce, "estimated_norm", estimated)
        results |= {each.numpy().tobytes() for each in averaged("mean", rows, declared=declared).results}
    monkeypatch.undo()
    results |= {each.numpy().tobytes() for each in averaged("mean", rows, declared=declared).results}
    assert len(results) == 1


@pytest.mark.parametrize("name", RULES)
def test_group_averages_by_its_rule_and_blames_liars(name: str) -> None:
    rows = noisy_contributions(7, 3500, 2)
    rows[4] *= -1000
    assert follows(name, rows)
    result = averaged(name, rows, codec="int8")
    assert {mean.outcome for mean in result.means} == {Outcome.COMMITTED}
    assert {blame.peer for mean in result.means for blame in mean.blamed} == {"p04"}
    assert all("p04" in {blame.peer for blame in mean.blamed} for mean in result.means)
    assert float((result.results[0] - 1 / 3500**0.5).norm()) < 1.1
    assert result.means[0].peers == result.peers, "the excluded liar has contributed too"


def test_wrong_rule_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = noisy_contributions(5, 1000, 2)
    assert follows("median", rows)
    right = by_the_rule("median", rows)
    monkeypatch.setitem(robust.RULES, "median", robust.trimmed_mean)
    wrong = averaged("median", rows).results[0]
    assert not torch.allclose(wrong, right, atol=1e-5)


def test_understated_norm_is_clipped_and_blamed_by_all() -> None:
    """By itself too, for its own part. Its contribution is not refused; it is clipped to 1.4 times the norm."""
    rows = noisy_contributions(7, 3500, 2)
    rows[4] *= -10
    result = averaged("mean", rows, declared={4: 1.0})
    naming = [blame.why for mean in result.means for blame in mean.blamed if blame.peer == "p04"]
    assert len(naming) == 7 and all("times what counts" in why for why in naming)
    assert float((result.results[0] - 1 / 3500**0.5).norm()) < 0.9
    assert float((rows.mean(0) - 1 / 3500**0.5).norm()) > 2, "the plain mean"


class PoisonedWorld(World):
    """A swarm in which the last peers attack."""

    def __init__(self, attack: str, liars: int, scenario: Scenario) -> None:
        super().__init__(scenario)
        self._attack, self._count = attack, liars
        self._honest: list[LocalTraining] = []

    def trainer(self, index: int) -> InlineTrainer:
        if index < self.scenario.peers - self._count:
            honest = super().trainer(index)
            self._honest.append(honest.local_training)
            return honest
        assert self.scenario.step_seconds
        seconds = self.scenario.step_seconds[index]
        steps, learner = self.scenario.inner_steps, self.learner(index)
        return PoisonedTrainer(learner, steps, seconds, self._attack, self._count, lambda: self._honest)


def attacked(attack: str, liars: int, **setup: Any) -> Played:
    scenario = Scenario(seed=4, codec="fp32", elements=2000, chunk_elements=1024, **setup)
    return play(scenario, lambda resolved: PoisonedWorld(attack, liars, resolved))


@pytest.mark.parametrize(
    "rule, attack, peers, liars",
    [
        ("median", "reversed", 5, 1),
        ("mean", "understated", 5, 1),
        ("mean", "ipm", 7, 2),
        ("centered_clip", "alie", 7, 2),
        *long(*((rule, "reversed", 5, 1) for rule in RULES if rule != "median")),
    ],
)
def test_swarm_under_attack_commits_identical_bits(rule: str, attack: str, peers: int, liars: int) -> None:
    assert attack in ATTACKS
    played = attacked(attack, liars, peers=peers, rounds=2, robust=rule)
    assert played.violations == []
    assert {report["outcome"] for history in played.histories.values() for report in history} == {"committed"}
    blamed = {peer for history in played.histories.values() for report in history for peer in report["blamed"]}
    if attack in ("reversed", "understated"):
        assert blamed == {"p4"}


@pytest.mark.parametrize("rule", ["centered_clip", *long(*(rule for rule in RULES if rule != "centered_clip"))])
def test_rule_holds_in_clusters_behind_voters(rule: str) -> None:
    """Three clusters of three: a liar in one of them is blamed by those that it sends to, and no honest peer is."""
    played = attacked("reversed", 1, peers=9, voters=3, clusters=True, rounds=8, robust=rule)
    assert played.violations == []
    last = [history[-1] for peer, history in played.histories.items() if peer != "p8"]
    assert {report["contributors"] for report in last} == {9}
    assert {peer for history in played.histories.values() for report in history for peer in report["blamed"]} == {"p8"}
