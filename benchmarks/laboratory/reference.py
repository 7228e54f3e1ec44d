"""Training runs without any protocol: simulated learners in one process, a mean in memory, outer steps."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Literal

import torch

from benchmarks.book import History
from node.outer.sgd import OuterSGD
from node.tasks.base import Recipe
from node.tasks.gpt import GptTask, preset
from node.tasks.text import Text, load
from node.training.task_learner import TaskLearner
from node.training.trainer import LocalTraining, Step
from protocols.allreduce.clipping import allowances, clip_factors
from protocols.allreduce.plan import part_bounds
from protocols.codec import Codec, codec
from protocols.codecs.coding import carry
from protocols.codecs.sparse import sent, settle
from protocols.vectors import norm

EVALUATION_STEPS = 50
"""Inner steps between two evaluations, rounded up to the end of a round."""
AVERAGED = 4
"""Of the last outer parameters, with the variant "averaged"."""

Variant = Literal["", "decay", "restarts", "moments", "averaged"]
"""What a run does differently.

decay       in its last quarter, the outer step goes in equal parts to a plain mean: learning rate 1, momentum 0
restarts    the outer momentum begins at zero again after each quarter
moments     the peers average the moments of AdamW after each round
averaged    the mean of the outer parameters after the last `AVERAGED` rounds is evaluated; training is unchanged
"""


@dataclass(frozen=True, slots=True)
class Run:
    """One training run, determined by its fields alone.

    Attributes:
        peers: 0 means one worker without an outer step.
        drop: share of the contributions that are lost each round.
        keep: a peer keeps lost work for the next round, instead of dropping it.
        codec: the encoding of vectors on the wire.
        outer: learning rate and momentum of the outer steps; None for the preset's.
        rate: learning rate of the inner steps, as a multiple of the preset's.
        optimizer: of the inner steps; None for AdamW.
        speeds: of each peer, relative to the fastest: its share of the inner steps; empty if all are equal.
        variant: as `Variant` says; in memory only.
    """

    peers: int
    rounds: int
    inner_steps: int
    preset: str
    seed: int
    drop: float = 0.0
    keep: bool = False
    codec: str = "fp32"
    outer: tuple[float, float] | None = None
    rate: float = 1.0
    optimizer: Literal["muon"] | None = None
    speeds: tuple[float, ...] = ()
    variant: Variant = ""

    def name(self) -> str:
        lost_ = f"{self.drop} kept" if self.keep else f"{self.drop}"
        name = f"{self.preset} peers={self.peers} rounds={self.rounds} H={self.inner_steps} drop={lost_} {self.seed}"
        outer = " outer={:g},{:g}".format(*self.outer) if self.outer else ""
        rate = f" rate={self.rate:g}" if self.rate != 1.0 else ""
        speeds = " speeds=" + ":".join(f"{each:g}" for each in self.speeds) if self.speeds else ""
        optimizer = f" {self.optimizer}" if self.optimizer else ""
        variant = f" {self.variant}" if self.variant else ""
        return name + (f" {self.codec}" if self.codec != "fp32" else "") + outer + rate + optimizer + speeds + variant

    @property
    def recipe(self) -> Recipe:
        """The preset's recipe, with this run's changes."""
        recipe = preset(self.preset).recipe
        rate, optimizer = self.rate * recipe.learning_rate, self.optimizer
        sizes = {"inner_steps": self.inner_steps, "rounds": self.rounds}
        return replace(recipe, **sizes, learning_rate=rate, inner_optimizer=optimizer)

    def steps_of(self, peer: int) -> int:
        """Inner steps that a peer takes in a round."""
        return round(self.inner_steps * self.speeds[peer]) if self.speeds else self.inner_steps


@cache
def _text() -> Text:
    return load()


class LabMember:
    """A simulated learner: exactly H steps a round, or its share, so that no peer trains more than the one worker.

    If its contribution to a round is lost and not kept, it trains but reports no tokens: its weight is 0.
    """

    def __init__(self, run: Run, index: int) -> None:
        task = GptTask(preset(run.preset), _text(), run.seed)
        # The initial weights are the run's; the stream is the peer's.
        self._learner = TaskLearner(task, run.recipe, seed=1000 * run.seed + index)
        self._run, self._index = run, index
        self.layout, self.vectors, self.evaluate = self._learner.layout, self._learner.vectors, self._learner.evaluate
        self.moments = self._learner.moments

    def step(self, round_number: int, step: int) -> Step:
        if step >= self._run.steps_of(self._index):
            return Step(math.nan, 0)
        done = self._learner.step(round_number, step)
        discarded = not self._run.keep and self._index in lost(self._run, round_number)
        return replace(done, tokens=0) if discarded else done


def lost(run: Run, round_number: int) -> list[int]:
    """The peers whose contributions are lost in a round."""
    draw = random.Random(f"{run.seed}/drop/{round_number}")
    return draw.sample(range(run.peers), int(run.drop * run.peers))


def outer_of(run: Run, round_number: int = 0) -> OuterSGD:
    """The run's outer step in a round."""
    recipe = preset(run.preset).recipe
    rate, momentum = run.outer or (recipe.outer_learning_rate, recipe.outer_momentum)
    if run.variant == "decay":
        left = min(1.0, 4 * (1 - (round_number + 1) / run.rounds))
        rate, momentum = 1 + left * (rate - 1), left * momentum
    return OuterSGD(rate, momentum)


