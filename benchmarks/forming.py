"""How fast a group forms: from the last peer's offer to the first byte of the data phase.

    python -m benchmarks.forming [--peers 8] [--rounds 20] [--protocol butterfly] [--path libp2p]

Each peer is a process with its own p2pd on the loopback. Vectors go directly, or over libp2p. In each round it enters,
offers half of its work, "trains" for a while, and offers all of it. The peers' last offers are spread over a moment, as
those of equal machines are.

forming    from the last peer's offer until each peer has sent or received a byte of a vector
first      from the last peer's offer until the first peer has
called     from the last peer's offer until each peer knows that the round is called

The clock is CLOCK_MONOTONIC, which all processes of a machine share. A round in which a contribution is missing makes
the exit code 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import sys
import time
from collections.abc import Sequence
from statistics import median

import torch

from benchmarks.averaging import Answer, Swarm, ends_in_one_line
from benchmarks.averaging_setup import Setup
from protocols.wire import MAX_ROSTER
from tests.sim.arguments import Parser, at_least_one

PEER = "benchmarks.forming_peer"
COLUMNS = ("forming", "first", "called")


async def play_round(swarm: Swarm, number: int, options: argparse.Namespace) -> Answer:
    """Play one round, and return what it took, in seconds."""
    await swarm.all("make", round=number)
    draw = random.Random(f"forming/{number}")
    at = time.monotonic() + options.train
    for rank in range(swarm.setup.peers):
        late = options.spread * draw.random()
        swarm.tell(rank, "form", round=number, at=at, late=late, protocol=options.protocol)
    answers = await swarm.collect("form", swarm.setup.deadline_seconds)
    offered = max(each["offered"] for each in answers)
    return {
        "round": number,
        "forming": max(each["first"] for each in answers) - offered,
        "first": min(each["first"] for each in answers) - offered,
        "called": max(each["called"] for each in answers) - offered,
        "ok": all(
            each["outcome"] == "committed" and each["counted"] >= swarm.setup.peers - (options.protocol != "butterfly")
            for each in answers
        ),
    }


async def measure(options: argparse.Namespace) -> list[Answer]:
    setup = Setup(options.peers, int(options.megabytes * 250_000), "fp32", deadline_seconds=30.0, path=options.path)
    reports = []
    async with Swarm(setup, PEER) as swarm:
        for number in range(options.rounds):
            reports.append(report := await play_round(swarm, number, options))
            times = "  ".join(f"{name} {1e3 * report[name]:7.1f} ms" for name in COLUMNS)
            print(f"round {number:3}: {times}{'' if report['ok'] else '  NOT OK'}", flush=True)
    return reports


def summary(reports: Sequence[Answer]) -> Answer:
    """Median and 95th percentile of each column, in seconds."""
    found: Answer = {"ok": all(report["ok"] for report in reports)}
    for name in COLUMNS:
        values = sorted(report[name] for report in reports)
        found[f"{name}_seconds_p50"] = round(median(values), 5)
        found[f"{name}_seconds_p95"] = round(values[math.ceil(0.95 * len(values)) - 1], 5)
    return found


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("python -m benchmarks.forming", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--peers", type=int, default=8, help=f"2 to {MAX_ROSTER} processes (default %(default)s)")
    parser.add_argument("--rounds", type=at_least_one, default=20, help="default %(default)s")
    parser.add_argument("--protocol", choices=("butterfly", "moshpit"), default="butterfly", help="default %(default)s")
    parser.add_argument("--path", choices=("direct", "libp2p"), default="direct", help="default %(default)s")
    parser.add_argument("--megabytes", type=float, default=1.0, help="of float32 in each vector (default %(default)s)")
    parser.add_argument("--train", type=float, default=0.5, help="seconds until the offers (default %(default)s)")
    parser.add_argument("--spread", type=float, default=0.1, help="seconds between them, at most (default %(default)s)")
    options = parser.parse_args(arguments)
    if not 2 <= options.peers <= MAX_ROSTER:
        parser.error(f"argument --peers: 2 to {MAX_ROSTER}, not {options.peers}")
    if not 0.01 <= options.megabytes <= 100:
        parser.error(f"argument --megabytes: 0.01 to 100, not {options.megabytes:g}")
    if not (0 <= options.train <= 60 and 0 <= options.spread <= 60):
        parser.error("arguments --train and --spread: 0 to 60 seconds")
    return options


@ends_in_one_line("benchmarks.forming")
def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    reports = asyncio.run(measure(options))
    short = summary(reports)
    what = f"{options.protocol}, {options.path}, {options.peers} peers, {options.rounds} rounds"
    print(f"{what}; load before: {load:.1f}")
    print("ms         p50     p95")
    for name in COLUMNS:
        print(f"{name:8}{1e3 * short[f'{name}_seconds_p50']:6.1f}  {1e3 * short[f'{name}_seconds_p95']:6.1f}")
    print(json.dumps({**vars(options), "load": load, "cores": os.cpu_count(), **short}))
    return 0 if short["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
