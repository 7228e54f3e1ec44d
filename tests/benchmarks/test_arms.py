"""How the laboratory's arms train: who is down, and data parallel training, which equals plain training of one peer."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from benchmarks.laboratory import replicated
from benchmarks.laboratory.data_parallel import Pooled
from benchmarks.laboratory.independent import train_independent
from benchmarks.laboratory.replicated import LabMember
from benchmarks.laboratory.runs import WITHOUT_COMMON_STATE, ArmName, LabRun, Run, trial
from benchmarks.mixers import all_reduce, gossip, pairs
from node.tasks.base import Step
from protocols.base import Layout
from tests.support.long import long


def short(arm: ArmName, peers: int) -> LabRun:
    return LabRun(arm, Run(peers, rounds=1, inner_steps=2, preset="w64", seed=0))


def test_all_protocols_share_the_same_downtime() -> None:
    for number in range(200):
        downs = {tuple(replace(short(arm, 8), failure=0.9).up(number)) for arm in ("butterfly", *WITHOUT_COMMON_STATE)}
        assert len(downs) == 1 and any(*downs)
    share = sum(sum(replace(short("gossip", 8), failure=0.3).up(number)) for number in range(500)) / 4000
    assert share == pytest.approx(0.7, abs=0.03)


class Halving:
    """A learner whose step halves its one parameter, 1 at first."""

    layout = Layout(((("weight", (1,)),),))
    position = 0

    def __init__(self, run: Run, index: int) -> None:
        self.vector = torch.ones(1)

    def step(self, round_number: int, step: int) -> Step:
        self.vector /= 2
        return Step(0.0, 1)

    def evaluate(self) -> float:
        return float(self.vector)


@pytest.mark.parametrize("kept", (0.0, 0.5, 1.0))
def test_share_of_late_steps_is_kept(monkeypatch: pytest.MonkeyPatch, kept: float) -> None:
    """The mean takes x from 1 to 1/4 while the peer goes on to 1/8; of that 1/8, a share stays, and all counts."""
    monkeypatch.setattr(replicated, "LabMember", Halving)
    run = Run(1, rounds=2, inner_steps=2, preset="w64", seed=0, outer=(1.0, 0.0), delay=1, kept=kept)
    assert replicated.train_replicated(run)[-1] == (4, kept / 16)


def test_data_parallel_with_one_peer_equals_plain_training() -> None:
    run = short("data-parallel", 1).run
    pooled, plain = Pooled(run), LabMember(run, 0)
    pooled.among([0])
    for step in range(2):
        assert pooled.step(0, step).loss == plain.step(0, step).loss
    assert torch.equal(pooled.vector, plain.vector)


def test_rate_changes_run_name_and_step_length() -> None:
    """Without decay, the first step of AdamW is as long as its rate."""
    one, half = trial("alone", 0), trial("alone", 0, rate=0.5)
    assert one.name() != half.name()
    moved = []
    for each in (one, half):
        member = LabMember(each.run, 0)
        before = member.vector.clone()
        member.step(0, 0)
        moved.append(float((member.vector - before).norm()))
    assert moved[1] == pytest.approx(moved[0] / 2, rel=0.01)


@pytest.mark.parametrize("arm", ("noloco", *long("moshpit")))
def test_full_state_averaging_gives_one_model(arm: ArmName) -> None:
    """Then the mean of the losses is the loss of each."""
    averaged = train_independent(short(arm, 2), all_reduce(2, random.Random(0)))[-1][1]
    apart = train_independent(short(arm, 2), lambda number, here, values: values)[-1][1]
    assert averaged != apart and averaged == pytest.approx(apart, rel=0.01)


def test_gossip_replaces_partner_that_is_down() -> None:
    here, values = torch.tensor([True, False, True, True, False, True]), torch.eye(6, dtype=torch.float64)
    calm = gossip("random")(6, random.Random(1))(3, torch.ones(6, dtype=torch.bool), values)
    assert torch.equal(calm, pairs(6, random.Random(1))(3, torch.ones(6, dtype=torch.bool), values))
    for number in range(20):
        mixed = pairs(6, random.Random(1))(number, here, values)
        assert torch.equal(mixed[~here], values[~here])
        assert sorted(mixed[here].max(1).values.tolist()) == [0.5] * 4 and torch.equal(mixed.sum(0), torch.ones(6))
