"""What all peers of a pipeline agree on, and the limits of a microbatch. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from protocols.base import Member
from protocols.pipeline.job import StageSizes

MAX_WINDOW = 32
MAX_STREAMS = 512  # streams of all drivers to one replica, at most: a driver's window shrinks as drivers become more

GRANT_SECONDS = 5.0  # a replica answers a request within this time: with a place, or that it is busy
CALL_FLOOR_SECONDS, CALL_LIMIT_SECONDS, CALL_MULTIPLE = 20.0, 240.0, 8.0
"""A forward or backward call may take CALL_MULTIPLE times the usual, within these limits. It may wait in the replica's
queue behind B others. A replica that is dead or mute is found sooner, by the failure detector."""
MICROBATCH_SECONDS = 600.0  # the whole path of a microbatch, forwards and backwards
LEASE_SECONDS, CONTENDED_LEASE_SECONDS, LEASE_MULTIPLE = 600.0, 10.0, 4.0
"""How long a replica waits for a microbatch's backward. Where other drivers wait for a place: LEASE_MULTIPLE times the
usual, at least CONTENDED_LEASE_SECONDS. A step needs every lease to end, so one that never ends stops a replica."""
SERVER_IDLE_SECONDS, DRIVER_IDLE_SECONDS = 60.0, 30.0
"""How long a stream without a request stays open. The driver drops its own first, so it rarely meets a closed one."""
STREAM_SECONDS = 1800.0
RETRY_SECONDS = 0.25  # when a driver that was refused may ask again
MAX_REQUESTS = 2
"""Jobs with outer parameters that a replica computes at once, and held-out microbatches that a driver has in flight."""
PAIR_SECONDS = 600.0
"""How long a driver remembers that a replica cannot reach another, or serves no chains, and carries their data itself.
"""
MAX_FAILURES = 4  # Failed calls to a stage after which a microbatch is abandoned. "Busy" does not count as one.


@dataclass(frozen=True, slots=True)
class PipelineSettings:
    run: bytes  # hash of the manifest, 32 bytes
    stages: int  # S: stage 0 draws the microbatches, S - 1 computes the loss
    batches: int  # B, microbatches of one optimiser step of a replica
    sizes: StageSizes
    lookahead: int = 0  # A, microbatches of the next step that a replica admits

    def __post_init__(self) -> None:
        if self.stages < 2 or self.batches < 1 or min(self.sizes.activation_bytes, self.sizes.gradient_bytes) < 1:
            raise ValueError(f"a pipeline needs at least 2 stages and 1 batch: {self}")
        if self.lookahead < 0:
            raise ValueError(f"lookahead is 0 or more, not {self.lookahead}")

    @property
    def last(self) -> int:
        return self.stages - 1

    def upload_bytes(self, is_chain: bool) -> int:
        """That a driver sends for each microbatch, headers left out."""
        sizes = self.sizes
        passed_on = 0 if is_chain else (self.stages - 2) * (sizes.activation_bytes + sizes.gradient_bytes)
        return sizes.activation_bytes + sizes.target_bytes + passed_on

    def window(self, drivers: int) -> int:
        """W, microbatches that one of `drivers` drivers keeps in flight."""
        return max(1, min(self.batches + self.lookahead, MAX_WINDOW, MAX_STREAMS // max(1, drivers)))


@dataclass(frozen=True, slots=True)
class PipelineEvent:
    """Something that became of a microbatch, for checkers and logs.

    At a replica: `granted`, `handed` (its input by the stage before), `forwarded`, `counted`, `ended` (a lease that was
    not counted), `stepped`, `voided` (all leases, and what is counted since the last step). At a driver, too: `asked`
    (a replica, for a place), `waiting` (for its answer), `answered` (or the call has failed), `done`, `abandoned`.
    """

    kind: str
    origin: Member  # with `number`, the microbatch; for `stepped` and `voided` the replica itself, and 0
    number: int
    stage: int
    replica: Member  # of `asked`, `waiting` and `answered`, the one that is called
    epoch: int  # of the replica's weights, from `forwarded` on of the forward's; of these three, of the driver's
    why: str = ""  # of `abandoned`, in a few words
    sender: Member | None = None  # of `handed`: the replica of the stage before


def ignore_event(event: PipelineEvent) -> None:
    """For a pipeline that is not watched."""
