"""What gossip and push-sum have in common: they converge, keep the sum, and survive liars, silence and slow links."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from protocols.base import Outcome, Settings
from protocols.pairwise.gossip import Gossip
from protocols.pairwise.push_sum import PushSum
from tests.sim.swarm import SimSwarm
from tests.support.pairwise import ROUND_SECONDS, PairwiseSwarm

both_protocols = pytest.mark.parametrize("protocol", (Gossip, PushSum))


@pytest.mark.parametrize(
    "protocol, count, rounds, stagger_seconds, slowest_seconds", [(Gossip, 8, 8, 0.13, 2.5), (PushSum, 6, 10, 0.0, 1.0)]
)
def test_swarm_converges_and_keeps_its_sum(
    protocol: Any, count: int, rounds: int, stagger_seconds: float, slowest_seconds: float
) -> None:
    """No peer waits for another's work, and each state that was sent counts once."""
    swarm = PairwiseSwarm(count, protocol=protocol)
    before = swarm.spread()
    swarm.rounds(rounds, stagger_seconds)
    assert swarm.spread() < 0.1 * before
    assert swarm.drift() < 1e-6 if protocol is Gossip else swarm.is_conserved()
    counted = [name for index in range(count) for name in swarm.messages(index)]
    assert len(counted) == len(set(counted)) > 40
    results = [result for each in swarm.results for result in each]
    assert max(result.ended - result.asked for result in results) < slowest_seconds
    assert protocol is PushSum or all(result.mean.outcome is Outcome.COMMITTED for result in results)


@both_protocols
def test_non_finite_state_is_not_sent(protocol: Any) -> None:
    swarm = PairwiseSwarm(2, protocol=protocol)
    swarm.states[0][1][3] = torch.inf  # not NaN, which is not equal to itself
    swarm.rounds()
    assert not swarm.moved(1) and all(result.mean.outcome is Outcome.SKIPPED for (result,) in swarm.results)
    assert protocol is Gossip or not swarm.results[0][0].mean.blamed


@both_protocols
@pytest.mark.parametrize(
    "settings, error",
    [
        (Settings("fp32", (8,), schedule="torus"), "unknown schedule 'torus'"),
        (Settings("fp8", (8,)), "unknown codec"),
    ],
    ids=("schedule", "codec"),
)
def test_invalid_settings_are_rejected(protocol: Any, settings: Settings, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        protocol(SimSwarm().join("p0"), settings)


@both_protocols
def test_partners_are_those_of_the_runs_schedule(protocol: Any) -> None:
    swarm = PairwiseSwarm(8, protocol=protocol, schedule="ring")
    swarm.rounds()
    for index, (result,) in enumerate(swarm.results):
        beside = {swarm.names[index], swarm.names[index - 1], swarm.names[(index + 1) % 8]}
        assert result.mean.peers and set(result.mean.peers) <= beside


@both_protocols
def test_peers_meet_again_after_a_long_silence(protocol: Any) -> None:
    """Waiting in vain says nothing about how long a share or a state takes."""
    swarm = PairwiseSwarm(2, 25_000, chunk_elements=5_000, protocol=protocol)
    links = (("p0", "p1"), ("p1", "p0"))

    async def main() -> None:
        tasks = [swarm.start(index, swarm.play_rounds(index, 30, train_seconds=10.0)) for index in range(2)]
        for link in links:
            swarm.network.link(*link).blocked = True  # without any notice to the peers
        await asyncio.sleep(200.0)
        assert not swarm.messages(0) and not swarm.messages(1)
        for link in links:
            swarm.network.heal(*link)
        await asyncio.wait(tasks)

    swarm.run(main)
    assert len(swarm.messages(0)) > 2 and len(swarm.messages(1)) > 2
    for averager, other in zip(swarm.gossips, ("p1", "p0"), strict=True):
        assert averager.timeouts.timeout_seconds(other, 200_000) < 5.0


@both_protocols
def test_peer_estimated_too_slow_is_still_tried(protocol: Any) -> None:
    """The link carried next to nothing for some hours. Only another try can show that it is repaired."""
    swarm = PairwiseSwarm(2, 25_000, chunk_elements=5_000, protocol=protocol)
    for averager, other in zip(swarm.gossips, ("p1", "p0"), strict=True):
        for _ in range(20):
            averager.timeouts.late(other, -1e6, 0.0)
        assert averager.timeouts.expected_seconds(other, 200_000) > ROUND_SECONDS
    swarm.rounds(3, stagger_seconds=0.5)
    assert swarm.messages(0) and swarm.messages(1)
