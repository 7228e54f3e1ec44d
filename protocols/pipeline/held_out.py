"""The held-out loss of one version of a pipeline's outer parameters, from samples that may be cut short. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import fmean

MAX_SAMPLES, LEAST_SAMPLES = 64, 8
"""Held-out microbatches of an evaluation. The mean of fewer than `LEAST_SAMPLES` is not reported."""
SHARE = 0.06
"""Samples for each microbatch of a round. One takes a third of a microbatch's time, all at most 2 % of the round's."""
_BITS = (MAX_SAMPLES - 1).bit_length()


def usual_samples(inner_steps: int, batches: int) -> int:
    """How many samples an evaluation takes beside a round of so many steps of so many microbatches."""
    return max(LEAST_SAMPLES, min(MAX_SAMPLES, int(SHARE * inner_steps * batches)))


def spread_order() -> Iterator[int]:
    """Indices of all samples with their bits reversed: the first n are spread evenly, for any n."""
    for number in range(MAX_SAMPLES):
        yield int(f"{number:0{_BITS}b}"[::-1], 2)


@dataclass(slots=True)
class HeldOutLoss:
    """Filled sample after sample (`PipelineDriver.evaluate`). When that ends early, it has what has come."""

    trained: int  # the version: rounds whose result the parameters of all stages have
    wanted: int = MAX_SAMPLES
    losses: dict[int, float] = field(default_factory=dict)  # nats per token of a held-out microbatch, by its index
    is_whole: bool = False  # it has all that were wanted, or all that there are
    exist: int = MAX_SAMPLES  # how many there are, once the first sample has said it
    _begun: int = 0
    _order: Iterator[int] = field(default_factory=spread_order)

    @property
    def samples(self) -> int:
        return len(self.losses)

    @property
    def is_enough(self) -> bool:
        return self.samples >= LEAST_SAMPLES or (self.is_whole and self.samples > 0)

    @property
    def mean(self) -> float:
        """nan if there are too few samples."""
        return fmean(self.losses[index] for index in sorted(self.losses)) if self.is_enough else math.nan

    def next(self) -> int | None:
        """Index of the next sample to take; None if there are enough, with those that are being taken."""
        left = (each for each in self._order if each < self.exist)
        if self._begun >= self.wanted or (index := next(left, None)) is None:
            return None
        self._begun += 1
        return index

    def add(self, index: int, loss: float) -> None:
        self.losses[index] = loss

    def skip(self) -> None:
        """The held-out data have no sample of an index that `next` gave."""
        self._begun -= 1
