"""Lack of memory: peers in memory control groups (version 1 or 2), in which the kernel kills processes at a limit.

A harness that is killed by SIGKILL leaves directories named `starling-…` there; `rmdir` removes them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from node.runtime.cgroup import ControlGroup, memory_group, memory_kills
from node.session.fatal import NO_WORKER
from tests.faults.event_log import EventLog
from tests.faults.steps import Step
from tests.support.processes import runs
from tests.support.real_swarm import RealSwarm, wait

HEADROOM_BYTES = 64 << 20
"""How much a peer's limit is above its use, before another program in its group takes that memory."""
SPARE_BYTES = 8 << 20
"""How much a peer may grow while it has no worker: less than the 13 MB of its own that a forked worker needs."""
PIECE_BYTES = 2 << 20
KILLED_SECONDS, SAID_SECONDS, GIVEN_UP_SECONDS = 30.0, 10.0, 60.0
EVIDENCE = "probably out of memory"
_REMOVED_SECONDS = 5.0
_LIMITS = {1: ("memory.limit_in_bytes", "-1"), 2: ("memory.max", "max")}
_USED = {1: "memory.usage_in_bytes", 2: "memory.current"}
_SWAP = {1: ("memory.swappiness", "0"), 2: ("memory.swap.max", "0")}
_ENTER = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
_HOG = f"""
import time
kept = []
while True:
    kept.append(b"x" * {PIECE_BYTES})
    time.sleep(0.005)
"""


class Group:
    def __init__(self, path: Path, version: int) -> None:
        self.path, self._version = path, version
        self._memory = ControlGroup(path, version)

    @property
    def inside(self) -> tuple[str, ...]:
        """Prefix of a command that runs it in the group; the process keeps its id."""
        return ("/bin/sh", "-c", _ENTER, str(self.path))

    def kills(self) -> int:
        return memory_kills(self._memory) or 0

    def used_bytes(self) -> int:
        return int((self.path / _USED[self._version]).read_text())

    def limit(self, size: int | None) -> None:
        """None: unlimited. OSError with version 1, if more is in use that cannot be reclaimed."""
        name, unlimited = _LIMITS[self._version]
        (self.path / name).write_text(unlimited if size is None else str(size))

    def remove(self) -> None:
        until = time.monotonic() + _REMOVED_SECONDS
        while time.monotonic() < until:
            with suppress(OSError):
                for pid in (self.path / "cgroup.procs").read_text().split():
                    with suppress(ProcessLookupError):
                        os.kill(int(pid), 9)
            with suppress(OSError):
                self.path.rmdir()
                return
            time.sleep(0.05)


def group(name: str) -> Group:
    """Make a memory control group; OSError says in one line why that cannot be."""
    own = memory_group()
    version = own.version
    for parent in _parents(own):
        path = parent / f"starling-{uuid.uuid4().hex[:8]}-{name}"
        with suppress(OSError):
            path.mkdir()
            try:
                made = Group(path, version)
                made.limit(None)
                made.used_bytes()
                with suppress(OSError):  # where there is no swap at all
                    (path / _SWAP[version][0]).write_text(_SWAP[version][1])
                return made
            except OSError:
                path.rmdir()
    where = f"by version {version}" if own.path else "here"
    raise OSError(f"no memory limits can be set {where}: run this as root, where memory control groups can be written")


def _parents(own: ControlGroup) -> Iterator[Path]:
    """Directories in which a group may be made; in version 2 one without processes, most likely the root."""
    if own.path:
        yield own.path
        yield from (each for each in own.path.parents if (each / "cgroup.procs").exists())


def why_not() -> str:
    try:
        trial = group("trial")
    except OSError as error:
        return str(error)
    trial.remove()
    return ""


class Memory:
    def __init__(self, notes: EventLog, swarm: RealSwarm, groups: Mapping[str, Group]) -> None:
        self._notes, self._swarm, self._groups = notes, swarm, groups

    def heal(self) -> None:
        for each in self._groups.values():
            with suppress(OSError):
                each.limit(None)

    def squeeze(self, targets: tuple[str, ...], step: Step) -> None:
        """Let another program take memory until the kernel has killed the worker."""
        for name in targets:
            self._kill(name)
        self._notes.tell("memory runs out, and the kernel kills the worker", targets, "fault")
        self._said(targets)

    def confine(self, targets: tuple[str, ...], step: Step) -> None:
        for name in targets:
            self._kill(name)
            wait(f"there is a limit for {name}", lambda name=name: self._limited(self._groups[name]), 5)  # type: ignore[misc]
        self._notes.tell("memory has no room for a worker any more", targets, "fault")

    def resigned(self, targets: tuple[str, ...], step: Step) -> None:
        """Wait until each peer has logged the reason, and ended with the documented exit code."""
        began = self._notes.last
        for name in targets:
            self._notes.over(name, NO_WORKER, GIVEN_UP_SECONDS)
            self._notes.measure("leaving_seconds", time.time() - began)
        self._said(targets)

    def _said(self, targets: tuple[str, ...]) -> None:
        for name in targets:
            wait(f"{name} says that {EVIDENCE}", lambda name=name: EVIDENCE in self._swarm[name].said(), SAID_SECONDS)  # type: ignore[misc]

    def _kill(self, name: str) -> None:
        place, peer = self._groups[name], self._swarm[name]
        worker = wait(f"{name} has a worker", lambda: peer.child("worker"), SAID_SECONDS)
        before = place.kills()
        place.limit(place.used_bytes() + HEADROOM_BYTES)
        with _hog(place) as hog:
            wait(
                f"the kernel kills for {name}", lambda: place.kills() > before or hog.poll() is not None, KILLED_SECONDS
            )
            assert hog.poll() is None, "the kernel has killed the program that took the memory, and not the worker"
        wait(f"it was the worker of {name}", lambda: not runs(worker), SAID_SECONDS)
        assert peer.running, f"the kernel killed {name} itself"

    def _limited(self, place: Group) -> bool:
        """Whether a limit just above the use could be set: the memory of a dead worker is freed only gradually."""
        with suppress(OSError):
            place.limit(place.used_bytes() + SPARE_BYTES)
            return True
        return False


@contextmanager
def _hog(place: Group) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program that takes more and more memory in the group."""
    hog = subprocess.Popen([*place.inside, sys.executable, "-c", _HOG])
    try:
        yield hog
    finally:
        hog.kill()
        hog.wait(SAID_SECONDS)
