"""A round over slow links: the data phase beside the time that its bytes take on the wire.

    python -m benchmarks.shaped [--links 100,100,100,100] [--milliseconds 100] [--codecs fp32,int8,int4] [--path libp2p]

Each peer is a process in a network namespace of its own. A token bucket limits each direction of its line. With
--milliseconds, a delay line holds each packet, so that a round trip takes that long (`benchmarks.delay_line`). Needs
root, iproute2 and iptables.

wire      the busiest direction of any line in the data phase: bytes on the wire (with headers) over its bandwidth
least     the least time for which the payload could be divided among these links (minimise max load / bandwidth)
data      from the first peer's cut until the last part has come in at the last peer
round     the same until the vote is over
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.averaging import Answer, Swarm, SwarmError, ends_in_one_line
from benchmarks.averaging_setup import Setup
from protocols.vectors.codec import codec
from protocols.wire import MAX_ROSTER
from tests.faults.network import Namespaces, Place, why_not
from tests.faults.shell import from_shell
from tests.sim.arguments import Parser, at_least_one

MEGABIT = 1_000_000
START_SECONDS = 20.0


class ShapedSwarm(Swarm):
    """Peers in namespaces."""

    def __init__(self, setup: Setup, places: Sequence[Place], bits_per_second: Sequence[float]) -> None:
        super().__init__(setup, "benchmarks.shaped_peer")
        self._places, self._bits = places, bits_per_second

    def prefix(self, rank: int) -> Sequence[str]:
        return self._places[rank].inside

    def setup_of(self, rank: int) -> Setup:
        listen = f"/ip4/{self._places[rank].address}/tcp/0"
        return replace(self.setup, rank=rank, listen=listen, bandwidth=self._bits[rank] / 8)


def least_seconds(size_bytes: float, bits_per_second: Sequence[float]) -> float:
    """The least possible data phase: the shares f_i of the reducers that minimise max S (1 + (N - 2) f_i) / b_i.

    A member that reduces nothing sends and receives S once. Its load cannot be less, so it bounds the time from below;
    the other shares are such that all other loads take equally long. Tried for each set of members that reduce.
    """
    count, rates = len(bits_per_second), [bits / 8 for bits in bits_per_second]
    best = float("inf")
    for size in range(1, count + 1):
        for able in combinations(range(count), size):
            idle = max((size_bytes / rates[each] for each in range(count) if each not in able), default=0.0)
            # the sum of f_i over those that reduce is 1: T = S (|able| + N - 2) / (sum of their rates), f_i >= 0
            seconds = size_bytes * (size + count - 2) / sum(rates[each] for each in able)
            if all(seconds * rates[each] >= size_bytes for each in able):
                best = min(best, max(idle, seconds))
    return best


@contextmanager
def delayed(network: Namespaces, milliseconds: float) -> Any:
    """Hold each packet so long that a round trip between two peers takes this time."""
    if not milliseconds:
        yield
        return
    lines = [place.device for place in network.places.values()]
    command = [*network.inside, sys.executable, "-m", "benchmarks.delay_line", "--seconds", str(milliseconds / 2000)]
    process = subprocess.Popen([*command, *lines], stdout=subprocess.PIPE, cwd=Path(__file__).parents[1])
    try:
        assert process.stdout is not None
        if process.stdout.readline() != b"up\n":
            raise SwarmError("the delay line does not start")
        yield
    finally:
        process.kill()
        process.wait(START_SECONDS)


def _counted(network: Namespaces) -> list[tuple[int, int]]:
    """Bytes that each peer's line has carried: (sent by the peer, received by it)."""
    found = []
    for place in network.places.values():
        read = "cat /sys/class/net/line/statistics/tx_bytes /sys/class/net/line/statistics/rx_bytes"
        command = ("ip", "netns", "exec", place.namespace, *read.split())  # a mount of its own, so that /sys is its own
        sent, received = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.split()
        found.append((int(sent), int(received)))
    return found


async def play(network: Namespaces, setup: Setup, bits: Sequence[float], rounds: int) -> list[dict[str, float]]:
    """Play that many rounds after one that is not counted."""
    found = []
    async with ShapedSwarm(setup, list(network.places.values()), bits) as swarm:
        for number in range(rounds + 1):
            await swarm.all("make", round=number)
            before = _counted(network)
            averaged = await swarm.all("average", round=number)
            after = _counted(network)
            digests = {answer["digest"] for answer in await swarm.all("digest")}
            if len(digests) != 1 or any(answer["outcome"] != "committed" for answer in averaged):
                raise SwarmError(f"round {number}: {[answer['outcome'] for answer in averaged]}")
            if number:
                carried = [tuple(b - a for a, b in zip(*pair, strict=True)) for pair in zip(before, after, strict=True)]
                found.append(_row(averaged, carried, bits))
    return found


