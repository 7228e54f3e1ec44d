"""What a pipeline of many peers costs each of them: whom drivers use, streams, messages, bytes.

    python -m benchmarks.large_pipelines [--peers 64,256,512] [--stages 4,8,16] [--json FILE]
    python -m benchmarks.large_pipelines reach
    python -m benchmarks.large_pipelines watch [--peers 64,256,512] [--stages 4,8,16]
    python -m benchmarks.large_pipelines place [--peers 64,256,512] [--stages 4,8,16]

As many peers in each stage, of speeds 1 to 4, in the simulator, between two rounds: B = 8, A = 8, links of 50 ms; a
replica of speed 1 takes two seconds for a microbatch. `all` is the same with drivers that use all replicas of each
stage. Payloads have a few bytes, so nearly all that is sent are headers. Heartbeats are not sent here.

`reach` plays nothing: 32 drivers, and 32 replicas of a stage, of which each driver uses 2 to 8. How much of the stage's
capacity can be used if all drivers are as fast as their own stage allows? The largest flow, in 100 draws.

`watch` plays nothing either: whom each peer watches, by `node.membership.watching`, if it knows all others and all are
in the rosters of their stages. A peer sends each that it watches a heartbeat a second, and gets an echo. Bytes are
those of headers.

`place` asks a founder that sees all others for the stage of 20 newcomers, one after another, and times its answers. A
newcomer asks one peer, so the ways between the two come on top. The founder's membership is a stand-in.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from types import SimpleNamespace
from typing import Any
from unittest import mock

from benchmarks.pipeline import MeasuredWorld, played, scenario_of
from benchmarks.planning import numbers
from node.joining.stages import StageAssigner
from node.membership.handshake import TEAM_PULSES
from node.membership.hello import ANY_STAGE, UNPLACED, VERSION, Heartbeat, Hello, StageReply, StageTeam, WantStage
from node.membership.peer_record import NOTHING_SAID, PeerRecord
from node.membership.seats import Seats
from node.membership.watching import Known, Lot, choose, roster_role, stage_role
from protocols.base import Member, PeerId
from protocols.pipeline import fan_out
from protocols.wire import encode
from tests.sim.arguments import Parser
from tests.sim.faults import Faults
from tests.sim.host import SimSigner
from tests.sim.process import prepare
from tests.sim.scenario import Scenario

BATCHES, LOOKAHEAD = 8, 8
SPEEDS, MICROBATCH_SECONDS = (1.0, 2.0, 3.0, 4.0), 2.0
WARM_SECONDS, SECONDS = 40.0, 100.0
REACHED = 32  # drivers, and replicas, of `reach`
NEWCOMERS = 20  # of `place`


@dataclass(frozen=True, slots=True)
class Crowd:
    """`streams` are those open at the end; `messages` and `sent` of a peer in a second. Means, but for those `most`."""

    peers: int
    stages: int
    uses: str
    share: float  # of the slowest stage's capacity
    replicas_of_driver: int  # most, in all stages
    drivers_of_replica: int  # most
    driver_streams: int  # most
    replica_streams: int  # most
    messages: float  # for each microbatch that a stage counts
    sent: float


class LargeWorld(MeasuredWorld):
    """Counts messages and bytes after the warm-up."""

    messages = sent = 0

    def __init__(self, scenario: Scenario, seconds: float) -> None:
        super().__init__(scenario, seconds)
        self._stages = {peer: index % scenario.stages for index, peer in enumerate(self.peers)}

    def stage(self, peer: PeerId) -> int:
        return self._stages[peer]

    async def _wait(self, seconds: float) -> None:
        await super()._wait(WARM_SECONDS)
        before = self._traffic()
        await super()._wait(seconds - WARM_SECONDS)
        self.messages, self.sent = (after - was for after, was in zip(self._traffic(), before, strict=True))
        self.streams = {peer: len(self.network.nodes[peer].ends) for peer in self.peers}

    def _traffic(self) -> tuple[int, int]:
        nodes = self.network.nodes.values()
        return sum(node.messages for node in nodes), sum(node.sent_bytes for node in nodes)


def play(peers: int, stages: int, uses: int | None) -> Crowd:
    """With drivers that use so many replicas of each stage; None: all."""
    rng, replicas = random.Random(f"speeds/{peers}"), peers // stages
    speeds = [SPEEDS[index % len(SPEEDS)] / MICROBATCH_SECONDS for index in range(replicas)]
    rates = [rng.sample(speeds, replicas) for _ in range(stages)]
    with mock.patch.object(fan_out, "FAN_OUT", uses or peers):
        world = played(LargeWorld(scenario_of(rates, 0, 1_000_000, Faults(), BATCHES, LOOKAHEAD), SECONDS))
    used: dict[PeerId, set[PeerId]] = defaultdict(set)
    for at, event in world.events:
        if event.kind == "asked" and at >= WARM_SECONDS:
            used[event.origin.peer].add(event.replica.peer)
            used[event.replica.peer].add(event.origin.peer)
    drivers, later = world.of_stage(0), [peer for peer in world.peers if world.stage(peer)]
    rate = world.rate(WARM_SECONDS)
    counted = rate * (SECONDS - WARM_SECONDS) * stages
    return Crowd(
        peers=peers,
        stages=stages,
        uses=str(uses or "all"),
        share=rate / sum(rates[0]),
        replicas_of_driver=max(len(used[peer]) for peer in drivers),
        drivers_of_replica=max(len(used[peer]) for peer in later),
        driver_streams=max(world.streams[peer] for peer in drivers),
        replica_streams=max(world.streams[peer] for peer in later),
        messages=world.messages / counted,
        sent=world.sent / counted,
    )


def reach(uses: int, speeds: Sequence[int], seed: int) -> float:
    """The largest flow from drivers of these speeds to replicas of the same, by augmenting paths, as a share."""
    rng, all_speeds = random.Random(f"reach/{seed}"), [*speeds] * (REACHED // len(speeds))
    drivers = {f"driver {seed}/{index}": speed for index, speed in enumerate(rng.sample(all_speeds, REACHED))}
    replicas = {f"replica {seed}/{index}": speed for index, speed in enumerate(rng.sample(all_speeds, REACHED))}
    used = {driver: fan_out.ranked(driver, [*replicas])[:uses] for driver in drivers}
    flow: dict[str, Counter[str]] = {replica: Counter() for replica in replicas}

    def augment(driver: str, seen: set[str]) -> bool:
        for replica in used[driver]:
            if replica in seen:
                continue
            seen.add(replica)
            before = [other for other, part in flow[replica].items() if part]
            if flow[replica].total() < replicas[replica]:
                flow[replica][driver] += 1
                return True
            for other in before:
                if augment(other, seen):
                    flow[replica][other] -= 1
                    flow[replica][driver] += 1
                    return True
        return False

    found = sum(augment(driver, set()) for driver, speed in drivers.items() for _ in range(speed))
    return found / sum(all_speeds)


def print_reach() -> None:
    print("| replicas that a driver uses | speeds | share of the capacity: mean | least |\n|---|---|---|---|")
    for uses in (2, 4, 6, 8):
        for what, speeds in (("equal", (1,)), ("1:4", (1, 2, 3, 4))):
            found = [reach(uses, speeds, seed) for seed in range(100)]
            print(f"| {uses} | {what} | {fmean(found):.3f} | {min(found):.3f} |", flush=True)


def watch(peers: int, stages: int) -> dict[str, float]:
    """With how many others peers exchange heartbeats."""
    stage_of = {f"{index % stages}/{index // stages}": index % stages for index in range(peers)}
    rosters = [[peer for peer, stage in stage_of.items() if stage == each] for each in range(stages)]
    pairs: dict[PeerId, set[PeerId]] = {peer: set() for peer in stage_of}
    watched: list[int] = []
    for me, stage in stage_of.items():
        known = [Known(peer, other, is_voter=True) for peer, other in stage_of.items() if peer != me]
        role = stage_role(roster_role(me, rosters[stage]), stage, stages, (), known)
        chosen = choose(role, known, Lot(f"secret of {me}".encode())) or frozenset(stage_of) - {me}
        watched.append(len(chosen))
        for peer in chosen:
            pairs[me].add(peer)
            pairs[peer].add(me)
    drivers, others = ([len(pairs[peer]) for peer in stage_of if (stage_of[peer] == 0) is is_driver]
                       for is_driver in (True, False))  # fmt: skip
    team = (StageTeam(32, 50.0),) if min(watched) < peers - 1 else ()
    place = (replace(UNPLACED, member=True, arrived=1000),)
    sizes = [len(encode(Heartbeat(10**5, 1.8e9, 1000, False, b"", 1000, 2.5, 0, place, (), told)))
             for told in (team, *(TEAM_PULSES - 1) * [()])]  # fmt: skip
    return {"watched": max(watched), "mean": fmean(drivers + others), "driver": max(drivers), "other": max(others),
            "messages": 4 * fmean(watched), "bytes": 2 * fmean(watched) * fmean(sizes)}  # fmt: skip


def print_watch(sizes: Sequence[tuple[int, int]]) -> None:
    print("| peers, stages | watches at most | in contact with: mean | a driver, most | another peer, most |"
          " messages/s, both ways | sent, bytes/s |\n" + "|---" * 7 + "|")  # fmt: skip
    for peers, stages in sizes:
        found = watch(peers, stages)
        print(f"| {peers}, {stages} | " + " | ".join(f"{each:.0f}" for each in found.values()) + " |", flush=True)


async def place(peers: int, stages: int) -> tuple[float, float]:
    """Seconds in which a founder answers a newcomer: median, and longest."""
    me, rng = Member("founder"), random.Random(f"place/{peers}")
    manifest: Any = SimpleNamespace(stages=(None,) * stages, costs=(1.0,) * stages, run_id=bytes(32).hex(), founder=me)
    seats = Seats(manifest, SimSigner(me.peer, 0))
    for stage in range(stages):
        seats.add([seats.make(stage, me if stage == 0 else Member(f"first of {stage}"), None)])
    here: dict[PeerId, PeerRecord] = {}
    for index in range(1, peers):
        member, stage = Member(f"peer {index}"), index % stages
        hello = Hello(VERSION, bytes(32), member, 1, "", (), stage, seats.line(stage), b"")
        team = StageTeam(peers // stages, fmean(SPEEDS) * (peers // stages))
        said = replace(NOTHING_SAID, rate=rng.choice(SPEEDS))
        here[member.peer] = PeerRecord(member.peer, (), hello, live=True, said=said, team=team, team_at=math.inf)
    membership: Any = SimpleNamespace(
        contacts=lambda: tuple(here.values()), contact=here.get, stage_of=lambda peer: 0, pulse=lambda: NOTHING_SAID
    )
    transport: Any = None  # the founder asks no other peer

    async def keep(seats: object) -> None:
        raise AssertionError("no stage lacks its first member")

    assigner = StageAssigner(me, seats, membership, transport, keep=keep, has_begun=lambda: True)
    times = []
    for index in range(NEWCOMERS):
        newcomer, began = Member(f"newcomer {index}"), perf_counter()
        answer = await assigner.assign(newcomer.peer, WantStage(VERSION, newcomer, ANY_STAGE))
        times.append(perf_counter() - began)
        assert isinstance(answer, StageReply)
    return median(times), max(times)


def print_places(sizes: Sequence[tuple[int, int]]) -> None:
    print("| peers, stages | an answer: median, ms | longest |\n|---|---|---|")
    for peers, stages in sizes:
        found, longest = asyncio.run(place(peers, stages))
        print(f"| {peers}, {stages} | {1e3 * found:.0f} | {1e3 * longest:.0f} |", flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m benchmarks.large_pipelines", description="Pipelines of many peers.")
    parser.add_argument("experiment", nargs="?", choices=("play", "reach", "watch", "place"), default="play")
    parser.add_argument("--peers", type=numbers, default=[64, 256, 512])
    parser.add_argument("--stages", type=numbers, default=[4, 8, 16], help="of each of these swarms")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    options = parser.parse_args(arguments)
    if len(options.peers) != len(options.stages):
        parser.error("give as many numbers of stages as of peers")
    if any(not 2 <= stages <= peers for peers, stages in zip(options.peers, options.stages, strict=True)):
        parser.error("a run has two stages or more, and a peer for each")
    if options.experiment == "reach":
        print_reach()
        return 0
    if options.experiment in ("watch", "place"):
        show = print_watch if options.experiment == "watch" else print_places
        show(list(zip(options.peers, options.stages, strict=True)))
        return 0
    prepare()
    found = []
    print("| peers, stages | replicas of a stage that a driver uses | share of the capacity | replicas of a driver |"
          " drivers of a replica | streams: of a driver | of a replica | messages a microbatch and stage | bytes |\n"
          + "|---" * 9 + "|")  # fmt: skip
    for (peers, stages), uses in ((size, uses) for size in zip(options.peers, options.stages, strict=True)
                                  for uses in (fan_out.FAN_OUT, None)):  # fmt: skip
        found.append(each := play(peers, stages, uses))
        most = (each.replicas_of_driver, each.drivers_of_replica, each.driver_streams, each.replica_streams)
        cells = (each.uses, f"{each.share:.2f}", *map(str, most), f"{each.messages:.1f}", f"{each.sent:.0f}")
        print(f"| {peers}, {stages} | {' | '.join(cells)} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
