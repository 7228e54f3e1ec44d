"""Bulk data from peer to peer: each way that it may go, beside a plain TCP stream over the same path.

    python -m benchmarks.routes [--megabytes 64] [--repeats 3] [--links 0 100]

Real transports in namespaces (`tests.faults.homes`): a peer with a public address, which is also the relay, and three
at home, each behind a router. Two routers keep ports, the third changes them. Needs root, iproute2 and iptables.

direct         from home to the public peer
dialled back   from the public peer to one at home, which it cannot dial
punched        between two homes whose routers keep ports
libp2p         from home to the public peer, over a stream of p2pd
relayed        to the home whose router changes ports: bulk data is refused

The transport chooses the way; the run ends if it is another. In turn with it, as much goes over a plain TCP stream,
unencrypted, between the same places. The time is from the open stream until the receiver has all. `open` is the time
until the row's first stream is open; a later row may find a connection that is not closed yet. Processor seconds are
those of both peers and their p2pd. --links are Mbit/s of the homes' lines, 0 for no limit. The last line is a JSON
object. Exit code 1 if another way is chosen, or bulk data goes through the relay.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.averaging import Answer, Swarm, SwarmError, ends_in_one_line, process_cpu_seconds
from benchmarks.averaging_peer import MOVE
from benchmarks.averaging_setup import Setup
from benchmarks.routes_peer import OVER_LIBP2P, PUBLIC
from node.runtime import identity
from protocols.base import CHUNK_BYTES
from tests.faults.homes import Homes, Router
from tests.faults.network import Namespaces, Place, why_not
from tests.faults.shell import from_shell
from tests.sim.arguments import Parser, at_least_one

HOME, OTHER, CHANGING = 1, 2, 3
ROUTERS = {HOME: Router.PORT_KEEPING, OTHER: Router.PORT_KEEPING, CHANGING: Router.SYMMETRIC}
WAYS = {
    "direct": (HOME, PUBLIC, MOVE),
    "dialled back": (PUBLIC, HOME, MOVE),
    "punched": (HOME, OTHER, MOVE),
    "libp2p": (HOME, PUBLIC, OVER_LIBP2P),
}
LISTEN_PORT, PLAIN_PORTS = 4001, itertools.count(20_000)  # routers remember a pair of ports for a minute
PATIENT_SECONDS = 180.0


class RoutesSwarm(Swarm):
    """The peers in their places, by rank."""

    def __init__(self, places: Sequence[Place], hosts: Sequence[str]) -> None:
        super().__init__(Setup(len(places), 1, "fp32", path="direct"), "benchmarks.routes_peer")
        self._places, self.hosts = places, hosts
        self._relay = identity.create(Path(self.setup.directory) / f"identity{PUBLIC}").peer_id

    def prefix(self, rank: int) -> Sequence[str]:
        return self._places[rank].inside

    def setup_of(self, rank: int) -> Setup:
        listen = [f"/ip4/{place.address}/tcp/{LISTEN_PORT}" for place in self._places]
        relays = () if rank == PUBLIC else (f"{listen[PUBLIC]}/p2p/{self._relay}",)
        return replace(self.setup, rank=rank, listen=listen[rank], relays=relays)

    async def ask(self, rank: int, command: str, **arguments: Any) -> Answer:
        self.tell(rank, command, **arguments)
        return await self.hear(rank, command, PATIENT_SECONDS)

    async def plain(self, source: int, target: int, chunks: int) -> Answer:
        """Send over one TCP connection; what the source says."""
        port = next(PLAIN_PORTS)
        for rank, other in ((target, source), (source, target)):
            self.tell(rank, "plain", host=self.hosts[other], port=port, chunks=chunks, sends=rank == source)
        return (await asyncio.gather(*(self.hear(rank, "plain", PATIENT_SECONDS) for rank in (source, target))))[0]

    def cpu_seconds(self, *ranks: int) -> float:
        return sum(sum(process_cpu_seconds(self.ups[rank])) for rank in ranks)


async def measure_way(swarm: RoutesSwarm, name: str, chunks: int, repeats: int) -> dict[str, Any]:
    """The way and the plain stream in turn: seconds of each transfer, and processor seconds."""
    source, target, method = WAYS[name]
    open_seconds = (await swarm.ask(source, "send", to=target, method=method, chunks=0))["open"]
    seconds: dict[str, list[float]] = {kind: [] for kind in ("ours", "plain", "ours_cpu", "plain_cpu")}
    for kind in ("ours", "plain") * repeats:
        before = swarm.cpu_seconds(source, target)
        if kind == "plain":
            answer = await swarm.plain(source, target, chunks)
        else:
            answer = await swarm.ask(source, "send", to=target, method=method, chunks=chunks)
            if answer.get("way") != name:
                raise SwarmError(f"the transport has not chosen {name!r}: {answer}")
        seconds[kind].append(answer["seconds"])
        seconds[f"{kind}_cpu"].append(swarm.cpu_seconds(source, target) - before)
    return {"way": name, "open": open_seconds, **seconds}


async def play(network: Namespaces, swarm: RoutesSwarm, options: argparse.Namespace) -> list[dict[str, Any]]:
    rows, chunks = [], max(1, round(options.megabytes * 1e6 / CHUNK_BYTES))
    async with swarm:
        for home in (OTHER, CHANGING):
            await swarm.ask(home, "send", to=PUBLIC, method=MOVE, chunks=0)  # it is told where it is seen
            await swarm.ask(HOME, "meet", to=home)
        for megabits in options.links:
            network.heal()
            for rank in ROUTERS if megabits else ():
                network.slow(f"home{rank}", int(megabits * 1e6))
            for name in WAYS:
                rows.append({"megabits": megabits, **await measure_way(swarm, name, chunks, options.repeats)})
                show(rows[-1], chunks)
        for _ in range(2):
            answer = await swarm.ask(HOME, "send", to=CHANGING, method=MOVE, chunks=chunks)
            rows.append({"way": "relayed", **answer})
            print(f"relayed, after {1e3 * answer['open']:.0f} ms: {answer.get('refused', 'NOT REFUSED')}", flush=True)
    return rows


def show(row: dict[str, Any], chunks: int) -> None:
    size = chunks * CHUNK_BYTES / 1e6
    ratios = [ours / plain for ours, plain in zip(row["ours"], row["plain"], strict=True)]
    line = f"{row['megabits']:g} Mbit/s" if row["megabits"] else "no limit"
    cells = [line, row["way"], f"{1e3 * row['open']:.0f} ms"]
    cells += [f"{size / median(row[kind]):.1f}" for kind in ("ours", "plain")]
    cells.append(f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    cells += [f"{mean(row[f'{kind}_cpu']) / size * 1e3:.2f}" for kind in ("ours", "plain")]
    print(f"| {' | '.join(cells)} |", flush=True)


@ends_in_one_line("benchmarks.routes")
def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser("python -m benchmarks.routes", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--megabytes", type=float, default=64.0, help="of each transfer (default %(default)s)")
    parser.add_argument("--repeats", type=at_least_one, default=3, help="default %(default)s")
    parser.add_argument("--links", type=float, nargs="+", default=[0, 100], help="default: 0 100")
    options = parser.parse_args(arguments)
    if not (1 <= options.megabytes <= 1000 and all(each == 0 or 1 <= each <= 1e5 for each in options.links)):
        parser.error("--megabytes: 1 to 1000; --links: each 0, or 1 to 100000")
    if why := why_not():
        parser.error(why)
    load = os.getloadavg()[0]
    print("| line | way | open | MB/s | plain TCP | time / plain | CPU s/GB | plain |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    with Homes() as network:
        places = [network.add("public"), *(network.home(f"home{rank}", router) for rank, router in ROUTERS.items())]
        swarm = RoutesSwarm(places, [place.address for place in network.places.values()])
        rows = asyncio.run(play(network, swarm, options))
    print(json.dumps({**vars(options), "load": [load, os.getloadavg()[0]], "cores": os.cpu_count(), "rows": rows}))
    return 0 if all(row.get("refused") for row in rows if row["way"] == "relayed") else 1


if __name__ == "__main__":
    sys.exit(from_shell(main, "python -m benchmarks.routes", cure=""))
