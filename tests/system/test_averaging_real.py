"""Averaging between real processes: the benchmark's own machinery, on small vectors, and the cost of a lost peer.

No failure detector runs here: members are fixed, and only streams show that one is gone. The time bounds are several
times the usual times, for a machine with other work.
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

from benchmarks.averaging import BOUNDS, Answer, main, play_round
from benchmarks.averaging_setup import Setup
from protocols.base import Member
from protocols.butterfly.vote import BALLOT_FLOOR_SECONDS
from protocols.consensus.record import coordinators
from tests.support.warm import WarmSwarm

pytestmark = pytest.mark.real

VECTOR_BYTES = 4_000_000


def run(setup: Setup, body: Callable[[WarmSwarm], Awaitable[None]]) -> None:
    """Run `body` with a swarm; no process or file of it may remain afterwards."""

    async def play() -> None:
        async with asyncio.timeout(55):
            async with WarmSwarm(setup) as swarm:
                await body(swarm)
            while swarm.left_over():  # noqa: ASYNC110  # a signal takes its time
                await asyncio.sleep(0.05)
            assert not swarm.setup.result.parent.exists()

    asyncio.run(play())


async def judged_round(swarm: WarmSwarm, number: int) -> Answer:
    report = await play_round(swarm, number, floor=False)
    assert report["outcomes"] == ["committed"] * swarm.setup.peers
    assert report["identical"]
    assert report["relative_error"] <= BOUNDS[swarm.setup.codec]
    assert all(peer["blamed"] == {} for peer in report["peers"])
    return report


@pytest.mark.long
@pytest.mark.parametrize("codec, rounds", [("int8", 1), ("fp32", 2)])
def test_rounds_with_real_processes(codec: str, rounds: int) -> None:
    async def body(swarm: WarmSwarm) -> None:
        for number in range(rounds):
            await judged_round(swarm, number)

    run(Setup(peers=4, elements=VECTOR_BYTES // 4, codec=codec), body)


FAULTY = Setup(peers=4, elements=4_000_000, codec="fp32", deadline_seconds=45.0, keep_rounds=16)
"""Vectors of 16 MB, so that a data phase has a middle. A stopped peer asks for its parts some rounds later."""
FAST_SECONDS = BALLOT_FLOOR_SECONDS
"""For a death that the streams show: the round is over before any timer would have run out."""
FREE_SECONDS = 10.0
"""For an action without a bound of its own."""
PATIENT_SECONDS = 25.0
"""For a stop that only silence shows: a contribution becomes late, and two ballots time out."""


@dataclass(frozen=True, slots=True)
class Fault:
    """The victim in round 1, the time of the fault, and each peer's tasks and file descriptors before it."""

    victim: int
    others: tuple[int, ...]
    began: float
    level: list[Answer]


async def strike(swarm: WarmSwarm, place: int, process: str, number: int) -> Fault:
    """Play round 0, and half of round 1; then signal the peer at this place of the ballot order."""
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


async def others_commit(swarm: WarmSwarm, fault: Fault, seconds: float) -> list[tuple[str, str]]:
    """The others end round 1 within `seconds` of the fault, and round 2; returns (lineage, digest) of both."""
    ends = await asyncio.gather(*(swarm.hear(rank, "average", PATIENT_SECONDS) for rank in fault.others))
    assert max(end["ended"] for end in ends) - fault.began < seconds
    first = await agreed(swarm, fault.others, ends)
    await together(swarm, fault.others, "make", round=2)
    return [first, await agreed(swarm, fault.others, await together(swarm, fault.others, "average", round=2))]


async def victim_follows(swarm: WarmSwarm, fault: Fault, records: list[tuple[str, str]]) -> None:
    """The victim ends rounds 1 and 2 as the others did, which play on: peers answer while they are in a round."""
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


async def agreed(swarm: WarmSwarm, ranks: Sequence[int], ends: Sequence[Answer]) -> tuple[str, str]:
    """Assert that these peers committed one record and hold the same bits; returns its lineage and their digest."""
    assert [end["outcome"] for end in ends] == ["committed"] * len(ranks)
    found = await together(swarm, ranks, "digest")
    results = {(end["lineage"], each["digest"]) for end, each in zip(ends, found, strict=True)}
    assert len(results) == 1
    return results.pop()


async def together(swarm: WarmSwarm, ranks: Sequence[int], command: str, **arguments: Any) -> list[Answer]:
    """Give a command to some peers; returns their answers."""
    for rank in ranks:
        swarm.tell(rank, command, **arguments)
    return list(await asyncio.gather(*(swarm.hear(rank, command, PATIENT_SECONDS) for rank in ranks)))


async def nothing_stays_open(swarm: WarmSwarm, ranks: Sequence[int], level: Sequence[Answer]) -> None:
    """Wait until each peer has no more tasks and file descriptors, thus streams, than before the fault."""
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


@pytest.mark.long
@pytest.mark.parametrize("place", [pytest.param(0, id="coordinator"), pytest.param(3, id="another")])
def test_killed_peer_barely_delays_the_others(place: int) -> None:
    async def body(swarm: WarmSwarm) -> None:
        fault = await strike(swarm, place, "pid", signal.SIGKILL)
        await others_commit(swarm, fault, FAST_SECONDS)
        await nothing_stays_open(swarm, fault.others, fault.level)

    run(FAULTY, body)


@pytest.mark.long
@pytest.mark.parametrize(
    "process, number, seconds",
    [
        pytest.param("daemon", signal.SIGKILL, FREE_SECONDS, id="p2pd killed"),
        pytest.param("pid", signal.SIGSTOP, PATIENT_SECONDS, id="stopped for long"),
    ],
)
def test_absent_peer_receives_the_decision(process: str, number: int, seconds: float) -> None:
    async def body(swarm: WarmSwarm) -> None:
        fault = await strike(swarm, 0, process, number)
        records = await others_commit(swarm, fault, seconds)
        if number == signal.SIGSTOP:
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
