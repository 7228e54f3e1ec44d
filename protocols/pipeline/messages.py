"""Messages between a driver and the replica of a stage, in the order in which a stream carries them.

    driver                          replica of stage k
    StageRequest             ->
                             <-     Granted, or StageBusy (the stream is free for the next request)
    JobInput(forward), x     ->
                             <-     JobOutput, y
    JobInput(backward), gy   ->
                             <-     JobOutput, gx             (the microbatch is counted)

The last stage computes forward, loss and backward in one job. Instead of any answer after `Granted` a replica may send
`LeaseVoid`. Jobs with the outer parameters have a method of their own, and no lease:

    StageRequest             ->     (without a microbatch)
                             <-     Granted, or StageBusy
    JobInput, x              ->
                             <-     OuterOutput, y
"""

from __future__ import annotations

from dataclasses import dataclass

from protocols.base import Header, Member
from protocols.wire import MAX_SECONDS, digest, one, real, register, text, uint

METHOD, OUTER_METHOD = "starling/stage/1", "starling/stage-outer/2"
HEADER_LIMIT = 1024
MAX_LOSS, MAX_TRAINED = 1e9, 1 << 40


@dataclass(frozen=True, slots=True)
class StageRequest(Header):
    """Asks a replica to admit a microbatch to its present AdamW step, or to compute with its outer parameters."""

    run: bytes = digest()
    scope: str = text(64)  # of the replica's stage
    sender: Member = one(Member)  # the driver; with `number` it names the microbatch
    to: Member = one(Member)
    number: int = uint(1 << 48)  # never used twice by this incarnation of the driver; 0: with the outer parameters
    trained: int = uint(MAX_TRAINED)  # rounds whose result these must have; the replica is busy until they have it


@dataclass(frozen=True, slots=True)
class Granted(Header):
    """Send the job."""


@dataclass(frozen=True, slots=True)
class StageBusy(Header):
    """There is no place for the request now. The driver may ask again after `retry_seconds`."""

    retry_seconds: float = real(0, MAX_SECONDS)


@dataclass(frozen=True, slots=True)
class JobInput(Header):
    """A payload of a job follows. A backward has only the gradient: the replica has kept the forward's input."""

    kind: str = text(16)  # a value of `JobKind`
    number: int = uint(1 << 20)  # as in `StageJob`


@dataclass(frozen=True, slots=True)
class JobOutput(Header):
    """A payload of the result follows, if the kind gives one."""

    loss: float = real(-MAX_LOSS, MAX_LOSS)


@dataclass(frozen=True, slots=True)
class OuterOutput(Header):
    """As `JobOutput`, of the outer parameters that have the result of so many rounds: what was asked for, or more."""

    loss: float = real(-MAX_LOSS, MAX_LOSS)
    trained: int = uint(MAX_TRAINED)


@dataclass(frozen=True, slots=True)
class LeaseVoid(Header):
    """The microbatch is not counted, see `LeaseLost`."""

    why: str = text(120)


register(176, (StageRequest, Granted, StageBusy, JobInput, JobOutput, LeaseVoid, OuterOutput))
