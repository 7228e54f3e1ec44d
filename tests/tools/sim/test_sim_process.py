"""Processes that work for another end with it, even if it is killed."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from tests.support.paths import REPOSITORY

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]
PARENT = """
import time
from tests.sim.process import workers
with workers(1) as pool:
    pool.submit(time.sleep, 0).result()
    print("up", flush=True)
    pool.submit(time.sleep, 600).result()
"""


def test_worker_processes_end_with_killed_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        assert parent.stdout.readline() == "up\n"
        children = psutil.Process(parent.pid).children(recursive=True)
        lines = [each.cmdline() for each in children]
        parent.kill()
    assert any("spawn_main" in " ".join(each) for each in lines), "no worker"
    _, left = psutil.wait_procs(children, timeout=20)
    for each in left:
        each.kill()
    assert not left
