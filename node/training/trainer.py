"""The inner loop: optimiser steps between two rounds, and the accounting of tokens, loss and time.

Learner          takes inner steps: `node.training.task_learner.TaskLearner` on a task's module, `Paced` only waits
LocalTraining    one learner's work since its anchor: tokens, loss, seconds, norm of the pseudo-gradient
RestGate         how a trainer rests between two steps
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Protocol

import torch

from node.tasks.base import Step
from protocols.aio import Notifier, run_with_helper
from protocols.base import ALL, Layout, LocalProgress, Vector
from protocols.vectors.views import fragment

REPORT_SHARE = 0.01
"""Part of a worker's time that reports within a round may take: each computes a norm of all parameters."""
_PIECE, _DEVICE_PIECE = 1 << 18, 1 << 24
"""Elements of which a norm is computed at once: on a CPU as many as fit into its cache."""


def device_name(device: str | torch.device) -> str:
    """A device in words: the name of a GPU, else mps or cpu."""
    kind = torch.device(device)
    return torch.cuda.get_device_name(kind) if kind.type == "cuda" else kind.type


class Learner(Protocol):
    """Takes inner steps, which change its vector in place: all that is trained, flat, in the order of the layout."""

    layout: Layout
    vector: Vector
    position: int
    """Batches drawn so far. Data can be resumed there."""

    def step(self, round_number: int, step: int) -> Step:
        """Take inner step `step` (from 0) of a round. Surplus steps continue the count beyond the inner steps."""

    def moments(self, make: bool = False) -> dict[str, torch.Tensor]:
        """The optimiser's own tensors by name; none before the first step, unless `make` creates them."""

    def evaluate(self) -> float:
        """Mean loss of the present parameters over held-out data."""


class LocalTraining:
    """One learner's work since its anchor was last written, and the anchor itself: twice the parameters in memory.

    `inner_steps` (H) complete a round. By default, the anchor is a copy of the present parameters. Rounds average
    `fragments` of the parameters in turn.
    """

    def __init__(self, learner: Learner, inner_steps: int, anchor: Vector | None = None, fragments: int = 1) -> None:
        if inner_steps < 1:
            raise ValueError(f"inner_steps must be at least 1, not {inner_steps}")
        self.learner = learner
        self._inner_steps, self._fragments = inner_steps, fragments
        self.part = ALL  # that the round averages
        self.anchor = learner.vector.clone() if anchor is None else anchor
        self._round, self._steps, self._is_past = -1, 0, False
        self._step_seconds = 0.0
        self.reset(0)

    def begin(self, round_number: int, index: int = 0) -> None:
        """Start a round, or resume it, and take its fragment's number. Work that a skipped round has left is kept.

        The round before the present one is complete: the present one was begun while its mean was on its way.
        """
        self._is_past = round_number == self._round - 1
        if round_number != self._round and not self._is_past:
            self._round, self._steps = round_number, 0
        self._reported = 0
        if self._fragments > 1:
            self.part = fragment(len(self.anchor), self._fragments, index)

    @property
    def complete(self) -> bool:
        return self._is_past or self._steps >= self._inner_steps

    @property
    def steps_left(self) -> int:
        """Until the round is complete; below 0 with surplus steps."""
        return self._inner_steps - self._steps

    @property
    def tokens(self) -> int:
        return self._carried + self._tokens

    def step(self) -> None:
        step = self.learner.step(self._round, self._steps)
        self._steps += 1
        self.add(step)

    def add(self, step: Step) -> None:
        """Count the tokens and the loss of a step."""
        if step.tokens:
            self._tokens += step.tokens
            self._loss += step.loss * step.tokens

    def take(self, steps: int, trained: Step, seconds: float) -> None:
        """Count steps that were taken elsewhere, with the tokens and mean loss of all."""
        self._steps += steps
        self.add(trained)
        self._seconds += seconds
        if steps:
            self._step_seconds = seconds / steps

    def spend(self, seconds: float) -> None:
        self._seconds += seconds
        self._step_seconds = seconds

    def due(self, soon: bool = False) -> bool:
        """Whether to report now: at the first step, after the last inner step and, unless it is too `soon` after a
        report, at each 10 % more tokens.
        """
        tokens = self.tokens
        news = self._reported == 0 or self._steps == self._inner_steps
        news |= not soon and 10 * tokens >= 11 * self._reported
        if news:
            self._reported = tokens
        return news

    def work(self) -> LocalProgress:
        tokens = self.tokens
        return LocalProgress(
            tokens=tokens,
            loss=self._loss / self._tokens if self._tokens else math.nan,
            seconds=self._seconds,
            step_seconds=self._step_seconds,
            norm=self._norm() if tokens else 0.0,
            complete=self.complete,
            carried=self._carried,
        )

    def read(self, into: Vector, part: slice = ALL) -> None:
        into.copy_(self.learner.vector[part])

    def write(self, source: Vector, anchor: Vector | None = None, tokens: int = 0, part: slice = ALL) -> None:
        """Replace the parameters and their anchor, or a part. To keep `tokens` of uncounted work, `source` is the
        anchor minus that work.
        """
        self.learner.vector[part].copy_(source)
        self.anchor[part].copy_(source if anchor is None else anchor)
        self.reset(tokens)

    def reset(self, carried: int) -> None:
        """The parameters were written, and contain `carried` tokens of work. Without any, the round starts again."""
        if not carried:
            self._round, self._steps = -1, 0
        self._carried, self._tokens, self._loss, self._seconds = carried, 0, 0.0, 0.0
        self._reported = 0

    def evaluate(self) -> float:
        with self.outer():
            return self.learner.evaluate()

    @contextmanager
    def outer(self) -> Iterator[None]:
        """The learner has the outer parameters inside the context."""
        vector = self.learner.vector
        local = vector.clone()
        vector.copy_(self.anchor)
        try:
            yield
        finally:
            vector.copy_(local)

    def _norm(self) -> float:
        """L2 norm of the pseudo-gradient."""
        return distance(self.anchor[self.part], self.learner.vector[self.part])


def distance(one: Vector, other: Vector) -> float:
    """L2 norm of the difference, in pieces; squares are summed in float64, except within a piece on mps."""
    kind = one.device.type
    size = _PIECE if kind == "cpu" else _DEVICE_PIECE
    dtype = torch.float32 if kind == "mps" else torch.float64  # which mps does not have
    pairs = zip(torch.split(one, size), torch.split(other, size), strict=True)
    norms = [torch.linalg.vector_norm(first - second, dtype=dtype) for first, second in pairs]
    # One wait for the device, however many pieces there are.
    return math.sqrt(sum(norm**2 for norm in torch.stack(norms).tolist()))


def as_json(work: LocalProgress) -> dict[str, Any]:
    """The fields of `LocalProgress` that a worker knows: all but the state root, which the peer computes."""
    values = asdict(work)
    del values["state_root"]
    return values


class RestGate:
    """Holds a trainer between two steps while it rests: without a clock, until it is to work or the round is cut."""

    def __init__(self) -> None:
        self.resting = False
        self._changed = Notifier()

    def rest(self, resting: bool) -> None:
        self.resting = resting
        self._changed.notify()

    async def opened(self, cut: asyncio.Event) -> None:
        """Wait until the gate is open, or the round is cut; its deadline sets the cut."""

        async def watch() -> None:
            await cut.wait()
            self._changed.notify()

        await run_with_helper(self._changed.until(lambda: not self.resting or cut.is_set(), math.inf), watch())
