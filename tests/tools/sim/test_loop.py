"""The loop on virtual time: it jumps, it sees a deadlock, it repeats itself, it leaves nothing running."""

from __future__ import annotations

import asyncio
import contextlib
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


# -- repeatability ----------------------------------------------------------------------------------------------------


def cancellations() -> list[int]:
    """In which order a TaskGroup cancels its tasks when its body fails."""
    order: list[int] = []

    async def wait(number: int) -> None:
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            order.append(number)
            raise

    async def main() -> None:
        with contextlib.suppress(ExceptionGroup):
            async with asyncio.TaskGroup() as group:
                for number in range(40):
                    group.create_task(wait(number))
                await asyncio.sleep(1)
                raise LookupError
        assert len(order) == 40

    run(main())
    return order


def test_group_cancels_tasks_in_deterministic_order() -> None:
    ballast: list[list[object]] = []
    orders = set()
    for repeat in range(10):
        ballast.append([object() for _ in range(97 * repeat)])  # so that addresses differ
        orders.add(tuple(cancellations()))
    assert len(orders) == 1


def test_futures_hash_by_a_counter() -> None:
    async def main() -> list[int]:
        return [hash(asyncio.get_running_loop().create_future()) for _ in range(5)]

    first = run(main())
    assert first == run(main()) == list(range(first[0], first[0] + 5))


# -- processes --------------------------------------------------------------------------------------------------------


class Office:
    """Two processes with a few tasks each, and how each task ended."""

    def __init__(self) -> None:
        self.ends: list[str] = []
        self.processes = [SimProcess("one"), SimProcess("two")]

    async def work(self, name: str, then: Callable[[], None] = lambda: None) -> None:
        try:
            await asyncio.sleep(100)
            self.ends.append(f"{name} ended")
        except asyncio.CancelledError:
            self.ends.append(f"{name} cancelled at {now():g}")
            then()
            raise

    async def parent(self, name: str, then: Callable[[], None] = lambda: None) -> None:
        child = asyncio.create_task(self.work(f"{name}/child", then))
        await self.work(name)
        await child

    def start(self, index: int, name: str, then: Callable[[], None] = lambda: None) -> asyncio.Task[None]:
        token = PROCESS.set(self.processes[index])
        task = asyncio.create_task(self.parent(name, then))
        PROCESS.reset(token)
        return task


def test_kill_cancels_only_its_process_and_starts_none() -> None:
    office, late = Office(), list[asyncio.Task[None]]()

    async def main() -> None:
        killed = office.start(0, "a", then=lambda: late.append(asyncio.create_task(office.work("late"))))
        spared = office.start(1, "b")
        mine = asyncio.create_task(office.work("main's"))
        await asyncio.sleep(10)
        assert [len(process.tasks) for process in office.processes] == [2, 2]
        office.processes[0].kill()
        await asyncio.gather(killed, spared, mine, return_exceptions=True)

    run(main())
    assert office.ends[:2] == ["a cancelled at 10", "a/child cancelled at 10"]
    assert sorted(office.ends[2:]) == ["b ended", "b/child ended", "main's ended"]
    assert [task.cancelled() for task in late] == [True], "a dead process starts no task"
    assert [(process.alive, process.tasks) for process in office.processes] == [(False, {}), (True, {})]


# -- the end ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [None, LookupError("main")])
def test_leftover_tasks_are_cancelled_in_creation_order(error: Exception | None) -> None:
    ends: list[int] = []
    tasks: list[asyncio.Task[None]] = []

    async def left(number: int) -> None:
        try:
            await asyncio.sleep(1e5)
        finally:
            ends.append(number)
            await asyncio.sleep(5)

    async def main() -> str:
        tasks.extend(asyncio.create_task(left(number)) for number in range(20))
        await asyncio.sleep(1)
        if error:
            raise error
        return "result"

    with pytest.raises(LookupError, match="main") if error else contextlib.nullcontext():
        assert run(main()) == "result"
    assert ends == list(range(20)) and all(task.cancelled() for task in tasks)


def test_threads_are_refused() -> None:
    async def main() -> None:
        with pytest.raises(RuntimeError, match="no threads in the simulated world"):
            await asyncio.to_thread(print)

    run(main())
