"""Heavy work on its thread: the loop goes on, a caller waits for its work, and nothing is left behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator

import pytest
import torch

from node.runtime.compute import ThreadCompute

LONG_SECONDS = 20.0


class Held:
    """Work that signals its start and ends when `free` is set."""

    def __init__(self) -> None:
        self.free, self.done = threading.Event(), False
        self._loop, self._started = asyncio.get_running_loop(), asyncio.Event()

    def __call__(self) -> str:
        self._loop.call_soon_threadsafe(self._started.set)
        assert self.free.wait(LONG_SECONDS)
        self.done = True
        return "done"

    async def begun(self) -> None:
        async with asyncio.timeout(LONG_SECONDS):
            await self._started.wait()


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.fixture
async def held() -> AsyncIterator[Held]:
    work = Held()
    yield work
    work.free.set()


@pytest.fixture
def restored() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)


async def test_work_runs_on_another_thread_and_returns() -> None:
    async with ThreadCompute() as compute:
        where = await compute.run(threading.current_thread, 0)
        assert where is not threading.current_thread()
        assert await compute.run(lambda: 6 * 7, 0) == 42
        with pytest.raises(ZeroDivisionError):
            await compute.run(lambda: 1 // 0, 0)
        assert await compute.run(lambda: "still there", 0) == "still there"


async def test_work_items_run_one_at_a_time(held: Held) -> None:
    """One thread: two pieces never run at once, in the order in which they came."""
    order: list[int] = []
    async with ThreadCompute() as compute:
        first = asyncio.create_task(compute.run(held, 0))
        rest = [asyncio.create_task(compute.run(lambda n=n: order.append(n), 0)) for n in range(5)]  # type: ignore[misc]
        await held.begun()
        await turns()
        assert order == []
        held.free.set()
        await asyncio.gather(first, *rest)
        assert order == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("cancellations", [1, 3])
async def test_cancelled_caller_waits_for_the_work(held: Held, cancellations: int) -> None:
    async with ThreadCompute() as compute:
        running = asyncio.create_task(compute.run(held, 0))
        await held.begun()
        for _ in range(cancellations):
            running.cancel()
            await turns()
            assert not running.done(), "the work still has its buffers"
        held.free.set()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert held.done


async def test_failure_after_cancellation_is_not_logged(held: Held, caplog: pytest.LogCaptureFixture) -> None:
    def failing() -> None:
        held()
        raise ValueError("the caller is gone")

    async with ThreadCompute() as compute:
        running = asyncio.create_task(compute.run(failing, 0))
        await held.begun()
        running.cancel()
        await turns()
        held.free.set()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert caplog.records == []


async def test_exit_waits_for_work_and_ends_the_thread(held: Held) -> None:
    threading.Timer(0.05, held.free.set).start()
    async with ThreadCompute() as compute:
        running = asyncio.create_task(compute.run(held, 0))
        waiting = asyncio.create_task(compute.run(lambda: "never", 0))
        await held.begun()
    assert held.done
    assert not any(thread.name.startswith("compute") for thread in threading.enumerate())
    assert await running == "done"
    with pytest.raises(asyncio.CancelledError):
        await waiting
    with pytest.raises(RuntimeError, match="shutdown"):
        await compute.run(lambda: None, 0)


async def test_worker_thread_uses_the_canonical_float_mode(restored: None) -> None:
    """One thread of torch and subnormal numbers kept, whatever the thread it was started from does."""
    torch.set_num_threads(2)
    assert torch.set_flush_denormal(True)

    def seen() -> tuple[int, float]:
        return torch.get_num_threads(), float(torch.tensor([1e-40]) * torch.tensor([0.5]))

    async with ThreadCompute() as compute:
        threads, subnormal = await compute.run(seen, 0)
    assert threads == 1 and subnormal > 0
