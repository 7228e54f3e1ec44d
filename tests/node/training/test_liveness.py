"""When a worker that does not answer is taken to hang, in virtual time; what the kernel counts of real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.training.liveness import BUSY_FACTOR, TIMEOUT_SECONDS, Usage, Watchdog, usage

LOOK_SECONDS = 2.5


def hangs_after(look: Callable[[float], tuple[int, Usage | None]], seconds: float) -> tuple[float, str]:
    """When the watchdog takes a worker to hang that shows `look(now)`, and what it says; (`seconds`, "") if never."""
    watchdog, now = Watchdog("evaluate", TIMEOUT_SECONDS, 0.0), 0.0
    while now < seconds:
        now += LOOK_SECONDS
        if why := watchdog.look(now, *look(now)):
            return now, why
    return seconds, ""


@pytest.mark.parametrize(
    "look, seconds, why",
    [
        pytest.param(lambda now: (0, None), 5400, "", id="a kernel that says nothing"),
        pytest.param(lambda now: (0, Usage(5e-4 * now, 0)), 602.5, "for 600 s it finished nothing", id="a deadlock"),
        pytest.param(lambda now: (0, Usage(now, 0)), 6002.5, "it computed for 6000 s", id="an endless loop"),
        pytest.param(lambda now: (0, None), 6002.5, "it computed for 6000 s", id="an endless loop, unseen"),
        pytest.param(
            lambda now: (0, Usage(0, 0, "rank 1 of 2" * (now > 60))),
            67.5,
            "rank 1 of 2 was stopped (by SIGSTOP",
            id="a stopped process",
        ),
        pytest.param(
            lambda now: (0, Usage(0.5 * now, 0, "the worker" * (now % 5 > 2))), 5400, "", id="stopped for moments"
        ),
    ],
)
def test_hang_is_told_from_slow_work(
    look: Callable[[float], tuple[int, Usage | None]], seconds: float, why: str
) -> None:
    after, said = hangs_after(look, max(seconds, 10.0) + (2 * LOOK_SECONDS if why else 0.0))
    assert (after == seconds and why in said and "evaluate" in said) if why else not said


@given(st.lists(st.sampled_from(["nothing", "computes", "reads", "finishes"]), max_size=120), st.floats(1, 30))
def test_worker_hangs_exactly_when_a_limit_is_reached(looks: list[str], timeout_seconds: float) -> None:
    watchdog = Watchdog("train", timeout_seconds, 0.0)
    steps, seconds, size = 0, 0.0, 0
    worked = finished = LOOK_SECONDS  # the first look has nothing to compare with
    watchdog.look(LOOK_SECONDS, steps, Usage(seconds, size))
    for number, kind in enumerate(looks, 2):
        now = LOOK_SECONDS * number
        steps, seconds, size = (
            steps + (kind == "finishes"),
            seconds + (kind == "computes"),
            size + 5000 * (kind == "reads"),
        )
        finished = now if kind == "finishes" else finished
        worked = worked if kind == "nothing" else now
        late = now - worked >= timeout_seconds or now - finished >= BUSY_FACTOR * timeout_seconds
        assert bool(watchdog.look(now, steps, Usage(seconds, size))) == late


def test_pause_of_the_peer_itself_is_not_the_workers() -> None:
    """A frozen container or a suspended job stops both; the worker may have no chance to show that it works."""
    watchdog = Watchdog("evaluate", TIMEOUT_SECONDS, 0.0)
    for now, seconds in ((2.5, 1.0), (5.0, 3.0), (9005.0, 3.1), (9007.5, 3.1), (9600.0, 3.1)):
        assert not watchdog.look(now, 0, Usage(seconds, 0)), now
    found = [watchdog.look(9600.0 + 2.5 * each, 0, Usage(3.1, 0)) for each in range(1, 300)]
    assert not found[0] and "hangs in evaluate" in found[-1], "from then on it counts again"


SPIN = f"import os; os.sched_setaffinity(0, [{min(os.sched_getaffinity(0))}]); print(flush=True)\nwhile True: pass"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-I', '-S', '-c', {SPIN!r}])"
SLEEP = "print(flush=True); import time; time.sleep(60)"


def test_kernel_counts_work_of_a_process_and_its_children() -> None:
    """Two spin on one core, one of them as a child: each waits for it half of the time, and that counts, too."""
    with ExitStack() as stack:
        spins, parent, sleeps = (_started(stack, each) for each in (SPIN, PARENT, SLEEP))
        _until(lambda: min(_seconds(spins), _seconds(parent)) > 0.05)
        asleep = _seconds(sleeps)
        os.kill(spins, signal.SIGSTOP)
        _until(lambda: _stopped(spins))
        before = _seconds(spins)
        _until(lambda: _seconds(parent) > before + 0.1)
        assert _seconds(spins) == before and _seconds(sleeps) - asleep < 0.05
        assert not _stopped(sleeps) and not _stopped(parent)
    assert usage(spins) is None, "it is gone"


def _started(stack: ExitStack, code: str) -> int:
    process = stack.enter_context(
        subprocess.Popen((sys.executable, "-I", "-S", "-c", code), stdout=subprocess.PIPE, start_new_session=True)
    )
    stack.callback(os.killpg, process.pid, signal.SIGKILL)
    assert process.stdout and process.stdout.readline()
    return process.pid


def _seconds(pid: int) -> float:
    found = usage(pid)
    assert found
    return found.processor_seconds


def _stopped(pid: int) -> bool:
    found = usage(pid)
    return found is not None and found.stopped == "the worker"


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
