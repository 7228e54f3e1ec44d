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
from protocols.base import Layout
from protocols.vectors.codec import codec
from protocols.vectors.coding import carry
from protocols.vectors.sparse import sent, settle
from protocols.vectors.views import fragment, norm


@cache
def text() -> Text:
    """The training text, loaded once in a process."""
    return load()


class LabMember:
    """A simulated learner: exactly H steps a round, or its share, so that no peer trains more than one alone.

    If its contribution to a round is lost, it trains but reports no tokens: its weight is 0, unless it counts late.
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


def trained_tokens(training: LocalTraining) -> int:
    """Tokens since its parameters were written."""
    work = training.work()
    return work.tokens - work.carried


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
    fragments = [
        _Fragment(run, part, anchor) for part in fragment_indices(trainings[0].learner.layout, run.fragments, run)
    ]
    outer, tokens = run.outer_sgd(), [0.0] * run.peers
    for number in range(run.rounds):
        due = fragments[number % run.fragments]
        overlaps = bool(run.delay) and number + 1 < run.rounds
        for index, training in enumerate(trainings):
            train_round(training, number, run.inner_steps - (run.delay if number else 0))
            tokens[index] += trained_tokens(training)
        counted = list(weights[number]) if weights else due.take_tokens(tokens)
        late = dict.fromkeys(run.lost(number) if run.late else (), run.late)
        for index in late:
            tokens[index] += run.late * (max(counted) + counted[index])
            counted[index] = 0.0
        if run.variant == "restarts" and number and number % max(1, run.rounds // 4) == 0:
            due.velocity.zero_()
        mean, handed_in = due.mean([training.learner.vector for training in trainings], counted)
        before = [training.learner.vector.clone() for training in trainings] if run.variant == "naive" else []
        for index, training in enumerate(trainings):
            training.reset(1)
            if overlaps:
                train_round(training, number + 1, run.delay)
                tokens[index] += trained_tokens(training)
        theta = due.anchor.clone()
        outer.at(number).step(due.anchor, due.velocity, mean)
        anchor[due.part] = due.anchor
        recent.append(anchor.clone())
        for index, training in enumerate(trainings):
            local = before[index] if before else training.learner.vector
            kept = late.get(index, 0.0) * (handed_in[index] - theta)
            meanwhile = 0 if before else local[due.part] - handed_in[index]
            local[due.part] = due.anchor + kept + run.kept * meanwhile
            due.bases[index] = due.anchor - (1 - run.kept) * meanwhile
            training.write(local.clone(), anchor, tokens=1)
        if run.is_evaluated(number + 1):
            history.append(((number + 1) * run.inner_steps, _evaluate(trainings[0], recent)))
        if run.variant == "moments":
            _average_moments([training.learner for training in trainings])  # type: ignore[misc]
    return history


def _evaluate(training: LocalTraining, recent: Sequence[torch.Tensor]) -> float:
    local, anchor = training.learner.vector.clone(), training.anchor.clone()
    training.write(torch.stack(tuple(recent)).mean(0), tokens=1)
    found = training.evaluate()
    training.write(local, anchor, tokens=1)
    return found


class _Fragment:
    """The elements of the vector that some of the rounds average.

    Attributes:
        bases: from which each peer's pseudo-gradient is measured.
    """

    def __init__(self, run: Run, part: torch.Tensor, anchor: torch.Tensor) -> None:
        self.part, self.anchor = part, anchor[part]
        self.bases = [self.anchor] * run.peers
        self.velocity, self._reduction = torch.zeros_like(self.anchor), _Reducer(run, len(part))
        self._tokens = [0.0] * run.peers

    def take_tokens(self, tokens: Sequence[float]) -> list[float]:
        """Tokens of each peer since its last round."""
        taken = [now - before for now, before in zip(tokens, self._tokens, strict=True)]
        self._tokens = list(tokens)
        return taken

    def mean(
        self, locals_: Sequence[torch.Tensor], weights: Sequence[float]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The mean of the pseudo-gradients, and each peer's local parameters as they were handed in."""
        handed_in = [local[self.part] for local in locals_]
        deltas = [base - each for base, each in zip(self.bases, handed_in, strict=True)]
        return self._reduction.mean(torch.stack(deltas), weights), handed_in


def fragment_indices(layout: Layout, count: int, run: Run) -> list[torch.Tensor]:
    """The elements of each fragment: equal parts of the vector or, if strided, of its layers, each `count`-th first."""
    elements = sum(layout.sizes())
    order = torch.arange(elements)
    if run.variant == "strided":
        blocks: dict[str, int] = {}
        low, keyed = 0, []
        for name, shape in layout.fragments[0]:
            block = blocks.setdefault(".".join(name.split(".")[:2]), len(blocks))
            keyed.append((block % count, block, order[low : low + math.prod(shape)]))
            low += math.prod(shape)
        order = torch.cat([part for *_, part in sorted(keyed, key=lambda each: each[:2])])
    return [order[fragment(elements, count, index)] for index in range(count)]


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
