"""One mean of a thousand peers: what it costs each of them, and how long it takes, beside gossip and Moshpit.

    python -m benchmarks.thousand [--peers 32 256 1000] [--protocols clusters gossip moshpit] [--rounds 3] [--json FILE]
                                  [--elements 65536] [--chunks 1]
    python -m benchmarks.thousand faults [--peers 1000] [--rounds 3] [--seeds 1]    # joiners
    python -m benchmarks.thousand plot --json FILE --file build/thousand.png

Simulated peers (`tests.sim`) with lines of 8 Mbit/s and messages that take 20 ms, in virtual time. Vectors of 256 KB of
float32 and one chunk a part, with clusters of `--elements` and `--chunks`; all frames are real; heartbeats are not
sent. Each play ends when all hold a mean of all within 1 %; a round of clusters that lost too much work for that says
so.

clusters  32 voters, and the others behind them, which have their leads when they begin. Rounds are measured from the
          first mean of all on, each with a second of training. Checked: one state root, and each element against the
          float64 mean of all vectors. The first round also opens the streams that stay open
gossip    random pairs without training, until the spread over the peers' vectors is 1 % of the first
moshpit   the same, in groups of the grid that fits the number of peers

`faults`: calm rounds, then one in whose data phase .5 % of the peers die and 2 % send nothing any more. `late` of the
others learn its outcome only when those have begun the next round, and begin a later one. `joiners`: half
of the peers have calm rounds, then the others come, all at once and with the state, and look for leads. `plot` draws
what `--json` wrote. What misses an aim is said, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from benchmarks.thousand_swarms import (
    ELEMENTS,
    TRAIN_SECONDS,
    VOTERS,
    WITHIN,
    FaultyThousand,
    Independent,
    JoiningThousand,
    Thousand,
)
from tests.sim.arguments import Parser, at_least, at_least_one

ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Cost:
    """Means over the peers; of clusters also over the rounds measured."""

    protocol: str
    peers: int
    sent: float  # bytes of a peer until all hold a mean of all within 1 %, in vectors
    frames: float  # sent by a peer until then; openings and ends of streams count
    most_frames: float
    seconds: float  # until then; nan if a round of clusters lost so much work that they do not
    round_seconds: float  # median
    rounds: float
    counted: int | None = None  # peers whose work is in the mean; the least of all rounds measured
    lost: float | None = None  # share of the work that is not in the mean, chunk by chunk; the largest
    root: bool | None = None  # whether all hold one state
    error: float | None = None  # of an element, relative to the float64 mean of all; the largest
    cpu_seconds: float = 0.0  # of the simulation


def clusters(peers: int, rounds: int = ROUNDS, elements: int = ELEMENTS, chunks: int = 1) -> Cost:
    cpu, swarm, first, lost = time.process_time(), Thousand(peers, elements, chunks), 0, list[float]()

    async def main() -> None:
        nonlocal first
        first = await swarm.until_all_count()
        for round in range(first, first + rounds):
            await swarm.until_begun(round + 1)
            lost.append(1 - swarm.share(round))

    swarm.play(main)
    last = first + rounds
    error = max(swarm.error(round) for round in range(first, last))
    spans = list(swarm.spans(first, last))
    frames, seconds = [frames / rounds for _, frames, _ in spans], [swarm.seconds(each) for each in range(first, last)]
    return Cost(
        protocol="clusters",
        peers=peers,
        sent=fmean(sent for *_, sent in spans) / rounds / (4 * elements),
        frames=fmean(frames),
        most_frames=max(frames),
        seconds=median(seconds) if error <= WITHIN else math.nan,
        round_seconds=median(seconds),
        rounds=1,
        lost=max(lost),
        counted=min(swarm.contributors[round] for round in range(first, last)),
        root=all(len(roots) == 1 for roots in swarm.found.values()),
        error=error,
        cpu_seconds=time.process_time() - cpu,
    )


def independent(protocol: str, peers: int) -> Cost:
    cpu, swarm = time.process_time(), Independent(protocol, peers)
    swarm.play(swarm.until_mixed)
    nodes, frames = list(swarm.network.nodes.values()), [swarm.frames[name] for name in swarm.names]
    return Cost(
        protocol=protocol,
        peers=peers,
        sent=fmean(node.sent_bytes for node in nodes) / (4 * ELEMENTS),
        frames=fmean(frames),
        most_frames=max(frames),
        seconds=swarm.ended,
        round_seconds=median(result.seconds for results in swarm.results for result in results),
        rounds=fmean(map(len, swarm.results)),
        cpu_seconds=time.process_time() - cpu,
    )


def with_faults(peers: int, rounds: int, seed: int) -> dict[str, Any]:
    """A calm round, the median of some, and one with faults: seconds until all that are well hold the mean."""
    swarm = FaultyThousand(peers, seed=seed)
    found: dict[str, Any] = {"peers": peers, "seed": seed}

    async def main() -> None:
        first = await swarm.until_all_count()
        hit = first + rounds
        await swarm.until_begun(hit)
        calm = median(swarm.seconds(round) for round in range(first, hit))
        victims = await swarm.strike(hit, calm - TRAIN_SECONDS)
        well = [name for name in swarm.names if name not in victims]
        ended = [await swarm.until_past(hit, name) for name in well]
        began = min(begin for begin, *_ in swarm.began[hit].values())
        found.update(
            calm_seconds=calm,
            seconds=max(ended) - began,
            ratio=(max(ended) - began) / calm,
            late=sum(name not in swarm.began[hit + 1] for name in well),
            lost=1 - swarm.share(hit),
            died=sum(not swarm.alive(name) for name in victims),
            stalled=sum(swarm.alive(name) for name in victims),
            voters_hit=len(victims & {*swarm.voters}),
            repairs=max(swarm.versions[hit]),
            roots=len(swarm.found[hit]),
        )

    swarm.play(main)
    return found


def with_joiners(peers: int, rounds: int, seed: int) -> dict[str, Any]:
    """Calm rounds of half of the peers, then those until the work of the other half counts, too."""
    swarm = JoiningThousand(peers, seed=seed)
    found: dict[str, Any] = {"peers": peers, "seed": seed}

    async def main() -> None:
        here, first = list(swarm.names), await swarm.until_all_count()
        joined = first + rounds
        await swarm.until_begun(joined)
        calm = median(swarm.seconds(round) for round in range(first, joined))
        swarm.add_joiners()
        whole = await swarm.until_all_count()
        await swarm.until_begun(whole + 1, here)
        longest = max(swarm.seconds(round, here) for round in range(joined, whole + 1))
        counted = {round: swarm.contributors[round] for round in range(joined, whole + 1)}
        found.update(
            joiners=len(swarm.joiners),
            calm_seconds=calm,
            longest_seconds=longest,
            ratio=longest / calm,
            rounds=whole - joined,
            counted=counted,
        )

    swarm.play(main)
    return found


# -- what is printed and drawn ----------------------------------------------------------------------------------------

PLAYS = {"faults": with_faults, "joiners": with_joiners}
LOST_SHARE, FAULTY_RATIO, JOINED_ROUNDS, JOINED_RATIO = 0.03, 1.6, 3, 1.2  # aims
PROTOCOLS = ("clusters", "gossip", "moshpit")
COLUMNS = (
    "| protocol | peers | sent, in vectors | frames; the most | s to 1 % | s a round | rounds | work lost | one state"
    " | error |"
)
PUBLISHED = {"Moshpit's paper, 1,024 peers": 2 * 2.0 * 31 / 32}
"""Two rounds in groups of 32 (Ryabinin et al. 2021, without failures), each of which takes 2 · 31/32 vectors."""
NOT_DRAWN = "Plexus (Dhasade et al. 2025) has no mean of all: in each round a sample of its up to 1,000 nodes trains"


def line(cost: Cost) -> str:
    exact = [f"{cost.lost:.2%}", "yes" if cost.root else "**no**", f"{cost.error:.1e}"] if cost.counted else 3 * [""]
    cells = [
        f"{cost.protocol}",
        f"{cost.peers:,}",
        f"{cost.sent:.2f}",
        f"{cost.frames:.0f}; {cost.most_frames:.0f}",
        f"{cost.seconds:.2f}" if math.isfinite(cost.seconds) else "not reached",
        f"{cost.round_seconds:.2f}",
        f"{cost.rounds:.1f}",
        *exact,
    ]
    return f"| {' | '.join(cells)} |"


def shown(found: dict[str, Any]) -> list[str]:
    """Print what a round with faults or joiners came to, and what misses an aim. Returns that."""
    print(json.dumps(found), flush=True)
    aims = {
        "one state": found.get("roots", 1) != 1,
        f"at most {LOST_SHARE:.0%} of the work lost": found.get("lost", 0.0) > LOST_SHARE,
        f"at most {FAULTY_RATIO} x a calm round": "roots" in found and found["ratio"] > FAULTY_RATIO,
        f"all count within {JOINED_ROUNDS} rounds": found.get("rounds", 0) > JOINED_ROUNDS,
        f"the others' rounds at most {JOINED_RATIO} x a calm one": "joiners" in found and found["ratio"] > JOINED_RATIO,
    }
    missed = [f"{found['peers']} peers, seed {found['seed']}, miss: {aim}" for aim, miss in aims.items() if miss]
    for each in missed:
        print(each, flush=True)
    return missed


def misses(costs: Sequence[Cost]) -> list[str]:
    """What misses an aim: of clusters, beside 32 peers of which all vote."""
    few = next((cost for cost in costs if (cost.protocol, cost.peers) == ("clusters", VOTERS)), None)
    found = []
    for cost in costs:
        if cost.protocol != "clusters" or cost is few:
            continue
        aims = {
            "a mean within 1 %": not math.isfinite(cost.seconds),
            "the whole work of all": cost.counted != cost.peers or cost.lost != 0.0,
            "one state": not cost.root,
            "elements within 1e-6": not (cost.error or 0.0) <= 1e-6,
            "sent at most 1.1 x 2 (N - 1)/N": cost.sent > 1.1 * 2 * (cost.peers - 1) / cost.peers,
            "frames at most 1.5 x those of 32": few and cost.frames > 1.5 * few.frames,
            "a round at most 1.5 x that of 32": few and cost.round_seconds > 1.5 * few.round_seconds,
        }
        found += [f"{cost.peers} peers miss: {aim}" for aim, missed in aims.items() if missed]
    return found


def draw(costs: Sequence[Cost], file: Path) -> None:
    """Bytes, messages and seconds until all hold a mean of all. Raises OSError if the file cannot be written, and
    ValueError without figures.
    """
    if not costs:
        raise ValueError("it holds no figures")
    figure = Figure(figsize=(11.0, 4.2), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle("Until all peers hold a mean of all within 1 %")
    sizes = sorted({cost.peers for cost in costs})
    titles = {"sent": "vectors that a peer sends", "frames": "messages that a peer sends", "seconds": "virtual seconds"}
    panels = dict(zip(titles, figure.subplots(1, len(titles)), strict=True))
    for kind, axes in panels.items():
        for protocol in dict.fromkeys(cost.protocol for cost in costs):
            mine = [cost for cost in costs if cost.protocol == protocol and math.isfinite(cost.seconds)]
            places = sorted((cost.peers, getattr(cost, kind)) for cost in mine)
            axes.plot([peers for peers, _ in places], [value for _, value in places], marker="o", label=protocol)
        axes.set(xscale="log", yscale="log", title=titles[kind], xlabel="peers")
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axes.set_xticks([], minor=True)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:,g}")
        axes.yaxis.set_minor_formatter("")
        axes.grid(alpha=0.3)
    for name, vectors in PUBLISHED.items():
        panels["sent"].plot([1024], [vectors], marker="*", markersize=11, linestyle="", color="#444444", label=name)
    handles, labels = panels["sent"].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, title=NOT_DRAWN)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("python -m benchmarks.thousand", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("table", *PLAYS, "plot"), nargs="?", default="table")
    parser.add_argument("--peers", type=at_least_one, nargs="+", help="default 32 256 1000; of faults and joiners 1000")
    parser.add_argument("--protocols", choices=PROTOCOLS, nargs="+", default=PROTOCOLS, help="default: all")
    parser.add_argument("--rounds", type=at_least_one, default=ROUNDS, help="of clusters (default %(default)s)")
    parser.add_argument("--seeds", type=partial(at_least, 0), nargs="+", help="of faults and joiners (default 1)")
    parser.add_argument("--elements", type=at_least_one, default=ELEMENTS, help="of clusters (default %(default)s)")
    parser.add_argument("--chunks", type=at_least_one, default=1, help="of a part, of clusters (default %(default)s)")
    parser.add_argument("--json", type=Path, help="written, and read by plot")
    parser.add_argument("--file", type=Path, default=Path("build/thousand.png"), help="of plot (default %(default)s)")
    options = parser.parse_args(arguments)
    options.peers = options.peers or ([1000] if options.what in PLAYS else [32, 256, 1000])
    if options.what == "joiners" and min(options.peers) < 2 * VOTERS:
        parser.error(
            f"half of the peers join those that are there, {VOTERS} voters among them: give {2 * VOTERS} or more"
        )
    if options.seeds and options.what not in PLAYS:
        parser.error(f"--seeds is for {' and '.join(PLAYS)}: the others play one seed")
    if options.what == "plot" and not options.json:
        parser.error("plot needs --json FILE")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    torch.set_num_threads(1)
    if options.what == "plot":
        try:
            draw([Cost(**each) for each in json.loads(options.json.read_text())], options.file)
        except (OSError, ValueError, TypeError) as error:
            print(f"no plot of {options.json}: {error}: give what a run with --json has written", file=sys.stderr)
            return 2
        print(options.file)
        return 0
    if play := PLAYS.get(options.what):
        found = [
            missed
            for peers in options.peers
            for seed in options.seeds or [1]
            for missed in shown(play(peers, options.rounds, seed))
        ]
        return 1 if found else 0
    print(COLUMNS, "|" + 10 * "---|", sep="\n")
    costs = []
    for peers in options.peers:
        for protocol in options.protocols:
            if protocol == "clusters":
                cost = clusters(peers, options.rounds, options.elements, options.chunks)
            else:
                cost = independent(protocol, peers)
            costs.append(cost)
            print(line(cost), flush=True)
            if options.json:
                options.json.write_text(json.dumps([asdict(each) for each in costs]))
    for missed in (found := misses(costs)):
        print(missed)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
