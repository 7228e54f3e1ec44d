"""The worker's low priority: of each thread and of the session, by the kernel's own files."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.paths import REPOSITORY

SHOW = """
import os, sys, threading, time
from node.runtime.cgroup import stand_back
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