def _row(averaged: Sequence[Answer], carried: Sequence[Sequence[int]], bits: Sequence[float]) -> dict[str, float]:
    began = min(answer["began"] for answer in averaged)
    return {
        "wire": max(8 * max(both) / rate for both, rate in zip(carried, bits, strict=True)),
        "data": max(answer["data_ended"] for answer in averaged) - began,
        "round": max(answer["ended"] for answer in averaged) - began,
    }


def lines(text: str) -> list[float]:
    """Bits per second of each peer's line, from Mbit/s: `100,100,20`."""
    try:
        found = [float(each) * MEGABIT for each in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of Mbit/s like 100,100,20") from None
    if not 2 <= len(found) <= MAX_ROSTER or not all(0.1 * MEGABIT <= bits <= 1e5 * MEGABIT for bits in found):
        raise argparse.ArgumentTypeError(f"{text!r}: 2 to {MAX_ROSTER} lines of 0.1 to 100000 Mbit/s")
    return found


def codecs(text: str) -> list[str]:
    """Names of codecs: `fp32,int8`."""
    names = text.split(",")
    try:
        for name in names:
            codec(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return names


def shaped_rounds(
    bits: Sequence[float],
    codecs: Sequence[str],
    *,
    megabytes: float,
    rounds: int,
    milliseconds: float = 0.0,
    path: str = "direct",
    on_row: Callable[[dict[str, Any]], None] = lambda row: None,
) -> list[dict[str, Any]]:
    """Play rounds between peers on lines of so many bits/s. Returns for each codec the medians, in seconds.

    Args:
        on_row: called with each codec's row as it comes.
    """
    rows = []
    with Namespaces() as network:
        for number, rate in enumerate(bits):
            network.add(f"peer{number}")
            network.slow(f"peer{number}", int(rate))
        with delayed(network, milliseconds):
            for name in codecs:
                setup = Setup(len(bits), int(megabytes * MEGABIT / 4), name, 600.0, path=path)
                turns = asyncio.run(play(network, setup, bits, rounds))
                middle = {key: median(turn[key] for turn in turns) for key in turns[0]}
                encoded = codec(name).encoded_bytes(setup.elements)
                rows.append({"codec": name, "least": least_seconds(encoded, bits), **middle})
                on_row(rows[-1])
    return rows


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    return shaped_rounds(
        options.links,
        options.codecs,
        megabytes=options.megabytes,
        rounds=options.rounds,
        milliseconds=options.milliseconds,
        path=options.path,
        on_row=lambda row: show(row, options),
    )


def show(row: dict[str, Any], options: argparse.Namespace) -> None:
    """Print one line of the table."""
    seconds = [f"{row[name]:.2f} s" for name in ("least", "wire", "data")]
    ratios = [f"{row['data'] / row[name]:.2f}" for name in ("wire", "least")]
    rates = ",".join(f"{bits / MEGABIT:g}" for bits in options.links)
    links = (f"{rates} Mbit/s", f"{options.milliseconds:g} ms", options.path, row["codec"])
    print("| " + " | ".join((*links, *seconds, *ratios, f"{row['round']:.2f} s")) + " |", flush=True)


@ends_in_one_line("benchmarks.shaped")
def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser("python -m benchmarks.shaped", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--links", type=lines, default="100,100,100,100", help="Mbit/s of each (default %(default)s)")
    parser.add_argument("--milliseconds", type=float, default=0.0, help="round trip (default %(default)s)")
    parser.add_argument("--megabytes", type=float, default=100.0, help="of float32 (default %(default)s)")
    parser.add_argument("--codecs", type=codecs, default="fp32,int8,int4", help="default %(default)s")
    parser.add_argument("--path", choices=("direct", "libp2p"), default="direct", help="default %(default)s")
    parser.add_argument("--rounds", type=at_least_one, default=3, help="default %(default)s")
    options = parser.parse_args(arguments)
    if not 0.01 <= options.megabytes <= 1_000 or not 0 <= options.milliseconds <= 2_000:
        parser.error("--megabytes: 0.01 to 1000; --milliseconds: 0 to 2000")
    if why := why_not():
        parser.error(why)
    torch.set_num_threads(1)
    print("| links | round trip | path | codec | least | wire | data | data / wire | data / least | round |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    load = os.getloadavg()[0]
    rows = measure(options)
    print(json.dumps({**vars(options), "load": load, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(from_shell(main, "python -m benchmarks.shaped", cure=""))
