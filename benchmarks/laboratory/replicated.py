"""Peers whose outer parameters are equal after each round, and a peer alone: training without any protocol."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise

import torch

from benchmarks.journal import History
from benchmarks.laboratory.runs import Run
from node.tasks.base import Step
from node.tasks.gpt import GptTask
from node.tasks.text import Text, load
from node.training.task_learner import TaskLearner
from node.training.trainer import LocalTraining
from protocols.allreduce.plan import allowances, clip_factors, part_bounds
from protocols.vectors.codec import codec
from protocols.vectors.coding import carry
from protocols.vectors.sparse import sent, settle
from protocols.vectors.views import norm


@cache
def text() -> Text:
    """The training text, loaded once in a process."""
    return load()


class LabMember:
    """A simulated learner: exactly H steps a round, or its share, so that no peer trains more than one alone.

    If its contribution to a round is lost, it trains but reports no tokens: its weight is 0.
    """

    def __init__(self, run: Run, index: int) -> None:
        task = GptTask(run.settings, text(), run.seed)
        # The initial weights are the run's; the stream is the peer's.
        self._learner = TaskLearner(task, run.settings.recipe, seed=1000 * run.seed + index)
        self._run, self._index = run, index
        self.layout, self.vector, self.position = self._learner.layout, self._learner.vector, 0
        self.evaluate, self.moments = self._learner.evaluate, self._learner.moments

    def step(self, round_number: int, step: int) -> Step:
        if step >= self._run.steps_of(self._index):
            return Step(math.nan, 0)
        done = self._learner.step(round_number, step)
        return replace(done, tokens=0) if self._index in self._run.lost(round_number) else done


def train_alone(run: Run) -> History:
    """Train the first peer: inner steps one after the other, and nothing else."""
    learner, history = LabMember(run, 0), History()
    for number in range(run.rounds):
        for step in range(run.inner_steps):
            learner.step(number, step)
        if run.is_evaluated(number + 1):
            history.append(((number + 1) * run.inner_steps, learner.evaluate()))
    return history


def train_round(training: LocalTraining, number: int, inner_steps: int) -> None:
    """Take the inner steps of a round."""
    training.begin(number)
    for _ in range(inner_steps):
        training.step()


def train_replicated(run: Run, weights: Sequence[Sequence[float]] | None = None) -> History:
    """A mean with clipped norms and an outer step in each round.

    Contributions and mean are encoded by the run's codec. As in the protocol, each peer reduces one part, and its own
    contribution to that part is not encoded, unless the codec has error feedback.

    Args:
        weights: of every peer in every round. By default they are the peers' tokens.
    """
    trainings = [LocalTraining(LabMember(run, index), run.inner_steps) for index in range(run.peers)]
    history, recent = History(), deque[torch.Tensor](maxlen=run.averaged)
    anchor = trainings[0].learner.vector.clone()
    velocity, outer, reduction = torch.zeros_like(anchor), run.outer_sgd(), _Reducer(run, len(anchor))
    for number in range(run.rounds):
        for training in trainings:
            train_round(training, number, run.inner_steps - (run.delay if number else 0))
        counted = weights[number] if weights else [float(training.work().tokens) for training in trainings]
        deltas = torch.stack([anchor - training.learner.vector for training in trainings])
        if run.variant == "restarts" and number and number % max(1, run.rounds // 4) == 0:
            velocity.zero_()
        handed_in = [training.learner.vector.clone() for training in trainings] if run.delay else []
        overlaps = bool(run.delay) and number + 1 < run.rounds
        for training in trainings if overlaps else ():
            train_round(training, number + 1, run.delay)
        begun = [
            training.learner.vector - before for training, before in zip(trainings, handed_in, strict=bool(run.delay))
        ]
        outer.at(number).step(anchor, velocity, reduction.mean(deltas, counted))
        recent.append(anchor.clone())
        if run.is_evaluated(number + 1):
            trainings[0].write(torch.stack(tuple(recent)).mean(0), tokens=int(overlaps))
            history.append(((number + 1) * run.inner_steps, trainings[0].evaluate()))
        for index, training in enumerate(trainings):
            keeps = overlaps and run.variant != "naive"
            training.write(anchor + begun[index] if keeps else anchor, anchor, tokens=int(overlaps))
        if run.variant == "moments":
            _average_moments([training.learner for training in trainings])  # type: ignore[misc]
    return history


def _average_moments(members: Sequence[LabMember]) -> None:
    for tensors in zip(*(member.moments().values() for member in members), strict=True):
        mean = torch.stack(tensors).mean(0)
        for tensor in tensors:
            tensor.copy_(mean)


class _Reducer:
    """The mean of the contributions, as the peers compute it: part by part, through the codec, with clipped norms."""

    def __init__(self, run: Run, elements: int) -> None:
        self._codec, self._peers = codec(run.codec), run.peers
        self._residuals = torch.zeros(run.peers if self._codec.decay else 0, elements)
        self._parts = list(pairwise(part_bounds([1 / run.peers] * run.peers, elements, self._codec.grain)))

    def mean(self, deltas: torch.Tensor, weights: Sequence[float]) -> torch.Tensor:
        """
        Args:
            deltas: pseudo-gradients (peers, n); overwritten.
            weights: tokens of each peer.
        """
        norms = [norm([delta]) if weight else 0.0 for delta, weight in zip(deltas, weights, strict=True)]
        if decay := self._codec.decay:
            norms = [own + decay * norm([left]) for own, left in zip(norms, self._residuals, strict=True)]
            deltas = self._through_feedback(deltas)
        else:
            self._encode(deltas)
        shares = torch.tensor(weights)
        factors = torch.tensor(clip_factors(norms, allowances(weights)))
        found = (shares * factors) @ deltas / float(shares.sum())
        for low, high in self._parts:
            carry(self._codec.reduced(self._peers), found[low:high])
        return found

    def _encode(self, rows: torch.Tensor) -> None:
        for own, (low, high) in enumerate(self._parts):
            for peer in set(range(self._peers)) - {own}:
                carry(self._codec, rows[peer, low:high])

    def _through_feedback(self, deltas: torch.Tensor) -> torch.Tensor:
        """What each peer sends of its row and its error feedback, which is updated."""
        rows = torch.empty_like(deltas)
        for row, residual, delta in zip(rows, self._residuals, deltas, strict=True):
            sent(self._codec, residual, delta, row)
            settle(self._codec, residual, delta, row)
        return rows
