"""The paced task in a stage, a module of its own: runs without stages load nothing of pipelines.

An activation is a hash of its input, the replica and the epoch of its weights. A backward computes it again, in the
present epoch or, if it is stale, in that before the last step; the gradient that it is given must name the same
activation. So a backward at another replica than its forward's, or in other weights, cannot pass unseen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace

import torch

from node.tasks.base import Step
from node.tasks.paced import Paced
from protocols.base import Buffer, Vector
from protocols.pipeline.job import JobKind, JobResult, StageJob, StageSizes

SIZES = StageSizes(activation_bytes=256, gradient_bytes=256, target_bytes=32)
LOGIT_BYTES = 4 * 256  # float32 (1, 256), if they are asked for
_OUTER_SIZES = replace(SIZES, logit_bytes=LOGIT_BYTES)


class WrongWeights(RuntimeError):
    """A gradient for an output that these weights never gave."""


class PacedStage(Paced):
    """Moves as `Paced`; `tokens` are of one microbatch, `me` names the replica in its present incarnation."""

    held_out_microbatches = 4

    def __init__(
        self,
        elements: int,
        seed: int,
        tokens: int,
        me: str,
        allocate: Callable[[int], Vector] = torch.empty,
        resume: bool = False,
    ) -> None:
        super().__init__(elements, seed, tokens, allocate, resume)
        self._me = me
        self._epoch = 0
        self._before: int | None = None  # the epoch before the last step
        self._microbatches = 0

    def run(self, job: StageJob, outer: Vector | None = None) -> JobResult:
        """Compute a job; with the outer parameters, zeros and a loss of 1. May raise `WrongWeights`."""
        kind = job.kind
        if kind is JobKind.OUTER_SAMPLE and job.number >= self.held_out_microbatches:
            return JobResult(number=self.held_out_microbatches)
        if kind.is_outer:
            given = tuple(bytes(_OUTER_SIZES.of(payload)) for payload in kind.gives)
            return JobResult(given, number=self.held_out_microbatches, loss=1.0)
        match kind:
            case JobKind.DRAW:
                self.position += 1
                y = self._activation(self._batch(self.position), self._epoch)
                return JobResult((y, bytes(SIZES.target_bytes)), self.position)
            case JobKind.FORWARD:
                return JobResult((self._activation(job.payloads[0], self._epoch),))
            case JobKind.LOSS:
                self._microbatches += 1
                return JobResult((_gradient(job.payloads[0]),), loss=1.0)
            case JobKind.BACKWARD:
                x, gradient = job.payloads
                self._accumulate(x, gradient, job.stale)
                return JobResult((_gradient(x),))
            case JobKind.FINISH:
                self._accumulate(self._batch(job.number), job.payloads[0], job.stale)
                return JobResult()
        raise ValueError(f"the paced task has no job {kind.value}")

    def discard(self) -> None:
        self._change()
        self._before = None

    def _change(self) -> None:
        self._microbatches = 0
        self._before, self._epoch = self._epoch, self._epoch + 1

    def step(self, round_number: int, step: int) -> Step:
        """Move as `Paced` does, and count the tokens of the microbatches since the last step."""
        position = self.position
        moved = super().step(round_number, step)
        self.position = position  # of a stage, it counts batches
        tokens = moved.tokens * self._microbatches
        self._change()
        return Step(moved.loss, tokens)

    def _batch(self, position: int) -> bytes:
        return f"{self._me}/{position}".encode()

    def _accumulate(self, x: Buffer, gradient: Buffer, stale: bool) -> None:
        epoch = self._before if stale else self._epoch
        if epoch is None or bytes(gradient) != _gradient(self._activation(x, epoch)):
            raise WrongWeights(f"{self._me}: a gradient for an output that its weights of epoch {epoch} never gave")
        self._microbatches += 1

    def _activation(self, x: Buffer, epoch: int) -> bytes:
        return _filled(hashlib.sha256(f"{self._me}/{epoch}/".encode() + bytes(x)).digest())


def _gradient(activation: Buffer) -> bytes:
    return _filled(hashlib.sha256(b"gradient" + bytes(activation)).digest())


def _filled(digest: bytes) -> bytes:
    return digest * (SIZES.activation_bytes // len(digest))
