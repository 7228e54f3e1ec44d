"""What a round costs each peer as the swarm grows: messages and bytes, counted with the real averagers.

    python -m benchmarks.scale [--peers 32 128] [--protocols gossip ...] [--rounds 3] [--json]
    python -m benchmarks.scale --peers 32 128 512 2000 --file build/scale.png

Simulated peers (`tests.sim`) have states of a few numbers, so nearly all bytes are overhead of the protocol. Each
trains for ten seconds or a little longer, then averages. Traffic on streams counts, their opening and closing included.
Traffic of the directory, a DHT in a node, does not. Protocols in lockstep send N² messages, so they stop at 128 peers.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from protocols.base import Outcome
from protocols.registry import INDEPENDENT_PROTOCOLS, load_averager
from tests.sim.arguments import Parser, at_least_one
from tests.sim.averaging import random_swarm

ELEMENTS = 8
WORK_SECONDS, SPREAD_SECONDS = 10.0, 2.0
LOCKSTEP = ("data_parallel", "ring", "parameter_server")
LOCKSTEP_MOST = 128


def measure(protocol: str, peers: int, rounds: int) -> dict[str, Any]:
    """Run `rounds` rounds of `peers` peers. Returns what each peer sent and received in a round."""
    began = time.perf_counter()
    swarm = random_swarm(load_averager(protocol), peers, ELEMENTS)
    swarm.train_seconds = [WORK_SECONDS + SPREAD_SECONDS * index / peers for index in range(peers)]
    swarm.average(rounds)
    nodes = swarm.network.nodes.values()
    outcomes = [came.mean.outcome for results in swarm.results for came in results]
    messages, sent = [node.messages / rounds for node in nodes], [node.sent_bytes / rounds for node in nodes]
    return {
        "protocol": protocol,
        "peers": peers,
        "rounds": rounds,
        "messages": [sum(messages) / peers, max(messages)],
        "bytes": [sum(sent) / peers, max(sent)],
        "committed": outcomes.count(Outcome.COMMITTED) / len(outcomes),
        "virtual_seconds": swarm.ended / rounds,
        "seconds": time.perf_counter() - began,
    }


def print_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    print("per peer and round: messages sent and received, bytes sent; mean and maximum\n")
    print(
        f"{'protocol':<24} {'peers':>5} {'messages':>8} {'most':>7} {'bytes':>8} {'most':>9} {'committed':>9} {'s':>6}"
    )
    found = []
    for protocol in options.protocols:
        for peers in options.peers:
            if protocol in LOCKSTEP and peers > LOCKSTEP_MOST:
                continue
            each = measure(protocol, peers, options.rounds)
            found.append(each)
            print(
                f"{protocol:<24} {peers:>5} {each['messages'][0]:>8.1f} {each['messages'][1]:>7.0f}"
                f" {each['bytes'][0]:>8.0f} {each['bytes'][1]:>9.0f} {each['committed']:>9.0%} {each['seconds']:>6.1f}",
                flush=True,
            )
    return found


def draw(found: Sequence[dict[str, Any]], file: Path) -> None:
    """Plot messages and bytes over the number of peers. Raises OSError if the file cannot be written."""
    figure = Figure(figsize=(11.0, 4.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, kind in zip(figure.subplots(1, 2), ("messages", "bytes"), strict=True):
        for protocol in dict.fromkeys(each["protocol"] for each in found):
            mine = [each for each in found if each["protocol"] == protocol]
            axes.semilogx([e["peers"] for e in mine], [e[kind][0] for e in mine], marker="o", label=protocol)
        axes.set_ylim(0, 1.1 * axes.get_ylim()[1])  # the plot should show whether the curve is flat
        sizes = sorted({each["peers"] for each in found})
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.set_xticks([], minor=True)
        axes.set(title=f"{kind} of a peer in a round, mean", xlabel="peers")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.savefig(file)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("python -m benchmarks.scale", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--peers", type=at_least_one, nargs="+", default=[32, 128], help="default %(default)s")
    parser.add_argument(
        "--protocols",
        choices=tuple(INDEPENDENT_PROTOCOLS),
        nargs="+",
        default=tuple(INDEPENDENT_PROTOCOLS),
        help="default: all",
    )
    parser.add_argument("--rounds", type=at_least_one, default=3, help="default %(default)s")
    parser.add_argument("--file", type=Path, help="draw it there, too")
    parser.add_argument("--json", action="store_true", help="one JSON object with everything, as the last line")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    torch.set_num_threads(1)
    found = print_all(options)
    if options.file:
        options.file.parent.mkdir(parents=True, exist_ok=True)
        draw(found, options.file)
    if options.json:
        print(json.dumps({"rounds": options.rounds, "result": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
