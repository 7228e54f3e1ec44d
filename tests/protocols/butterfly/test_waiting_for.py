"""The peers that a round waits for, in each of its phases."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import torch

from protocols.base import (
    AveragingResult,
    AveragingSession,
    Head,
    Host,
    LocalProgress,
    Member,
    Outcome,
    Settings,
)
from protocols.history.chain import genesis as genesis_head
from protocols.registry import load_averager
from protocols.vectors.views import norm
from tests.sim.averaging import RUN
from tests.sim.network import SimNetwork
from tests.sim.swarm import SimSwarm
from tests.support.example_vectors import equal_norm_vectors


class WaitingLog:
    """When a peer's session changed what it waits for: (seconds, awaited peers)."""

    def __init__(self) -> None:
        self.changes: list[tuple[float, tuple[str, ...]]] = []

    @property
    def awaited(self) -> list[tuple[str, ...]]:
        return [peers for _, peers in self.changes]

    def at(self, seconds: float) -> tuple[str, ...]:
        return [peers for time, peers in self.changes if time <= seconds][-1]

    async def watch(self, session: AveragingSession) -> None:
        while True:
            if not self.changes or self.awaited[-1] != session.waiting_for():
                self.changes.append((asyncio.get_running_loop().time(), session.waiting_for()))
            await asyncio.sleep(0.01)


def average(
    count: int, late_seconds: dict[int, float], before: Callable[[SimNetwork], None] = lambda network: None
) -> tuple[dict[str, WaitingLog], list[AveragingResult]]:
    """Average once; what each peer waited for, and the means.

    Args:
        late_seconds: by which some peers' inner steps are done later than those of the others.
    """
    logs = {f"p{index:02}": WaitingLog() for index in range(count)}

    async def member(host: Host, head: Head, index: int) -> AveragingResult:
        given = equal_norm_vectors(count, 400_000, seed=1)[index]
        work = LocalProgress(1000, 0.0, 1.0, norm([given]), complete=True)
        averager = load_averager("butterfly")(host, Settings("fp32", (len(given),), 4096, 1e6))
        async with averager.enter(head, asyncio.get_running_loop().time() + 600.0) as session:
            watching = asyncio.create_task(logs[host.me].watch(session))
            session.offer(replace(work, complete=False))
            await asyncio.sleep(late_seconds.get(index, 0.0))
            session.offer(work)
            await session.cut.wait()
            mean = await session.average([given], work, [torch.empty_like(given)])
            await asyncio.sleep(0.02)
            watching.cancel()
            return mean

    async def main() -> list[AveragingResult]:
        hosts = [swarm.join(peer, 1e6) for peer in logs]
        before(swarm.network)
        head = genesis_head(RUN, "run", tuple(Member(peer) for peer in logs), bytes(32))
        return list(await asyncio.gather(*(member(host, head, index) for index, host in enumerate(hosts))))

    swarm = SimSwarm()
    return logs, swarm.play(main)


def test_awaited_peers_follow_the_phases_of_a_round() -> None:
    logs, means = average(4, {2: 0.5})
    assert {mean.outcome for mean in means} == {Outcome.COMMITTED}
    for log in logs.values():
        assert log.at(0.2) == ("p02",), "only the inner steps of p02 are not done"
        assert log.awaited[-1] == () and all(set(peers) <= logs.keys() for peers in log.awaited)
        assert len(log.awaited[-2]) == 1, "the coordinator of the decision"
        assert max(map(len, log.awaited[1:-1])) > 1, "the reducers, while data travels"


def test_peer_holding_up_data_is_reported() -> None:
    """Its link fails once the round is called: the others wait for the part that it reduces."""
    others = ("p00", "p01", "p03")

    def strike(network: SimNetwork) -> None:
        for peer in others:
            asyncio.get_running_loop().call_later(1.5, network.block, "p02", peer)

    logs, means = average(4, {}, strike)
    assert {means[index].outcome for index in (0, 1, 3)} == {Outcome.COMMITTED}
    for peer in others:
        assert any(time > 1.5 and awaited == ("p02",) for time, awaited in logs[peer].changes)
        assert logs[peer].awaited[-1] == ()
