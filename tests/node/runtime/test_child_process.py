"""A child process: how it ended is reported correctly."""

from __future__ import annotations

import asyncio
import sys

from node.runtime.child_process import ChildProcess


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
