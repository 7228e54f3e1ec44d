"""How long averaging takes as the swarm grows, beside the formula.

    python -m benchmarks.growth [--real 2 4 8 16] [--butterfly 2 4 8 16 32] [--moshpit 8 64 256 1024]
                                [--control 4 8 16 32] [--watch 64 96 150 300] [--file FILE]

real       butterfly between real processes, each in a network namespace with a line of 100 Mbit/s in each direction;
           25 MB of float32, the data phase over direct connections (`benchmarks.shaped`)
butterfly  the same in virtual time: the same ratio of vector to bandwidth, a message takes 20 ms
moshpit    Moshpit in virtual time, from the last peer's complete work until the mean of each axis of the grid is in
control    what a peer of the butterfly sends besides vectors in a simulated round with training: frames, header bytes.
           Ids of peers and signatures are as long as real ones, and each part is one chunk. Peers beyond the roster
           follow the rounds
watch      how many peers a peer watches and counts as live, with 32 voters and nothing but memberships in virtual time,
           and how many messages it sends a second: heartbeats, their echoes, and greetings of peers not watched

The formula is that of bandwidth alone: all-reduce among n peers moves 2 (n - 1) / n vectors in each direction of each
line. For butterfly n is the number of peers; for Moshpit it is added up over the axes of the grid.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.averaging import SwarmError, ends_in_one_line
from benchmarks.shaped import MEGABIT, shaped_rounds
from protocols.base import Buffer, Header, Host, PeerId, Settings
from protocols.moshpit.averager import Moshpit
from protocols.moshpit.grid import shape_for
from protocols.streams.framing import FramedStream
from protocols.wire import MAX_ROSTER
from tests.faults.network import why_not
from tests.sim import loop as simloop
from tests.sim.arguments import Parser, at_least_one
from tests.sim.averaging import AveragingSwarm, ButterflyHarness
from tests.sim.host import SimSigner
from tests.sim.pipe import SimPipe
from tests.sim.scenario import Scenario
from tests.sim.transport import SimTransport
from tests.sim.watching import Load, WatchingWorld
from tests.sim.world import World
from tests.support.disguises import SpoofedStream

MEGABYTES, LINE_BITS = 25.0, 100 * MEGABIT
VECTOR_SECONDS = 8e6 * MEGABYTES / LINE_BITS
"""Seconds in which a line carries one vector in one direction."""
MOSHPIT_ELEMENTS, MOSHPIT_CHUNK = 1 << 17, 1 << 12
"""A thousand vectors of 25 MB have no room here. Vector, chunk and bandwidth are smaller in the same proportion."""
TRAIN_SECONDS = 1.0
MEET_SECONDS, SETTLE_SECONDS, LOAD_SECONDS = 120.0, 2.5, 2.0
ID_LENGTH = 52

Row = dict[str, Any]


def formula(sizes: Sequence[int]) -> float:
    """Seconds that all-reduce takes in groups of these sizes, one after the other, if only bandwidth counts."""
    return sum(2 * (size - 1) / size * VECTOR_SECONDS for size in sizes)


def real(peers: int, rounds: int) -> Row:
    (row,) = shaped_rounds([LINE_BITS] * peers, ["fp32"], megabytes=MEGABYTES, rounds=rounds)
    return {"seconds": row["data"], "round": row["round"], "formula": formula([peers])}


def butterfly(peers: int, rounds: int) -> Row:
    vectors = [torch.full((int(MEGABYTES * 250_000),), float(index)) for index in range(peers)]
    harness = ButterflyHarness(vectors, [1000] * peers, [LINE_BITS / 8] * peers)
    averaged = harness.average()
    if any(each.outcome != "committed" for each in averaged.means):
        raise SwarmError(f"{peers} simulated peers: {[each.outcome for each in averaged.means]}")
    return {"seconds": averaged.seconds, "formula": formula([peers])}


def moshpit(peers: int, rounds: int) -> Row:
    rate = 4 * MOSHPIT_ELEMENTS / VECTOR_SECONDS
    states = [[torch.full((MOSHPIT_ELEMENTS,), float(index))] for index in range(peers)]
    settings = Settings("fp32", (), MOSHPIT_CHUNK)
    swarm = AveragingSwarm(Moshpit, states, tokens=[1000] * peers, uplinks=[rate] * peers, settings=settings)
    swarm.train_seconds = [TRAIN_SECONDS] * peers
    results = [came for history in swarm.average(rounds).values() for came in history]
    shape = shape_for(peers)
    return {
        "seconds": mean(came.seconds for came in results) - TRAIN_SECONDS,
        "formula": formula(shape),
        "grid": " x ".join(map(str, shape)),
        "committed": mean(came.mean.outcome == "committed" for came in results),
    }


class CountedWorld(World):
    """A simulated swarm whose peers have ids and signatures of real length. It counts their frames until the voters
    have ended their last round.
    """

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.frames, self.header_bytes = Counter[PeerId](), Counter[PeerId]()
        self.populate(tuple(f"p{index:0{ID_LENGTH - 1}}" for index in range(scenario.peers)))

    def _host(self, transport: SimTransport) -> Host:
        transport.disguise = partial(self._counted, transport.me)
        return replace(super()._host(transport), signer=LongSigner(transport.me, self.scenario.seed))

    def _count(self, me: PeerId, frames: int, size: int) -> None:
        if any(len(self.histories[peer.peer]) < self.scenario.rounds for peer in self.roster):
            self.frames[me] += frames
            self.header_bytes[me] += size

    def _counted(self, me: PeerId, method: str, stream: FramedStream, pipe: SimPipe) -> Any:
        self._count(me, stream.bytes_sent > 0, stream.bytes_sent)  # the frame that opened it
        return SpoofedStream(stream, partial(self._send, me))

    async def _send(self, me: PeerId, stream: FramedStream, header: Header, payload: Buffer) -> None:
        before = stream.bytes_sent
        await stream.send(header, payload)
        self._count(me, 1, stream.bytes_sent - before - len(payload))


class LongSigner(SimSigner):
    def _mac(self, peer: PeerId, message: bytes) -> bytes:
        return 2 * super()._mac(peer, message)


def control(peers: int, rounds: int) -> Row:
    """Of a voter; with more peers than a roster holds, `observers` of another peer, which follows the rounds."""
    chunk, voters = 128, min(peers, MAX_ROSTER)
    scenario = Scenario(
        peers=peers,
        rounds=rounds,
        codec="int8",
        elements=chunk * voters,
        chunk_elements=chunk,
        inner_steps=4,
        uplinks=(LINE_BITS / 8,) * peers,
        step_seconds=tuple(1.0 + 0.02 * (index % 5) for index in range(peers)),
    )
    world = CountedWorld(scenario)
    simloop.run(world.run())
    if any(each["outcome"] != "committed" for peer in world.peers[:voters] for each in world.histories[peer]):
        raise SwarmError(f"{peers} simulated peers: not every round was committed")

    def of(names: Sequence[PeerId]) -> Row:
        count = len(names) * rounds
        frames, kilobytes = (sum(each[name] for name in names) for each in (world.frames, world.header_bytes))
        return {"frames": frames / count, "kilobytes": kilobytes / count / 1000}

    found = of(world.peers[:voters])
    return found | {"observers": of(world.observers)} if world.observers else found


def watch(peers: int, rounds: int) -> Row:
    world, found = WatchingWorld(peers), dict[str, Load]()

    async def main() -> None:
        await world.start_all()
        await world.until(lambda: world.is_whole(world.names) and world.voters_meet(world.names), MEET_SECONDS)
        await asyncio.sleep(SETTLE_SECONDS)
        found.update(await world.load(LOAD_SECONDS))
        for peer in world.names:
            world.network.kill(peer)

    world.play(main)
    return {kind: asdict(load) for kind, load in found.items()}


DEFAULT_PEERS = {
    "real": [2, 4, 8, 16],
    "butterfly": [2, 4, 8, 16, 32],
    "moshpit": [8, 64, 256, 1024],
    "control": [4, 8, 16, 32],
    "watch": [64, 96, 150, 300],
}
MAX_PEERS = 1024
KINDS = {"real": real, "butterfly": butterfly, "moshpit": moshpit, "control": control, "watch": watch}


def lines(row: Row) -> Iterator[str]:
    """A row in columns: averaging, formula, their ratio, and what else there is to say."""
    if row["kind"] == "control":
        for name, each in (("voter" if "observers" in row else "", row), ("observer", row.get("observers"))):
            if each:
                yield f"{each['frames']:.0f} frames, {each['kilobytes']:.1f} KB | | | {name}"
    elif row["kind"] == "watch":
        for name in ("voter", "other"):
            if each := row.get(name):
                sends = f"sends {each['messages']:.0f}/s, at most {each['most_messages']:.0f}/s"
                yield f"watches {each['watched']:.0f}, sees {each['live']:.0f} | {sends} | | {name}"
    else:
        more = f"{row['grid']}, {row['committed']:.1%} committed" if "grid" in row else ""
        ratio = row["seconds"] / row["formula"]
        yield f"{row['seconds']:.2f} s | {row['formula']:.2f} s | {ratio:.2f} | {more}"


def measure(options: argparse.Namespace) -> list[Row]:
    print("| | peers | averaging | formula | / formula | |")
    print("|---|---|---|---|---|---|")
    found = []
    for kind, play in KINDS.items():
        for peers in getattr(options, kind):
            began = time.perf_counter()
            row = {"kind": kind, "peers": peers, **play(peers, options.rounds)}
            found.append(row | {"took": time.perf_counter() - began})
            for line in lines(row):
                print(f"| {kind} | {peers} | {line} |", flush=True)
    return found


def draw(found: Sequence[Row], file: Path) -> None:
    """Plot seconds over the number of peers."""
    figure = Figure(figsize=(8.0, 4.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    labels = {"real": "butterfly, real", "butterfly": "butterfly, simulated", "moshpit": "Moshpit, simulated"}
    for kind, label in labels.items():
        mine = [each for each in found if each["kind"] == kind]
        if mine:
            (line,) = axes.semilogx([e["peers"] for e in mine], [e["seconds"] for e in mine], marker="o", label=label)
            formulas = [e["formula"] for e in mine]
            axes.semilogx([e["peers"] for e in mine], formulas, ls="--", color=line.get_color(), alpha=0.6)
    sizes = sorted({each["peers"] for each in found if each["kind"] in labels})
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xticks([], minor=True)
    axes.set_ylim(0)
    axes.set(title="25 MB at 100 Mbit/s: averaging (dashed: bandwidth alone)", xlabel="peers", ylabel="seconds")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(file)


@ends_in_one_line("benchmarks.growth")
def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser("python -m benchmarks.growth", description=(__doc__ or "").partition("\n")[0])
    for kind, sizes in DEFAULT_PEERS.items():
        parser.add_argument(f"--{kind}", type=int, nargs="*", default=sizes, help="default %(default)s")
    parser.add_argument("--rounds", type=at_least_one, default=2, help="default %(default)s")
    parser.add_argument("--file", type=Path, help="draw it there, too")
    options = parser.parse_args(arguments)
    for kind in DEFAULT_PEERS:
        most = MAX_PEERS if kind in ("moshpit", "control", "watch") else MAX_ROSTER
        if any(not 2 <= peers <= most for peers in getattr(options, kind)):
            parser.error(f"argument --{kind}: 2 to {most} peers each")
    if options.real and (why := why_not()):
        parser.error(why)
    if options.file:  # now, not after all has been measured
        try:
            options.file.parent.mkdir(parents=True, exist_ok=True)
            options.file.touch()
        except OSError as error:
            parser.error(f"argument --file: {options.file}: {error.strerror}")
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    found = measure(options)
    if options.file:
        draw(found, options.file)
    print(json.dumps({"load": load, "rounds": options.rounds, "rows": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
