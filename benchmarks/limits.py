"""Caps on a peer's traffic: how well they hold, and what heartbeats take meanwhile.

    python -m benchmarks.limits [streams] [rounds] [--seconds 10] [--passes 1]

streams   Two peers with a p2pd each, over direct connections and over libp2p. Three streams of a round's data and one
          of a state download go as fast as they can, while one of the peers has a cap, on its uploads or its downloads.
          Bytes are counted by the receiver, from 2 s after the start on: before, buffers fill up. A tenth of a megabyte
          a second is measured three times as long, since it comes in few pieces. Beside the streams, small messages of
          the control class are echoed ten times a second.
rounds    Real peers, `python -m node join`: three of a run with a vector of 8 MB. One has an upload cap of 1 MB/s; its
          rate is what its reports say that it sent, by the length of their data phases. It leaves, and a peer with a
          download cap of 1 MB/s joins: its rate is that at which the state of 16 MB arrives.

The last line is a JSON object. The exit code is 1 if a rate is more than 5 % above its cap.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import uvloop

from benchmarks.averaging import ends_in_one_line
from node.network.libp2p import LibP2PTransport
from node.runtime import identity
from node.streams.byte_meter import Direction
from protocols import wire
from protocols.base import PeerId, Stream
from protocols.streams.framing import BULK_METHODS
from tests.faults.shell import from_shell
from tests.sim.arguments import Parser, at_least_one
from tests.support.real_swarm import RealPeer, RealSwarm, paced, wait

DATA, SYNC, ECHO = "starling/butterfly/data/1", "starling/sync/1", "echo"
CAPS = (("upload", 1e6), ("download", 1e6), ("upload", 1e5), ("download", 1e5))
FILL_SECONDS, CHUNK_BYTES, ELEMENTS, ROUNDS = 2.0, 1 << 20, 2_000_000, 6
WORST_RATIO = 1.05


async def sink(_: PeerId, stream: Stream) -> None:
    buffer = memoryview(bytearray(CHUNK_BYTES))
    while True:
        await stream.receive(64)
        await stream.receive_into(buffer)


async def echo(_: PeerId, stream: Stream) -> None:
    while True:
        await stream.send(await stream.receive(64))


async def fill(transport: LibP2PTransport, peer: PeerId, method: str, until: float) -> None:
    async with transport.open(peer, method, until + 60) as stream:
        for index in itertools.count():
            await stream.send(wire.Chunk(index % 1000, CHUNK_BYTES), bytes(CHUNK_BYTES))


async def beat(transport: LibP2PTransport, peer: PeerId, until: float) -> list[float]:
    """Round trips of small messages until that time."""
    loop, found = asyncio.get_running_loop(), []
    async with transport.open(peer, ECHO, until + 60) as stream:
        while loop.time() < until:
            began = loop.time()
            await stream.send(wire.Availability(True))
            await stream.receive(64)
            found.append(loop.time() - began)
            await asyncio.sleep(0.1)
    return found


async def stream_case(path: str, way: str, cap: float, seconds: float) -> dict[str, Any]:
    """One cap over one kind of connection."""
    loop = asyncio.get_running_loop()
    methods = BULK_METHODS if path == "direct" else None
    with tempfile.TemporaryDirectory(prefix="st") as home:
        async with AsyncExitStack() as stack:
            keys = [identity.create(Path(home) / name) for name in "ab"]
            a, b = [await stack.enter_async_context(LibP2PTransport(key, direct_methods=methods)) for key in keys]
            for method, handler in ((DATA, sink), (SYNC, sink), (ECHO, echo)):
                b.serve(method, handler)
            await a.connect(b.addresses[0], loop.time() + 10)
            (a.traffic.upload if way == "upload" else b.traffic.download).set_rate(cap)
            until = loop.time() + FILL_SECONDS + seconds
            tasks = [asyncio.create_task(fill(a, b.me, method, until)) for method in (DATA, DATA, DATA, SYNC)]
            beats = asyncio.create_task(beat(a, b.me, until))
            await asyncio.sleep(FILL_SECONDS)
            began, before = loop.time(), b.traffic.meter.total(Direction.DOWNLOAD)
            await asyncio.sleep(seconds)
            rate = (b.traffic.meter.total(Direction.DOWNLOAD) - before) / (loop.time() - began)
            trips = await beats
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    p99 = quantiles(trips, n=100)[98]
    return {"path": path, "way": way, "cap": cap, "rate": rate, "p50": median(trips), "p99": p99, "max": max(trips)}


def round_case() -> list[dict[str, Any]]:
    """Real peers with caps: one in the rounds, one that joins."""
    run = 'codec = "fp32"\n' + paced(ELEMENTS, step_seconds=0.05, inner_steps=10)
    with tempfile.TemporaryDirectory(prefix="st") as home, RealSwarm(Path(home), run) as swarm:
        a = swarm.found("a")
        swarm.join("b", via=a)
        b = swarm.peer("c").start("--bootstrap", a.address, "--upload-limit", "1")
        wait("the capped peer is in some rounds", lambda: len(counted(b)) >= ROUNDS, 300)
        rates = [each["bytes_sent"] / each["seconds_average"] for each in counted(b)[-ROUNDS:]]
        suspected = sum(each.said().count("is lost") for each in swarm.peers.values())
        b.ask("finish")  # while a round's data is under way, which it nearly always is with this peer, joiners wait
        b.ends(60)
        d = swarm.peer("d").start("--bootstrap", a.address, "--download-limit", "1")
        arrived = [(each["time"], each["bytes_here"]) for each in download(d)]
        (began, first), (ended, last) = arrived[0], arrived[-1]
    return [
        {"path": "rounds", "way": "upload", "cap": 1e6, "rate": median(rates), "rates": rates, "suspected": suspected},
        {"path": "join", "way": "download", "cap": 1e6, "rate": (last - first) / (ended - began)},
    ]


def counted(peer: RealPeer) -> list[dict[str, Any]]:
    """Reports of rounds in whose mean the peer's own work is."""
    return [each for each in peer.reports() if peer.id in each["peers"] or (peer.meet() and peer.id in each["peers"])]