def is_evaluated(run: Run, rounds_done: int, evaluation_steps: int | None = None) -> bool:
    """Whether a run is evaluated after this many rounds."""
    every = max(1, (evaluation_steps or EVALUATION_STEPS) // run.inner_steps)
    return rounds_done % every == 0 or rounds_done == run.rounds


def alone(run: Run, evaluation_steps: int | None = None) -> History:
    """Train one worker: inner steps one after the other, and nothing else."""
    learner, history = LabMember(replace(run, peers=1), 0), History()
    for number in range(run.rounds):
        for step in range(run.inner_steps):
            learner.step(number, step)
        if is_evaluated(run, number + 1, evaluation_steps):
            history.append(((number + 1) * run.inner_steps, learner.evaluate()))
    return history


def in_memory(
    run: Run, weights: Sequence[Sequence[float]] | None = None, evaluation_steps: int | None = None
) -> History:
    """The reference: a mean with clipped norms and an outer step, without any protocol.

    Contributions and mean are encoded by the run's codec. As in the protocol, each peer reduces one part, and its own
    contribution to that part is not encoded, unless the codec has error feedback.

    Args:
        weights: of every peer in every round. By default they are the peers' tokens.
    """
    shifts = [LocalTraining(LabMember(run, index), run.inner_steps) for index in range(run.peers)]
    history, recent = History(), deque[torch.Tensor](maxlen=AVERAGED if run.variant == "averaged" else 1)
    anchor = shifts[0].learner.vectors[0].clone()
    velocity = torch.zeros_like(anchor)
    mean_of, carried = _reduction(run, len(anchor)), codec(run.codec)
    residuals = torch.zeros(run.peers if carried.decay else 0, len(anchor))
    for number in range(run.rounds):
        for local_training in shifts:
            local_training.begin(number)
            for _ in range(run.inner_steps):
                local_training.step()
        counted = weights[number] if weights else [float(local_training.work().tokens) for local_training in shifts]
        deltas = torch.stack([anchor - local_training.learner.vectors[0] for local_training in shifts])
        norms = [norm([delta]) if weight else 0.0 for delta, weight in zip(deltas, counted, strict=True)]
        if carried.decay:
            norms = [own + carried.decay * norm([left]) for own, left in zip(norms, residuals, strict=True)]
            deltas = _through_feedback(carried, residuals, deltas)
        factors = torch.tensor(clip_factors(norms, allowances(counted)))
        shares = torch.tensor(counted)
        if run.variant == "restarts" and number and number % (run.rounds // 4) == 0:
            velocity.zero_()
        outer_of(run, number).step(anchor, velocity, mean_of(deltas, shares * factors, float(shares.sum())))
        recent.append(anchor.clone())
        if is_evaluated(run, number + 1, evaluation_steps):
            shifts[0].write(torch.stack(tuple(recent)).mean(0))
            history.append(((number + 1) * run.inner_steps, shifts[0].evaluate()))
        for local_training in shifts:
            local_training.write(anchor)
        if run.variant == "moments":
            _average_moments([local_training.learner for local_training in shifts])
    return history


def _average_moments(members: Sequence[LabMember]) -> None:
    for tensors in zip(*(member.moments().values() for member in members), strict=True):
        mean = torch.stack(tensors).mean(0)
        for tensor in tensors:
            tensor.copy_(mean)


def _through_feedback(carried: Codec, residuals: torch.Tensor, deltas: torch.Tensor) -> torch.Tensor:
    """What each peer sends of its row and its error feedback, which is updated."""
    rows = torch.empty_like(deltas)
    for row, residual, delta in zip(rows, residuals, deltas, strict=True):
        sent(carried, residual, delta, row)
        settle(carried, residual, delta, row)
    return rows


def _reduction(run: Run, elements: int) -> Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]:
    """A function of rows, which it overwrites, their weights and a divisor: their mean, as the peers compute it.

    They do so part by part, through the codec. With error feedback, the rows have been through it.
    """
    carried = codec(run.codec)
    parts = list(pairwise(part_bounds([1 / run.peers] * run.peers, elements, carried.grain)))

    def mean(rows: torch.Tensor, weights: torch.Tensor, divisor: float) -> torch.Tensor:
        for own, (low, high) in enumerate(parts):
            for peer in set() if carried.decay else set(range(run.peers)) - {own}:
                carry(carried, rows[peer, low:high])
        found = weights @ rows / divisor
        for low, high in parts:
            carry(carried.reduced(run.peers), found[low:high])
        return found

    return mean
