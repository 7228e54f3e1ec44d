"""Averagers whose result vectors hold NaN at first, so a mean that is not written does not go unseen."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

from protocols.base import (
    AveragingResult,
    Deadline,
    Head,
    IndependentAverager,
    IndependentSession,
    LocalProgress,
    Vector,
)

Enter = Callable[[Head, Deadline], AbstractAsyncContextManager[IndependentSession]]


def blank_results(averager: IndependentAverager) -> IndependentAverager:
    """The averager, changed so that `into` holds NaN when `average` begins."""
    averager.enter = partial(_enter_blank, averager.enter)  # type: ignore[method-assign]
    return averager


@asynccontextmanager
async def _enter_blank(
    enter: Callable[[Head, Deadline], AbstractAsyncContextManager[IndependentSession]], head: Head, deadline: Deadline
) -> AsyncIterator[IndependentSession]:
    async with enter(head, deadline) as session:
        average = session.average

        async def into_blank(mine: Sequence[Vector], work: LocalProgress, into: Sequence[Vector]) -> AveragingResult:
            for each in into:
                each.fill_(math.nan)
            return await average(mine, work, into)

        session.average = into_blank  # type: ignore[method-assign]
        yield session
