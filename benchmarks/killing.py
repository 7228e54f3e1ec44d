"""What a lost peer costs the others: four real peers, of which one is killed or paused in the middle of a round.

    python -m benchmarks.killing --megabytes 100 --trials 5 [--seed 0] [--stop]

Each peer is a `join` process on the loopback with its p2pd and its worker. Inner steps are paced, so that rounds do not
get faster with one trainer fewer. Only `rounds.jsonl` is judged. A kill comes at a random moment of training or of the
data phase. The last line is JSON.

after     from the kill until the last survivor has decided the round that was under way
late      how much longer than usual that round was for the last survivor: training goes on after a kill
next      length of the round after it
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from tests.faults.shell import from_shell
from tests.sim.arguments import Parser, at_least_one
from tests.support.checkers import DECIDED, Report
from tests.support.real_swarm import RealPeer, RealSwarm, paced, wait

AIM_SECONDS = 2.0
SUSPECTED_SECONDS = 6.0
STOPPED_SECONDS = 30.0
PATIENT_SECONDS = 240.0
"""Limit of each wait for a round, or for a peer that downloads the state."""
USUAL_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Killed:
    """Figures of one kill."""

    trial: int
    phase: str
    after_seconds: float
    late_seconds: float
    next_seconds: float
    usual_seconds: float
    same_bits: bool
    outcomes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Stopped:
    """Figures of one pause, in seconds from its start; the last figure counts from its end."""

    trial: int
    suspected_seconds: float
    excluded_seconds: float
    counted_seconds: float
    same_bits: bool


def decided(peer: RealPeer) -> dict[int, Report]:
    """Round -> what this peer decided; the last report if a round has two."""
    return {report["round"]: report for report in peer.reports() if report["outcome"] in DECIDED}


def length_seconds(peer: RealPeer, number: int) -> float:
    """Seconds from the end of the previous round to the end of this one."""
    rounds = decided(peer)
    return float(rounds[number]["time"] - rounds[number - 1]["time"])


def usual_seconds(peer: RealPeer, before: int) -> float:
    return median(length_seconds(peer, before - back) for back in range(1, USUAL_ROUNDS))


def moment(draw: random.Random, victim: RealPeer) -> str:
    """Wait for a random moment of a phase; returns the phase."""
    phase, report = draw.choice(("training", "averaging")), victim.last()
    wait("its next round", lambda: victim.last()["round"] > report["round"], PATIENT_SECONDS)
    wait(phase, lambda: victim.status().get("state") == phase, PATIENT_SECONDS)
    usual = report["seconds_train"] if phase == "training" else report["seconds_average"]
    time.sleep(draw.uniform(0.0, 0.8) * usual)
    return phase


def settled(swarm: RealSwarm) -> list[RealPeer]:
    """Four peers that have completed some rounds together."""
    four = swarm.four(PATIENT_SECONDS)
    first = four[0].last()["round"]
    wait("some rounds", lambda: all(peer.last()["round"] > first + USUAL_ROUNDS for peer in four), PATIENT_SECONDS)
    return four


def kill(swarm: RealSwarm, draw: random.Random, trial: int) -> Killed:
    four = settled(swarm)
    victim = draw.choice(four)
    survivors = [peer for peer in four if peer is not victim]
    phase = moment(draw, victim)
    number = min(max(decided(peer)) for peer in survivors) + 1
    killed = victim.strike()
    victim.leaves_nothing()
    wait("the round after it", lambda: all(number + 1 in decided(peer) for peer in survivors), PATIENT_SECONDS)
    ends = [decided(peer)[number] for peer in survivors]
    usual = usual_seconds(survivors[0], number)
    return Killed(
        trial,
        phase,
        after_seconds=max(end["time"] for end in ends) - killed,
        late_seconds=max(length_seconds(peer, number) for peer in survivors) - usual,
        next_seconds=max(length_seconds(peer, number + 1) for peer in survivors),
        usual_seconds=usual,
        same_bits=len({(end["lineage"], end["params_hash"]) for end in ends}) == 1,
        outcomes=tuple(end["outcome"] for end in ends),
    )


def stop(swarm: RealSwarm, draw: random.Random, trial: int) -> Stopped:
    four = settled(swarm)
    victim = draw.choice(four)
    others = [peer for peer in four if peer is not victim]
    moment(draw, victim)
    stopped = victim.strike(number=signal.SIGSTOP)
    try:
        wait("suspicion", lambda: all(peer.sees(victim).get("live") is False for peer in others), PATIENT_SECONDS)
        suspected = time.time()
        wait("exclusion", lambda: all(peer.sees(victim).get("member") is False for peer in others), PATIENT_SECONDS)
        excluded = time.time()
        time.sleep(max(0.0, stopped + STOPPED_SECONDS - time.time()))
    finally:
        woken = victim.strike(number=signal.SIGCONT)
    full = wait("it counts again", lambda: swarm.all_in_one_mean(four, woken), PATIENT_SECONDS)
    same = {report["params_hash"] for peer in four for report in peer.reports() if report["lineage"] == full["lineage"]}
    return Stopped(trial, suspected - stopped, excluded - stopped, full["time"] - woken, len(same) == 1)


def said(trial: Killed | Stopped) -> str:
    """One line of text for a trial."""
    values = asdict(trial).items()
    return "  ".join(f"{name} {value:.2f}" if isinstance(value, float) else f"{name} {value}" for name, value in values)


def passed(trial: Killed | Stopped) -> bool:
    if isinstance(trial, Stopped):
        return trial.same_bits and trial.suspected_seconds <= SUSPECTED_SECONDS
    cost = trial.after_seconds if trial.phase == "averaging" else trial.late_seconds
    return trial.same_bits and cost <= AIM_SECONDS


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all trials on one swarm. Returns 0 if all reached their aims."""
    parser = Parser(prog="python -m benchmarks.killing", description="What a lost peer costs the others.")
    parser.add_argument("--megabytes", type=at_least_one, default=100, help="of the vector, as float32")
    parser.add_argument("--trials", type=at_least_one, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stop", action="store_true", help="stop one for 30 s instead of killing it")
    given = parser.parse_args(arguments)
    draw = random.Random(given.seed)
    trials: list[Killed | Stopped] = []
    trial = stop if given.stop else kill
    run = paced(given.megabytes * 250_000, inner_steps=20)
    with tempfile.TemporaryDirectory(prefix="starling-killing-") as home, RealSwarm(Path(home), run) as swarm:
        for number in range(given.trials):
            trials.append(trial(swarm, draw, number))
            print(f"{said(trials[-1])}  load {os.getloadavg()[0]:.1f}", flush=True)
    print(json.dumps({"passed": all(map(passed, trials)), "trials": [asdict(trial) for trial in trials]}))
    return 0 if all(map(passed, trials)) else 1


if __name__ == "__main__":
    sys.exit(from_shell(main, "python -m benchmarks.killing", cure=""))
