"""The cost of joining a run in progress: time, bytes, and the effect on the others.

    python -m benchmarks.joining [line] [shares] [killed] [--megabytes 100] [--round-seconds 10] [--json]

Each peer is a real `join` process in a network of its own with a line of its own (`tests.faults.network`; needs root).
Inner steps are paced. `--loopback` needs no networks, and then no line is slow. Megabytes are those of the outer state:
parameters and momentum. Three peers average for some rounds. Then a joiner that knows one address catches up.

line    The joiner's line carries 100 Mbit/s; the others' are not limited. Shows the seconds of catching up, and their
        ratio to the time that the received bytes take on that line.
shares  The others' lines carry 30 Mbit/s each, with priority for rounds. Shows which share of the state each sends.
killed  As `line`, but one of the three gets SIGKILL while it serves the state. Shows what was downloaded twice.

Each also shows how long the others' rounds are during the join, beside as many before. By default all three run.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.lasting import decided, lengths
from tests.faults.network import Namespaces, why_not
from tests.faults.shell import from_shell
from tests.sim.arguments import Parser, at_least_one
from tests.support.checkers import Report
from tests.support.real_swarm import RealPeer, RealSwarm, paced, wait

DONORS = ("a", "b", "c")
NEWCOMER = "d"
LINE_MEGABITS, DONOR_MEGABITS = 100, 30
CALM_ROUNDS = 14
"""Enough that replaying all means costs more than a snapshot; they are also the rounds to compare with."""
PATIENT_SECONDS = 300.0
KILLED_AT = 0.3
_STEP_SECONDS = 0.1
_BROUGHT = re.compile(r"brought by (.*?)(?:\"|$)", re.MULTILINE)

Lines = Callable[[str, int], None]
"""Sets the bandwidth of a peer's line, Mbit/s."""


def play(what: str, megabytes: int, round_seconds: int, loopback: bool) -> dict[str, Any]:
    """One swarm and one joiner."""
    elements = megabytes * 125_000
    run = paced(elements, _STEP_SECONDS, max(1, round(round_seconds / _STEP_SECONDS)))
    patience_seconds = PATIENT_SECONDS + 10 * (round_seconds + 8 * elements / (LINE_MEGABITS * 125_000))
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        network = None if loopback else stack.enter_context(Namespaces())

        def prepare(peer: RealPeer) -> None:
            if network:
                place = network.add(peer.name)
                peer.inside, peer.listen = place.inside, f"/ip4/{place.address}/tcp/0"

        def carries(name: str, megabits: int) -> None:
            if network:
                network.slow(name, megabits * 1_000_000)

        swarm = stack.enter_context(RealSwarm(home, run, prepare))
        first = swarm.found(DONORS[0])
        swarm.join(*DONORS[1:], via=first)
        wait("three in one mean", lambda: swarm.all_in_one_mean(swarm.running), patience_seconds)
        began = time.time()
        if what == "shares":
            for name in DONORS:
                carries(name, DONOR_MEGABITS)
        enough = decided(first)[-1]["round"] + CALM_ROUNDS
        wait("some rounds", lambda: decided(first)[-1]["round"] >= enough, patience_seconds)
        found = _join(swarm, first, carries, what, patience_seconds)
        least = LINE_MEGABITS if what != "shares" else min(LINE_MEGABITS, len(DONORS) * DONOR_MEGABITS)
        lines = {"line_megabits": None if loopback else least, "state_bytes": 8 * elements}
        return {"what": what, "megabytes": megabytes, **lines, **found, **_rounds(first, began, found)}


def _join(swarm: RealSwarm, first: RealPeer, carries: Lines, what: str, patience_seconds: float) -> dict[str, Any]:
    newcomer = swarm.peer(NEWCOMER)
    carries(NEWCOMER, LINE_MEGABITS)
    joined = time.time()
    swarm.join(NEWCOMER, via=first)
    if what == "killed":
        wait(
            "some of the state is there",
            lambda: _part_here(newcomer) > KILLED_AT or newcomer.reports(),
            patience_seconds,
        )
        swarm[DONORS[-1]].strike()
    passes = wait("it has caught up", lambda: _passes(newcomer), patience_seconds)
    there = passes[-1]["time"]
    counts = wait("its work counts", lambda: swarm.all_in_one_mean(swarm.running, joined), patience_seconds)["time"]
    received = sum(each["bytes_received"] for each in passes)
    return {
        "joined": joined,
        "there": there,
        "seconds": sum(each["seconds_average"] for each in passes),
        "seconds_until_it_counts": counts - joined,
        "passes": len(passes),
        "replayed_rounds": sum(each["replayed_rounds"] for each in passes),
        "bytes_received": received,
        "bytes_downloaded": sum(each["bytes_downloaded"] for each in passes),
        "brought": _brought(newcomer, swarm),
        "blamed": sorted({why for each in passes for why in each["blamed"].values()}),
    }


