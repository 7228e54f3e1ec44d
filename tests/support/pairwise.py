"""Rounds of gossip and push-sum: with lending peers, with faults, and beside a peer without honest code."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from protocols.base import Stream
from tests.sim.faults import Faults
from tests.sim.gossip_harness import GossipHarness
from tests.sim.host import DirectoryFaults
from tests.sim.injection import Injector


@asynccontextmanager
async def lending(swarm: GossipHarness, *lenders: int, seconds: float = 60.0) -> AsyncIterator[None]:
    """Inside, these peers train and lend their states; waits at the end until their time is over."""
    tasks = [swarm.start(index, swarm.lending(index, seconds)) for index in lenders]
    yield
    await asyncio.gather(*tasks)


def run_round(swarm: GossipHarness, index: int, *lenders: int, seconds: float = 60.0) -> None:
    """One round of a peer while these lend their states; the others are busy."""

    async def main() -> None:
        async with lending(swarm, *lenders, seconds=seconds):
            await swarm.start(index, swarm.round(index))

    swarm.run(main)


async def play_rounds(swarm: GossipHarness, index: int, count: int, train_seconds: float = 1.0, first: int = 0) -> None:
    for number in range(first, first + count):
        await swarm.round(index, number, train_seconds)


def run_with_faults(
    swarm: GossipHarness,
    faults: Faults,
    rounds: int = 1,
    afterwards: Callable[[Injector], Awaitable[None]] | None = None,
) -> None:
    """This many rounds of every peer with these faults, then what comes `afterwards`."""

    async def main() -> None:
        injector = Injector(faults, swarm.network, DirectoryFaults(), lambda peer: None)
        injector.start()
        await asyncio.wait([swarm.start(index, play_rounds(swarm, index, rounds)) for index in range(swarm.count)])
        await asyncio.sleep(5.0)
        if afterwards:
            await afterwards(injector)

    swarm.run(main)


@asynccontextmanager
async def opened(swarm: GossipHarness, method: str, seconds: float = 500.0) -> AsyncIterator[Stream]:
    """A stream from p1 to p0, on which the test plays p1 without any honest code."""
    deadline = asyncio.get_running_loop().time() + seconds
    async with swarm.network.transports["p1"].open("p0", method, deadline) as stream:
        yield stream
