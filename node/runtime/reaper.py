"""Runs one program, which dies with this process's parent. If `reaped`, so does whatever the program has started, also
when the program ends.

    python -I -S reaper.py PARENT OOM_SCORE [reaped]    # the program: JSON in the variable STARLING_PROGRAM

It is a program of its own, because code between fork and exec (preexec_fn) is unsafe once threads exist; or it is
forked (`node.runtime.fork_server`). A program that is not reaped takes this process's place. Else this process forks
it, and waits. Only an ancestor that outlives both peer and worker can find every process: the kernel gives it each
descendant whose parent has died, even one that has left its session. Elsewhere than on Linux it kills the process group
only. The first line of its output is the id of the program. Then it ends as the program ended. SIGTERM ends it at
once.

Source: prctl(2), PR_SET_CHILD_SUBREAPER. Standard library only: it must start fast and stay small.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NoReturn

PROGRAM = "STARLING_PROGRAM"
_LINUX = sys.platform == "linux"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LOOK_SECONDS = 1.0
"""Between two looks whether the parent lives, in addition to the kernel's signal, which exists only on Linux."""
_KILL_SECONDS = 0.01  # until killed processes have ended, and their children are this process's
_MAX_LOOKS = 3000
"""About 30 s. After that, processes of other users, and those that wait for a disk, are left behind."""
_TRACKER, _TRACKER_LOOKS = b"multiprocessing.resource_tracker", 300
"""Python's own process that removes the shared memory of dead processes, and then ends. Once these have ended, which
takes long on a busy machine, it gets 3 s for that."""


def _prctl(option: int, value: int) -> None:
    if _LINUX:
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def die_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _begin_program(oom_score: str) -> None:
    """Begin a session of its own, so that a signal to the program's group does not reach this process."""
    with suppress(PermissionError):  # it has one already
        os.setsid()
    die_with_parent()
    if oom_score != "0":
        with suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
            score.write(oom_score)


def _children() -> Iterator[int]:
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            if int(file.read().rpartition(b")")[2].split()[1]) == os.getpid():
                yield int(name)


def _is_tracker(pid: int) -> bool:
    with suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return _TRACKER in file.read()
    return False


def _kill_descendants() -> None:
    """Kill all children until none is left. The children of each one that ends become children of this process."""
    looks = 0
    for _ in range(_MAX_LOOKS):
        children = [*_children()]
        doomed = [pid for pid in children if not _is_tracker(pid)]
        looks += not doomed
        for pid in children if looks > _TRACKER_LOOKS else doomed:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        signal.sigtimedwait((), _KILL_SECONDS)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return


def begin(parent: int, oom_score: str, reaped: bool, run: Callable[[], NoReturn]) -> NoReturn:
    """Run a program. Nothing runs if the parent is another one: it may have died before the kernel was asked."""
    if reaped:
        _supervise(parent, oom_score, run)
    _begin_program(oom_score)
    if os.getppid() == parent:
        run()
    os._exit(1)


def _supervise(parent: int, oom_score: str, run: Callable[[], NoReturn]) -> NoReturn:
    program = 0

    def end(number: int = 0, frame: object = None) -> None:
        if not program:
            os._exit(1)
        with suppress(ProcessLookupError, PermissionError):
            os.kill(program, signal.SIGKILL)

    def look(number: int, frame: object) -> None:
        if os.getppid() != parent:
            end()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGALRM, look)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != parent:
        os._exit(1)
    told, tells = os.pipe()
    if not (child := os.fork()):
        _begin_program(oom_score)
        os.close(tells)
        if not os.read(told, 1):  # its id has to be the first line, which the program's own output must not overtake
            os._exit(1)
        os.close(told)
        run()
    program = child
    signal.setitimer(signal.ITIMER_REAL, _LOOK_SECONDS, _LOOK_SECONDS)
    print(program, flush=True)
    os.write(tells, b".")
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # the program's: its peer waits for the end of a socket among them
    pid, status = os.wait()
    while pid != program:  # a descendant that became a child of this process has ended
        pid, status = os.wait()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_REAL, 0)
    if _LINUX:
        _kill_descendants()
    else:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    _end_like(status)


def _end_like(status: int) -> NoReturn:
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the program has written its own, if any
        with suppress(OSError):  # SIGKILL needs no handler, and takes none
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    command = json.loads(os.environ.pop(PROGRAM))
    begin(int(sys.argv[1]), sys.argv[2], "reaped" in sys.argv, lambda: os.execv(command[0], command))