def download(peer: RealPeer) -> list[dict[str, Any]]:
    """How much of the state was here at which times, until it is whole."""
    seen: list[dict[str, Any]] = []

    def done() -> bool:
        now = peer.status().get("syncing")
        if now and 0 < now["bytes_here"] < now["bytes_whole"]:
            seen.append({"time": time.monotonic(), "bytes_here": now["bytes_here"]})
        return len(seen) > 1 and (not now or now["bytes_here"] >= now["bytes_whole"])

    wait("the state is here", done, 200, poll_seconds=0.1)
    return seen


def show(row: dict[str, Any]) -> None:
    trips = [f"{1e3 * row[name]:.0f} ms" if name in row else "–" for name in ("p50", "p99", "max")]
    cap, rate = row["cap"], row["rate"]
    words = (row["path"], row["way"], f"{cap / 1e6:g}", f"{rate / 1e6:.3f}", f"{rate / cap:.3f}")
    print("| " + " | ".join((*words, *trips)) + " |", flush=True)


@ends_in_one_line("benchmarks.limits")
def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser("python -m benchmarks.limits", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("cases", nargs="*", metavar="streams|rounds", help="default: both")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement (default %(default)s)")
    parser.add_argument("--passes", type=at_least_one, default=1, help="default %(default)s")
    options = parser.parse_args(arguments)
    cases = options.cases or ["streams", "rounds"]
    if unknown := [each for each in cases if each not in ("streams", "rounds")]:
        parser.error(f"{unknown[0]!r} is neither streams nor rounds")
    load, rows = os.getloadavg()[0], []
    print("| over | cap on | MB/s | measured | ratio | heartbeat, p50 | p99 | longest |\n" + "|---" * 8 + "|")
    for _ in range(options.passes):
        for row in _rows(cases, options):
            rows.append(row)
            show(row)
    print(json.dumps({**vars(options), "load": load, "cores": os.cpu_count(), "rows": rows}))
    return 0 if all(row["rate"] <= WORST_RATIO * row["cap"] for row in rows) else 1


def _rows(cases: Sequence[str], options: argparse.Namespace) -> Sequence[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if "streams" in cases:
        for path, (way, cap) in itertools.product(("direct", "libp2p"), CAPS):
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                found.append(runner.run(stream_case(path, way, cap, options.seconds * (1 if cap >= 1e6 else 3))))
    if "rounds" in cases:
        found += round_case()
    return found


if __name__ == "__main__":
    sys.exit(from_shell(main, "python -m benchmarks.limits", cure=""))
