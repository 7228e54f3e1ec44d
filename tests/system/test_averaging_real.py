"""Averaging between real processes: the benchmark's own machinery, on small vectors, and what a lost peer costs.

Nobody is ever pronounced dead here: members are fixed, and only streams show that one is gone. Times are judged by
bounds several times above what they are, also on a machine that has other work to do.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from benchmarks.averaging import BOUNDS, Answer, Swarm, main, play_round
from benchmarks.averaging_peer import Setup
from protocols.base import Member
from protocols.butterfly.consensus_driver import BALLOT_FLOOR_SECONDS
from protocols.consensus.record import coordinators

pytestmark = [pytest.mark.real, pytest.mark.timeout(60)]

VECTOR_BYTES = 4_000_000


def run(setup: Setup, body: Callable[[Swarm], Awaitable[None]]) -> None:
    """Run `body` with a swarm, of which nothing may be left afterwards."""

    async def play() -> None:
        async with asyncio.timeout(55):
            async with Swarm(setup) as swarm:
                await body(swarm)
            while swarm.left_over():  # noqa: ASYNC110  # a signal takes its time
                await asyncio.sleep(0.05)
            assert not swarm.setup.result.parent.exists()

    asyncio.run(play())


async def judged_round(swarm: Swarm, number: int) -> Answer:
    report = await play_round(swarm, number, floor=number == 0)
    assert report["outcomes"] == ["committed"] * swarm.setup.peers
    assert report["identical"]
    assert report["relative_error"] <= BOUNDS[swarm.setup.codec]
    assert all(peer["blamed"] == {} for peer in report["peers"])
    return report


def test_int8_round_with_real_processes() -> None:
    async def body(swarm: Swarm) -> None:
        await judged_round(swarm, 0)

    run(Setup(peers=4, elements=VECTOR_BYTES // 4, codec="int8"), body)


FAULTY = Setup(peers=4, elements=4_000_000, codec="fp32", deadline_seconds=45.0)
"""Vectors of 16 MB, so that a data phase has a middle."""
FAST_SECONDS = BALLOT_FLOOR_SECONDS
"""A death that the streams show is not waited for: all is over before any timer would have run out."""
FREE_SECONDS = 10.0
"""What may take a moment."""
PATIENT_SECONDS = 25.0
"""One that only silence shows: the time after which a contribution is late, and the patience of two ballots."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What was done to whom in round 1, when, and what each peer held before: tasks and file descriptors."""

    victim: int
    others: tuple[int, ...]
    began: float
    level: list[Answer]


async def strike(swarm: Swarm, place: int, process: str, number: int) -> Fault:
    """Play round 0, and round 1 until half of the mean is in; then strike whom its order has in this place."""
    report = await judged_round(swarm, 0)
    level = await swarm.all("digest")
    await swarm.all("make", round=1)
    for rank in range(4):
        swarm.tell(rank, "average", round=1, mark=0.5)
    order = coordinators(bytes.fromhex(report["peers"][0]["lineage"]), [Member(up["peer"]) for up in swarm.ups])
    victim = [up["peer"] for up in swarm.ups].index(order[place])
    await swarm.hear(victim, "mark", FREE_SECONDS)
    os.kill(swarm.ups[victim][process], number)
    return Fault(victim, tuple(rank for rank in range(4) if rank != victim), time.monotonic(), level)


async def others_commit(swarm: Swarm, fault: Fault, seconds: float) -> list[tuple[str, str]]:
    """The others end round 1 within so many seconds of the fault, and then round 2; (lineage, digest) of each."""
    ends = await asyncio.gather(*(swarm.hear(rank, "average", PATIENT_SECONDS) for rank in fault.others))
    assert max(end["ended"] for end in ends) - fault.began < seconds
    first = await agreed(swarm, fault.others, ends)
    await together(swarm, fault.others, "make", round=2)
    return [first, await agreed(swarm, fault.others, await together(swarm, fault.others, "average", round=2))]


