"""One stage of the paced task: it takes a set time, and its activations name the weights that computed them.

An activation is a hash of its input, the replica and the epoch of its weights. A backward computes it again, and the
gradient that it is given must name the same activation. So a backward at another replica than its forward's, or in
other weights, cannot pass unseen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from node.tasks.base import Step
from node.tasks.paced import Paced
from protocols.base import Buffer, Vector

ACTIVATION_BYTES = 256
TARGET_BYTES = 32
LOGIT_BYTES = 4 * 256
_HELD_OUT = 4
"""Held-out microbatches."""


class WrongWeights(RuntimeError):
    """A gradient for an output that these weights never gave."""


class PacedStage(Paced):
    """A `StageCompute` whose vector follows the walk of `Paced`, one move a step."""

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
        self._microbatches = 0

    def forward(self, x: Buffer) -> bytes:
        return self._activation(x)

    def backward(self, x: Buffer, gradient: Buffer) -> bytes:
        self._accumulate(x, gradient)
        return _gradient(x)

    def loss(self, x: Buffer, targets: Buffer) -> tuple[float, bytes]:
        self._microbatches += 1
        return 1.0, _gradient(x)

    def draw(self) -> tuple[int, bytes, bytes]:
        self.position += 1
        return self.position, self._activation(self._batch(self.position)), bytes(TARGET_BYTES)

    def finish(self, batch: int, gradient: Buffer, loss: float) -> None:
        self._accumulate(self._batch(batch), gradient)

    def outer_forward(self, x: Buffer) -> bytes:
        return bytes(ACTIVATION_BYTES)

    def outer_loss(self, x: Buffer, targets: Buffer) -> float:
        return 1.0

    def outer_logits(self, x: Buffer, position: int) -> bytes:
        return bytes(LOGIT_BYTES)

    def outer_sample(self, index: int) -> tuple[bytes, bytes] | None:
        return (bytes(ACTIVATION_BYTES), bytes(TARGET_BYTES)) if index < _HELD_OUT else None

    def outer_first(self, tokens: Buffer) -> bytes:
        return bytes(ACTIVATION_BYTES)

    def check(self, activation: Buffer) -> None:
        """Nothing: hashes are always finite."""

    @contextmanager
    def using(self, vectors: Sequence[Vector]) -> Iterator[None]:
        yield

    def discard(self) -> None:
        self._microbatches = 0
        self._epoch += 1

    def step(self, round_number: int, step: int) -> Step:
        """Move as `Paced` does, and count the tokens of the microbatches since the last step."""
        position = self.position
        moved = super().step(round_number, step)
        self.position = position  # it counts batches here
        tokens = moved.tokens * self._microbatches
        self.discard()
        return Step(moved.loss, tokens)

    def _batch(self, position: int) -> bytes:
        return f"{self._me}/{position}".encode()

    def _accumulate(self, x: Buffer, gradient: Buffer) -> None:
        if bytes(gradient) != _gradient(self._activation(x)):
            raise WrongWeights(
                f"{self._me}: a gradient for an output that its weights of epoch {self._epoch} never gave"
            )
        self._microbatches += 1

    def _activation(self, x: Buffer) -> bytes:
        return _filled(hashlib.sha256(f"{self._me}/{self._epoch}/".encode() + bytes(x)).digest())


def _gradient(activation: Buffer) -> bytes:
    return _filled(hashlib.sha256(b"gradient" + bytes(activation)).digest())


def _filled(digest: bytes) -> bytes:
    return digest * (ACTIVATION_BYTES // len(digest))
