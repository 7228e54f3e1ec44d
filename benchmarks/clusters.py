"""Rounds of real peers of which some vote, and the others contribute through these (`clusters = true`).

    python -m benchmarks.clusters [--peers 24] [--voters 8] [--rounds 20] [--kills 0] [--seed 0] [--json FILE]

Each peer is a `join` process on the loopback with its p2pd and its worker; inner steps are paced. First the voters
alone, as a run without clusters; then all peers. A row: rounds once all are in one mean, those that were a mean of all,
those that some peer lost, a round's median seconds and of these averaging, and what a peer sends in a round.

`--kills`: so many times, an associate or a voter beside the founder is killed (SIGKILL) in an averaging, and starts
again once the others have decided; seconds from the kill until the last of them has, and from the start until its work
counts again.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from tests.sim.arguments import Parser, at_least_one
from tests.support.checkers import DECIDED, Report
from tests.support.real_swarm import RealPeer, RealSwarm, deciding_one_round, paced, wait

PATIENT_SECONDS = 240.0
AT_ONCE = 6  # peers that start together
STEP_SECONDS, INNER_STEPS, ELEMENTS = 0.5, 20, 250_000


@dataclass(frozen=True, slots=True)
class Figures:
    peers: int
    voters: int
    rounds: int
    of_all: int
    lost: int
    seconds: float
    seconds_average: float
    sent: float


@dataclass(frozen=True, slots=True)
class Killed:
    role: str
    decided_seconds: float
    back_seconds: float
    outcomes: tuple[str, ...]  # of the others, in rounds from the kill until then


def run_of(voters: int) -> str:
    clusters = f"clusters = true\nvoters = {voters}\n" if voters else ""
    return clusters + paced(elements=ELEMENTS, step_seconds=STEP_SECONDS, inner_steps=INNER_STEPS)


def holds_all(report: Report, peers: Sequence[RealPeer]) -> bool:
    return (report["contributors"] or len(report["peers"])) == len(peers)


def all_in(peers: Sequence[RealPeer], since: float = 0.0) -> bool:
    """Whether the latest round of each peer began after that wall time, and was a mean of the work of all of them."""
    last = [next(iter(reversed(peer.since(since))), None) for peer in peers]
    return all(
        report and peer.id in report["peers"] and holds_all(report, peers)
        for peer, report in zip(peers, last, strict=True)
    )


def gather(swarm: RealSwarm, count: int) -> list[RealPeer]:
    founder = swarm.found("p0")
    names = [f"p{number}" for number in range(1, count)]
    for low in range(0, len(names), AT_ONCE):
        swarm.join(*names[low : low + AT_ONCE], via=founder, seconds=PATIENT_SECONDS)
    peers = [swarm[name] for name in ("p0", *names)]
    wait("all are in one mean", lambda: all_in(peers), PATIENT_SECONDS, 0.5)
    return peers


def measured(peers: Sequence[RealPeer], voters: int, rounds: int) -> Figures:
    begun = max(peer.last()["round"] for peer in peers)
    wait(
        "the rounds",
        lambda: all(peer.last()["round"] >= begun + rounds for peer in peers),
        rounds * PATIENT_SECONDS,
        0.5,
    )
    found = [each for peer in peers for each in peer.reports() if begun < each["round"] <= begun + rounds]
    kept = [each for each in found if each["outcome"] == "committed"]
    ways = ("seconds_train", "seconds_wait", "seconds_average")
    return Figures(
        peers=len(peers),
        voters=voters or len(peers),
        rounds=rounds,
        of_all=min(sum(holds_all(each, peers) for each in kept if each["peer"] == peer.id) for peer in peers),
        lost=len({each["round"] for each in found if each["outcome"] not in DECIDED or each["outcome"] == "skipped"}),
        seconds=median(sum(each[way] for way in ways) for each in kept),
        seconds_average=median(each["seconds_average"] for each in kept),
        sent=median(each["bytes_sent"] for each in kept),
    )


def kill(peers: Sequence[RealPeer], draw: random.Random) -> Killed:
    founder = peers[0]
    votes = [peer for peer in peers[1:] if founder.sees(peer).get("member")]
    role = draw.choice(("voter", "associate"))
    victim = draw.choice(votes if role == "voter" else [peer for peer in peers[1:] if peer not in votes])
    wait("an averaging", lambda: victim.status().get("state") == "averaging", PATIENT_SECONDS, 0.02)
    killed = victim.strike()
    rest = [peer for peer in peers if peer is not victim]
    ends = wait("the others decide", lambda: deciding_one_round(rest, killed), PATIENT_SECONDS)
    until = max(end["time"] for end in ends)
    victim.leaves_nothing()
    began = time.time()
    victim.start("--bootstrap", founder.address)
    wait("it counts again", lambda: all_in(peers, began), PATIENT_SECONDS, 0.25)
    outcomes = sorted({each["outcome"] for peer in rest for each in peer.reports() if each["time"] > killed})
    return Killed(role, until - killed, time.time() - began, tuple(outcomes))


def play(count: int, voters: int, rounds: int, kills: int, seed: int) -> tuple[Figures, list[Killed]]:
    with tempfile.TemporaryDirectory() as home, RealSwarm(Path(home), run_of(voters)) as swarm:
        peers, draw = gather(swarm, count), random.Random(seed)
        found = measured(peers, voters, rounds)
        return found, [kill(peers, draw) for _ in range(kills)]


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m benchmarks.clusters", description="Real peers behind voters.")
    parser.add_argument("--peers", type=at_least_one, default=24)
    parser.add_argument("--voters", type=at_least_one, default=8)
    parser.add_argument("--rounds", type=at_least_one, default=20)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    options = parser.parse_args(arguments)
    if not 3 <= options.voters <= 32 or options.peers <= options.voters:
        parser.error("give 3 to 32 voters, and more peers than that")
    print(
        "| peers | voters | rounds | means of all | lost | s a round | of these averaging | MB sent |\n"
        + "|---" * 8
        + "|"
    )
    rows, killed = [], list[Killed]()
    for peers, voters in ((options.voters, 0), (options.peers, options.voters)):
        row, killed = play(peers, voters, options.rounds, options.kills if voters else 0, options.seed)
        rows.append(row)
        print(f"| {row.peers} | {row.voters} | {row.rounds} | {row.of_all} | {row.lost} | {row.seconds:.1f} |"
              f" {row.seconds_average:.2f} | {row.sent / 1e6:.2f} |", flush=True)  # fmt: skip
    for each in killed:
        print(f"- {each.role}: the others decided after {each.decided_seconds:.1f} s ({', '.join(each.outcomes)}); its")
        print(f"  work counted again {each.back_seconds:.0f} s after its start")
    if options.json:
        found = {"rows": [asdict(row) for row in rows], "kills": [asdict(each) for each in killed]}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
