"""Peers that take their own outer steps and average states, or pull each other by NoLoCo's rule.

The schedules of `protocols` decide who meets whom, in memory: no network and no waits.
"""

from __future__ import annotations

import random
from statistics import fmean

import torch

from benchmarks.journal import History
from benchmarks.laboratory.replicated import LabMember, train_round
from benchmarks.laboratory.runs import LabRun
from benchmarks.mixers import Mixer, moshpit_seats, pairs, push_sum
from node.outer.noloco import NoLoCo
from node.outer.state import OuterSGD
from node.training.trainer import LocalTraining
from protocols.moshpit.grid import shape_for

GROUP_MOST = 4
"""For Moshpit. By default eight peers are one group, which is butterfly without a vote."""


def train_independent(given: LabRun, mixer: Mixer | None = None) -> History:
    """Train the peers of an arm without a common state. Losses are means over all peers' models, down ones included.

    A peer that is down goes on from its own state.

    Args:
        mixer: averages states; with noloco what the peers bring to its step. By default the arm's own.
    """
    run, history = given.run, History()
    trainings = [LocalTraining(LabMember(run, index), run.inner_steps) for index in range(run.peers)]
    travelling = _travelling(given, torch.stack([training.learner.vector for training in trainings]))
    mix = mixer or _mixer(given)
    passes = len(shape_for(run.peers, GROUP_MOST)) if given.arm == "moshpit" and mixer is None else 1
    for number in range(run.rounds):
        for peer, training in enumerate(trainings):
            train_round(training, number, run.inner_steps)
            travelling.bring(peer, training.learner.vector, number)
        here, mixed = torch.tensor(given.up(number)), travelling.brought.double()
        for step in range(passes):
            mixed = mix(number * passes + step, here, mixed)
        for peer, (training, row) in enumerate(zip(trainings, mixed.float(), strict=True)):
            training.write(travelling.take(peer, row))
        if run.is_evaluated(number + 1):
            history.append(((number + 1) * run.inner_steps, fmean(training.evaluate() for training in trainings)))
    return history


class _States:
    """Sends states after the outer step, as `node.outer.mixing.StateMixing` does.

    Attributes:
        brought: what each peer sends, one row per peer.
    """

    def __init__(self, starts: torch.Tensor, outer: OuterSGD) -> None:
        self.brought = torch.cat([starts, torch.zeros_like(starts)], dim=1)
        self._outer, self._size = outer, starts.shape[1]

    def bring(self, peer: int, local: torch.Tensor, round_number: int) -> None:
        phi, velocity = torch.split(self.brought[peer], self._size)
        self._outer.at(round_number).step(phi, velocity, phi - local)

    def take(self, peer: int, mixed: torch.Tensor) -> torch.Tensor:
        self.brought[peer] = mixed
        return mixed[: self._size]


class _Pulls:
    """As `node.outer.mixing.PullMixing`, with all peers meeting at the end of a round."""

    def __init__(self, starts: torch.Tensor, rule: NoLoCo) -> None:
        self.brought, self._phis, self._velocities = torch.zeros_like(starts), starts, torch.zeros_like(starts)
        self._rule = rule

    def bring(self, peer: int, local: torch.Tensor, round_number: int) -> None:
        self._rule.offer(self._phis[peer], self._phis[peer] - local, self.brought[peer])

    def take(self, peer: int, mixed: torch.Tensor) -> torch.Tensor:
        self._rule.step(self._phis[peer], self._velocities[peer], mixed)
        return self._phis[peer]


def _travelling(given: LabRun, starts: torch.Tensor) -> _States | _Pulls:
    outer = given.run.outer_sgd()
    if given.arm == "noloco":
        return _Pulls(starts, NoLoCo(outer.momentum, outer.learning_rate, pull=1 - outer.momentum**2))
    return _States(starts, outer)


def _mixer(given: LabRun) -> Mixer:
    makers = {"moshpit": moshpit_seats(GROUP_MOST), "gossip": pairs, "noloco": pairs, "push-sum": push_sum}
    return makers[given.arm](given.run.peers, random.Random(f"{given.run.seed}/mixing"))
