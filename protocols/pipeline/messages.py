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

In a chain replicas pass activations and gradients on to each other; the driver has a stream to each, and sends the
first input and the targets only:

    StageRequest             ->
                             <-     ChainGranted (a ticket), or StageBusy
    JobInput(forward), x     ->     to stage 1, and where no replica can pass the input on
    JobInput(loss), targets  ->     to the last stage
    NextHop                  ->     to the others: where the output goes; with an empty ticket it comes to the driver
    LeaseVoid                ->     to the last stage: give the microbatch up, if its job has not begun
                             <-     JobDone(forward); JobOutput, y, if it comes to the driver
                             <-     HopFailed, or LeaseVoid; the driver may answer `HopFailed` with another NextHop
    JobInput(backward), gy   ->     if the output came to the driver
                             <-     JobDone(backward or loss); instead JobOutput, gx, if the input came from the driver

    replica of stage k              replica of stage k + 1
    HopInput, x              ->
                             <-     JobOutput, gx; or LeaseVoid: the lease has ended
"""

from __future__ import annotations

from dataclasses import dataclass

from protocols.base import Header, Member
from protocols.wire import MAX_SECONDS, blob, digest, flag, one, real, register, text, uint

METHOD, OUTER_METHOD = "starling/stage/1", "starling/stage-outer/2"
CHAIN_METHOD, HOP_METHOD = "starling/stage-chain/1", "starling/stage-hop/1"
HEADER_LIMIT = 1024
TICKET_BYTES = 16
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
    """The microbatch is not counted, see `LeaseLost`. In a chain drivers send it, too: they need no count."""

    why: str = text(120)


@dataclass(frozen=True, slots=True)
class ChainGranted(Header):
    """The stage before may send this microbatch's input, once, with this ticket. It is void when the lease ends."""

    ticket: bytes = blob(TICKET_BYTES, TICKET_BYTES)


@dataclass(frozen=True, slots=True)
class NextHop(Header):
    """Send the output to this replica of the next stage. It replaces an earlier one."""

    to: Member = one(Member)
    ticket: bytes = blob(TICKET_BYTES)  # empty: send it to the driver, on this stream


@dataclass(frozen=True, slots=True)
class JobDone(Header):
    """The job is done. Its result goes to the replica of the next stage, or of the one before."""

    kind: str = text(16)  # a value of `JobKind`
    loss: float = real(-MAX_LOSS, MAX_LOSS)


@dataclass(frozen=True, slots=True)
class HopFailed(Header):
    """The input that this ticket is for was not passed on, or its gradient did not come back.

    Its receiver says so, too, of an input that does not decode. The lease stays.
    """

    ticket: bytes = blob(TICKET_BYTES, TICKET_BYTES)
    reached: bool = flag()  # False: nothing has reached the next replica
    why: str = text(120)


@dataclass(frozen=True, slots=True)
class HopInput(Header):
    """The output of the stage before follows."""

    run: bytes = digest()
    scope: str = text(64)  # of the receiver's stage
    sender: Member = one(Member)
    to: Member = one(Member)
    driver: Member = one(Member)
    number: int = uint(1 << 48)  # with the driver, the microbatch
    ticket: bytes = blob(TICKET_BYTES, TICKET_BYTES)


register(176, (StageRequest, Granted, StageBusy, JobInput, JobOutput, LeaseVoid, OuterOutput))
register(183, (ChainGranted, NextHop, JobDone, HopFailed, HopInput))
