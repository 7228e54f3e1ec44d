"""A simulated swarm finds what its peers do wrong, whatever the play itself asserts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from protocols.base import PeerId, Stream
from tests.sim.swarm import SimSwarm


class Checked(SimSwarm):
    async def finish(self) -> None:
        self.assert_nothing_left()


async def fails(*_: PeerId | Stream) -> None:
    raise LookupError("a bug")


async def lingers(*_: PeerId | Stream) -> None:
    await asyncio.sleep(100.0)


@pytest.mark.parametrize("job, error", [(fails, LookupError), (lingers, AssertionError)])
@pytest.mark.parametrize("serves", (False, True))
def test_failing_or_lingering_peer_fails_the_play(job: Any, error: type[Exception], serves: bool) -> None:
    """In its main task, or in a handler."""
    swarm = Checked()

    async def main() -> None:
        host, other = swarm.join("anna"), swarm.join("bert")
        if not serves:
            swarm.spawn("anna", job())
            return await asyncio.sleep(1.0)
        host.transport.serve("method", job)
        async with other.transport.open("anna", "method", swarm.now + 10.0):
            await asyncio.sleep(1.0)

    with pytest.raises(error):
        swarm.play(main)
