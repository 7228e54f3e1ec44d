"""The work is saved before the machine sleeps. Programs of the same names play logind."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from node.machine.monitor import SleepGuard
from node.runtime.child_process import ChildProcess
from tests.support.waiting import until

pytestmark = pytest.mark.real
HEADER = "signal time=1 sender=:1.2 path=/org/freedesktop/login1; interface=x; member=PrepareForSleep"


def programs(directory: Path) -> Path:
    """Put them into a directory; returns the pipe from which the signals come."""
    pipe = directory / "signals"
    os.mkfifo(pipe)
    for name, body in (
        ("dbus-monitor", f"exec cat {pipe}"),
        ("systemd-inhibit", f"echo $$ >> {directory}/held; exec sleep 60"),
    ):
        (directory / name).write_text(f"#!/bin/sh\n{body}\n")
        (directory / name).chmod(0o755)
    return pipe


def pids(file: Path) -> list[int]:
    """Processes that have held the inhibitor, in order."""
    return [int(each) for each in file.read_text().split()] if file.exists() else []


async def holder(file: Path, number: int) -> int:
    """Wait for the process that holds the inhibitor for the `number`-th time."""
    await until(lambda: len(pids(file)) >= number)
    return pids(file)[number - 1]


def is_read(pipe: Path) -> bool:
    """Whether a process has it open for reading. That one comes to its end now."""
    try:
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return True


def is_alive(pid: int) -> bool:
    return (Path("/proc") / str(pid)).exists()


async def test_work_is_saved_before_sleep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, saved, held = programs(tmp_path), asyncio.Event(), tmp_path / "held"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    alive_while_saving: list[bool] = []

    async def save() -> None:
        alive_while_saving.append(is_alive(await holder(held, 1)))
        saved.set()

    guard = asyncio.create_task(SleepGuard(save).run())
    writer = os.open(pipe, os.O_RDWR)
    try:
        first = await holder(held, 1)
        os.write(writer, f"{HEADER}\n   boolean true\n".encode())
        await asyncio.wait_for(saved.wait(), 10)
        await until(lambda: not is_alive(first))
        os.write(writer, f"{HEADER}\n   boolean false\n".encode())
        assert alive_while_saving == [True] and is_alive(await holder(held, 2))
    finally:
        guard.cancel()
        await asyncio.wait([guard])
        os.close(writer)


@pytest.mark.parametrize("second_start", ("works", "fails"))
async def test_sleep_is_not_delayed_once_guard_ends(
    second_start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """dbus-monitor dies, or the program that holds the inhibitor cannot be started: the peer goes on without."""
    pipe, held = programs(tmp_path), tmp_path / "held"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    if second_start == "fails":
        start, failing = ChildProcess.start, OSError(11, "no process")

        async def refused(name: str, *more: Any) -> ChildProcess:
            if name == "systemd-inhibit":
                raise failing
            return await start(name, *more)

        monkeypatch.setattr(ChildProcess, "start", refused)

    async def save() -> None:
        raise AssertionError

    guard = asyncio.create_task(SleepGuard(save).run())
    if second_start == "works":
        holding = await holder(held, 1)
        await until(lambda: is_read(pipe))
    await asyncio.wait_for(guard, 10)
    assert second_start == "fails" or not is_alive(holding)


async def test_machine_without_logind_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    async def save() -> None:
        raise AssertionError

    await asyncio.wait_for(SleepGuard(save).run(), 5)