def _part_here(peer: RealPeer) -> float:
    syncing = peer.status().get("syncing") or {}
    return float(syncing.get("bytes_here", 0) / (syncing.get("bytes_whole") or 1))


def _passes(peer: RealPeer) -> list[Report] | None:
    """The joiner's reports of catching up; None until it has taken part in a round."""
    reports = peer.reports()
    taken = next((place for place, each in enumerate(reports) if each["outcome"] != "superseded"), None)
    return reports[:taken] if taken else None


def _brought(newcomer: RealPeer, swarm: RealSwarm) -> dict[str, float]:
    """Share of the state by donor, from the joiner's log."""
    words = _BROUGHT.findall(newcomer.said())
    ends = {peer.id[-6:]: name for name, peer in swarm.peers.items()}
    shares = re.findall(r"(\w{6}) (\d+) %", words[-1]) if words else []
    return {ends.get(end, end): int(percent) / 100 for end, percent in shares}


def _rounds(first: RealPeer, began: float, found: dict[str, Any]) -> dict[str, Any]:
    """Length of the rounds whose middle lies within the join, of as many before it, and the difference."""
    during = [s for end, s in lengths(first) if found["joined"] <= end - s / 2 <= found["there"]]
    before = [s for end, s in lengths(first) if began <= end - s and end <= found["joined"]][-max(3, len(during)) :]
    grown = 100 * (median(during) / median(before) - 1) if during and before else None
    return {"before_seconds": before, "during_seconds": during, "longer_percent": grown}


def show(result: dict[str, Any]) -> str:
    """Lines of the table for one experiment."""
    state, received = result["state_bytes"], result["bytes_received"]
    words = [
        f"{result['what']}, {result['megabytes']} MB of state",
        f"  caught up in        {result['seconds']:.1f} s, {result['passes']} passes, "
        f"{result['replayed_rounds']} rounds replayed; its work counts after "
        f"{result['seconds_until_it_counts']:.1f} s",
        f"  received            {received / 1e6:.1f} MB; of the state {result['bytes_downloaded'] / 1e6:.1f} MB, "
        f"{(result['bytes_downloaded'] - state) / 1e6:+.1f}",
    ]
    if result["line_megabits"]:
        least = received / (result["line_megabits"] * 125_000)
        words.append(f"  beside bytes / line {result['seconds'] / least:.2f} times {least:.1f} s")
    if result["brought"]:
        words.append("  brought by          " + ", ".join(f"{n} {100 * s:.0f} %" for n, s in result["brought"].items()))
    if result["longer_percent"] is not None:
        before, during = median(result["before_seconds"]), median(result["during_seconds"])
        words.append(
            f"  the others' rounds  {during:.2f} s where {before:.2f} s before ({result['longer_percent']:+.1f} %, "
            f"{len(result['during_seconds'])} rounds)"
        )
    return "\n".join([*words, *(f"  blamed              {why}" for why in result["blamed"])])


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m benchmarks.joining", description=__doc__)
    parser.add_argument("what", nargs="*", metavar="line|shares|killed")
    parser.add_argument("--megabytes", type=at_least_one, default=100)
    parser.add_argument("--round-seconds", type=at_least_one, default=10)
    parser.add_argument("--loopback", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    plays = options.what or ["line", "shares", "killed"]
    if unknown := [each for each in plays if each not in ("line", "shares", "killed")]:
        parser.error(f"{unknown[0]!r} is none of line, shares, killed")
    if not options.loopback and (why := why_not()):
        parser.error(f"{why}; or give --loopback")
    results = []
    for what in plays:
        results.append(play(what, options.megabytes, options.round_seconds, options.loopback))
        if not options.json:
            print(show(results[-1]), flush=True)
    if options.json:
        print(json.dumps({"results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(from_shell(main, "python -m benchmarks.joining", cure=""))
