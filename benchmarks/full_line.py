"""Control traffic on lines that a round's data fills: heartbeats, votes, questions, and a join.

    python -m benchmarks.full_line [--queues 0,100,1000] [--congestion cubic] [--rounds 20] [--json FILE]

Four real peers, each behind a router with a line of 10 Mbit/s up and down and two queues (FIFO, as in most home
routers) of that many milliseconds. All steps are paced; a round's data fills the lines for over 20 s. A queue
of 0 means idle lines: the same, with a vector of 4 kB. From outside, the peers are asked for their status, one at a
time. After the rounds another peer joins in the middle of a data phase.

heartbeat   from a heartbeat until its echo, in data phases; late: over a second, the time until the next
silence     longest time between two echoes of one peer; lost: how often a live peer was taken for lost
vote        from the last part at any peer until the last peer has the decision
other       rounds that were skipped, undecided or superseded at any peer, or whose mean lacks a peer
status      of a question until its answer; failed: of how many
join        from the start of the process; dial: until it is in touch; state: until it has that; roster: until admitted
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.full_line_peer import MOMENTS
from benchmarks.own_loop import Script, scripts
from tests.faults.homes import Homes
from tests.faults.network import Place, run, why_not
from tests.faults.shell import from_shell
from tests.sim.arguments import Parser, at_least_one
from tests.support.real_swarm import RealPeer, RealSwarm, paced, wait

MEGABITS, NAMES = 10.0, ("a", "b", "c", "d")
ELEMENTS, IDLE_ELEMENTS, STEP_SECONDS, STEPS = 18_000_000, 1000, 0.25, 16
"""An int8 vector of 18 MB: each of four peers sends 27 MB, 22 s at 10 Mbit/s. Training takes 4 s."""
START_SECONDS, ROUND_SECONDS, JOIN_SECONDS, ASK_PAUSE_SECONDS = 90.0, 240.0, 900.0, 2.0
PROGRAM = "benchmarks.full_line_peer"


class LinedSwarm(RealSwarm):
    """Peers behind routers with slow lines, which write down their moments and know what their lines carry."""

    def __init__(self, home: Path, run_file: str, network: Homes, congestion: str) -> None:
        self._network, self._congestion = network, congestion
        super().__init__(home, run_file, self._place)

    def place(self, name: str) -> Place:
        """A host with a line of its own."""
        place = self._network.plain(name)
        if self._congestion:
            gateway = place.address.rpartition(".")[0] + ".1"
            words = ("route", "replace", "default", "via", gateway, "congctl", self._congestion)
            run("ip", "-n", place.namespace, *words)
        return place

    def _place(self, peer: RealPeer) -> None:
        place = self.place(peer.name)
        peer.inside, peer.listen, peer.program = place.inside, f"/ip4/{place.address}/tcp/0", PROGRAM
        peer.environment |= {"NODE_NICE": "0", MOMENTS: str(self.moments(peer.name))}

    def moments(self, name: str) -> Path:
        return self.home / f"{name}.moments"

    def arguments(self, name: str) -> tuple[str, ...]:
        return ("--bandwidth", f"{MEGABITS / 8:g}")

    def all(self) -> list[RealPeer]:
        """All peers, in a run whose first round waits for them."""
        first, *others = NAMES
        founder = self.found(first, "--wait-for", str(len(NAMES)), *self.arguments(first), seconds=START_SECONDS)
        return [founder, *self.join(*others, via=founder, seconds=START_SECONDS)]


# -- figures ----------------------------------------------------------------------------------------------------------


def moments(swarm: LinedSwarm, since: float) -> dict[str, list[dict[str, Any]]]:
    read = {name: map(json.loads, swarm.moments(name).read_text().splitlines()) for name in NAMES}
    return {name: [each for each in lines if each["at"] >= since] for name, lines in read.items()}


def phases(seen: Sequence[dict[str, Any]]) -> list[tuple[float, float]]:
    """The data phases of a peer: from their beginning until its last part."""
    found, began = [], None
    for each in seen:
        if each["what"] == "data":
            began = began or each["at"]
        elif each["what"] in ("parts", "decided") and began:
            found.append((began, each["at"]))
            began = None
    return found


def votes(seen: dict[str, list[dict[str, Any]]], rounds: Sequence[int]) -> list[float]:
    """Of each round, from the last part at any peer until the last peer has the decision."""

    def last(what: str, number: int) -> float:
        every = (each for one in seen.values() for each in one)
        return max(float(each["at"]) for each in every if each["what"] == what and each["round"] == number)

    return [last("decided", each) - last("parts", each) for each in rounds]


def figures(swarm: LinedSwarm, rounds: Sequence[int], since: float, asked: Sequence[Any]) -> dict[str, Any]:
    """Of these rounds; the lines are slow since that moment."""
    seen = moments(swarm, since)
    beats = [
        each
        for one in seen.values()
        for low, high in phases(one)
        for each in one
        if each["what"] == "heartbeat" and low <= each["at"] - each["seconds"] and each["at"] <= high + 5
    ]
    ids = [swarm[name].id for name in NAMES]
    reports = [each for name in NAMES for each in swarm[name].reports() if each["round"] in rounds]
    other = {each["round"] for each in reports if each["outcome"] != "committed" or len(each["peers"]) < len(NAMES)}
    lost = [each for one in seen.values() for each in one if each["what"] == "lost" and each["peer"] in ids]
    return {
        "averaging": spread([each["seconds_average"] for each in reports]),
        "heartbeat": spread([each["seconds"] for each in beats]) | {"late": sum(b["seconds"] > 1 for b in beats)},
        "silence": max(each["silent"] for one in seen.values() for each in one if each["what"] == "heartbeat"),
        "lost": len(lost),
        "vote": spread(votes(seen, [each for each in rounds if each not in other])),
        "other": len(other),
        "rounds": len(rounds),
        "status": spread([each["seconds"] for each in asked if not each["why"]])
        | {"failed": sum(bool(each["why"]) for each in asked)},
        "blamed": sorted({why for each in reports for why in each["blamed"].values()})[:5],
    }


def spread(values: Sequence[float]) -> dict[str, Any]:
    return {"count": len(values), "mean": mean(values) if values else None, "worst": max(values, default=None)}


# -- the play ---------------------------------------------------------------------------------------------------------


@contextmanager
def asker(network: Homes, peers: Sequence[RealPeer]) -> Iterator[Script]:
    """Asks the peers from a place with a fast line."""
    place = network.add("asker")
    with scripts() as start:
        words = ("-m", PROGRAM, "ask", str(ASK_PAUSE_SECONDS), *(peer.address for peer in peers))
        yield start("asker", *words, inside=place.inside)


def play(queue: int, congestion: str, rounds: int, joins: bool) -> dict[str, Any]:
    load = os.getloadavg()[0]
    run_file = paced(ELEMENTS if queue else IDLE_ELEMENTS, STEP_SECONDS, STEPS) + 'overlap = "off"\n'
    with (
        tempfile.TemporaryDirectory() as home,
        Homes() as network,
        LinedSwarm(Path(home), run_file, network, congestion) as swarm,
    ):
        peers = swarm.all()
        wait("a mean of all", lambda: swarm.all_in_one_mean(peers), ROUND_SECONDS)
        for name in NAMES:  # only now: each peer has downloaded the founder's state
            network.slow(name, int(MEGABITS * 1e6), queue or 100)
        since = time.monotonic()
        first = max(peer.last()["round"] for peer in peers) + 2
        with asker(network, peers) as asking:
            last = first + rounds - 1
            until = rounds * ROUND_SECONDS
            wait("the rounds", lambda: all(peer.last()["round"] >= last for peer in peers), until, 0.5)
            asked = [json.loads(line) for _, line in asking.lines]
        found = figures(swarm, range(first, last + 1), since, asked)
        if joins:
            found["join"] = join(swarm, peers, network, queue or 100)
    return {"queue": queue, "congestion": congestion, "load": load, **found}


def join(swarm: LinedSwarm, peers: Sequence[RealPeer], network: Homes, queue: int) -> dict[str, float]:
    """Seconds of the steps of a join that begins in the middle of a data phase."""
    wait("a data phase", lambda: peers[0].status().get("state") == "averaging", ROUND_SECONDS)
    began = time.monotonic()
    joiner = swarm.peer("e")
    network.slow("e", int(MEGABITS * 1e6), queue)
    joiner.start("--bootstrap", peers[0].address, *swarm.arguments("e"))
    found: dict[str, float] = {}

    def reached(step: str) -> bool:
        status = joiner.status()
        states = {"dial": ("syncing", "training", "averaging"), "state": ("training", "averaging")}
        there = status.get("state") in states[step] if step in states else joiner.id in peers[0].last()["peers"]
        joiner.meet()
        return there

    for step in ("dial", "state", "roster"):
        wait(f"the joiner's {step}", partial(reached, step), JOIN_SECONDS, 0.2)
        found[step] = time.monotonic() - began
    return found


def told(row: dict[str, Any]) -> str:
    def pair(of: str) -> str:
        got = row[of]
        return "–" if not got["count"] else f"{got['mean']:.2f} / {got['worst']:.2f} s"

    queue = f"{row['queue']} ms" if row["queue"] else "idle"
    steps = " / ".join(f"{each:.0f}" for each in row["join"].values()) + " s" if "join" in row else "–"
    cells = (
        queue,
        row["congestion"],
        pair("averaging"),
        pair("heartbeat"),
        f"{row['heartbeat']['late']} of {row['heartbeat']['count']}",
        f"{row['silence']:.1f} s",
        str(row["lost"]),
        pair("vote"),
        f"{row['other']} of {row['rounds']}",
        pair("status"),
        f"{row['status']['failed']} of {row['status']['failed'] + row['status']['count']}",
        steps,
    )
    return f"| {' | '.join(cells)} |"


def numbers(text: str) -> list[int]:
    try:
        found = [int(each) for each in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of milliseconds like 0,100,1000") from None
    if not all(each == 0 or 10 <= each <= 5000 for each in found):
        raise argparse.ArgumentTypeError(f"{text!r}: each queue has 10 to 5000 ms; 0 means idle lines")
    return found


def control(text: str) -> str:
    """The name of a congestion control that this kernel has."""
    known = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
    names = known.read_text().split() if known.exists() else []
    if text not in names:
        raise argparse.ArgumentTypeError(f"{text!r}: this kernel has {', '.join(names) or 'none that is known'}")
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser("python -m benchmarks.full_line", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--queues", type=numbers, default=[0, 100, 1000], help="milliseconds (default 0,100,1000)")
    parser.add_argument(
        "--congestion", type=control, default="cubic", help="TCP's congestion control (default %(default)s)"
    )
    parser.add_argument("--rounds", type=at_least_one, default=20, help="default %(default)s")
    parser.add_argument("--no-join", action="store_true", help="leave out the join")
    parser.add_argument("--json", type=Path, help="add what was measured to this file")
    options = parser.parse_args(arguments)
    if why := why_not():
        parser.error(why)
    if options.json:  # an hour later it would be too late
        options.json.open("a").close()
    print("| queue | TCP | averaging | heartbeat | late | silence | lost | vote | other | status | failed | join |")
    print("|" + "---|" * 12, flush=True)
    for queue in options.queues:
        row = play(queue, options.congestion, options.rounds, not options.no_join)
        print(told(row), flush=True)
        if options.json:
            with options.json.open("a") as file:
                file.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(from_shell(main, "python -m benchmarks.full_line", cure=""))
