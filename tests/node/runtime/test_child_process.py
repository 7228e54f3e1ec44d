"""A child process: how it ended is reported correctly, and nothing that it has started outlives it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import psutil
import pytest

from node.runtime.child_process import ChildProcess
from tests.support.paths import REPOSITORY

_BREEDS = """
import os, subprocess, sys, time
plain = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
ours, theirs = os.pipe()
if os.fork() == 0:
    os.setsid()  # a daemon: its parent ends, it has a session of its own, and an environment of its own
    if os.fork() == 0:
        os.write(theirs, str(os.getpid()).encode())
        os.execve("/bin/sh", ["sh", "-c", "sleep 600; sleep 600"], {"PATH": os.environ["PATH"]})
    os._exit(0)
os.wait()
print("started", plain.pid, os.read(ours, 9).decode(), flush=True)
if sys.argv[1] == "exit":
    os._exit(7)
time.sleep(600)
"""
_PARENT = """
import asyncio, os, signal, sys
from node.runtime.child_process import ChildProcess

async def main():
    child = await ChildProcess.start("child", sys.argv[1:], lambda line: line and print(line, flush=True), reaped=True)
    await child.ended()

asyncio.run(main())
"""


SLOW_REAPER = """
import os, time
from node.runtime import reaper

def print_late(*words, **named):
    time.sleep(0.5)
    print(*words, **named)

reaper.print = print_late

def program():
    print("first", os.getpid(), flush=True)
    os._exit(0)

reaper.begin(os.getppid(), "0", True, program)
"""


def test_output_of_a_program_comes_after_its_id() -> None:
    """Its peer takes the first line for the id: another one would be lost, and signals would go to the reaper."""
    done = subprocess.run(
        [sys.executable, "-c", SLOW_REAPER], cwd=REPOSITORY, capture_output=True, text=True, timeout=30
    )
    number, line = done.stdout.splitlines()
    assert line == f"first {number}"


async def test_kill_after_exit_keeps_the_exit_code() -> None:
    """A kill between the end of a process and the report of it does not take the exit code away."""
    command = (sys.executable, "-I", "-S", "-c", "raise SystemExit(3)")
    for _ in range(20):
        silent = asyncio.Event()

        def hear(line: str | None, silent: asyncio.Event = silent) -> None:
            if line is None:
                silent.set()

        child = await ChildProcess.start("child", command, hear)
        await silent.wait()  # its output ends where it does
        while child.code is None:
            child.send_kill()
            await asyncio.sleep(0)
        assert child.code in (3, -9)
        await child.kill()


async def _gone(pids: list[int]) -> bool:
    """Whether these processes and all that they have started end within a second."""
    for _ in range(100):
        if not any(map(psutil.pid_exists, pids)):
            return True
        await asyncio.sleep(0.01)
    return False


@pytest.mark.parametrize(
    "end, how",
    [
        ("exit", "exit code 7"),
        ("killed", "killed by signal 9"),
        ("crashed", "killed by signal 11"),
        ("ended by its parent", "killed by signal 9"),
        ("parent killed", "killed by signal 9"),
    ],
)
async def test_daemons_of_a_program_die_with_it(end: str, how: str) -> None:
    command: tuple[str, ...] = (sys.executable, "-I", "-S", "-c", _BREEDS, end)
    heard: asyncio.Queue[str | None] = asyncio.Queue()
    if end == "parent killed":
        command = (sys.executable, "-c", _PARENT, *command)
    path = {"PYTHONPATH": str(REPOSITORY)}
    child = await ChildProcess.start("child", command, heard.put_nowait, path, reaped=end != "parent killed")
    async with asyncio.timeout(10):
        line = await heard.get()
    assert line and line.startswith("started ")
    pids = [int(each) for each in line.split()[1:]]
    assert all(map(psutil.pid_exists, pids)) or end == "exit"
    if end in ("killed", "crashed", "parent killed"):
        os.kill(child.pid, signal.SIGSEGV if end == "crashed" else signal.SIGKILL)
    elif end == "ended by its parent":
        child.send_kill()
    assert (await child.ended()).startswith(f"{how}; ")
    assert await _gone([*pids, child.pid])
    await child.kill()
