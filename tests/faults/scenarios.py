"""The fault scenarios. Each draws a schedule, a list of steps, from its seed before the play begins.

A schedule is data. The nemesis (`tests/faults/nemesis.py`) carries out its steps, and logs when each was done.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from protocols.registry import INDEPENDENT_PROTOCOLS
from tests.faults import draws
from tests.faults.draws import Draw
from tests.faults.failpoints import POINTS
from tests.faults.recording import Limits
from tests.faults.steps import Step

LIES = ("wrong-mean", "nan", "forged-record")
INDEPENDENT_LIES = ("nan",)
"""The lies that independent protocols know; the others concern parts and votes (`tests/faults/liar.py`)."""
_VOTERS_ONLY = ("excluded",)
_VOTERS_AIMS = ("decided_seconds", "excluded_seconds", "rounds_skipped", "skipped_share", "contributions_lost")


@dataclass(frozen=True, slots=True)
class Scenario:
    """A kind of fault. `network`: whether it needs namespaces. With stages, each has two peers at least."""

    about: str
    draw: Draw
    limits: Limits = field(default_factory=Limits)
    network: bool = False
    stages: int = 1
    private: bool = False

    def schedule(self, name: str, seed: int, names: Sequence[str]) -> list[Step]:
        return self.draw(random.Random(f"{name}/{seed}"), seed, names)


STAGES = 3
STAGE_AIMS = {"rate_lost": 0.6, "stage_rounds_lost": 0, "back_seconds": 20, "whole_stage_seconds": 60}
"""One of two replicas, or of two drivers, is half of what the run can do: 60 % of the rate may be lost meanwhile."""

_GOES_ON = Limits(aims={"standstill_seconds": 10})
"""For faults that last, during which the swarm should still make progress."""

SCENARIOS: Mapping[str, Scenario] = {
    "kill": Scenario(
        "SIGKILL at a named point of a round", draws.kill(POINTS["butterfly"]), Limits(aims={"decided_seconds": 2})
    ),
    "kill-restart": Scenario(
        "the same twice; the killed peer is started again",
        draws.kill_restart(POINTS["butterfly"]),
        Limits(aims={"recovery_seconds": 30}),
    ),
    "stop": Scenario(
        "SIGSTOP of one peer's own process, or of all of its processes, until it is excluded; then SIGCONT",
        draws.stop,
        Limits(aims={"suspected_seconds": 6, "excluded_seconds": 10, "recovery_seconds": 30}),
    ),
    "worker": Scenario("SIGKILL to a worker", draws.one("worker"), Limits(aims={"recovery_seconds": 15})),
    "p2pd": Scenario("SIGKILL to a p2pd", draws.one("p2pd"), Limits(aims={"recovery_seconds": 15})),
    "bootstrap": Scenario(
        "the founder is killed, then a newcomer joins through another",
        draws.bootstrap,
        Limits(aims={"recovery_seconds": 30}),
    ),
    "kill-two": Scenario("two peers are killed at once", draws.many(2), Limits(forks=True)),
    "all-but-one": Scenario("all peers but one are killed at once", draws.many(-1), Limits(forks=True)),
    "partition": Scenario(
        "a partition into halves, or into one and the others, for 10 s",
        draws.partition,
        Limits(aims={"recovery_seconds": 30}, forks=True),
        network=True,
    ),
    "one-way": Scenario(
        "one peer receives nothing, or nothing of it arrives, for 10 s",
        draws.one_way,
        Limits(aims={"recovery_seconds": 30}, forks=True),
        network=True,
    ),
    "joiners": Scenario("eight peers join at once", draws.joiners, Limits(180, aims={"recovery_seconds": 120})),
    "rolling": Scenario(
        "for each peer another joins, and then it leaves",
        draws.rolling,
        Limits(aims={"rounds_skipped": 0, "contributions_lost": 0}),
    ),
    "slow-link": Scenario(
        "the line of one peer carries 10 Mbit/s for 10 s", draws.lasting("slow", 10e6), _GOES_ON, network=True
    ),
    "firewall": Scenario(
        "a firewall resets or swallows all direct connections of one peer",
        draws.firewall,
        Limits(aims={"standstill_seconds": 15}),
        network=True,
    ),
    "loss": Scenario(
        "1 % of all packets are lost for 20 s",
        draws.lasting("lose", 0.01, everybody=True, seconds=20),
        Limits(aims={"skipped_share": 0.01, "standstill_seconds": 10}),
        network=True,
    ),
    "loss-20": Scenario(
        "20 % of all packets are lost for 10 s",
        draws.lasting("lose", 0.2, everybody=True),
        Limits(aims={"standstill_seconds": 30}, forks=True),
        network=True,
    ),
    "everyone": Scenario(
        "all peers are killed at once, and started again 3 s later",
        draws.everyone,
        Limits(aims={"rounds_lost": 5, "recovery_seconds": 60}, forks=True),
    ),
    "disk": Scenario("the disk of one peer is full for 10 s", draws.lasting("fill", 0), _GOES_ON),
    "checkpoint": Scenario(
        "one peer is killed, and its newest checkpoint is damaged before it is started again",
        draws.checkpoint,
        Limits(aims={"recovery_seconds": 30}),
    ),
    "suspend": Scenario(
        "one or two machines are suspended for 20 s", draws.suspend, Limits(aims={"recovery_seconds": 30}, forks=True)
    ),
    "skew": Scenario("the clock of one peer is 5 s to 10 min off", draws.skew, Limits(aims={"rounds_skipped": 0})),
    "new-address": Scenario(
        "one peer gets another address", draws.new_address, Limits(aims={"recovery_seconds": 30}), network=True
    ),
    "straggler": Scenario("one worker runs a fifth of the time for 10 s", draws.lasting("straggle", 0.2), _GOES_ON),
    "memory": Scenario(
        "memory runs out, and the kernel kills a worker", draws.memory, Limits(aims={"recovery_seconds": 15})
    ),
    "memory-gone": Scenario(
        "memory has no room for a worker until its peer has left; then the peer is started again",
        draws.memory_gone,
        Limits(aims={"recovery_seconds": 30, "leaving_seconds": 30}),
    ),
    "disk-checkpoint": Scenario(
        "one disk is full for 10 s from the middle of a checkpoint on; with odd seeds its peer is killed then",
        draws.disk_checkpoint,
        Limits(aims={"standstill_seconds": 10}),
    ),
    "latency": Scenario(
        "50 to 400 ms of latency, and as much jitter, each way on all lines or those of one peer for 20 s",
        draws.latency,
        _GOES_ON,
        network=True,
    ),
    "bit-flips": Scenario(
        "bits flip on all lines, or on those of one peer, for 10 s",
        draws.bit_flips,
        Limits(aims={"standstill_seconds": 30}, forks=True),
        network=True,
    ),
    "liar": Scenario(
        "one peer sends a wrong mean, NaN, or a forged certificate for 10 s",
        draws.liar(LIES),
        Limits(aims={"recovery_seconds": 15, "standstill_seconds": 10}),
    ),
    "stages": Scenario(
        "of a model in three stages, replicas, a driver and a whole stage are killed or stopped in turn",
        draws.stages(STAGES),
        Limits(aims=STAGE_AIMS, forks=True),
        stages=STAGES,
    ),
    "private": Scenario(
        "of a private run, one member is killed, and another one is removed meanwhile; a stranger is refused",
        draws.private,
        Limits(aims={"removed_seconds": 10, "recovery_seconds": 30}, forks=True),
        private=True,
    ),
    "overlap": Scenario(
        "a lasting fault (a cut, loss, a slow line, a straggler), and a kill or a stop meanwhile",
        draws.overlap,
        Limits(aims={"recovery_seconds": 60}, forks=True),
        network=True,
    ),
}


def scenario_of(name: str, protocol: str) -> Scenario:
    """The scenario for a protocol: without votes there is no exclusion, no decision, and no aim at either."""
    scenario, points = SCENARIOS[name], POINTS[protocol]
    if protocol not in INDEPENDENT_PROTOCOLS:
        return scenario
    own = {"kill": draws.kill(points), "kill-restart": draws.kill_restart(points), "liar": draws.liar(INDEPENDENT_LIES)}
    aims = {what: aim for what, aim in scenario.limits.aims.items() if what not in _VOTERS_AIMS}
    draw = _without_votes(own.get(name, scenario.draw))
    return replace(scenario, draw=draw, limits=replace(scenario.limits, aims=aims))


def _without_votes(draw: Draw) -> Draw:
    return lambda *drawn: [step for step in draw(*drawn) if step.act not in _VOTERS_ONLY]
