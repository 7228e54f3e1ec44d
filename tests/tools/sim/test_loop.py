"""The loop on virtual time: it jumps, it sees a deadlock, it repeats itself, it leaves nothing running."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.sim.loop import PROCESS, SimDeadlock, SimProcess, run


def now() -> float:
    return asyncio.get_running_loop().time()


# -- time -------------------------------------------------------------------------------------------------------------


def test_timers_fire_in_order_at_their_times() -> None:
    async def main() -> list[tuple[str, float]]:
        fired = [("begin", now())]

        async def after(seconds: float) -> None:
            await asyncio.sleep(seconds)
            fired.append((f"{seconds:g}", now()))

        async with asyncio.TaskGroup() as group:
            for seconds in (7.0, 2.0, 100_000.0, 2.5):
                group.create_task(after(seconds))
            timer = asyncio.get_running_loop().call_at(1.0, fired.append, ("cancelled", 1.0))
            timer.cancel()
            for _ in range(1000):
                await asyncio.sleep(0)
            fired.append(("ready", now()))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout_at(1.25):
                    await asyncio.sleep(1e5)
            fired.append(("timeout", now()))
        return fired

    assert run(main()) == [
        ("begin", 0.0), ("ready", 0.0), ("timeout", 1.25), ("2", 2.0), ("2.5", 2.5), ("7", 7.0), ("100000", 100_000.0),
    ]  # fmt: skip


# -- programs that cannot end -----------------------------------------------------------------------------------------


async def waits() -> None:
    await asyncio.Event().wait()


async def sleeps(seconds: float) -> None:
    while True:  # noqa: ASYNC110 -- that is the bug
        await asyncio.sleep(seconds)


@pytest.mark.parametrize(
    "endless, words",
    [
        (waits, r"no timer is set at 3\.000 s"),
        (lambda: sleeps(10.0), "limit of 1000 s"),
        (lambda: sleeps(0.0), r"spins: time stands still at 3\.000 s"),
        (lambda: sleeps(-1.0), r"spins: time stands still at 3\.000 s"),
    ],
    ids=["waits", "endless", "spins", "spins-into-the-past"],
)
def test_program_that_cannot_end_is_stopped(endless: Callable[[], asyncio.Future[None]], words: str) -> None:
    cleaned: list[str] = []

    async def within(name: str) -> None:
        try:
            await endless()
        finally:
            cleaned.append(name)

    async def main() -> None:
        await asyncio.sleep(3)
        helper = asyncio.create_task(within("helper"))
        await within("main")
        await helper

    with pytest.raises(SimDeadlock, match=words):
        run(main(), limit_seconds=1000.0)
    assert sorted(cleaned) == ["helper", "main"]


def test_futures_and_tasks_hash_by_a_counter() -> None:
    """So that sets of them, as in a TaskGroup, have the same order in each run."""

    async def main() -> list[int]:
        loop = asyncio.get_running_loop()
        return [hash(each) for _ in range(5) for each in (loop.create_future(), loop.create_task(asyncio.sleep(0)))]

    first = run(main())
    assert first == run(main()) == list(range(first[0], first[0] + 10))


# -- processes --------------------------------------------------------------------------------------------------------


def test_kill_cancels_only_its_process_and_starts_none() -> None:
    ends: list[str] = []
    late: list[asyncio.Task[None]] = []
    processes = [SimProcess("one"), SimProcess("two")]

    async def work(name: str) -> None:
        try:
            await asyncio.sleep(100)
            ends.append(f"{name} ended")
        except asyncio.CancelledError:
            ends.append(f"{name} cancelled at {now():g}")
            late.append(asyncio.create_task(work("late")))
            raise

    async def parent(name: str) -> None:
        child = asyncio.create_task(work(f"{name}/child"))
        await work(name)
        await child

    async def main() -> None:
        tasks = [asyncio.create_task(work("main's"))]
        for process in processes:
            token = PROCESS.set(process)
            tasks.append(asyncio.create_task(parent(process.name)))
            PROCESS.reset(token)
        await asyncio.sleep(10)
        assert [len(process.tasks) for process in processes] == [2, 2]
        processes[0].kill()
        await asyncio.gather(*tasks, return_exceptions=True)

    run(main())
    assert ends[:2] == ["one cancelled at 10", "one/child cancelled at 10"]
    assert sorted(ends[2:]) == ["main's ended", "two ended", "two/child ended"]
    assert [task.cancelled() for task in late] == [True, True], "a dead process starts no task"
    assert [(process.alive, process.tasks) for process in processes] == [(False, {}), (True, {})]
