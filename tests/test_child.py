"""A program of ours in a process of its own: how it ended is told truly."""

from __future__ import annotations

import asyncio
import os
import sys

from node.child import Child


async def test_who_strikes_does_not_take_the_exit_code_away() -> None:
    """Between the end of a process and the news of it: who looked for the code then would have it, and nobody else."""
    command = (sys.executable, "-I", "-S", "-c", "raise SystemExit(3)")
    for _ in range(20):
        silent = asyncio.Event()

        def hear(line: str | None, silent: asyncio.Event = silent) -> None:
            if line is None:
                silent.set()

        child = await Child.start("straw", command, hear)
        await silent.wait()  # its output ends where it does
        while child.code is None:
            child.strike()
            await asyncio.sleep(0)
        assert child.code in (3, -9)
        await child.kill()


async def test_a_lower_share_is_the_process_s_and_its_session_s() -> None:
    """Both, for the one acts inside a scheduling group and the other between groups."""
    show = "import os; print(os.nice(0)); print(open('/proc/self/autogroup').read() if os.path.exists(%r) else '')"
    told: dict[int, list[str]] = {}
    for nice in (0, 7):
        lines: list[str | None] = []
        command = (sys.executable, "-I", "-S", "-c", show % "/proc/self/autogroup")
        child = await Child.start("straw", command, lines.append, nice=nice)
        await child.ended()
        await child.kill()
        told[nice] = [line for line in lines if line]
    ours = os.nice(0)
    lowered = min(19, ours + 7)
    assert told[0][0] == str(ours) and told[7][0] == str(lowered)
    if len(told[7]) > 1:  # the kernel has scheduling groups of sessions
        assert told[0][1].endswith("nice 0") and told[7][1].endswith(f"nice {lowered}")
