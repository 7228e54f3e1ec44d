"""Gossip of whole peers in virtual time, of states and by NoLoCo's rule: nothing is lost or made."""

from __future__ import annotations

import pytest
import torch

from node.tasks.base import Step
from protocols.base import PeerId, Vector
from tests.sim.__main__ import main as simulate
from tests.sim.account import Head
from tests.sim.independent_world import IndependentWorld, Wander
from tests.sim.scenario import OUTER_MOMENTUM, OUTER_RATE, Scenario
from tests.sim.world import play
from tests.support.long import diagonal, long

STEPS = {"even": (0.2, 0.2, 0.2, 0.2, 0.2), "uneven": (0.2, 0.21, 0.25, 0.3, 0.2)}


class Walked(Wander):
    """Knows how far it has walked by itself, in all."""

    def __init__(self, elements: int, seed: int) -> None:
        super().__init__(elements, seed, 256)
        self.far = torch.zeros(elements, dtype=torch.float64)

    def step(self, round_number: int, step: int) -> Step:
        before = self.vector.double()
        done = super().step(round_number, step)
        self.far += self.vector.double() - before
        return done


class WalkedWorld(IndependentWorld):
    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.walkers: list[Walked] = []
        self.starts: dict[PeerId, Vector] = {}

    def learner(self, index: int) -> Walked:
        assert self.scenario.elements
        self.walkers.append(Walked(self.scenario.elements, 1000 + index))
        return self.walkers[-1]

    def entering(self, peer: PeerId, head: Head) -> None:
        self.starts.setdefault(peer, self.replicas[peer].anchor.clone())
        super().entering(peer, head)


def balance(world: WalkedWorld) -> float:
    """How far the mean of φ − α/(1 − α)δ is from where the work of all has led it, as a share of that way; of averaged
    states, that of φ − βα²/(1 − α)v, with Nesterov's momentum v.

    Each step of NoLoCo takes it g / (1 − α) further, with g = γφ + ū, and so does every amendment by what it amends:
    what one gets of a partner the partner has given, whichever of their steps that falls into.
    """
    keeps = 1 / (1 - OUTER_MOMENTUM)
    owed = (OUTER_MOMENTUM if world.scenario.pull else OUTER_RATE * OUTER_MOMENTUM**2) * keeps
    states = [
        (outer_loop.anchor.double(), outer_loop.state.velocity.double()) for outer_loop in world.replicas.values()
    ]
    ends = torch.stack([phi - owed * velocity for phi, velocity in states]).mean(dim=0)
    starts = torch.stack([start.double() for start in world.starts.values()]).mean(dim=0)
    way = torch.stack([walker.far for walker in world.walkers]).mean(dim=0) * OUTER_RATE * keeps
    return float((ends - starts - way).norm() / way.norm())


@diagonal("rule, pace", ((None, "fp32"), (None, "int8"), (0.3, "fp32"), (0.9, "fp32")), ("uneven", "even", "even"))
def test_mean_of_all_follows_their_work(rule: tuple[float | None, str], pace: str) -> None:
    pull, codec = rule
    worlds: list[WalkedWorld] = []

    class Kept(WalkedWorld):
        def __init__(self, scenario: Scenario) -> None:
            super().__init__(scenario)
            worlds.append(self)

    scenario = Scenario(
        protocol="gossip", peers=5, rounds=8, codec=codec, elements=300, step_seconds=STEPS[pace], pull=pull
    )
    outcome = play(scenario, Kept)
    assert outcome.violations == []
    met = [report for history in outcome.histories.values() for report in history if report["outcome"] == "committed"]
    assert len(met) > 30
    assert balance(worlds[0]) < 1e-4


@pytest.mark.parametrize("fault", ("lies", *long("crash", "partition")))
def test_simulation_survives_faults(fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--protocol", "gossip", "--pull", "0.3", "--peers", "4", "--rounds", "4", "--seeds", "11"]
    assert simulate([*options, "--faults", fault, "--json"]) == 0, capsys.readouterr()
