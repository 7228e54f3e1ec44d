"""Averaging between real processes: the benchmark's own machinery, on vectors of 4 MB. No time is judged."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable

import pytest

from benchmarks.averaging import BOUNDS, Swarm, main, play_round
from benchmarks.averaging_peer import Setup

pytestmark = [pytest.mark.real, pytest.mark.timeout(60)]

VECTOR_BYTES = 4_000_000


def run(setup: Setup, body: Callable[[Swarm], Awaitable[None]]) -> None:
    """Run `body` with a swarm, of which nothing may be left afterwards."""

    async def play() -> None:
        async with asyncio.timeout(50):
            async with Swarm(setup) as swarm:
                await body(swarm)
            while swarm.left_over():  # noqa: ASYNC110  # a signal takes its time
                await asyncio.sleep(0.05)
            assert not swarm.setup.result.parent.exists()

    asyncio.run(play())


async def judged_round(swarm: Swarm, number: int) -> None:
    report = await play_round(swarm, number, floor=number == 0)
    assert report["outcomes"] == ["committed"] * swarm.setup.peers
    assert report["identical"]
    assert report["relative_error"] <= BOUNDS[swarm.setup.codec]
    assert all(peer["blamed"] == {} for peer in report["peers"])


def test_int8_through_real_processes() -> None:
    async def body(swarm: Swarm) -> None:
        await judged_round(swarm, 0)

    run(Setup(peers=4, elements=VECTOR_BYTES // 4, codec="int8"), body)


def test_fp32_through_real_processes_and_one_killed_in_mid_round() -> None:
    """A second round extends the first; a third loses a peer: the others end by the deadline, whatever came of it.

    Until there is a vote some may have all parts, and commit, where others have not: no more can be asked here.
    """
    deadline_seconds = 20.0

    async def body(swarm: Swarm) -> None:
        await judged_round(swarm, 0)
        await judged_round(swarm, 1)
        await swarm.all("make", round=2)
        for rank in range(4):
            swarm.tell(rank, "average", round=2)
        # All three: if it is the coordinator, whoever has no plan yet waits for the round's deadline.
        await asyncio.gather(*(swarm.hear(rank, "cut", deadline_seconds) for rank in range(3)))
        os.kill(swarm.ups[3]["pid"], signal.SIGKILL)
        ends = [await swarm.hear(rank, "average", deadline_seconds + 5) for rank in range(3)]
        assert {end["outcome"] for end in ends} <= {"undecided", "committed"}

    run(Setup(peers=4, elements=VECTOR_BYTES // 4, codec="fp32", deadline_seconds=deadline_seconds), body)


@pytest.mark.parametrize(
    "arguments", [("--peers", "1"), ("--megabytes", "0"), ("--codec", "fp33"), ("--rounds", "no"), ("--speed",)]
)
def test_a_bad_argument_is_one_line(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
