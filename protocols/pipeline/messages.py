"""Messages between the driver of a microbatch and the replica of a stage, in the order in which a stream carries them.

    driver                          replica of stage k
    MicrobatchRequest        ->
                             <-     Granted, or StageBusy (the stream is free for the next request)
    MicrobatchInput, x       ->
                             <-     ForwardOutput, y
    BackwardRequest, gy      ->
                             <-     InputGradient, gx         (the microbatch is done)

The last stage computes forward, loss and backward in one: after `MicrobatchInput` comes `MicrobatchTargets`, and the
answer is `LossResult` with gx. Instead of any answer after `Granted` a replica may send `LeaseVoid`: it has not counted
the microbatch and never will. The sizes of payloads follow from the run's settings alone (`PipelineSettings`), never
from a message.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocols.base import Header, Member
from protocols.wire import MAX_SECONDS, digest, one, real, register, text, uint

METHOD = "starling/stage/1"
OUTER_METHOD = "starling/stage-outer/1"
HEADER_LIMIT = 1024
MAX_LOSS = 1e9


@dataclass(frozen=True, slots=True)
class MicrobatchRequest(Header):
    """Asks a replica to admit a microbatch to its present AdamW step.

    Attributes:
        scope: of the replica's stage.
        sender: the driver; with `number` it names the microbatch.
        number: of the microbatch, never used twice by this incarnation of the driver.
    """

    run: bytes = digest()
    scope: str = text(64)
    sender: Member = one(Member)
    to: Member = one(Member)
    number: int = uint(1 << 48)


@dataclass(frozen=True, slots=True)
class Granted(Header):
    """The microbatch has a place in the present step: send its input."""


@dataclass(frozen=True, slots=True)
class MicrobatchInput(Header):
    """The stage's input follows as payload."""


@dataclass(frozen=True, slots=True)
class MicrobatchTargets(Header):
    """The microbatch's targets follow as payload."""


@dataclass(frozen=True, slots=True)
class StageBusy(Header):
    """There is no place for the microbatch now. The driver may ask again after `retry_seconds`."""

    retry_seconds: float = real(0, MAX_SECONDS)


@dataclass(frozen=True, slots=True)
class ForwardOutput(Header):
    """The stage's output follows as payload."""


@dataclass(frozen=True, slots=True)
class BackwardRequest(Header):
    """The gradient of the stage's output follows as payload."""


@dataclass(frozen=True, slots=True)
class InputGradient(Header):
    """The microbatch is counted; the gradient of the stage's input follows as payload."""


@dataclass(frozen=True, slots=True)
class LossResult(Header):
    """Of the last stage: the microbatch is counted; the gradient of the stage's input follows as payload."""

    loss: float = real(-MAX_LOSS, MAX_LOSS)


@dataclass(frozen=True, slots=True)
class LeaseVoid(Header):
    """The microbatch is not counted: the replica's weights have changed since its forward, or its time is up."""

    why: str = text(120)


@dataclass(frozen=True, slots=True)
class OuterRequest(Header):
    """Asks a replica to compute a forward with its outer parameters; answered with `Granted` or `StageBusy`.

    After `Granted` comes `MicrobatchInput`; at the last stage without `position`, `MicrobatchTargets` as well. The
    answer is `OuterOutput`, or `OuterLoss` if there were targets. Then the stream ends.

    Attributes:
        trained: training rounds whose result the outer parameters must have; the replica is busy until they have it.
        position: at the last stage: return the logits of this position, from 1; 0: the loss of all positions.
    """

    run: bytes = digest()
    scope: str = text(64)
    sender: Member = one(Member)
    to: Member = one(Member)
    trained: int = uint(1 << 40)
    position: int = uint(1 << 20)


@dataclass(frozen=True, slots=True)
class OuterOutput(Header):
    """The stage's output follows as payload; of the last stage, float32 logits (rows, classes)."""


@dataclass(frozen=True, slots=True)
class OuterLoss(Header):
    """The mean loss of the microbatch, in nats per token."""

    loss: float = real(-MAX_LOSS, MAX_LOSS)


MESSAGES = (
    MicrobatchRequest,
    Granted,
    StageBusy,
    MicrobatchInput,
    MicrobatchTargets,
    ForwardOutput,
    BackwardRequest,
    InputGradient,
    LossResult,
    LeaseVoid,
    OuterRequest,
    OuterOutput,
    OuterLoss,
)
register(176, MESSAGES)
