"""The event loop's lag, on both loops, and what processes hold."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable

import psutil
import pytest
import uvloop

from node.runtime.metrics import _TICK_SECONDS, LoopLag, rss_bytes, vitals
from tests.sim.loop import run as virtual

LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


async def measured(block_seconds: float, blocks: int) -> tuple[float, float]:
    async with LoopLag() as lag:
        for _ in range(blocks):
            await asyncio.sleep(3 * _TICK_SECONDS)
            time.sleep(block_seconds)  # noqa: ASYNC251  # it is what is measured
        await asyncio.sleep(3 * _TICK_SECONDS)
        return lag.take()


@pytest.mark.parametrize("loop", LOOPS)
def test_blocked_loop_lag_is_measured(loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    began = time.monotonic()
    with asyncio.Runner(loop_factory=loop) as runner:
        p99_seconds, max_seconds = runner.run(measured(0.2, 2))
    assert 0.19 - _TICK_SECONDS <= max_seconds < time.monotonic() - began
    assert 0.1 <= p99_seconds <= max_seconds


def test_idle_loop_has_no_lag() -> None:
    assert virtual(measured(0.0, 8)) == pytest.approx((0.0, 0.0), abs=1e-6)


async def test_long_block_weighs_by_time_and_is_bounded() -> None:
    async with LoopLag() as lag:
        for late_seconds in (1.0, 36000.0):  # many timers were due; hours cost little time and memory
            lag._due = asyncio.get_running_loop().time() - late_seconds
            lag._timer.cancel()
            lag._tick()
            assert sum(lag._counts) >= 1.0 / _TICK_SECONDS and len(lag._counts) == 2000
            assert (
                min(late_seconds, 2.0) - 2 * _TICK_SECONDS <= lag.peek()
                and late_seconds <= lag.take()[1] <= late_seconds + 1.0
            )
            assert lag.take() == (0.0, 0.0)
    await asyncio.sleep(2 * _TICK_SECONDS)
    assert lag.take() == (0.0, 0.0)


def test_rss_counts_live_processes_only() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    mine = rss_bytes([os.getpid()])
    assert mine > 10 << 20
    assert rss_bytes([ended.pid]) == 0
    assert abs(rss_bytes([os.getpid(), os.getpid(), ended.pid]) - mine) < 8 << 20


_HOLD = "import mmap, sys; m = mmap.mmap({fd}, {size}); m[:] = b'x' * {size}; print(flush=True); sys.stdin.read()"


@pytest.mark.skipif(sys.platform != "linux", reason="memfd")
def test_shared_memory_is_counted_once() -> None:
    size = 32 << 20
    fd = os.memfd_create("shared")
    os.ftruncate(fd, size)
    code = _HOLD.format(fd=fd, size=size)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "pass_fds": (fd,)}
    holders = [subprocess.Popen([sys.executable, "-c", code], **pipes) for _ in range(2)]  # type: ignore[call-overload]
    try:
        for holder in holders:
            holder.stdout.readline()
        alone = rss_bytes([holders[0].pid])
        both = rss_bytes([holder.pid for holder in holders])
        assert alone > size
        assert both - alone < size
    finally:
        for holder in holders:
            holder.communicate()
        os.close(fd)


async def test_vitals_are_current() -> None:
    async with LoopLag() as lag:
        files, running = psutil.Process().num_fds(), len(asyncio.all_tasks())
        fd = os.open(os.devnull, os.O_RDONLY)
        try:
            task = asyncio.create_task(asyncio.sleep(10))
            await asyncio.sleep(2 * _TICK_SECONDS)
            taken = vitals(lag, [os.getpid()])
            task.cancel()
        finally:
            os.close(fd)
    assert (taken.open_files, taken.tasks) == (files + 1, running + 1)
    assert taken.rss_bytes > 10 << 20
    assert 0.0 <= taken.loop_lag_p99_seconds <= taken.loop_lag_max_seconds