async def victim_follows(swarm: Swarm, fault: Fault, records: list[tuple[str, str]]) -> None:
    """One that was away ends rounds 1 and 2 as the others did, who play on: whoever is in a round answers."""
    caught_up = asyncio.Event()

    async def play_on() -> None:
        for number in itertools.count(3):
            await together(swarm, fault.others, "make", round=number)
            ends = await together(swarm, fault.others, "average", round=number)
            await agreed(swarm, fault.others, ends)
            if caught_up.is_set():
                return

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(play_on())
        ends = [await swarm.hear(fault.victim, "average", PATIENT_SECONDS)]
        assert await agreed(swarm, [fault.victim], ends) == records[0]
        await together(swarm, [fault.victim], "make", round=2)
        ends = await together(swarm, [fault.victim], "average", round=2)
        assert await agreed(swarm, [fault.victim], ends) == records[1]
        caught_up.set()


async def agreed(swarm: Swarm, ranks: Sequence[int], ends: Sequence[Answer]) -> tuple[str, str]:
    """That these committed the same record and hold the same bits; the lineage and the digest."""
    assert [end["outcome"] for end in ends] == ["committed"] * len(ranks)
    found = await together(swarm, ranks, "digest")
    results = {(end["lineage"], each["digest"]) for end, each in zip(ends, found, strict=True)}
    assert len(results) == 1
    return results.pop()


async def together(swarm: Swarm, ranks: Sequence[int], command: str, **arguments: Any) -> list[Answer]:
    """Give a command to some peers; their answers."""
    for rank in ranks:
        swarm.tell(rank, command, **arguments)
    return list(await asyncio.gather(*(swarm.hear(rank, command, PATIENT_SECONDS) for rank in ranks)))


async def nothing_stays_open(swarm: Swarm, ranks: Sequence[int], level: Sequence[Answer]) -> None:
    """That tasks and file descriptors, thus streams, go back to where they were; ends of streams take a moment."""
    until = time.monotonic() + FREE_SECONDS
    while True:
        held = await together(swarm, ranks, "digest")
        above = [
            each
            for rank, each in zip(ranks, held, strict=True)
            if any(each[kind] > level[rank][kind] for kind in ("tasks", "descriptors"))
        ]
        if not above:
            return
        assert time.monotonic() < until, above
        await asyncio.sleep(0.2)


def test_fp32_rounds_with_real_processes() -> None:
    async def body(swarm: Swarm) -> None:
        await judged_round(swarm, 0)
        await judged_round(swarm, 1)

    run(Setup(peers=4, elements=VECTOR_BYTES // 4, codec="fp32"), body)


@pytest.mark.parametrize("place", [0, 3], ids=["coordinator", "another"])
def test_killed_peer_barely_delays_the_others(place: int) -> None:
    async def body(swarm: Swarm) -> None:
        fault = await strike(swarm, place, "pid", signal.SIGKILL)
        await others_commit(swarm, fault, FAST_SECONDS)
        await nothing_stays_open(swarm, fault.others, fault.level)

    run(FAULTY, body)


def test_peer_with_killed_p2pd_receives_the_decision() -> None:
    async def body(swarm: Swarm) -> None:
        fault = await strike(swarm, 0, "daemon", signal.SIGKILL)
        records = await others_commit(swarm, fault, FREE_SECONDS)
        await victim_follows(swarm, fault, records)
        await nothing_stays_open(swarm, range(4), fault.level)

    run(FAULTY, body)


def test_long_stopped_peer_receives_the_decision() -> None:
    async def body(swarm: Swarm) -> None:
        fault = await strike(swarm, 0, "pid", signal.SIGSTOP)
        records = await others_commit(swarm, fault, PATIENT_SECONDS)
        os.kill(swarm.ups[fault.victim]["pid"], signal.SIGCONT)
        await victim_follows(swarm, fault, records)
        await nothing_stays_open(swarm, range(4), fault.level)

    run(FAULTY, body)


@pytest.mark.parametrize(
    "arguments", [("--peers", "1"), ("--megabytes", "0"), ("--codec", "fp33"), ("--rounds", "no"), ("--speed",)]
)
def test_bad_argument_gives_one_line_error(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
