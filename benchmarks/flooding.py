"""Rounds while strangers flood the peers' direct ports, beside rounds in peace: four peers on the loopback.

    python -m benchmarks.flooding [--megabytes 100] [--rounds 5]

Rounds in peace and under each attack take turns. An attacker (`benchmarks.flood_attacker`) is a process of its own,
with the lowest priority, which spreads up to 10,000 connections a round over the peers' ports:

elsewhere  connect to a port of the attacker's own: what the attacker alone costs on this machine
silent     connect and never speak
half       connect and send half an opening
drops      send an opening byte by byte, with a token that nobody granted
other      as silent, from the address at which the peers are themselves; the others come from another one
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch

from benchmarks.averaging import Swarm, SwarmError, ends_in_one_line, span_seconds
from benchmarks.averaging_setup import Setup
from tests.sim.arguments import Parser, at_least_one

PEACE, ATTACKS = "peace", ("elsewhere", "silent", "half", "drops", "other")
PEERS = 4


@asynccontextmanager
async def attacked(kind: str, ports: Sequence[int]) -> AsyncIterator[list[int]]:
    """Let an attacker run. The result holds the number of its connections at the end."""
    made: list[int] = []
    if kind == PEACE:
        yield made
        return
    command = [sys.executable, "-m", "benchmarks.flood_attacker", kind, *map(str, ports)]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=PIPE, stdin=DEVNULL, cwd=Path(__file__).parents[1], limit=1 << 20
    )
    try:
        assert process.stdout is not None
        await process.stdout.readline()  # it has begun
        yield made
    finally:
        process.kill()
        made.append(await _last_number(process))


async def _last_number(process: Process) -> int:
    assert process.stdout is not None
    lines = (await process.stdout.read()).split()
    await process.wait()
    return int(lines[-1]) if lines else 0


def direct_ports(swarm: Swarm) -> list[int]:
    """The ports on which the peers take bulk data."""
    found = []
    for up in swarm.ups:
        listening = psutil.Process(up["pid"]).net_connections("tcp")
        found += [each.laddr.port for each in listening if each.status == psutil.CONN_LISTEN]
    return found


def held(swarm: Swarm) -> tuple[int, float]:
    """Descriptors and resident megabytes of all peers."""
    processes = [psutil.Process(up["pid"]) for up in swarm.ups]
    return sum(each.num_fds() for each in processes), sum(each.memory_info().rss for each in processes) / 1e6


async def measure(megabytes: float, rounds: int) -> list[dict[str, Any]]:
    setup = Setup(PEERS, int(megabytes * 250_000), "fp32", 300.0, path="direct")
    rows: dict[str, list[dict[str, Any]]] = {kind: [] for kind in (PEACE, *ATTACKS)}
    async with Swarm(setup) as swarm:
        for number in range(rounds * len(rows) + 1):
            kind = list(rows)[number % len(rows)]
            await swarm.all("make", round=number)
            async with attacked(kind, direct_ports(swarm)) as made:
                averaged = await swarm.all("average", round=number)
                descriptors, _ = held(swarm)
            await asyncio.sleep(1.0)
            left, memory = held(swarm)
            if number and any(answer["outcome"] != "committed" for answer in averaged):
                raise SwarmError(f"round {number}: {[answer['outcome'] for answer in averaged]}")
            if number:
                rows[kind].append(
                    {"seconds": span_seconds(averaged), "connections": sum(made), "descriptors": descriptors,
                     "descriptors_after": left, "memory_after": memory}
                )  # fmt: skip
    return [
        {"kind": kind} | {key: median(turn[key] for turn in turns) for key in turns[0]} for kind, turns in rows.items()
    ]


@ends_in_one_line("benchmarks.flooding")
def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser("python -m benchmarks.flooding", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--megabytes", type=float, default=100.0, help="of float32 (default %(default)s)")
    parser.add_argument("--rounds", type=at_least_one, default=5, help="default %(default)s")
    options = parser.parse_args(arguments)
    if not 0.01 <= options.megabytes <= 1_000:
        parser.error(f"argument --megabytes: 0.01 to 1000, not {options.megabytes:g}")
    torch.set_num_threads(1)
    rows = asyncio.run(measure(options.megabytes, options.rounds))
    print("| strangers | round, p50 | to peace | connections a round | descriptors in the round, 1 s later | memory |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['kind']} | {row['seconds']:.3f} s | {row['seconds'] / rows[0]['seconds']:.2f} |"
            f" {row['connections']:,.0f} | {row['descriptors']:.0f}, {row['descriptors_after']:.0f} |"
            f" {row['memory_after']:.0f} MB |"
        )
    print(json.dumps({"load": os.getloadavg()[0], "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
