"""What a report says of the time in which data moved: it is the bytes' time on the line, not the wait for others."""

from __future__ import annotations

import asyncio
from typing import cast

from protocols.base import Stream
from protocols.streams.endpoint import RoundAccounting
from tests.sim.swarm import SimSwarm
from tests.support.simulated import simulated


class Moving:
    """A stream that moves a megabyte a second for two seconds, then waits for three."""

    def __init__(self, now: float) -> None:
        self._began, self.bytes_sent, self.bytes_received = now, 0, 0

    @property
    def moved_bytes(self) -> int:
        return int(1e6 * min(2.0, asyncio.get_running_loop().time() - self._began))


@simulated(SimSwarm)
async def test_waits_are_apart_from_moving_bytes(swarm: SimSwarm) -> None:
    accounting, loop = RoundAccounting(), asyncio.get_running_loop()
    async with accounting.counting(cast("Stream", Moving(loop.time()))):
        timing = asyncio.create_task(accounting.time_movement())
        await asyncio.sleep(5.0)
        timing.cancel()
    assert 1.9 < accounting.seconds_moving < 2.2
