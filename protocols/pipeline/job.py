"""The jobs of a stage: the seam between the protocol, which moves bytes, and whatever holds the weights.

A new kind of job is a member of `JobKind`, and a case where a learner computes it (`node.training.stage_learner`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol, Self

from protocols.base import Buffer
from protocols.pipeline.admission import Lease


class Payload(Enum):
    """What a job takes or gives, as it travels. Its size follows from the run's settings alone (`StageSizes`)."""

    ACTIVATION = auto()  # in the run's codec of activations
    GRADIENT = auto()  # of an activation, in the run's codec of gradients
    TARGETS = auto()
    LOGITS = auto()  # of one position, float32 (rows, classes)
    TOKENS = auto()  # uint8 (rows * positions)


@dataclass(frozen=True, slots=True)
class StageSizes:
    """Bytes of each payload of a microbatch; 0: the run has none."""

    activation_bytes: int
    gradient_bytes: int
    target_bytes: int
    logit_bytes: int = 0
    tokens: int = 0

    def of(self, payload: Payload) -> int:
        return {
            Payload.ACTIVATION: self.activation_bytes,
            Payload.GRADIENT: self.gradient_bytes,
            Payload.TARGETS: self.target_bytes,
            Payload.LOGITS: self.logit_bytes,
            Payload.TOKENS: self.tokens,
        }[payload]


class Place(Enum):
    FIRST = auto()
    MIDDLE = auto()
    LAST = auto()


class JobKind(Enum):
    """The verbs of a stage. A forward need keep nothing: its input comes again with the backward.

    Kinds that add to the gradient count the microbatch. Outer kinds compute with the outer parameters, and count
    nothing.
    """

    DRAW = "draw", Place.FIRST, (), (Payload.ACTIVATION, Payload.TARGETS)  # the next batch, with its number
    FINISH = "finish", Place.FIRST, (Payload.GRADIENT,), (), True  # takes the batch's number and its loss, too
    FORWARD = "forward", Place.MIDDLE, (Payload.ACTIVATION,), (Payload.ACTIVATION,)
    BACKWARD = "backward", Place.MIDDLE, (Payload.ACTIVATION, Payload.GRADIENT), (Payload.GRADIENT,), True
    """Takes the forward's input, and the gradient of its output; gives that of the input."""
    LOSS = "loss", Place.LAST, (Payload.ACTIVATION, Payload.TARGETS), (Payload.GRADIENT,), True  # and the loss

    OUTER_SAMPLE = "outer_sample", Place.FIRST, (), (Payload.ACTIVATION, Payload.TARGETS)
    """Of held-out microbatch `number`, from 0: the stage's output and the targets; nothing beyond the last."""
    OUTER_FIRST = "outer_first", Place.FIRST, (Payload.TOKENS,), (Payload.ACTIVATION,)
    OUTER_FORWARD = "outer_forward", Place.MIDDLE, (Payload.ACTIVATION,), (Payload.ACTIVATION,)
    OUTER_LOSS = "outer_loss", Place.LAST, (Payload.ACTIVATION, Payload.TARGETS), ()
    """Gives the mean loss of a microbatch, in nats per token."""
    OUTER_LOGITS = "outer_logits", Place.LAST, (Payload.ACTIVATION,), (Payload.LOGITS,)
    """Takes a position as its `number`, counted from 1."""

    place: Place
    takes: tuple[Payload, ...]
    gives: tuple[Payload, ...]
    adds_gradient: bool

    def __new__(
        cls,
        word: str,
        place: Place,
        takes: tuple[Payload, ...],
        gives: tuple[Payload, ...],
        adds_gradient: bool = False,
    ) -> Self:
        kind = object.__new__(cls)
        kind._value_ = word
        kind.place, kind.takes, kind.gives, kind.adds_gradient = place, takes, gives, adds_gradient
        return kind

    @property
    def is_outer(self) -> bool:
        return self.name.startswith("OUTER_")


@dataclass(frozen=True, slots=True)
class StageJob:
    """What a stage is to compute. The payloads are those that the kind takes."""

    kind: JobKind
    payloads: tuple[Buffer, ...] = ()
    number: int = 0  # of a batch, a held-out microbatch or a position
    loss: float = 0.0  # of FINISH: what the last stage measured
    stale: bool = False  # of a backward: in the weights before the last step, as its forward


@dataclass(frozen=True, slots=True)
class JobResult:
    """What a stage has computed: the payloads that the kind gives, or none of them."""

    payloads: tuple[Buffer, ...] = ()
    number: int = 0  # of the batch that was drawn; of OUTER_SAMPLE: how many there are
    loss: float = 0.0
    trained: int = 0  # of an outer kind: rounds whose result the parameters have that computed all of it


class StageWork(Protocol):
    """Computes the jobs of one replica, one at a time, in the order in which they come."""

    async def run(self, job: StageJob, lease: Lease | None = None) -> JobResult:
        """Compute a job: with a lease, or of an outer kind without one.

        A job that adds to the gradient counts its lease even if its caller is cancelled meanwhile. Raises `BadPayload`
        if what it was given does not decode, and `LeaseLost`, with nothing counted, if the lease is void by then, what
        was computed is not finite, or the outer parameters have changed meanwhile.
        """


class LeaseLost(Exception):
    """The microbatch cannot be counted any more, and no other peer is to blame: the weights have changed since its
    forward, their worker died, or what they give is not finite.
    """


class VersionPassed(LeaseLost):
    """The outer parameters are of another version by now."""
