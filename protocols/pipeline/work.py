"""What a pipeline needs computed: the seam between the protocol, which moves bytes, and whatever holds the weights."""

from __future__ import annotations

from typing import Protocol

from protocols.base import Buffer
from protocols.pipeline.admission import Lease


class StageWork(Protocol):
    """The computations of one replica of a stage other than 0. Activations and gradients are bytes, in the run's codec.

    Jobs run one at a time. All raise `BadPayload` if what they were given does not decode, or is not finite. A backward
    keeps its lease from the moment it begins, counts it when it has added to the gradient, and does so even if its
    caller is cancelled meanwhile. It raises `LeaseLost` and computes nothing if the lease is void by then.
    """

    async def forward(self, x: Buffer, lease: Lease) -> bytes:
        """The stage's output for an input. It keeps nothing: the backward computes it again."""

    async def backward(self, x: Buffer, gradient: Buffer, lease: Lease) -> bytes:
        """Add to the stage's gradient. Returns the gradient of the input."""

    async def loss(self, x: Buffer, targets: Buffer, lease: Lease) -> tuple[float, bytes]:
        """Of the last stage: forward, loss and backward in one. Returns the loss and the gradient of the input."""


class FirstStageWork(Protocol):
    """The computations of a driver: the first stage, and the data. The rules of `StageWork` hold here, too."""

    async def draw(self, lease: Lease) -> tuple[int, bytes, bytes]:
        """Draw the next batch of the stream.

        Returns:
            Its number for `finish`, the stage's output, and the batch's targets as they travel.
        """

    async def finish(self, batch: int, gradient: Buffer, loss: float, lease: Lease) -> None:
        """Add to the stage's gradient, with the gradient of its output and the loss that the last stage measured."""

    def check(self, activation: Buffer) -> None:
        """Check what another stage has sent, before it is passed on: else the next stage would blame the driver.

        Raises:
            BadPayload: it is not finite.
        """


class OuterWork(Protocol):
    """The computations of one replica of a stage other than 0 with its outer parameters. They count nothing.

    All raise `BadPayload` if what they were given does not decode, or is not finite, and `LeaseLost` without a worker.
    """

    async def outer_forward(self, x: Buffer) -> bytes:
        """The stage's output for an input, both as they travel."""

    async def outer_loss(self, x: Buffer, targets: Buffer) -> float:
        """Of the last stage: the mean loss of a microbatch, in nats per token."""

    async def outer_logits(self, x: Buffer, position: int) -> bytes:
        """Of the last stage: the logits of one position, counted from 1, as float32 (rows, classes)."""


class FirstOuterWork(Protocol):
    """The computations of a peer of stage 0 with its outer parameters, and its held-out data."""

    async def outer_sample(self, index: int) -> tuple[bytes, bytes] | None:
        """Of held-out microbatch `index`, from 0: the stage's output and the targets. None beyond the last."""

    async def outer_first(self, tokens: Buffer) -> bytes:
        """The stage's output for these inputs, uint8 (rows * positions)."""


class LeaseLost(Exception):
    """The weights have changed since the microbatch's forward, or their worker died: it cannot be counted any more."""
