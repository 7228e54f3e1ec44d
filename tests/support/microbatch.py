"""A microbatch through the stages of one process, without leases and without a network."""

from __future__ import annotations

from collections.abc import Sequence

from node.training.stage_learner import StageCompute
from protocols.pipeline.job import JobKind, StageJob


def accumulate(stages: Sequence[StageCompute]) -> float:
    """One microbatch through all stages, forwards and back; returns its loss."""
    first, *middle, last = stages
    drawn = first.run(StageJob(JobKind.DRAW))
    x, targets = drawn.payloads
    inputs = []
    for stage in middle:
        inputs.append(x)
        (x,) = stage.run(StageJob(JobKind.FORWARD, (x,))).payloads
    done = last.run(StageJob(JobKind.LOSS, (x, targets)))
    (gradient,) = done.payloads
    for stage, x in zip(reversed(middle), reversed(inputs), strict=True):
        (gradient,) = stage.run(StageJob(JobKind.BACKWARD, (x, gradient))).payloads
    first.run(StageJob(JobKind.FINISH, (gradient,), drawn.number, done.loss))
    return done.loss
