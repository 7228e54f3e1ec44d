"""What several scenarios do to the peers of a simulated swarm."""

from __future__ import annotations

import asyncio

from protocols.base import PeerId
from tests.sim.leaving_scenario import LeavingScenario, LongRounds
from tests.sim.scenario_runner import ScenarioRunner

STEP_SECONDS = 0.5
MIDDLE_SECONDS = 2.2
"""Into a round that lasts five."""


def leaving_swarm(peers: int, **changes: object) -> LeavingScenario:
    """A swarm with long rounds whose peers may leave."""
    return LeavingScenario(LongRounds(peers, pace_seconds=STEP_SECONDS, **changes))  # type: ignore[arg-type]


async def begin(swarm: ScenarioRunner, *peers: PeerId) -> None:
    """Start these peers for the first time."""
    for peer in peers:
        swarm.begin(peer)
    await asyncio.sleep(0.0)


async def revive(swarm: ScenarioRunner, *peers: PeerId) -> None:
    """Start the next incarnation of these peers."""
    for peer in peers:
        swarm.revive(peer)
    await asyncio.sleep(0.0)


async def restart(swarm: ScenarioRunner, *peers: PeerId) -> None:
    """Kill these peers, and start their next incarnations."""
    for peer in peers:
        swarm.kill(peer)
    await revive(swarm, *peers)
