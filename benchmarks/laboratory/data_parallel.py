"""Synchronous data parallel training: one AdamW step by the mean gradient over one batch of each peer."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import torch

from benchmarks.journal import History
from benchmarks.laboratory.replicated import text
from benchmarks.laboratory.runs import LabRun, Run
from node.tasks.gpt import GptTask
from node.training.task_learner import TaskLearner


class _Streams:
    """A task whose batches come from the streams of the peers that are up, in turn."""

    def __init__(self, task: GptTask, seed: int, peers: int) -> None:
        self.module, self.loss, self.evaluate = task.module, task.loss, task.evaluate
        self._task, self._seed = task, seed
        self._positions = [0] * peers
        self._due: list[int] = []
        self.up: list[int] = []

    def batch(self, seed: int, position: int) -> tuple[torch.Tensor, ...]:
        self._due = self._due or list(self.up)
        peer = self._due.pop(0)
        self._positions[peer] += 1
        return self._task.batch(1000 * self._seed + peer, self._positions[peer] - 1)


class Pooled(TaskLearner):
    """One learner with the data of all peers that are up."""

    def __init__(self, run: Run) -> None:
        self._one = run.settings.recipe
        self._streams = _Streams(GptTask(run.settings, text(), run.seed), run.seed, run.peers)
        super().__init__(self._streams, self._one, seed=run.seed)

    def among(self, peers: Sequence[int]) -> None:
        """Let these peers take part from now on."""
        self._streams.up = list(peers)
        self._recipe = replace(self._one, batches=self._one.batches * len(peers))


def train_data_parallel(given: LabRun) -> History:
    """A peer that is down takes part in no step of the round. The others do not wait for it, as with a barrier."""
    run, learner, history = given.run, Pooled(given.run), History()
    recent = deque[torch.Tensor](maxlen=run.averaged)
    for number in range(run.rounds):
        learner.among([peer for peer, here in enumerate(given.up(number)) if here])
        for step in range(run.inner_steps):
            learner.step(number, step)
        recent.append(learner.vector.clone())
        if run.is_evaluated(number + 1):
            learner.vector.copy_(torch.stack(tuple(recent)).mean(0))
            history.append(((number + 1) * run.inner_steps, learner.evaluate()))
            learner.vector.copy_(recent[-1])
    return history
