"""The download of a state beside the time that its bytes take on the wire.

    python -m benchmarks.downloading [one] [line] [three] [--megabytes 1000] [--path libp2p] [--passes 3]
                                     [--megabits 100] [--milliseconds 0]

one     From one donor, on the loopback.
line    From one donor whose line carries --megabits in each direction. The joiner's line has no limit. With
        --milliseconds, a round trip takes that long (`benchmarks.delay_line`).
three   As `line`, from three such donors; with --megabits 100,100,10 the third one's line carries 10 Mbit/s.

Each peer is a real process with a p2pd of its own, and serves or downloads with the code of a joining peer; states are
in files. `line` and `three` use network namespaces: they need root, iproute2 and iptables. Megabytes are those of the
state: parameters and momentum. In each pass, the joiner handles the same bytes in four ways, one after the other:

plain     over plain TCP from one donor, by blocking calls (not in `three`)
wire      from the same donors over one encrypted stream each, shared by their lines; nothing is done with them
download  the download: requested by chunk, verified, and written to a file
work      without other peers: verified and written to a file, from memory

`line` says the time that the state's bytes alone take on the donors' lines. Figures are medians of the passes; the last
line is a JSON object with all of them. The exit code is 1 if a download differs from the state.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from statistics import median
from typing import Any

from benchmarks.averaging import Answer, Swarm, ends_in_one_line, process_cpu_seconds
from benchmarks.averaging_setup import Setup
from benchmarks.shaped import delayed
from protocols.sync.snapshot import buffer_bytes
from tests.faults.network import Namespaces, Place, why_not
from tests.faults.shell import from_shell
from tests.sim.arguments import Parser, at_least_one

CASES = {"one": 1, "line": 1, "three": 3}
"""Case -> its number of donors."""
START_SECONDS = 60.0


class DonorSwarm(Swarm):
    """A joiner and its donors, each in a namespace if there are places."""

    def __init__(self, setup: Setup, places: Sequence[Place]) -> None:
        super().__init__(setup, "benchmarks.downloading_peer")
        self._places = places

    def prefix(self, rank: int) -> Sequence[str]:
        return self._places[rank].inside if self._places else ()

    def setup_of(self, rank: int) -> Setup:
        setup = super().setup_of(rank)
        return replace(setup, listen=f"/ip4/{self._places[rank].address}/tcp/0") if self._places else setup

    async def one(self, rank: int, command: str, **arguments: Any) -> Answer:
        """Send a command to one peer, and return its answer."""
        self.tell(rank, command, **arguments)
        return await self.hear(rank, command, self.setup.deadline_seconds + START_SECONDS)

    def cpu_seconds(self) -> tuple[float, float, float]:
        """Processor seconds used so far: by the joiner, by the donors, and by the daemons of all."""
        both = [process_cpu_seconds(up) for up in self.ups]
        return both[0][0], sum(process for process, _ in both[1:]), sum(daemon for _, daemon in both)


async def play(
    case: str, setup: Setup, places: Sequence[Place], lines: Sequence[int], passes: int
) -> list[dict[str, Any]]:
    """The passes of one case, with donors whose lines are in this proportion."""
    donors, found = list(range(1, setup.peers)), []
    sizes = [(rank, buffer_bytes(setup.elements) * line // sum(lines)) for rank, line in enumerate(lines, 1)]
    async with DonorSwarm(setup, places) as swarm:
        await swarm.one(1, "write")
        for rank in donors:
            await swarm.one(rank, "hold")
        for _ in range(passes):
            row: dict[str, Any] = {}
            if case != "three":
                place = await swarm.one(1, "listen")
                row["plain"] = (await swarm.one(0, "plain", **place))["seconds"]
            row["wire"] = (await swarm.one(0, "wire", sizes=sizes))["seconds"]
            before = swarm.cpu_seconds()
            answer = await swarm.one(0, "download", ranks=donors)
            row |= {"download": answer["seconds"], "answer": answer}
            row["cpu"] = [now - then for now, then in zip(swarm.cpu_seconds(), before, strict=True)]
            row |= await swarm.one(0, "check")
            row["work"] = (await swarm.one(0, "work"))["seconds"]
            found.append(row)
    return found


def measure(case: str, options: argparse.Namespace) -> dict[str, Any]:
    donors, megabytes = CASES[case], options.megabytes
    deadline_seconds = 120.0 + megabytes / 2
    setup = Setup(1 + donors, 125_000 * megabytes, "fp32", deadline_seconds, path=options.path)
    with nullcontext() if case == "one" else Namespaces() as network:
        places = [network.add(f"peer{rank}") for rank in range(1 + donors)] if network else []
        lines = list(itertools.islice(itertools.cycle(options.megabits), donors))
        if network:
            for rank, megabits in enumerate(lines, 1):
                network.slow(f"peer{rank}", megabits * 1_000_000)
        with delayed(network, options.milliseconds) if network else nullcontext():
            passes = asyncio.run(play(case, setup, places, lines, options.passes))
    middle: dict[str, Any] = {
        key: median(each[key] for each in passes) for key in ("plain", "wire", "download", "work") if key in passes[0]
    }
    line = {} if case == "one" else {"line": megabytes / (sum(lines) / 8)}
    same = all(each["same"] for each in passes)
    return {"case": case, **middle, **line, "same": same, "passes": passes}


def show(row: dict[str, Any], options: argparse.Namespace) -> None:
    """Print one line of the table."""
    seconds = [f"{row[name]:.2f} s" if name in row else "" for name in ("plain", "line", "work", "wire", "download")]
    ratios = [f"{row['download'] / row[name]:.2f}" if name in row else "" for name in ("wire", "line")]
    answers = [each["answer"] for each in row["passes"]]
    shares = "/".join(f"{100 * share:.0f}" for share in answers[-1]["brought"])
    cpu = "/".join(f"{median(each['cpu'][kind] for each in row['passes']):.1f}" for kind in range(3))
    lag = f"{1e3 * max(each['lag_p99'] for each in answers):.0f} ms"
    extra = f"{max(each['extra'] for each in answers) / 1e6:.1f} MB"
    words = (row["case"], options.path, *seconds, *ratios, shares, extra, cpu, lag, "" if row["same"] else "DIFFERENT")
    print("| " + " | ".join(words) + " |", flush=True)


def _rates(words: str) -> list[int]:
    return [at_least_one(each) for each in words.split(",")]


@ends_in_one_line("benchmarks.downloading")
def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser("python -m benchmarks.downloading", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("cases", nargs="*", metavar="one|line|three", help="default: all three")
    parser.add_argument("--megabytes", type=at_least_one, default=1000, help="of state (default %(default)s)")
    parser.add_argument("--passes", type=at_least_one, default=3, help="default %(default)s")
    parser.add_argument(
        "--megabits", type=_rates, default=[100], help="a second, of the donors' lines in turn (default 100)"
    )
    parser.add_argument("--milliseconds", type=float, default=0.0, help="round trip on lines (default %(default)s)")
    parser.add_argument("--path", choices=("direct", "libp2p"), default="direct", help="default %(default)s")
    options = parser.parse_args(arguments)
    cases = options.cases or list(CASES)
    if unknown := [each for each in cases if each not in CASES]:
        parser.error(f"{unknown[0]!r} is none of {', '.join(CASES)}")
    if cases != ["one"] and (why := why_not()):
        parser.error(why)
    load, rows = os.getloadavg()[0], []
    print(
        "| case | path | plain TCP | bytes / line | work | wire | download | / wire | / line | shares, % | twice"
        " | CPU s, joiner/donors/p2pd | lag p99 | |\n" + "|---" * 14 + "|"
    )
    for case in cases:
        rows.append(measure(case, options))
        show(rows[-1], options)
    by_case = {row["case"]: row["download"] for row in rows}
    if {"line", "three"} <= set(by_case):
        print(f"three donors are {by_case['line'] / by_case['three']:.2f} times as fast as one")
    print(json.dumps({**vars(options), "load": load, "cores": os.cpu_count(), "rows": rows}))
    return 0 if all(row["same"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(from_shell(main, "python -m benchmarks.downloading", cure=""))
