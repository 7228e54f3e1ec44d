"""What control costs a peer that trains and does not average.

    python -m benchmarks.idle [--peers 4 12 24] [--seconds 60]

Real `join` peers on the loopback, paced: their steps sleep, and no round ends meanwhile. Processor time of a peer's own
process and of its p2pd, in percent of one core; the mean of the peers.
"""

from __future__ import annotations

import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import fmean

import psutil

from benchmarks.clusters import AT_ONCE, PATIENT_SECONDS
from tests.faults.shell import from_shell
from tests.sim.arguments import Parser, at_least, at_least_one
from tests.support.real_swarm import RealPeer, RealSwarm, paced

SETTLE_SECONDS = 60.0  # all have met, and have looked into the directory twice
RUN = paced(step_seconds=0.5, inner_steps=100_000)


def used_seconds(peers: list[RealPeer]) -> tuple[float, float]:
    """Processor seconds that the peers' own processes, and their p2pds, have used so far: the means."""
    times = [(psutil.Process(peer.pid).cpu_times(), _daemon(peer).cpu_times()) for peer in peers]
    mine, daemons = zip(*times, strict=True)
    return fmean(each.user + each.system for each in mine), fmean(each.user + each.system for each in daemons)


def _daemon(peer: RealPeer) -> psutil.Process:
    found = peer.child("p2pd")
    assert found is not None, f"{peer.name} has no p2pd"
    return found


def play(count: int, seconds: float) -> tuple[float, float]:
    """Percent of a core that a peer takes, and its p2pd."""
    with tempfile.TemporaryDirectory() as home, RealSwarm(Path(home), RUN) as swarm:
        founder, names = swarm.found("p0"), [f"p{number}" for number in range(1, count)]
        for low in range(0, len(names), AT_ONCE):
            swarm.join(*names[low : low + AT_ONCE], via=founder, seconds=PATIENT_SECONDS)
        peers = [swarm[name] for name in ("p0", *names)]
        time.sleep(SETTLE_SECONDS)
        before, began = used_seconds(peers), time.monotonic()
        time.sleep(seconds)
        after, took = used_seconds(peers), time.monotonic() - began
        return 100 * (after[0] - before[0]) / took, 100 * (after[1] - before[1]) / took


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m benchmarks.idle", description="What control costs a peer that does not average.")
    parser.add_argument(
        "--peers", type=partial(at_least, 2), nargs="+", default=[4, 12, 24], help="how many, one play each"
    )
    parser.add_argument("--seconds", type=at_least_one, default=60, help="to measure, once all have met")
    options = parser.parse_args(arguments)
    print("| peers | a peer, % of a core | its p2pd |\n" + "|---" * 3 + "|")
    for count in options.peers:
        mine, daemon = play(count, options.seconds)
        print(f"| {count} | {mine:.2f} | {daemon:.2f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(from_shell(main, "python -m benchmarks.idle", cure=""))
