"""What a joiner costs the others, and what many rounds leave behind.

    python -m benchmarks.lasting join [--megabytes 100] [--trials 3]
    python -m benchmarks.lasting level [--rounds 600] [--megabytes 4]

Peers are real `join` processes on the loopback with paced inner steps. Only `rounds.jsonl` is judged. The last line is
JSON.

join    Three peers, and joiners that know one address, one after the other. Shows:
        - how long the others' rounds are from a joiner's start until its work counts, and otherwise;
        - in which round the joiner is admitted, and in which its work counts;
        - how late the event loops are;
        - the largest memory of the three peers in any round, all processes of each, beside a bare loop of such steps.
level   Three peers. During the first hundred rounds, every twenty rounds one of them loses its worker, and another its
        p2pd. After that there are no faults. Memory, descriptors and tasks of each peer are compared at two times: a
        hundred rounds later, when everything is warm, and at the end.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from tests.faults.shell import from_shell
from tests.sim.arguments import Parser, at_least_one
from tests.support.checkers import DECIDED, Report
from tests.support.paths import REPOSITORY
from tests.support.real_swarm import RealPeer, RealSwarm, paced, wait

PATIENT_SECONDS = 240.0
CALM_ROUNDS = 4
_FAULTS_EVERY, _FAULTS_UNTIL, _WARM = 20, 100, 200


def decided(peer: RealPeer) -> list[Report]:
    return [each for each in peer.reports() if each["outcome"] in DECIDED]


def lengths(peer: RealPeer) -> list[tuple[float, float]]:
    """(end, seconds) of each decided round but the first, from the end of the previous round."""
    ends = [each["time"] for each in decided(peer)]
    return [(end, end - before) for before, end in itertools.pairwise(ends)]


def join(megabytes: int, trials: int) -> dict[str, Any]:
    """Joiners one after the other: each leaves when its work has counted.

    A calm round begins after the previous joiner has left and ends before the next one starts, since a round in which
    a peer leaves is called at once. Joiners run at the lowest priority: on a machine of their own, their start would
    take none of the others' cores.
    """
    run = paced(elements=megabytes * 250_000, step_seconds=0.1, inner_steps=50)
    with tempfile.TemporaryDirectory() as home, RealSwarm(Path(home), run) as swarm:
        first = swarm.found("a")
        swarm.join("b", "c", via=first)
        three = swarm.running
        wait("three in one mean", lambda: swarm.all_in_one_mean(three), PATIENT_SECONDS)
        began, found = time.time(), []
        for number in range(trials):
            _go_on(first, CALM_ROUNDS)
            found.append(_newcomer(swarm, f"newcomer-{number}", first))
        _go_on(first, CALM_ROUNDS)
        rounds = lengths(first)
        during = [s for end, s in rounds if any(each["began"] <= end < each["ended"] for each in found)]
        ends, begins = [began, *(each["gone"] for each in found)], [*(each["began"] for each in found), math.inf]
        pauses = list(zip(ends, begins, strict=True))
        calm = [s for end, s in rounds if any(since <= end - s and end < until for since, until in pauses)]
        return {
            "megabytes": megabytes,
            "calm_seconds": calm,
            "during_seconds": during,
            "during_percent": 100 * (median(during) / median(calm) - 1),
            "newcomers": found,
            "rss_megabytes": [max(each["rss_bytes"] for each in decided(peer)) / 1e6 for peer in three],
            "bare_loop_rss_megabytes": _bare(megabytes),
            "lag_milliseconds": {
                "those who were there": _lag([each for peer in three for each in decided(peer)[1:]]),
                "newcomers, while they come in": _lag([swarm[each["name"]].reports()[0] for each in found]),
            },
        }


_BARE = """
import psutil, sys
from node.tasks.paced import Paced
task = Paced(int(sys.argv[1]), seed=0)
for number in range(100):
    task.step(0, number)
print(psutil.Process().memory_info().rss / 1e6)
"""


def _bare(megabytes: int) -> float:
    """Memory of one process that only takes the same task's steps."""
    command = [sys.executable, "-c", _BARE, str(megabytes * 250_000)]
    return float(subprocess.run(command, capture_output=True, check=True, timeout=60, cwd=REPOSITORY).stdout)


