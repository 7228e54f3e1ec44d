"""The order in which a stage's jobs get their turns."""

from __future__ import annotations

import asyncio

from node.training.stage_replica import OUTER_AFTER, Priority, TurnQueue
from tests.support.simulated import on_virtual_time


@on_virtual_time
async def test_jobs_with_outer_parameters_come_after_microbatches_but_come() -> None:
    """One in a row at most while microbatches wait; what changes the weights is before both."""
    turns, order = TurnQueue(), list[Priority]()

    async def job(priority: Priority) -> None:
        async with turns.turn(priority):
            order.append(priority)
            await asyncio.sleep(1.0)

    outer = [asyncio.create_task(job(Priority.OUTER)) for _ in range(4)]
    microbatches = [asyncio.create_task(job(Priority.MICROBATCH)) for _ in range(3 * OUTER_AFTER)]
    await asyncio.sleep(0.5)  # nothing waited before the first
    outer.pop(1).cancel()
    weights = asyncio.create_task(job(Priority.WEIGHTS))
    await asyncio.wait([*outer, *microbatches, weights])
    some = [Priority.MICROBATCH] * OUTER_AFTER
    assert order == [
        Priority.OUTER, Priority.WEIGHTS, *some, Priority.OUTER, *some, Priority.OUTER, *some
    ]  # fmt: skip
