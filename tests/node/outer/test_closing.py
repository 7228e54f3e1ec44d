"""Closing exchanges: a run by gossip or push-sum ends with all peers at the mean, without needless waits."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.pairwise.closing import BEYOND, CLOSING, STEP_SECONDS, ClosingStep
from protocols.pairwise.gossip import Gossip
from protocols.pairwise.push_sum import PushSum
from tests.sim import closing, crashes
from tests.sim.independent_world import IndependentWorld
from tests.sim.scenario import Scenario
from tests.support.disguises import changing_kind
from tests.support.pairwise import PairwiseSwarm
from tests.support.simulated import simulated

PROTOCOLS = (Gossip, PushSum)
FASTEST = 2 * STEP_SECONDS
"""Longer than any wait for one step of a small state."""
FAULTY_SECONDS = 3 * (STEP_SECONDS + 2.5)
"""The bound with one faulty peer among four."""


def ended(swarm: PairwiseSwarm, closing_peers: int, stagger_seconds: float = 0.0, here: int | None = None) -> list[int]:
    """The closing exchanges that each of the first peers had; the other peers are live and do nothing."""
    held = [0] * closing_peers

    async def end(index: int) -> None:
        await asyncio.sleep(index * stagger_seconds)
        held[index] = await swarm.close(index, range(here or swarm.count))

    async def play() -> None:
        await asyncio.wait([swarm.start(index, end(index)) for index in range(closing_peers)])

    swarm.run(play)
    return held


def seconds(swarm: PairwiseSwarm) -> float:
    """The longest time that a peer took."""
    return max(rounds[-1].ended - rounds[-1].began for rounds in swarm.results if rounds)


@settings(max_examples=25)
@given(
    protocol=st.sampled_from(PROTOCOLS),
    count=st.integers(1, 9),
    codec=st.sampled_from(("fp32", "bf16", "int8")),
    stagger_seconds=st.sampled_from((0.0, 0.1, 1.0)),
    seed=st.integers(0, 9),
)
def test_staggered_closing_ends_near_the_mean(
    protocol: type[Gossip | PushSum], count: int, codec: str, stagger_seconds: float, seed: int
) -> None:
    swarm = PairwiseSwarm(count, codec=codec, seed=seed, jitter=seed, protocol=protocol)
    before = swarm.spread()
    held = ended(swarm, count, stagger_seconds)
    power = count & (count - 1) == 0
    assert swarm.spread() <= before * ((1e-5 if codec == "fp32" else 0.05) if power else 0.4)
    assert max(held) <= ((count - 1).bit_length() + 1 if count > 1 else 0)
    if codec == "fp32":  # the giver keeps what a lossy codec rounds off, at its own weight
        assert swarm.drift() < 1e-5 if protocol is Gossip else swarm.is_conserved()
    assert seconds(swarm) < FASTEST + stagger_seconds * count


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("older_version, most_seconds", [(True, 3.0), (False, FAULTY_SECONDS)])
def test_peer_without_closing_exchanges_delays_briefly(
    protocol: type[Gossip | PushSum], older_version: bool, most_seconds: float
) -> None:
    """One of an older version refuses at once; one that is absent costs its partners their steps."""
    swarm = PairwiseSwarm(4, protocol=protocol)
    if older_version:
        del swarm.network.nodes["p3"].handlers[CLOSING]
    before = swarm.spread()
    ended(swarm, 3)
    assert seconds(swarm) < most_seconds and swarm.spread() < before


@pytest.mark.parametrize("protocol", PROTOCOLS)
@simulated(lambda protocol: PairwiseSwarm(4, protocol=protocol))
async def test_peer_with_partial_view_still_narrows_the_spread(swarm: PairwiseSwarm) -> None:
    before = swarm.spread()
    views = [(0, 1, 2, 3), (0, 1, 2, 3), (0, 1, 2), (0, 1, 2, 3)]
    await asyncio.wait([swarm.start(index, swarm.close(index, view)) for index, view in enumerate(views)])
    await swarm.settle()
    assert swarm.spread() < 0.7 * before and seconds(swarm) < 4 * FASTEST


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("step", (0, 1, BEYOND))
def test_peer_lying_about_its_step_delays_briefly(protocol: type[Gossip | PushSum], step: int) -> None:
    misplaced = changing_kind(ClosingStep, lambda each: replace(each, step=step))
    swarm = PairwiseSwarm(4, protocol=protocol, disguises={3: misplaced})
    before = swarm.spread()
    ended(swarm, 4)
    assert seconds(swarm) < FAULTY_SECONDS and swarm.spread() < 0.8 * before


@pytest.mark.parametrize("protocol", ("gossip", "push_sum"))
def test_closing_exchanges_end_run_within_its_limit(protocol: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Without them it does not: the limit is a run file's default."""
    assert closing.main(["--protocol", protocol, "--peers", "4", "--rounds", "4", "--seeds", "0"]) == 0
    without = closing.end_of(Scenario(protocol, 4, 4, codec="fp32"), closing.Unclosed)
    assert without.spread > closing.LIMIT and without.exchanges == 0
    assert capsys.readouterr().out.count("\n") == 2


def test_noloco_ends_with_an_average_of_whole_states() -> None:
    end = closing.end_of(Scenario("gossip", 4, 4, codec="fp32", pull=0.75))
    assert end.spread < 1e-5 and end.exchanges == 3 and not end.violations


class Leaving(IndependentWorld):
    """Asks p0 to leave while it waits at the end for the others, and measures how long it takes."""

    seconds = 0.0

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.asked_at = 0.0

    def rounds(self, me: str) -> dict[str, int]:
        if me == "p0" and not self.asked_at:
            loop = asyncio.get_running_loop()
            self.asked_at = loop.time()
            loop.call_later(0.1, self.replicas["p0"].leave)
        return super().rounds(me)

    def reported(self, report: dict[str, Any]) -> None:
        super().reported(report)
        if report["peer"] == "p0" and report["round"] == self.scenario.rounds - 1:
            Leaving.seconds = asyncio.get_running_loop().time() - self.asked_at


@pytest.mark.parametrize("protocol", ("gossip", "push_sum"))
def test_leaver_waits_for_no_closing_exchange(protocol: str) -> None:
    steps = (0.1, 3.0, 3.0)
    end = closing.end_of(Scenario(protocol, 3, 2, step_seconds=steps, elements=64, codec="fp32"), Leaving)
    assert end.violations == () and Leaving.seconds < 3.0


@pytest.mark.parametrize("protocol, kind", (("gossip", "crash"), ("push_sum", "one-way")))
def test_faults_during_closing_are_survived(protocol: str, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """For every fault: `python -m tests.sim.crashes --end`."""
    assert crashes.main(["--protocol", protocol, "--kind", kind, "--end", "--sample", "4"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["points"] == 4
