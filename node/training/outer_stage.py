"""A stage computed with its outer parameters, in the event loop itself: evaluation and text through the pipeline."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol, TypeVar, cast

from node.training.trainer import LocalTraining
from protocols.base import Buffer

T = TypeVar("T")


class OuterCompute(Protocol):
    """What a stage computes, synchronously, with its present vectors. It counts nothing and changes no gradient.

    Raises:
        BadPayload: what was received does not decode, or is not finite.
    """

    def outer_forward(self, x: Buffer) -> bytes:
        """Of a middle stage: its output."""

    def outer_loss(self, x: Buffer, targets: Buffer) -> float:
        """Of the last stage: the mean loss, in nats per token."""

    def outer_logits(self, x: Buffer, position: int) -> bytes:
        """Of the last stage: the logits of a position, counted from 1, float32 (rows, classes)."""

    def outer_sample(self, index: int) -> tuple[bytes, bytes] | None:
        """Of stage 0: the output and the targets of held-out microbatch `index`. None beyond the last."""

    def outer_first(self, tokens: Buffer) -> bytes:
        """Of stage 0: the output for these inputs, uint8 (rows * positions)."""


class OuterStage:
    """`protocols.pipeline.work.OuterWork` and `FirstOuterWork` over a `LocalTraining`, whose anchor is used.

    The learner gets its own vectors back before its turn ends, so the jobs of training never see the anchor.
    """

    def __init__(self, turn: Callable[[], AbstractAsyncContextManager[None]], local_training: LocalTraining) -> None:
        """
        Args:
            turn: a context in which no other job of the stage runs.
            local_training: its learner is an `OuterCompute`, too.
        """
        self._turn, self._local_training = turn, local_training
        self._compute = cast(OuterCompute, local_training.learner)

    async def outer_forward(self, x: Buffer) -> bytes:
        return await self._with_anchor(lambda: self._compute.outer_forward(x))

    async def outer_loss(self, x: Buffer, targets: Buffer) -> float:
        return await self._with_anchor(lambda: self._compute.outer_loss(x, targets))

    async def outer_logits(self, x: Buffer, position: int) -> bytes:
        return await self._with_anchor(lambda: self._compute.outer_logits(x, position))

    async def outer_sample(self, index: int) -> tuple[bytes, bytes] | None:
        return await self._with_anchor(lambda: self._compute.outer_sample(index))

    async def outer_first(self, tokens: Buffer) -> bytes:
        return await self._with_anchor(lambda: self._compute.outer_first(tokens))

    async def _with_anchor(self, work: Callable[[], T]) -> T:
        async with self._turn():
            with self._local_training.outer():
                return work()
