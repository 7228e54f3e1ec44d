"""How the ranks sum their gradients: the ways are timed on the real sizes at the start, and the fastest is taken.

Which is fastest depends on the links between the devices, the number of ranks and the size of the model: NCCL or gloo,
one sum for all or one for each rank that trains a part, in buckets of one size or another, in float32 or bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import torch
import torch.distributed as dist

from node.ranks.group import RankGroup
from node.runtime.notes import note
from protocols.base import Vector

BUCKETS = (1 << 20, 1 << 22, 1 << 24)
"""Elements that are summed at once."""
MEASURED_ELEMENTS = 1 << 25
"""Of a longer vector only so many are summed to time a way."""
WORTH_ROUNDING = 0.8
"""A sum in bfloat16 is taken if it needs at most this share of the time of one in float32."""
TRIAL_SECONDS = 3.0
"""Once so much time has passed, no further way is tried."""


@dataclass(frozen=True, slots=True, eq=False)
class GradientSum:
    """One way to sum. `bounds` are those of the ranks' parts of the vector."""

    bounds: Sequence[int]
    bucket: int = BUCKETS[1]
    for_all: bool = False  # each rank gets the whole sum, though it trains a part of it
    dtype: torch.dtype = torch.float32
    group: Any = None  # a process group other than the default
    backend: str = ""

    def __call__(self, part: Vector, low: int) -> None:
        """Sum a part of the vector, which begins at `low`: each element at least where it is trained."""
        if len(self.bounds) == 2:  # a group of one
            return
        works = [(held, own, [*self._begin(held, at)]) for held, own, at in self._pieces(part, low)]
        for held, own, begun in works:
            for work in begun:
                work.wait()
            if held is not own:
                own.copy_(held)

    def _pieces(self, part: Vector, low: int) -> Iterator[tuple[Vector, Vector, int]]:
        for at in range(0, len(part), self.bucket):
            own = part[at : at + self.bucket]
            yield own if self.dtype == own.dtype else own.to(self.dtype), own, low + at

    def _begin(self, held: Vector, low: int) -> Iterator[Any]:
        if self.for_all:
            yield dist.all_reduce(held, group=self.group, async_op=True)
            return
        for owner, (begin, end) in enumerate(pairwise(self.bounds)):
            begin, end = max(begin, low), min(end, low + len(held))
            if begin < end:
                yield dist.reduce(held[begin - low : end - low], owner, group=self.group, async_op=True)

    def __str__(self) -> str:
        how = "a sum for all ranks" if self.for_all else "a sum for each rank's part"
        name = "bfloat16" if self.dtype == torch.bfloat16 else "float32"
        return f"{how} in {name}, {4 * self.bucket >> 20} MiB at once, by {self.backend}"


def fastest(group: RankGroup, bounds: Sequence[int], reduced: bool) -> GradientSum:
    """Time the ways, and tell the user the one that is taken. All ranks call it together, and take the same.

    `reduced`: the gradients are computed in bfloat16, so that they may be summed in it.
    """
    if group.size == 1:
        return GradientSum(bounds)
    elements = min(bounds[-1], MEASURED_ELEMENTS)
    trial = torch.zeros(elements, dtype=torch.float32, device=group.device)
    found: list[tuple[float, GradientSum]] = []
    spent = 0.0
    for way in _ways(group, bounds, reduced):
        way(trial[: way.bucket], 0)
        began = group.now()
        way(trial, 0)
        (seconds,) = group.total(group.now() - began)
        found.append((seconds / group.size, way))
        spent += 2 * seconds / group.size
        if spent > TRIAL_SECONDS:
            break
    best, taken = min(found, key=lambda each: each[0] / (1.0 if each[1].dtype == torch.float32 else WORTH_ROUNDING))
    factor = bounds[-1] / max(1, elements)
    others = f"; {len(found)} ways took up to {1e3 * factor * max(found, key=lambda each: each[0])[0]:.3g} ms"
    note(f"the ranks' gradients: {taken}: {1e3 * factor * best:.3g} ms each time{others}")
    return taken


def _ways(group: RankGroup, bounds: Sequence[int], reduced: bool) -> Iterator[GradientSum]:
    """The likeliest first, because there may be no time for all."""
    sizes = [each for each in BUCKETS if each < 4 * bounds[-1]] or [BUCKETS[0]]
    dtypes = (torch.float32, torch.bfloat16) if reduced else (torch.float32,)
    for (backend, process_group), dtype, for_all, bucket in product(
        group.backends().items(), dtypes, (False, True), sizes
    ):
        yield GradientSum(bounds, bucket, for_all, dtype, process_group, backend)
