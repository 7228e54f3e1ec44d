"""A stage of a real model: its jobs, gradients summed over microbatches, optimiser steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from node.tasks.base import Step
from node.tasks.flat import flatten
from node.tasks.gpt_stage import GptStageTask
from node.tasks.recipe import Recipe
from node.training.activations import ActivationCodec, raw
from node.training.inner_optimizer import FlatOptimizer
from node.training.kept_graphs import KeptGraphs
from node.training.trainer import Learner
from protocols.base import BadPayload, Buffer, Vector
from protocols.pipeline.job import JobKind, JobResult, LeaseLost, Payload, StageJob
from protocols.pipeline.messages import MAX_LOSS


class StageCompute(Learner, Protocol):
    """One stage's weights, and what is computed with them: `StageLearner`, `node.tasks.paced_stage`.

    Gradients of all microbatches since the last step are summed; `step` takes their mean, and clears them.
    """

    def run(self, job: StageJob, outer: Vector | None = None) -> JobResult:
        """Compute a job; of an outer kind, with this vector, if given, instead of its own.

        A stale job computes with the weights before the last step, which are gone after `discard`. Raises `BadPayload`,
        or `LeaseLost` if what it gives is not finite. The next step is left out then, if the job has added to the
        gradient.
        """

    def discard(self) -> None:
        """Drop the gradients since the last step, and the weights before it."""


@dataclass(slots=True)
class _Accumulated:
    count: int = 0
    tokens: int = 0
    loss: float = 0.0
    losses: int = 0
    is_spoiled: bool = False  # by a microbatch that is in the gradient and not counted

    def add(self, tokens: int, loss: float | None) -> None:
        self.count += 1
        self.tokens += tokens
        if loss is not None:
            self.loss += loss
            self.losses += 1


class StageLearner:
    """A `StageCompute` on a stage of the built-in model. `seed` is of this peer's stream of data.

    A backward computes the forward again where its graph was not kept (`KeptGraphs`); the results are the same bits.
    """

    def __init__(
        self,
        task: GptStageTask,
        recipe: Recipe,
        codec: ActivationCodec,
        seed: int = 0,
        allocate: Callable[[int], Vector] | None = None,
        resume: bool = False,
    ) -> None:
        flat = flatten(task.module, allocate, resume)
        self.layout, self.vector = flat.layout, flat.vector
        self.position = 0
        self._task, self._codec, self._seed = task, codec, seed
        self._device = flat.vector.device
        self._before = torch.empty_like(flat.vector) if recipe.lookahead else None  # the weights before the last step
        self._has_before = False
        self._optimizer = FlatOptimizer(flat.layout, flat.vector, gradient=flat.gradient, recipe=recipe)
        self._graphs = KeptGraphs(task.module)
        self._accumulated = _Accumulated()

    def keep_graphs(self, most_bytes: int) -> None:
        """Keep graphs of at most these bytes between forwards and their backwards, instead of the usual bound."""
        self._graphs = KeptGraphs(self._task.module, most_bytes)

    # -- jobs ---------------------------------------------------------------------------------------------------------

    def run(self, job: StageJob, outer: Vector | None = None) -> JobResult:
        if job.kind.is_outer:
            with torch.no_grad(), self._using(outer):
                return self._run(job)
        if job.stale and not self._has_before:
            raise RuntimeError(f"{job.kind.value} in the weights before a step, and none are kept")
        with self._using(self._before if job.stale else None):
            return self._run(job)

    def _run(self, job: StageJob) -> JobResult:
        match job.kind:
            case JobKind.DRAW:
                return self._draw()
            case JobKind.FINISH:
                return self._finish(job)
            case JobKind.FORWARD | JobKind.OUTER_FORWARD:
                return JobResult((self._forward(job.payloads[0]),))
            case JobKind.BACKWARD:
                return self._backward(job)
            case JobKind.LOSS:
                return self._loss(*job.payloads)
            case JobKind.OUTER_SAMPLE:
                batch = self._task.held_out(job.number)
                return JobResult(self._first(*batch) if batch else (), number=self._task.samples)
            case JobKind.OUTER_FIRST:
                return self._outer_first(job.payloads[0])
            case JobKind.OUTER_LOSS:
                return JobResult(loss=float(self._last(*job.payloads)[1]))
            case JobKind.OUTER_LOGITS:
                return self._outer_logits(job)

    def _draw(self) -> JobResult:
        number, self.position = self.position, self.position + 1
        inputs, targets = self._task.batch(self._seed, number)
        output = self._graphs.forward(number, inputs.to(self._device))
        return JobResult((self._codec.encode(output), self._codec.encode_targets(targets)), number)

    def _finish(self, job: StageJob) -> JobResult:
        gradient = self._decoded(job.payloads[0], Payload.GRADIENT)
        inputs, output = self._graphs.pop(job.number, lambda: self._inputs(job.number))
        output.backward(gradient)  # type: ignore[no-untyped-call]
        self._accumulated.add(inputs.numel(), job.loss)
        return JobResult()

    def _inputs(self, number: int) -> torch.Tensor:
        """Those of a batch, which is a pure function of its number."""
        return self._task.batch(self._seed, number)[0].to(self._device)

    def _forward(self, x: Buffer) -> bytes:
        return self._codec.encode(self._graphs.forward(bytes(x), self._decoded(x).requires_grad_()))

    def _backward(self, job: StageJob) -> JobResult:
        x, gradient = job.payloads
        given = self._decoded(gradient, Payload.GRADIENT)
        key = None if job.stale else bytes(x)  # an equal input may have been forwarded in the present weights
        taken, output = self._graphs.pop(key, lambda: self._decoded(x).requires_grad_())
        output.backward(given)  # type: ignore[no-untyped-call]
        return self._counted(taken)

    def _loss(self, x: Buffer, targets: Buffer) -> JobResult:
        taken, loss = self._last(x, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        return self._counted(taken, float(loss.detach()))

    def _counted(self, taken: torch.Tensor, loss: float | None = None) -> JobResult:
        """The gradient of a job's input, once its parameters' gradients have been added."""
        assert taken.grad is not None
        try:
            gradient = self._codec.encode(taken.grad, Payload.GRADIENT)
            if not abs(loss or 0.0) <= MAX_LOSS:
                raise LeaseLost("a loss that is not finite, or too large")
        except LeaseLost:
            self._accumulated.is_spoiled = True
            raise
        self._accumulated.add(self._codec.shape.tokens, loss)
        return JobResult((gradient,), loss=loss or 0.0)

    def _outer_first(self, tokens: Buffer) -> JobResult:
        shape = self._codec.shape
        if len(tokens) != shape.tokens:
            raise ValueError(f"{len(tokens)} bytes where a microbatch has {shape.tokens}")
        inputs = torch.frombuffer(bytearray(tokens), dtype=torch.uint8).long().view(shape.rows, shape.positions)
        return JobResult((self._codec.encode(self._task.module(inputs.to(self._device))),))

    def _outer_logits(self, job: StageJob) -> JobResult:
        if not 1 <= job.number <= self._codec.shape.positions:
            raise BadPayload(f"position {job.number} of {self._codec.shape.positions}")
        logits = self._task.module(self._decoded(job.payloads[0]))[:, job.number - 1]
        return JobResult((raw(logits.float().cpu()),))

    def _first(self, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[bytes, bytes]:
        output = self._task.module(inputs.to(self._device))
        return self._codec.encode(output), self._codec.encode_targets(targets)

    def _last(self, x: Buffer, targets: Buffer) -> tuple[torch.Tensor, torch.Tensor]:
        """The last stage's input, which takes a gradient, and its mean loss in nats per token."""
        taken = self._decoded(x).requires_grad_()
        output = self._task.module(taken)
        return taken, self._task.loss(output, self._codec.decode_targets(targets, output.shape[-1]).to(self._device))

    def _decoded(self, data: Buffer, payload: Payload = Payload.ACTIVATION) -> torch.Tensor:
        return self._codec.decode(data, payload).to(self._device)

    @contextmanager
    def _using(self, vector: Vector | None) -> Iterator[None]:
        """Compute with these parameters, if given, instead of the learner's own. Nothing is copied.

        Gradients are added to the learner's own all the same.
        """
        if vector is None:
            yield
            return
        parameters, low = list(self._task.module.parameters()), 0
        own = [parameter.data for parameter in parameters]
        for parameter in parameters:
            high = low + parameter.numel()
            parameter.data, low = vector[low:high].view(parameter.shape), high
        try:
            yield
        finally:
            for parameter, data in zip(parameters, own, strict=True):
                parameter.data = data

    # -- steps --------------------------------------------------------------------------------------------------------

    def discard(self) -> None:
        self._clear()
        self._has_before = False

    def _clear(self) -> None:
        self._graphs.clear()
        self._optimizer.clear()
        self._accumulated = _Accumulated()

    def step(self, round_number: int, step: int) -> Step:
        """Skipped if a gradient was not finite. The loss is nan in a middle stage, which measures none."""
        done = self._accumulated
        self._graphs.clear()
        if self._before is not None:
            self._before.copy_(self.vector)
            self._has_before = True
        stepped = not done.is_spoiled and self._optimizer.step(round_number, step, max(1, done.count))
        self._clear()
        if not stepped:
            return Step(math.nan, 0)
        return Step(done.loss / done.losses if done.losses else math.nan, done.tokens)

    def moments(self, make: bool = False) -> dict[str, torch.Tensor]:
        return self._optimizer.moments(make)

    def evaluate(self) -> float:
        """nan: a stage alone has no loss."""
        return math.nan
