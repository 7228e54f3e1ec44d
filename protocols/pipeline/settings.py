"""What all peers of a pipeline agree on, and the limits of a microbatch. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from protocols.base import Member

MAX_WINDOW = 32
MAX_STREAMS = 512
"""Streams of all drivers to one replica, at most: a driver's window shrinks as drivers become more."""

GRANT_SECONDS = 5.0
"""A replica answers a request within this time: with a place, or that it is busy."""
CALL_FLOOR_SECONDS, CALL_LIMIT_SECONDS, CALL_MULTIPLE = 20.0, 240.0, 8.0
"""A forward or backward call may take CALL_MULTIPLE times the usual, within these limits. It may wait in the replica's
queue behind B others. A replica that is dead or mute is found sooner, by the failure detector."""
MICROBATCH_SECONDS = 600.0
"""The whole path of a microbatch, forwards and backwards."""
LEASE_SECONDS, CONTENDED_LEASE_SECONDS, LEASE_MULTIPLE = 600.0, 10.0, 4.0
"""How long a replica waits for a microbatch's backward. Where other drivers wait for a place: LEASE_MULTIPLE times the
usual, at least CONTENDED_LEASE_SECONDS. A step needs every lease to end, so one that never ends stops a replica."""
SERVER_IDLE_SECONDS, DRIVER_IDLE_SECONDS = 60.0, 30.0
"""How long a stream without a request stays open. The driver drops its own first, so it rarely meets a closed one."""
STREAM_SECONDS = 1800.0
MAX_FAILURES = 4
"""Failed calls to a stage after which a microbatch is abandoned. "Busy" is no failure."""


@dataclass(frozen=True, slots=True)
class PipelineSettings:
    """The same at all peers of a run.

    Attributes:
        run: hash of the manifest, 32 bytes.
        stages: S, number of stages; 0 draws the microbatches, S - 1 computes the loss.
        batches: B, microbatches of one AdamW step of a replica.
        activation_bytes: of one activation, or its gradient, as it travels.
        target_bytes: of one microbatch's targets as they travel.
        logit_bytes: of the logits of one position, float32 (rows, classes); 0: the run gives none.
    """

    run: bytes
    stages: int
    batches: int
    activation_bytes: int
    target_bytes: int
    logit_bytes: int = 0

    def __post_init__(self) -> None:
        if self.stages < 2 or self.batches < 1 or self.activation_bytes < 1:
            raise ValueError(f"a pipeline needs at least 2 stages and 1 batch: {self}")
        if self.target_bytes < 0 or self.logit_bytes < 0:
            raise ValueError(f"sizes cannot be negative: {self}")

    @property
    def last(self) -> int:
        """Number of the last stage."""
        return self.stages - 1

    def window(self, drivers: int) -> int:
        """W, microbatches that one of `drivers` drivers keeps in flight."""
        return max(1, min(self.batches, MAX_WINDOW, MAX_STREAMS // max(1, drivers)))


@dataclass(frozen=True, slots=True)
class PipelineEvent:
    """Something that became of a microbatch, for checkers and logs.

    Attributes:
        kind: At a replica: `granted`, `forwarded`, `counted`, `ended` (a lease that was not counted), `stepped`, or
            `voided` (what was counted in this epoch is dropped). At a driver, which is the replica of stage 0, too:
            `asked` (a replica of another stage, for a place), `done`, `abandoned`.
        origin, number: the microbatch; for `stepped` and `voided` the replica itself, and 0.
        stage, replica: where it happened; of `asked`, the one that is asked.
        epoch: of the replica's weights; of `asked`, of the driver's.
        why: of `abandoned`, in a few words.
    """

    kind: str
    origin: Member
    number: int
    stage: int
    replica: Member
    epoch: int
    why: str = ""


def ignore_event(event: PipelineEvent) -> None:
    """For a pipeline that is not watched."""


def fair_share(batches: int, drivers: int) -> int:
    """Places of a step that one of `drivers` drivers may hold: twice its share; all of them if it is the only one."""
    return batches if drivers <= 1 else -(-2 * batches // drivers)