def _lag(reports: list[Report]) -> dict[str, float]:
    """Lag of the event loop: median and maximum of the rounds' 99th percentiles, and the overall maximum."""
    p99 = [1000 * each["loop_lag_p99_seconds"] for each in reports]
    worst = max(1000 * each["loop_lag_max_seconds"] for each in reports)
    return {"p99_median": median(p99), "p99_worst": max(p99), "worst": worst}


def _go_on(peer: RealPeer, rounds: int) -> None:
    goal = len(decided(peer)) + rounds
    wait(f"{rounds} rounds more", lambda: len(decided(peer)) >= goal, PATIENT_SECONDS)


def _newcomer(swarm: RealSwarm, name: str, first: RealPeer) -> dict[str, Any]:
    """Figures from a joiner's start until its work counted. Afterwards it has left, and the roster is without it."""
    swarm.peer(name).inside = ("nice", "-n", "19")
    began, number = time.time(), decided(first)[-1]["round"] + 1
    (newcomer,) = swarm.join(name, via=first)
    full = wait("its work counts", lambda: swarm.all_in_one_mean(swarm.running, began), PATIENT_SECONDS)
    newcomer.ask("finish")
    newcomer.ends(PATIENT_SECONDS)
    wait("the others decide without it", lambda: newcomer.id not in first.last()["peers"], PATIENT_SECONDS)
    return {
        "name": name,
        "began": began,
        "ended": full["time"],
        "gone": first.last()["time"],
        "seconds_until_it_counts": full["time"] - began,
        "started_in_round": number,
        "caught_up_in_round": decided(newcomer)[0]["round"],
        "counts_in_round": full["round"],
    }


def level(rounds: int, megabytes: int) -> dict[str, Any]:
    run = paced(elements=megabytes * 250_000, step_seconds=0.02, inner_steps=10)
    with tempfile.TemporaryDirectory() as home, RealSwarm(Path(home), run) as swarm:
        first = swarm.found("a")
        swarm.join("b", "c", via=first)
        for number in (*range(_FAULTS_EVERY, _FAULTS_UNTIL + 1, _FAULTS_EVERY), rounds):
            for peer in swarm.peers.values():
                wait(f"{peer.name} in round {number}", lambda p=peer, n=number: p.last()["round"] >= n, rounds)  # type: ignore[misc]
            for name, role in (("b", "worker"), ("c", "p2pd")):
                if number < rounds and (child := swarm[name].child(role)):
                    os.kill(child.pid, signal.SIGKILL)
        result: dict[str, Any] = {"rounds": rounds, "megabytes": megabytes, "peers": {}}
        for name, peer in swarm.peers.items():
            result["peers"][name] = _levels(peer.reports(), rounds)
        return result


def _levels(reports: list[Report], rounds: int) -> dict[str, Any]:
    """[median of the first hundred warm rounds, of the last hundred] of each figure; then the counts of outcomes."""
    early = [each for each in reports if _WARM <= each["round"] < _WARM + 100]
    late = [each for each in reports if rounds - 100 <= each["round"]]
    figures: dict[str, Any] = {
        key: [median(each[key] for each in part) for part in (early, late)]
        for key in ("rss_bytes", "open_files", "tasks")
    }
    outcomes = [each["outcome"] for each in reports]
    return figures | {each: outcomes.count(each) for each in sorted({*outcomes})}


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m benchmarks.lasting", description=__doc__)
    parser.add_argument("what", choices=("join", "level"))
    parser.add_argument("--megabytes", type=at_least_one)
    parser.add_argument("--rounds", type=at_least_one, default=600)
    parser.add_argument("--trials", type=at_least_one, default=3)
    options = parser.parse_args(arguments)
    print(f"load before: {os.getloadavg()[0]:.1f}", file=sys.stderr)
    result = (
        join(options.megabytes or 100, options.trials)
        if options.what == "join"
        else level(options.rounds, options.megabytes or 4)
    )
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(from_shell(main, "python -m benchmarks.lasting", cure=""))
