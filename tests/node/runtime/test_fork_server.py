"""Forked programs behave as executed ones: what they inherit, how they end, and what is left of them."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import REPOSITORY

pytestmark = pytest.mark.real

STARTS = """
import asyncio, fcntl, json, os, signal, sys, threading
from node.runtime.child_process import ChildProcess
from node.runtime.fork_server import ForkServer

signal.signal(signal.SIGTERM, lambda *_: None)
lock = open("lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX)
if sys.argv[1] == "forked":
    ForkServer.begin()
    assert ForkServer.here
given = os.open("/dev/null", os.O_RDONLY)

async def run(how, act=lambda child: None):
    lines, said, whole = [], asyncio.Event(), asyncio.Event()
    def take(line):
        lines.append(line)
        (said if line else whole).set()
    command = [sys.executable, "-P", "-m", "tests.support.forked_program", how]
    environment = {"ADDED": "yes", "PYTHONPATH": sys.argv[2]}
    child = await ChildProcess.start("program", command, take, environment, (given,), 0, True)
    await said.wait()
    act(child)
    await child.ended()
    await whole.wait()  # on a busy machine, `ended` waits for less than all of the output
    found = json.loads(lines[0])
    sleeper = found.pop("sleeper")
    left = os.path.exists(f"/proc/{sleeper}/cwd")
    return {"said": lines[1:], "code": child.code, "given": given, "left": left} | found

async def main():
    found = [await run(how) for how in ("ends", "fails", "crashes")]
    found.append(await run("waits", lambda child: child.send_kill()))
    if server := ForkServer.here:
        (pid,) = map(int, open(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read().split())
        held = [os.readlink(f"/proc/{pid}/fd/{each}") for each in os.listdir(f"/proc/{pid}/fd")]
        assert not [each for each in held if "lock" in each], held
        found.append(await run("waits", lambda child: os.kill(pid, signal.SIGKILL)))
        assert ForkServer.here is None
        found.append(await run("ends"))
    print(json.dumps(found))

asyncio.run(main())
"""


def started(tmp_path: Path, how: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-c", STARTS, how, str(REPOSITORY)]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=40)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_forked_programs_are_as_executed_ones(tmp_path: Path) -> None:
    forked, executed = started(tmp_path, "forked"), started(tmp_path, "executed")
    assert [each["code"] for each in forked] == [3, 1, -11, -9, -9, 3]
    assert "ValueError: as asked" in forked[1]["said"]
    for one, other in zip(forked[:4], executed, strict=True):
        same = ("code", "arguments", "added", "default signals", "from here", "left")
        assert [one[each] for each in same] == [other[each] for each in same]
        assert one["descriptors"] == [0, 1, 2, one["given"]] and one["default signals"] and not one["left"]
        assert one["line"].split()[1:] == ["-P", "-m", "tests.support.forked_program", *one["arguments"]]
    assert len({each["drawn"] for each in forked}) == len(forked)


ASKS_FOR_NO_GPU = """
import torch

def refuse(*arguments, **named):
    raise AssertionError("this initialises CUDA, and forked workers could not use it any more")

for name in ("is_available", "device_count", "init", "_lazy_init", "current_device", "mem_get_info"):
    setattr(torch.cuda, name, refuse)
for name in ("is_available", "current_accelerator", "device_count"):
    if hasattr(torch, "accelerator") and hasattr(torch.accelerator, name):
        setattr(torch.accelerator, name, refuse)
torch._C._cuda_getDeviceCount = refuse
import uvloop
import node.session.peer, node.training.worker, node.training.stage_worker, node.ui.logs, node.ui.terminal
assert not torch.cuda.is_initialized()
import sys
print([each for each in ("scipy", "hivemind.optim") if each in sys.modules])
"""


SERVES = """
import os, socket, sys
from node.runtime.fork_server import serve
serve(socket.socket(fileno=int(sys.argv[1])), lambda request, descriptors: os._exit(0))
"""


def test_server_ends_in_silence_with_a_peer_that_has_not_read_all() -> None:
    peer, link = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with subprocess.Popen(
        [sys.executable, "-c", SERVES, str(link.fileno())],
        cwd=REPOSITORY,
        pass_fds=[link.fileno()],
        stderr=subprocess.PIPE,
    ) as server:
        link.close()
        socket.send_fds(peer, [b"{}"], [])
        assert select.select([peer], [], [], 60.0)[0], "it was told of a program"
        peer.close()
        assert (server.wait(60.0), server.communicate()[1]) == (0, b"")


def test_what_forks_workers_asks_for_no_gpu_and_loads_no_trainers() -> None:
    """All that `run_peer` loads before it forks the server, and that a worker loads: of hivemind, no trainers."""
    command = [sys.executable, "-c", ASKS_FOR_NO_GPU]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=40)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
