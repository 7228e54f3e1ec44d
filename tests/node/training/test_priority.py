"""The worker's low priority: of each thread and of the session, by the kernel's own files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from node.training.priority import ready_seconds
from tests.support.paths import REPOSITORY

SHOW = """
import os, sys, threading, time
from node.training.priority import stand_back
wait = threading.Event()
threading.Thread(target=wait.wait).start()
stand_back(int(sys.argv[1]), time.sleep)
print(*sorted({os.getpriority(os.PRIO_PROCESS, int(each)) for each in os.listdir("/proc/self/task")}))
if os.path.exists("/proc/self/autogroup"):
    print(open("/proc/self/autogroup").read().split()[-1])
wait.set()
"""


def test_all_threads_and_session_get_low_priority() -> None:
    """Niceness acts inside a scheduling group, the group's between sessions: neither suffices alone."""
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    for nice, group in ((0, 0), (7, min(19, ours + 7)), (19, 19)):
        command = (sys.executable, "-c", SHOW, str(nice))
        done = subprocess.run(
            command, cwd=REPOSITORY, start_new_session=True, capture_output=True, timeout=60, check=True
        )
        threads, *session = done.stdout.decode().split()
        assert int(threads) == min(19, ours + nice)
        assert session in ([], [str(group)])


def test_ready_time_distinguishes_starved_from_stopped() -> None:
    """Two processes that compete for a core wait for it; a stopped one does not."""
    core = min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, [{core}]); print(flush=True)\nwhile True: pass"
    both = [subprocess.Popen((sys.executable, "-I", "-S", "-c", code), stdout=subprocess.PIPE) for _ in range(2)]
    try:
        for each in both:
            assert each.stdout and each.stdout.readline()
        deadline = time.monotonic() + 30.0
        while min(ready_seconds(each.pid) for each in both) < 0.05:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        stopped = both[0].pid
        os.kill(stopped, signal.SIGSTOP)
        time.sleep(0.05)
        before = ready_seconds(stopped)
        time.sleep(0.1)
        assert ready_seconds(stopped) == before > 0
    finally:
        for each in both:
            each.kill()
            each.communicate()
    assert ready_seconds(stopped) == 0, "it is gone"
