"""How often a peer looks into the directory: seldom once it has met all, soon again when something changes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise

import pytest

from node.session.discovery import discover
from protocols.base import Deadline, PeerId
from tests.sim.host import DirectoryFaults, SimClock, SimDirectory
from tests.support.membership_swarm import MembershipSwarm
from tests.support.simulated import on_virtual_time
from tests.support.waiting import until


@pytest.fixture
def swarm() -> MembershipSwarm:
    return MembershipSwarm()


class CountingDirectory(SimDirectory):
    def __init__(self) -> None:
        super().__init__({}, "a", SimClock(), DirectoryFaults())
        self.named: list[tuple[PeerId, bytes]] = []
        self.looks: list[float] = []

    async def meet(self, peer: PeerId, deadline: Deadline) -> bool:
        return True

    async def find(self, scope: str, limit: int, deadline: Deadline) -> Sequence[tuple[PeerId, bytes]]:
        self.looks.append(asyncio.get_running_loop().time())
        return self.named

    async def pauses(self, count: int) -> list[int]:
        """Before each of the next looks."""
        before = len(self.looks)
        await until(lambda: len(self.looks) == before + count, 1000.0)
        return [round(after - earlier) for earlier, after in pairwise(self.looks[before - 1 :])]


@on_virtual_time
async def test_directory_is_asked_seldom_while_nothing_is_new(swarm: MembershipSwarm) -> None:
    await swarm.meet("abc")
    directory = CountingDirectory()
    swarm.spawn("a", discover(swarm.members["a"], directory, "a", lambda: ["/ip4/10.0.0.1/tcp/1/p2p/a"]))
    await asyncio.sleep(110.0)
    assert await directory.pauses(5) == [60] * 5
    directory.named = [("d", b'["/ip4/10.0.0.4/tcp/4"]')]  # it never answers, and is known from now on
    assert await directory.pauses(5) == [60, 20, 20, 60, 60]
    directory.named = []
    swarm.network.kill("c")
    assert await directory.pauses(5) == [60, 20, 20, 60, 60]
    swarm.network.kill("b")
    await directory.pauses(1)
    assert await directory.pauses(15) == [20] * 15, "alone, it looks for others"
