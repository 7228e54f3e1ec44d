"""Rounds of real peers of which some vote, and the others contribute through these (`clusters = true`).

    python -m benchmarks.clusters [--peers 24] [--voters 8] [--rounds 20] [--kills 0] [--victims …] [--seed 0]
        [--json FILE]

Each peer is a `join` process on the loopback with its p2pd and its worker; inner steps are paced. First the voters
alone, as a run without clusters; then all peers. A row: rounds once all are in one mean, those that were a mean of all,
those that some peer lost, a round's median seconds and of these averaging, and what a peer sends in a round.

`--kills`: so many times each of `--victims` is killed (SIGKILL) in an averaging, and starts again once the others have
ended that round: an aggregator (an associate), a lead, the round's coordinator; `stopped` is an aggregator that is
stopped (SIGSTOP) and continued instead. The founder is spared. Seconds from the kill until the last of the others has
ended the round, and from the start until the victim's work counts again.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median

from protocols.base import Member
from protocols.consensus.record import coordinators
from tests.faults.shell import from_shell
from tests.sim.arguments import Parser, at_least, at_least_one
from tests.support.checkers import DECIDED, Report
from tests.support.real_swarm import RealPeer, RealSwarm, paced, wait

PATIENT_SECONDS = 240.0
AT_ONCE = 6  # peers that start together
STEP_SECONDS, INNER_STEPS, ELEMENTS = 0.5, 20, 250_000
VICTIMS = ("aggregator", "lead", "coordinator", "stopped")


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
    outcomes: tuple[str, ...]  # of that round, at the others


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


def victim_of(role: str, peers: Sequence[RealPeer], lineage: str, draw: random.Random) -> RealPeer | None:
    """A peer with this role in the round that extends `lineage`; None if only the founder has it."""
    founder = peers[0]
    members = {line["peer"] for line in founder.status().get("peers", ()) if line["member"]} | {founder.id}
    first = coordinators(bytes.fromhex(lineage), [Member(peer) for peer in members])[0]
    if role == "coordinator":
        able = [peer for peer in peers if peer.id == first]
    elif role == "lead":
        able = [peer for peer in peers if peer.id in members and peer.id != first]
    else:
        able = [peer for peer in peers if peer.id not in members]
    able = [peer for peer in able if peer is not founder]
    return draw.choice(able) if able else None


def caught(role: str, peers: Sequence[RealPeer], draw: random.Random) -> tuple[RealPeer, int]:
    """Wait until a peer of this role averages. Returns it, and the round."""
    until = time.monotonic() + PATIENT_SECONDS
    while time.monotonic() < until:
        lineage = peers[0].status().get("lineage", "")
        victim = victim_of(role, peers, lineage, draw) if lineage else None
        status = victim.status() if victim else {}
        while status.get("lineage") == lineage and status["state"] != "averaging":
            time.sleep(0.02)
            status = victim.status() if victim else {}
        if victim and status.get("lineage") == lineage:
            return victim, status["round"]
        time.sleep(0.25)
    raise AssertionError(f"no {role} was seen averaging within {PATIENT_SECONDS:g} s")


def ending(peers: Sequence[RealPeer], number: int) -> list[Report]:
    """How each peer ended that round, or a later one if it caught up; empty until all have."""
    found = [next((each for each in peer.reports() if each["round"] >= number), None) for peer in peers]
    return [each for each in found if each] if all(found) else []


def kill(role: str, peers: Sequence[RealPeer], draw: random.Random) -> Killed:
    victim, number = caught(role, peers, draw)
    killed = victim.strike(number=signal.SIGSTOP if role == "stopped" else signal.SIGKILL)
    rest = [peer for peer in peers if peer is not victim]
    ends = wait("the others decide", lambda: ending(rest, number), PATIENT_SECONDS)
    began = time.time()
    if role == "stopped":
        victim.strike(number=signal.SIGCONT)
    else:
        victim.leaves_nothing()
        victim.start("--bootstrap", rest[0].address)
    wait("it counts again", lambda: all_in(peers, began), PATIENT_SECONDS, 0.25)
    outcomes = sorted({each["outcome"] for each in ends})
    return Killed(role, max(each["time"] for each in ends) - killed, time.time() - began, tuple(outcomes))


def play(count: int, voters: int, rounds: int, victims: Sequence[str], seed: int) -> tuple[Figures, list[Killed]]:
    """Prints what it finds as soon as it is found. At its end a broken invariant raises AssertionError."""
    with tempfile.TemporaryDirectory() as home, RealSwarm(Path(home), run_of(voters)) as swarm:
        peers, draw = gather(swarm, count), random.Random(seed)
        row = measured(peers, voters, rounds)
        print(f"| {row.peers} | {row.voters} | {row.rounds} | {row.of_all} | {row.lost} | {row.seconds:.1f} |"
              f" {row.seconds_average:.2f} | {row.sent / 1e6:.2f} |", flush=True)  # fmt: skip
        killed = [kill(role, peers, draw) for role in victims]
        if killed:
            show(killed)
        return row, killed


def victims(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not {*names} <= {*VICTIMS}:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of {', '.join(VICTIMS)}")
    return names


def show(killed: Sequence[Killed]) -> None:
    print("\n| victim | plays | s until the others had decided | longest | s until it counted again | outcomes |")
    print("|---" * 6 + "|")
    for role in dict.fromkeys(each.role for each in killed):
        plays = [each for each in killed if each.role == role]
        after = [each.decided_seconds for each in plays]
        outcomes = ", ".join(sorted({outcome for each in plays for outcome in each.outcomes}))
        print(f"| {role} | {len(plays)} | {median(after):.1f} | {max(after):.1f} |"
              f" {median(each.back_seconds for each in plays):.0f} | {outcomes} |", flush=True)  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m benchmarks.clusters", description="Real peers behind voters.")
    parser.add_argument("--peers", type=at_least_one, default=24)
    parser.add_argument("--voters", type=at_least_one, default=8)
    parser.add_argument("--rounds", type=at_least_one, default=20)
    parser.add_argument("--kills", type=partial(at_least, 0), default=0, help="of each victim")
    parser.add_argument("--victims", type=victims, default=VICTIMS, help=f"some of {','.join(VICTIMS)}")
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
        roles = [role for role in options.victims for _ in range(options.kills)] if voters else []
        row, killed = play(peers, voters, options.rounds, roles, options.seed)
        rows.append(row)
    if options.json:
        found = {"rows": [asdict(row) for row in rows], "kills": [asdict(each) for each in killed]}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(from_shell(main, "python -m benchmarks.clusters", cure=""))
