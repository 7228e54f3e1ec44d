"""What a pause costs the others, and how soon it begins and ends, on real peers.

    python -m benchmarks.pausing [--rounds 18] [--rules]

Four `join` peers train the paced task, whose steps take the same time each. One after the other: one peer rests, is
away, and comes back; three of four rest. Times of the others' rounds are compared with those before and after the
pause, in one run. `--rules` adds the machine's rules at a lone peer: keyboard and mouse (a program of the name `busctl`
plays the desktop) and the battery (a directory mounted over the kernel's, in a mount namespace: needs root).
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median

from benchmarks.joined_peer import JoinedPeer
from node.reporting.status import PeerStatus
from node.session.pausing import REST_ROUNDS, REST_SECONDS
from tests.sim.arguments import Parser

PEERS = 4
ROUND_SECONDS = 60.0
PACED = ("--task", "paced", "--threads", "1")
MEMORY_GONE_SECONDS = 30.0
POWER_SUPPLY = "/sys/class/power_supply"
_BUSCTL = '#!/bin/sh\ncase "$*" in *ScreenSaver*) cat {answer} ;; *) exit 1 ;; esac\n'


def round_seconds(peer: JoinedPeer, first: int, last: int) -> list[float]:
    """Durations of a peer's rounds, by its reports."""
    return [r.seconds_train + r.seconds_wait + r.seconds_average for r in peer.reports()[first:last]]


async def until(condition: Callable[[], Awaitable[bool]], seconds: float) -> float:
    """Wait for a condition; returns how long it took."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with asyncio.timeout(seconds):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    return loop.time() - began


class Swarm:
    """Four peers of one run."""

    def __init__(self, peers: list[JoinedPeer]) -> None:
        self.peers = peers
        self.first, self.paused = peers[0], peers[1]

    @property
    def done(self) -> int:
        return len(self.first.reports())

    async def rounds(self, number: int, of: int) -> list[float]:
        """Wait for `number` rounds; returns durations of those that `of` peers averaged."""
        begin = self.done
        reports = await self.first.rounds_done(begin + number, number * ROUND_SECONDS)
        durations = round_seconds(self.first, begin, begin + number)
        return [each for each, report in zip(durations, reports[begin:], strict=True) if len(report.peers) == of]

    async def counted(self, of: int) -> int:
        """Wait for a round that `of` peers averaged; returns the number of rounds until then."""
        begin = self.done
        while len(self.first.reports()[-1].peers) != of or self.done == begin:
            await self.first.rounds_done(self.done + 1, ROUND_SECONDS)
        return self.done - begin


async def cost(rounds: int, directory: Path) -> dict[str, float]:
    """The swarm's part."""
    async with AsyncExitStack() as stack:
        founder = await stack.enter_async_context(
            JoinedPeer.run(directory / "a", *PACED, "--wait-for", str(PEERS), "--rounds", "1000")
        )
        where = await founder.address()
        others = [
            await stack.enter_async_context(JoinedPeer.run(directory / name, "--threads", "1", *where))
            for name in ("b", "c", "d")[: PEERS - 1]
        ]
        swarm = Swarm([founder, *others])
        await founder.rounds_done(2, 4 * ROUND_SECONDS)
        await swarm.counted(PEERS)
        values: dict[str, float] = {}
        for part in (one_rests, one_is_away, three_rest):
            values |= shown(await part(swarm, rounds))
    return values


def shown(values: dict[str, float]) -> dict[str, float]:
    """The same values, printed."""
    for name, value in values.items():
        print(f"{name:45}{value:10.3f}", flush=True)
    return values


async def one_rests(swarm: Swarm, rounds: int) -> dict[str, float]:
    """A rest becomes an absence after `REST_ROUNDS`: several rests, with rounds of all four before and after each."""
    working, resting, back = await swarm.rounds(REST_ROUNDS, PEERS), list[float](), list[int]()
    for _ in range(math.ceil(rounds / REST_ROUNDS)):
        await swarm.paused.ask("pause", until=time.time() + REST_SECONDS - 1, after_round=False)
        resting += await swarm.rounds(REST_ROUNDS, PEERS - 1)
        await swarm.paused.ask("resume")
        back.append(await swarm.counted(PEERS))
        working += await swarm.rounds(REST_ROUNDS, PEERS)
    return {
        "round, all work, s": median(working),
        "round, one of four rests, s": median(resting),
        "one of four rests / all work": median(resting) / median(working),
        "rests counted": len(back),
        "rest: rounds until counted again, at most": max(back),
    }


