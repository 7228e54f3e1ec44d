"""A stage of a real model: activations from bytes and back, gradients summed over microbatches, optimiser steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from node.tasks.base import Step
from node.tasks.flat import flatten
from node.tasks.gpt_presets import VOCABULARY
from node.tasks.gpt_stage import ActivationShape, GptStageTask
from node.tasks.recipe import Recipe
from node.training.inner_optimizer import FlatOptimizer
from node.training.trainer import Learner
from protocols.base import BadPayload, Buffer, Vector
from protocols.pipeline.job import JobKind, JobResult, StageJob, StageSizes
from protocols.registry import ACTIVATION_CODECS

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class StageCompute(Learner, Protocol):
    """One stage's weights, and what is computed with them: `StageLearner`, `node.tasks.paced_stage`.

    Gradients of all microbatches since the last step are summed; `step` takes their mean, and clears them.
    """

    def run(self, job: StageJob, outer: Vector | None = None) -> JobResult:
        """Compute a job; of an outer kind, with this vector, if given, instead of its own. Raises `BadPayload`."""

    def discard(self) -> None:
        """Drop the gradients since the last step."""


@dataclass(frozen=True, slots=True)
class ActivationCodec:
    """Turns activations (rows, positions, width), float32, into bytes and back, as one of `ACTIVATION_CODECS`."""

    shape: ActivationShape
    name: str = "bf16"

    @property
    def sizes(self) -> StageSizes:
        """Targets are int32, the logits of one position float32 (rows, classes)."""
        tokens, rows = self.shape.tokens, self.shape.rows
        activation_bytes = tokens * self.shape.width * ACTIVATION_CODECS[self.name]
        return StageSizes(activation_bytes, 4 * tokens, 4 * rows * VOCABULARY, tokens)

    def encode(self, activation: torch.Tensor) -> bytes:
        """The receiver refuses what is not finite."""
        return _bytes(activation.detach().cpu().to(_DTYPES[self.name]))

    def decode(self, data: Buffer) -> torch.Tensor:
        if len(data) != (due := self.sizes.activation_bytes):
            raise BadPayload(f"an activation of {len(data)} bytes where {due} are due")
        flat = torch.frombuffer(bytearray(data), dtype=_DTYPES[self.name])
        _require_finite(flat)
        return flat.float().view(self.shape.rows, self.shape.positions, self.shape.width)

    def encode_targets(self, targets: torch.Tensor) -> bytes:
        return _bytes(targets.to(torch.int32))

    def decode_targets(self, data: Buffer, classes: int) -> torch.Tensor:
        """int64 (rows, positions), each in 0..classes-1. Raises `BadPayload`: wrong size, or out of range."""
        if len(data) != (due := self.sizes.target_bytes):
            raise BadPayload(f"targets of {len(data)} bytes where {due} are due")
        targets = torch.frombuffer(bytearray(data), dtype=torch.int32).long()
        if not bool(((targets >= 0) & (targets < classes)).all()):
            raise BadPayload("targets that are not in the vocabulary")
        return targets.view(self.shape.rows, self.shape.positions)


def check_activation(data: Buffer, name: str) -> None:
    """Raise `BadPayload` if what another peer has sent, in this one of `ACTIVATION_CODECS`, is not finite."""
    _require_finite(torch.frombuffer(data, dtype=_DTYPES[name]))


def _require_finite(flat: torch.Tensor) -> None:
    if not bool(torch.isfinite(flat).all()):
        raise BadPayload("an activation or gradient that is not finite")


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


@dataclass(slots=True)
class _Accumulated:
    count: int = 0
    tokens: int = 0
    loss: float = 0.0
    losses: int = 0

    def add(self, tokens: int, loss: float | None) -> None:
        self.count += 1
        self.tokens += tokens
        if loss is not None:
            self.loss += loss
            self.losses += 1


class StageLearner:
    """A `StageCompute` on a stage of the built-in model. `seed` is of this peer's stream of data.

    No graph is kept between a forward and its backward: the backward computes the forward again.
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
        self._optimizer = FlatOptimizer(flat.layout, flat.vector, gradient=flat.gradient, recipe=recipe)
        self._accumulated = _Accumulated()

    # -- jobs ---------------------------------------------------------------------------------------------------------

    def run(self, job: StageJob, outer: Vector | None = None) -> JobResult:
        if not job.kind.is_outer:
            return self._run(job)
        with torch.no_grad(), self._using(outer):
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
                return self._backward(*job.payloads)
            case JobKind.LOSS:
                return self._loss(*job.payloads)
            case JobKind.OUTER_SAMPLE:
                batch = self._task.held_out(job.number)
                return JobResult(self._first(*batch) if batch else ())
            case JobKind.OUTER_FIRST:
                return self._outer_first(job.payloads[0])
            case JobKind.OUTER_LOSS:
                return JobResult(loss=float(self._last(*job.payloads)[1]))
            case JobKind.OUTER_LOGITS:
                return self._outer_logits(job)

    @torch.no_grad()
    def _draw(self) -> JobResult:
        number, self.position = self.position, self.position + 1
        return JobResult(self._first(*self._task.batch(self._seed, number)), number)

    def _finish(self, job: StageJob) -> JobResult:
        inputs, _ = self._task.batch(self._seed, job.number)  # a batch is a pure function of its number
        self._task.module(inputs.to(self._device)).backward(self._decoded(job.payloads[0]))
        self._accumulated.add(inputs.numel(), job.loss)
        return JobResult()

    @torch.no_grad()
    def _forward(self, x: Buffer) -> bytes:
        return self._codec.encode(self._task.module(self._decoded(x)))

    def _backward(self, x: Buffer, gradient: Buffer) -> JobResult:
        taken, given = self._decoded(x).requires_grad_(), self._decoded(gradient)
        self._task.module(taken).backward(given)
        self._accumulated.add(self._codec.shape.tokens, None)
        assert taken.grad is not None
        return JobResult((self._codec.encode(taken.grad),))

    def _loss(self, x: Buffer, targets: Buffer) -> JobResult:
        taken, loss = self._last(x, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        value = float(loss.detach())
        self._accumulated.add(self._codec.shape.tokens, value)
        assert taken.grad is not None
        return JobResult((self._codec.encode(taken.grad),), loss=value)

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
        return JobResult((_bytes(logits.float().cpu()),))

    def _first(self, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[bytes, bytes]:
        output = self._task.module(inputs.to(self._device))
        return self._codec.encode(output), self._codec.encode_targets(targets)

    def _last(self, x: Buffer, targets: Buffer) -> tuple[torch.Tensor, torch.Tensor]:
        """The last stage's input, which takes a gradient, and its mean loss in nats per token."""
        taken = self._decoded(x).requires_grad_()
        output = self._task.module(taken)
        return taken, self._task.loss(output, self._codec.decode_targets(targets, output.shape[-1]).to(self._device))

    def _decoded(self, data: Buffer) -> torch.Tensor:
        return self._codec.decode(data).to(self._device)

    @contextmanager
    def _using(self, vector: Vector | None) -> Iterator[None]:
        """Compute with these parameters, if given, instead of the learner's own. Nothing is copied."""
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
        self._optimizer.clear()
        self._accumulated = _Accumulated()

    def step(self, round_number: int, step: int) -> Step:
        """Skipped if the mean gradient is not finite. The loss is nan in a middle stage, which measures none."""
        done = self._accumulated
        stepped = self._optimizer.step(round_number, step, max(1, done.count))
        self.discard()
        if not stepped:
            return Step(math.nan, 0)
        return Step(done.loss / done.losses if done.losses else math.nan, done.tokens)

    def moments(self, make: bool = False) -> dict[str, torch.Tensor]:
        return self._optimizer.moments(make)

    def evaluate(self) -> float:
        """nan: a stage alone has no loss."""
        return math.nan
