"""Averaging side by side, on this machine and in one run.

    python -m benchmarks.peers [--peers 4] [--megabytes 100] [--rounds 6] [--systems NAME ...] [--all] [--out PNG]

Each peer is a process on the loopback, with libraries held to one thread. In a round all peers get the vectors of that
round, the same for every system, form their group, and average. The time runs from "vectors ready and group known" (the
first peer's start) until the last peer holds the mean. Forming the group is timed by itself and in no ratio. Our
rounds go on as soon as the group is formed, so their CPU seconds, memory and bytes are those of both.

    tcp-floor, encrypted-floor   the same bytes between the same processes, and nothing else done (`floor_peer`)
    p2pd-floor                   the same bytes over plain libp2p streams, to the next peer only
    gloo                         torch.distributed.all_reduce; group formed once, before all rounds
    torchft                      its Manager with gloo: quorum, allreduce, should_commit; not encrypted (`torchft_peer`)
    hivemind                     its DecentralizedAverager: no compression, matchmaking ahead, then a trigger; encrypted
                                 by p2pd; group of N, our weights, all else the defaults (`hivemind_peer`)
    ours-CODEC-PATH              the butterfly with its vote; encrypted; fp32, bf16, int8, int4; direct or libp2p

All results are compared with the mean in float64. Ours must also be the same bits at all peers, and on the direct path
p2pd must not carry the vectors. Each floor's bytes must have arrived. Otherwise the exit code is 1, as when a system
cannot be installed or started: no row is left out. (With ten peers hivemind's first round now and then misses a part,
with a warning. If another system's warm-up is wrong, a line says so, and the run does not fail.)

Systems are alive together and take turns, each round from another one on, with one round before that does not count. If
they do not all fit into memory, they are played in blocks, in two passes. CPU seconds are those of all processes of a
system. Memory is the resident memory of the peer that holds most: its peak, and what the round added to what it held
before. The wire's bytes are what the loopback carried meanwhile, so nothing else should use it.

The last line is one JSON object. Its `ours_fp32_seconds_p50` and `ours_int8_seconds_p50` are the direct path's.
`--all` plays 2, 4, 8 and 10 peers with 10, 100 and 400 MB, where all vectors together have 1,600 MB at most.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import torch

from benchmarks.averaging import ends_in_one_line
from benchmarks.peers.plot import draw
from benchmarks.peers.report import HEADLINE, Row, result, row, table
from benchmarks.peers.rounds import Cell, play
from benchmarks.peers.systems import chosen
from protocols.wire import MAX_ROSTER
from tests.sim.arguments import Parser, at_least_one

ALL_PEERS, ALL_MEGABYTES, ALL_LIMIT_MEGABYTES = (2, 4, 8, 10), (10.0, 100.0, 400.0), 1600.0
PROGRAM = "python -m benchmarks.peers"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(PROGRAM, description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--peers", type=int, help=f"2 to {MAX_ROSTER} processes (default {HEADLINE.peers})")
    parser.add_argument("--megabytes", type=float, help=f"of float32 in a vector (default {HEADLINE.megabytes:g})")
    parser.add_argument("--rounds", type=at_least_one, default=6, help="that count (default %(default)s)")
    parser.add_argument("--systems", nargs="+", default=["*"], help="names or patterns: 'ours-*-direct' (default all)")
    parser.add_argument("--all", action="store_true", help="every size, in hours")
    parser.add_argument("--out", type=Path, default=Path("build/peers.png"), help="the plot (default %(default)s)")
    options = parser.parse_args(arguments)
    if options.all and (options.peers or options.megabytes):
        parser.error("argument --all: not with --peers or --megabytes")
    if options.peers is not None and not 2 <= options.peers <= MAX_ROSTER:
        parser.error(f"argument --peers: 2 to {MAX_ROSTER}, not {options.peers}")
    if options.megabytes is not None and not 0.01 <= options.megabytes <= 10_000:
        parser.error(f"argument --megabytes: 0.01 to 10000, not {options.megabytes:g}")
    try:
        options.systems = chosen(options.systems)
    except ValueError as error:
        parser.error(f"argument --systems: {error}")
    return options


def sizes(options: argparse.Namespace) -> list[Cell]:
    if not options.all:
        return [Cell(options.peers or HEADLINE.peers, options.megabytes or HEADLINE.megabytes)]
    every = (Cell(peers, megabytes) for peers in ALL_PEERS for megabytes in ALL_MEGABYTES)
    return [cell for cell in every if cell.peers * cell.megabytes <= ALL_LIMIT_MEGABYTES]


async def measure(options: argparse.Namespace) -> dict[Cell, list[Row]]:
    """Play and print all sizes, and draw what there is after each."""
    cells: dict[Cell, list[Row]] = {}
    began = time.monotonic()

    def progress(text: str) -> None:
        print(f"[{time.monotonic() - began:6.1f} s] {text}", file=sys.stderr, flush=True)

    for cell in sizes(options):
        turns = await play(cell, options.systems, options.rounds, progress)
        cells[cell] = [row(system, turns[system.name]) for system in options.systems]
        print(table(cell, cells[cell]), end="\n\n", flush=True)
        draw(cells, options.out)
    return cells


def machine() -> dict[str, object]:
    """What the figures depend on."""
    versions = {name: metadata.version(name) for name in ("torch", "hivemind", "cryptography")}
    return {"cores": os.cpu_count(), "load": os.getloadavg()[0], "versions": versions}


@ends_in_one_line(PROGRAM)
def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    torch.set_num_threads(1)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    here = machine()
    cells = asyncio.run(measure(options))
    found = result(cells)
    print(f"{here['cores']} cores, load before {here['load']:.1f}; plot: {options.out}")
    print(json.dumps({**found, **here, "rounds": options.rounds}))
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