async def one_is_away(swarm: Swarm, rounds: int) -> dict[str, float]:
    peer = swarm.paused

    async def worker_gone() -> bool:
        return not peer.worker_pids()

    async def left() -> bool:
        status = await swarm.first.status()
        me = await peer.status()
        return status is not None and me is not None and not _is_member(status.peers, me.peer)

    await peer.ask("pause", until=None, after_round=False)
    begin = swarm.done
    gone = await until(left, 3 * ROUND_SECONDS)
    in_rounds = swarm.done - begin
    memory = await until(worker_gone, MEMORY_GONE_SECONDS)
    away = await swarm.rounds(rounds, PEERS - 1)
    await peer.ask("resume")
    back = await swarm.counted(PEERS)
    return {
        "away: out of the roster after, s": gone,
        "away: out of the roster after, rounds": in_rounds,
        "away: worker's memory free after leaving, s": memory,
        "away: round of the others, s": median(away),
        "away: rounds until counted again": back,
    }


async def three_rest(swarm: Swarm, rounds: int) -> dict[str, float]:
    for peer in swarm.peers[1:]:
        await peer.ask("pause", until=None, after_round=False)
    alone = await swarm.rounds(rounds, 1)
    for peer in swarm.peers[1:]:
        await peer.ask("resume")
    back = await swarm.counted(PEERS)
    return {"round, three of four pause, s": median(alone), "three: rounds until all count again": back}


def _is_member(peers: Sequence[PeerStatus], peer: str) -> bool:
    return any(each.peer == peer and each.member for each in peers)


async def rules(directory: Path) -> dict[str, float]:
    """The machine's rules at a lone peer."""
    answer, supply = directory / "idle", directory / "supply"
    answer.write_text("u 3600000\n")
    program = directory / "busctl"
    program.write_text(_BUSCTL.format(answer=answer))
    program.chmod(0o755)
    for name, kind in (("AC", "Mains"), ("BAT0", "Battery")):
        (supply / name).mkdir(parents=True)
        (supply / name / "type").write_text(f"{kind}\n")
    for name, value in (
        ("status", "Charging"),
        ("capacity", "80"),
        ("energy_now", "40"),
        ("energy_full", "50"),
        ("power_now", "10"),
    ):
        (supply / "BAT0" / name).write_text(f"{value}\n")
    (supply / "AC" / "online").write_text("1\n")
    wrapper = ("unshare", "--mount", "sh", "-c", f'mount --bind {supply} {POWER_SUPPLY} && exec "$@"', "sh")
    environment = {"PATH": f"{directory}:{os.environ['PATH']}"}
    flags = (*PACED, "--when-in-use", "pause", "--rounds", "10000")
    async with JoinedPeer.run(directory / "e", *flags, environment=environment, wrapper=wrapper) as peer:
        await peer.rounds_done(1, 2 * ROUND_SECONDS)

        async def paused() -> bool:
            status = await peer.status()
            return status is not None and status.state == "paused"

        async def works() -> bool:
            return not await paused()

        answer.write_text("u 500\n")
        in_use = await until(paused, 60)
        answer.write_text("u 3600000\n")
        quiet = await until(works, 400)
        (supply / "AC" / "online").write_text("0\n")
        (supply / "BAT0" / "status").write_text("Discharging\n")
        unplugged = await until(paused, 120)
        (supply / "AC" / "online").write_text("1\n")
        (supply / "BAT0" / "status").write_text("Charging\n")
        plugged = await until(works, 120)
    return {
        "input: paused after, s": in_use,
        "input: works again after, s": quiet,
        "battery: paused after, s": unplugged,
        "mains: works again after, s": plugged,
    }


def main() -> int:
    parser = Parser(prog="python -m benchmarks.pausing", description="What a pause costs the others.")
    parser.add_argument("--rounds", type=int, default=18)
    parser.add_argument("--rules", action="store_true")
    given = parser.parse_args()
    if given.rounds < 3:
        parser.error("give at least three rounds")
    if given.rules and (os.geteuid() != 0 or not shutil.which("unshare") or not Path(POWER_SUPPLY).is_dir()):
        parser.error(f"--rules needs root, unshare and {POWER_SUPPLY}")
    with tempfile.TemporaryDirectory() as place:
        values = asyncio.run(cost(given.rounds, Path(place)))
        if given.rules:
            values |= shown(asyncio.run(rules(Path(place))))
    print(json.dumps(values))
    return 0


if __name__ == "__main__":
    sys.exit(main())
