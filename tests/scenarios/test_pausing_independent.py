"""Pauses where peers share no anchor, and at the barrier of the baselines: whoever pauses is as if it was not there."""

from __future__ import annotations

from statistics import median

from protocols.registry import INDEPENDENT_PROTOCOLS
from tests.sim.faults import Faults
from tests.sim.host import EPOCH
from tests.sim.independent_world import world_of
from tests.sim.scenario import Scenario
from tests.sim.world import play
from tests.support.checkers import Report, began
from tests.support.long import diagonal

PEERS, INNER_STEPS, STEP_TOKENS = 4, 10, 256
FROM, SECONDS = 22.0, 25.0
SLOWER = 1.02


def seconds(reports: list[Report]) -> float:
    return median(each["time"] - began(each) for each in reports)


@diagonal("protocol, pausing, away", sorted(INDEPENDENT_PROTOCOLS), (1, 3), (False, True, True, False))
def test_pausing_peers_cost_the_others_nothing(protocol: str, pausing: int, away: bool) -> None:
    faults = Faults()
    for index in range(pausing):
        faults = faults.pause(f"p{index}", at=FROM, lasts=SECONDS, away=away)
    scenario = Scenario(
        protocol=protocol,
        peers=PEERS,
        seed=3,
        faults=faults,
        codec="fp32",
        elements=1000,
        step_seconds=(0.3,) * PEERS,
        uplinks=(12.5e6,) * PEERS,
        jitter=False,
    )
    outcome = play(scenario, world_of(protocol))
    assert outcome.violations == []
    history = outcome.histories["p3"]
    usual = [each for each in history if each["time"] - EPOCH < FROM]
    during = [each for each in history if began(each) - EPOCH > FROM and each["time"] - EPOCH < FROM + SECONDS]
    assert len(during) > 5 and seconds(during) <= SLOWER * seconds(usual[1:])
    assert all(each["tokens"] >= INNER_STEPS * STEP_TOKENS for each in during), "a round was called early"
    if pausing == 1 and protocol != "push_sum":  # there a peer that is given nothing has no partner in that round
        assert {each["outcome"] for each in history if each["time"] - EPOCH < FROM + SECONDS} == {"committed"}
    for index in range(pausing):
        paused = [each for each in outcome.histories[f"p{index}"] if FROM + 5.0 < each["time"] - EPOCH < FROM + SECONDS]
        assert not any(each["tokens"] for each in paused)
