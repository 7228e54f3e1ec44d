"""Joiners on slow lines: a founder that trains short rounds alone does not run away from them."""

from __future__ import annotations

import asyncio

import pytest

from node.session.peer_session import FINISH_SECONDS
from protocols.consensus.record import Kind
from tests.sim.contact import LIVENESS_SECONDS
from tests.sim.scenario_runner import ScenarioRunner, ScenarioSetup
from tests.support.simulated import simulated

WAIT = ScenarioSetup(3, founders=1, wait_for=3, every_rounds=1)


@simulated(ScenarioRunner, WAIT)
async def test_founder_waits_until_peers_are_admitted(swarm: ScenarioRunner) -> None:
    """The first round with a mean is of all three."""
    await swarm.begun("p1")
    await asyncio.sleep(30.0)
    assert not swarm.chain("p0").trained and len(swarm.head("p0").roster) == 1, "one joiner is not enough"
    await swarm.begun("p2")
    await swarm.until(lambda: swarm.chain("p0").trained > 2, 60.0, "three rounds")
    first, second, *_ = swarm.since("p0", 0)
    assert first.record.kind == Kind.SKIP and first.record.idle
    assert set(second.record.peers) == set(swarm.peers)


@simulated(ScenarioRunner, WAIT)
async def test_founder_killed_while_it_waits_waits_again(swarm: ScenarioRunner) -> None:
    await swarm.begun("p1")
    await asyncio.sleep(30.0)
    await swarm.restarted("p0")
    await asyncio.sleep(60.0)
    assert not swarm.chain("p0").trained
    await swarm.begun("p2")
    await swarm.until(lambda: swarm.whole() and swarm.chain("p0").trained > 2, 60.0, "rounds of all three")
    assert all(len(link.record.peers) == 3 for link in swarm.since("p0", 0) if link.record.averaged)


@simulated(ScenarioRunner, WAIT)
async def test_joiner_killed_while_founder_waits_is_not_counted(swarm: ScenarioRunner) -> None:
    await swarm.begun("p1")
    await asyncio.sleep(30.0)
    swarm.kill("p1")
    await asyncio.sleep(30.0)
    await swarm.begun("p2")
    await asyncio.sleep(30.0)
    assert len(swarm.head("p0").roster) == 1 and not swarm.chain("p0").trained
    await swarm.revived("p1")
    await swarm.until(lambda: swarm.whole() and swarm.chain("p0").trained > 2, 60.0, "rounds of all three")
    assert all(len(link.record.peers) == 3 for link in swarm.since("p0", 0) if link.record.averaged)


@simulated(ScenarioRunner, WAIT)
async def test_founder_that_waits_leaves_at_once(swarm: ScenarioRunner) -> None:
    await swarm.begun("p1")
    await asyncio.sleep(30.0)
    swarm.leave("p0")
    await swarm.gone("p0", seconds=FINISH_SECONDS)


SLOW = ScenarioSetup(
    2, founders=1, elements=250_000, chunk_elements=65_536, pace_seconds=0.05, uplinks=(125_000.0,) * 2, every_rounds=1
)
"""Rounds of .1 s alone, while the joiner needs 2 s for a mean and 16 s for the state."""


@simulated(ScenarioRunner, SLOW)
async def test_slow_joiner_is_admitted_beside_fast_founder(swarm: ScenarioRunner) -> None:
    await swarm.rounds(20)
    await swarm.begun("p1")
    seconds = await swarm.until(swarm.whole, 120.0, "the joiner in the roster")
    assert seconds <= 40.0, f"the joiner needs 16 s for the state; it was admitted after {seconds:.1f} s"
    number = swarm.head("p0").key.round
    await swarm.rounds(3)
    assert any(len(link.record.peers) == 2 for link in swarm.since("p0", number)), "its work is in no mean"


@simulated(ScenarioRunner, SLOW)
async def test_founder_trains_on_after_joiner_dies(swarm: ScenarioRunner) -> None:
    """In the middle of its catch-up."""
    await swarm.rounds(20)
    await swarm.begun("p1")
    await asyncio.sleep(8.0)
    swarm.kill("p1")
    number = swarm.head("p0").key.round
    await asyncio.sleep(LIVENESS_SECONDS + 5.0)
    assert swarm.head("p0").key.round >= number + 20, "the founder still waits for it"


@simulated(ScenarioRunner, SLOW)
async def test_joiner_gets_in_though_founder_was_killed(swarm: ScenarioRunner) -> None:
    """While the founder waits for it; the founder restarts from its disk."""
    await swarm.rounds(20)
    await swarm.begun("p1")
    await asyncio.sleep(8.0)
    await swarm.restarted("p0")
    await swarm.until(swarm.whole, 240.0, "both in the roster")
    await swarm.rounds(2)


FULL = ScenarioSetup(
    4, founders=3, elements=250_000, chunk_elements=65_536, inner_steps=10, pace_seconds=0.05, uplinks=(125_000.0,) * 4
)
"""Rounds that train for .5 s and average for three or more."""


@pytest.mark.long
@simulated(ScenarioRunner, FULL)
async def test_joiner_on_full_lines_counts(swarm: ScenarioRunner) -> None:
    await swarm.rounds(4)
    await swarm.begun("p3")
    seconds = await swarm.until(swarm.whole, 600.0, "the joiner in the roster")
    number = swarm.head("p0").key.round
    await swarm.rounds(8)
    shares = [len(link.record.peers) for link in swarm.since("p0", number)]
    assert seconds <= 90.0 and shares[-5:].count(4) >= 3, f"admitted after {seconds:.0f} s; members in means: {shares}"
