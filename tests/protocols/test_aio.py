"""Additions to asyncio: waiting for a condition, a helper beside a main task, and groups of tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar, cast

import pytest

from protocols.aio import Notifier, progress_timeout, run_with_helper, task_group
from protocols.base import PeerSilent, Stream
from tests.sim import loop as simloop
from tests.support.simulated import on_virtual_time
from tests.support.waiting import now

T = TypeVar("T")


def play(main: Coroutine[Any, Any, T]) -> T:
    return simloop.run(main, limit_seconds=1000.0)


# -- Notifier ---------------------------------------------------------------------------------------------------------


@on_virtual_time
async def test_waiter_wakes_when_its_condition_holds() -> None:
    notifier, count, woken = Notifier(), 0, list[tuple[int, float]]()

    async def wait(least: int) -> None:
        await notifier.until(lambda: count >= least, 100.0)
        woken.append((least, now()))

    async with asyncio.TaskGroup() as group:
        for least in (3, 1, 2, 2):
            group.create_task(wait(least))
        for _ in range(3):
            await asyncio.sleep(10)
            count += 1
            notifier.notify()
    assert woken == [(1, 10.0), (2, 20.0), (2, 20.0), (3, 30.0)]


@on_virtual_time
async def test_condition_already_true_returns_past_deadline() -> None:
    await asyncio.sleep(10)
    await Notifier().until(lambda: True, 5.0)
    with pytest.raises(TimeoutError):
        await Notifier().until(lambda: False, 5.0)
    assert now() == 10.0


@on_virtual_time
async def test_notification_before_waiting_is_not_kept() -> None:
    notifier, turns = Notifier(), iter([False, True])
    notifier.notify()
    with pytest.raises(TimeoutError):
        await notifier.until(lambda: next(turns), 5.0)
    assert now() == 5.0


# -- run_with_helper --------------------------------------------------------------------------------------------------


class RunLog:
    """Runs coroutines as main and helper, and logs how they ended."""

    def __init__(self) -> None:
        self.ends: list[str] = []

    async def run(self, name: str, seconds: float, end: Exception | str | None, cleanup_seconds: float = 0.0) -> Any:
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            await asyncio.sleep(cleanup_seconds)
            self.ends.append(f"{name} cancelled at {now():g}")
            raise
        self.ends.append(f"{name} ended at {now():g}")
        if isinstance(end, Exception):
            raise end
        return end


@on_virtual_time
async def test_main_result_is_returned_and_helper_ends() -> None:
    log = RunLog()
    result = await run_with_helper(log.run("main", 5, "result"), log.run("helper", 100, None, cleanup_seconds=2))
    assert (result, now()) == ("result", 7.0)
    assert log.ends == ["main ended at 5", "helper cancelled at 7"], "and it was waited for"


@pytest.mark.parametrize("failing, other", (("helper", "main"), ("main", "helper")))
def test_error_of_one_ends_the_other_and_propagates(failing: str, other: str) -> None:
    log, error = RunLog(), LookupError(failing)
    runs = {failing: log.run(failing, 2, error), other: log.run(other, 5, "result", cleanup_seconds=1)}
    with pytest.raises(LookupError) as raised:
        play(run_with_helper(runs["main"], runs["helper"]))
    assert raised.value is error
    assert log.ends == [f"{failing} ended at 2", f"{other} cancelled at 3"]


def test_first_of_two_errors_propagates() -> None:
    async def failing_in_cleanup() -> None:
        try:
            await asyncio.sleep(100)
        finally:
            raise OSError("failed while it was cancelled")

    async def failing() -> None:
        await asyncio.sleep(1)
        raise LookupError("first")

    for main, helper in ((failing(), failing_in_cleanup()), (failing_in_cleanup(), failing())):
        with pytest.raises(LookupError, match="first"):
            play(run_with_helper(main, helper))


@on_virtual_time
async def test_cancellation_cancels_both_and_waits() -> None:
    log = RunLog()
    running = asyncio.create_task(
        run_with_helper(log.run("main", 100, "result", cleanup_seconds=1), log.run("helper", 100, None, 3))
    )
    await asyncio.sleep(2)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert running.cancelled()
    assert [end.split(" at ")[0] for end in log.ends] == ["main cancelled", "helper cancelled"]


@on_virtual_time
async def test_surrounding_timeout_raises_timeout_error() -> None:
    log = RunLog()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout_at(4.0):
            await run_with_helper(log.run("main", 100, "result"), log.run("helper", 100, None))
    await asyncio.sleep(1)  # nothing of the cancellation is left in this task
    assert now() == 5.0
    assert sorted(log.ends) == ["helper cancelled at 4", "main cancelled at 4"]


def test_exception_group_of_main_stays_a_group() -> None:
    async def main() -> None:
        raise ExceptionGroup("several", [LookupError(), OSError()])

    async def helper() -> None:
        await asyncio.sleep(5)

    with pytest.raises(ExceptionGroup, match="several"):
        play(run_with_helper(main(), helper()))


# -- task_group -------------------------------------------------------------------------------------------------------


@on_virtual_time
async def test_error_after_the_body_is_no_cancellation() -> None:
    async def fail() -> None:
        await asyncio.sleep(1)
        raise ValueError("no")

    task = asyncio.current_task()
    with pytest.raises(ValueError, match="no"):
        async with task_group() as group:
            group.create_task(fail())
    assert task and task.cancelling() == 0
    await asyncio.sleep(1)


@on_virtual_time
async def test_cancellation_during_error_cleanup_still_cancels() -> None:
    async def slow_cleanup() -> None:
        try:
            await asyncio.sleep(100)
        finally:
            await asyncio.sleep(1)

    async def body() -> None:
        async with task_group() as group:
            group.create_task(slow_cleanup())
            await asyncio.sleep(1)
            raise ValueError("no")

    task = asyncio.create_task(body())
    await asyncio.sleep(1.5)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


# -- progress_timeout -------------------------------------------------------------------------------------------------


class Moving:
    """A stream of which one byte moves at each of these times."""

    peer = "slow"

    def __init__(self, times: list[float]) -> None:
        self._times = times

    @property
    def moved_bytes(self) -> int:
        return sum(each <= now() for each in self._times)


@pytest.mark.parametrize(
    "times, ends", [([], 30), ([10, 35, 60], 90), (list(range(10, 1000, 10)), 240), ([1, 2, 3, 4, 5, 6, 7, 8, 9], 39)]
)
def test_slow_peer_is_silent_only_without_progress(times: list[float], ends: float) -> None:
    async def main() -> float:
        with pytest.raises(PeerSilent, match="slow: nothing moved for 30 s, or too little, while it takes a part"):
            async with progress_timeout(30, cast(Stream, Moving(times)), "it takes a part"):
                await asyncio.sleep(900)
        return now()

    assert ends <= play(main()) <= ends + 30 / 8
