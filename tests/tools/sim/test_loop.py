"""The loop on virtual time: it jumps, it sees a deadlock, it repeats itself, it leaves nothing running."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import pytest

from tests.sim.loop import PROCESS, SimDeadlock, SimLoop, SimProcess, run


def now() -> float:
    return asyncio.get_running_loop().time()


# -- time -------------------------------------------------------------------------------------------------------------


def test_time_starts_at_zero_and_jumps_to_timers() -> None:
    async def main() -> list[float]:
        seen = [now()]
        for seconds in (0, 1e-3, 3600.0, 1e6):
            await asyncio.sleep(seconds)
            seen.append(now())
        return seen

    assert run(main()) == pytest.approx([0, 0, 1e-3, 3600.001, 1003600.001])


def test_ready_callbacks_take_no_time() -> None:
    async def main() -> float:
        for _ in range(1000):
            await asyncio.sleep(0)
        return now()

    assert run(main()) == 0.0


def test_timers_fire_in_order_at_their_times() -> None:
    async def main() -> list[tuple[str, float]]:
        fired: list[tuple[str, float]] = []

        async def after(seconds: float) -> None:
            await asyncio.sleep(seconds)
            fired.append((f"{seconds:g}", now()))

        async with asyncio.TaskGroup() as group:
            for seconds in (7.0, 2.0, 100_000.0, 2.5):
                group.create_task(after(seconds))
            timer = asyncio.get_running_loop().call_at(1.0, fired.append, ("cancelled", 1.0))
            timer.cancel()
        return fired

    assert run(main()) == [("2", 2.0), ("2.5", 2.5), ("7", 7.0), ("100000", 100_000.0)]


def test_timeouts_fire_at_their_deadline() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout_at(12.25):
                await asyncio.sleep(1e5)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 3.0)
        return now()

    assert run(main()) == 15.25


# -- deadlock ---------------------------------------------------------------------------------------------------------


def test_wait_without_timer_is_a_deadlock() -> None:
    async def main() -> None:
        await asyncio.sleep(2.5)
        await asyncio.Event().wait()

    with pytest.raises(SimDeadlock, match=r"no timer is set at 2\.500 s"):
        run(main())


def test_endless_program_is_stopped() -> None:
    async def main() -> None:
        while True:  # noqa: ASYNC110 -- it is to wait for nothing
            await asyncio.sleep(10)

    with pytest.raises(SimDeadlock, match="limit of 1000 s"):
        run(main(), limit_seconds=1000.0)


@pytest.mark.parametrize("pause_seconds", [0.0, -1.0])
def test_spinning_program_is_stopped(pause_seconds: float) -> None:
    """Time does not move while it asks again and again; a program with as many turns in moving time goes on."""
    cleaned: list[float] = []

    async def main() -> None:
        await asyncio.sleep(3)
        try:
            while True:  # noqa: ASYNC110 -- that is the bug
                await asyncio.sleep(pause_seconds)
        finally:
            cleaned.append(now())

    with pytest.raises(SimDeadlock, match=r"spins: time stands still at 3\.000 s"):
        run(main())
    assert cleaned == [3.0]


def test_deadlock_still_runs_cleanup() -> None:
    cleaned: list[str] = []

    async def waiting(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append(name)

    async def main() -> None:
        helper = asyncio.create_task(waiting("helper"))
        await waiting("main")
        await helper

    with pytest.raises(SimDeadlock):
        run(main())
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
    for repeat in range(30):
        ballast.append([object() for _ in range(97 * repeat)])  # so that addresses differ
        orders.add(tuple(cancellations()))
    assert len(orders) == 1


def test_tasks_and_futures_hash_by_a_counter() -> None:
    async def nothing() -> None:
        pass

    async def main() -> list[int]:
        loop = asyncio.get_running_loop()
        made: list[asyncio.Future[None]] = []
        for _ in range(5):
            made += [loop.create_future(), loop.create_task(nothing()), asyncio.ensure_future(nothing())]
        assert len(set(made)) == 15 and all(each in set(made) for each in made)
        await asyncio.gather(*made[1::3], *made[2::3])
        return [hash(each) for each in made]

    first, second = run(main()), run(main())
    assert first == second == list(range(first[0], first[0] + 15))


# -- processes --------------------------------------------------------------------------------------------------------


class Office:
    """Two processes with a few tasks each; who ended, and how."""

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


def test_kill_cancels_only_its_process_tasks_and_children() -> None:
    office = Office()

    async def main() -> None:
        killed, spared = office.start(0, "a"), office.start(1, "b")
        mine = asyncio.create_task(office.work("main's"))
        await asyncio.sleep(10)
        assert [len(process.tasks) for process in office.processes] == [2, 2]
        office.processes[0].kill()
        await asyncio.gather(killed, spared, mine, return_exceptions=True)

    run(main())
    assert office.ends[:2] == ["a cancelled at 10", "a/child cancelled at 10"]
    assert sorted(office.ends[2:]) == ["b ended", "b/child ended", "main's ended"]
    assert [(process.alive, process.tasks) for process in office.processes] == [(False, {}), (True, {})]


def test_dead_process_starts_no_tasks() -> None:
    office, late = Office(), list[asyncio.Task[None]]()

    async def main() -> None:
        office.start(0, "a", then=lambda: late.append(asyncio.create_task(office.work("late"))))
        await asyncio.sleep(10)
        office.processes[0].kill()
        await asyncio.sleep(10)

    run(main())
    (task,) = late
    assert task.cancelled() and office.ends == ["a cancelled at 10", "a/child cancelled at 10"]
    assert office.processes[0].tasks == {}


def test_finished_task_leaves_its_process() -> None:
    office = Office()

    async def main() -> None:
        await office.start(0, "a")
        await asyncio.sleep(0)
        assert office.processes[0].tasks == {} and office.processes[0].alive

    run(main())


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

    async def main() -> str:
        tasks.extend(asyncio.create_task(left(number)) for number in range(20))
        await asyncio.sleep(1)
        if error:
            raise error
        return "result"

    with pytest.raises(LookupError, match="main") if error else contextlib.nullcontext():
        assert run(main()) == "result"
    assert ends == list(range(20)) and all(task.cancelled() for task in tasks)


def test_cleanup_may_take_time() -> None:
    async def left() -> None:
        try:
            await asyncio.sleep(1e5)
        finally:
            await asyncio.sleep(5)
            ends.append(now())

    async def main() -> None:
        tasks.append(asyncio.create_task(left()))
        await asyncio.sleep(1)

    ends: list[float] = []
    tasks: list[asyncio.Task[None]] = []
    run(main())
    assert ends == [6.0]


def test_loops_are_independent() -> None:
    loops = []

    async def main() -> None:
        loops.append(asyncio.get_running_loop())
        await asyncio.sleep(5)

    run(main())
    run(main())
    assert loops[0] is not loops[1] and all(isinstance(loop, SimLoop) and loop.is_closed() for loop in loops)


def test_threads_are_refused() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        with pytest.raises(RuntimeError, match="no threads in the simulated world"):
            loop.run_in_executor(None, print)
        with pytest.raises(RuntimeError, match="no threads in the simulated world"):
            await asyncio.to_thread(print)

    run(main())
