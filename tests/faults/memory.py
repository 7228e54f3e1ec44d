"""Memory that runs out: peers in control groups with a limit, under which the kernel kills, by either version of these.

What a harness killed by SIGKILL leaves behind are directories named `starling-…` there; `rmdir` removes them.
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

import psutil

from node.session.peer import NO_WORKER
from node.training.cgroup import ControlGroup, memory_group, memory_kills
from tests.faults.event_log import EventLog
from tests.faults.steps import Step
from tests.support.real_swarm import RealSwarm, wait

HEADROOM_BYTES = 64 << 20
"""How much more than it has a peer is allowed, before another program takes that, too."""
SPARE_BYTES = 48 << 20
"""How much a peer may grow while it has no worker; less than a worker needs to come up."""
PIECE_BYTES = 2 << 20
KILLED_SECONDS, SAID_SECONDS, GIVEN_UP_SECONDS = 30.0, 10.0, 60.0
EVIDENCE = "memory has probably run out"
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
    """A memory control group of a peer's own. On leaving it goes; processes that are left of it are killed before."""

    def __init__(self, path: Path, version: int) -> None:
        self.path, self._version = path, version
        self._memory = ControlGroup(path, version)

    @property
    def inside(self) -> tuple[str, ...]:
        """Put before a command, runs it in the group; the process keeps its id."""
        return ("/bin/sh", "-c", _ENTER, str(self.path))

    def kills(self) -> int:
        return memory_kills(self._memory) or 0

    def used_bytes(self) -> int:
        return int((self.path / _USED[self._version]).read_text())

    def limit(self, size: int | None) -> None:
        """Allow so many bytes; None: any. By version 1 OSError, where more is in use that cannot be given back."""
        name, unlimited = _LIMITS[self._version]
        (self.path / name).write_text(unlimited if size is None else str(size))

    def remove(self) -> None:
        """Kill whatever is in it, and take it away."""
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
    """A new one.

    Raises:
        OSError: there can be none; one line says why.
    """
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
    """Where a group may be made: by version 2 not beside processes, so that the root of all is the likelier place."""
    if own.path:
        yield own.path
        yield from (each for each in own.path.parents if (each / "cgroup.procs").exists())


def why_not() -> str:
    """What keeps this machine from setting memory limits, in one line; empty if nothing does."""
    try:
        trial = group("trial")
    except OSError as error:
        return str(error)
    trial.remove()
    return ""


class Memory:
    """What can be done to a peer's memory."""

    def __init__(self, notes: EventLog, swarm: RealSwarm, groups: Mapping[str, Group]) -> None:
        self._notes, self._swarm, self._groups = notes, swarm, groups

    def heal(self) -> None:
        """Nobody's is limited."""
        for each in self._groups.values():
            with suppress(OSError):
                each.limit(None)

    def squeeze(self, whom: tuple[str, ...], step: Step) -> None:
        """Another program takes what is left, until the kernel has killed the worker; then it ends."""
        for name in whom:
            self._kill(name)
        self._notes.tell("memory runs out, and the kernel kills the worker", whom, "fault")
        self._said(whom)

    def confine(self, whom: tuple[str, ...], step: Step) -> None:
        for name in whom:
            self._kill(name)
            wait(f"there is a limit for {name}", lambda name=name: self._limited(self._groups[name]), 5)  # type: ignore[misc]
        self._notes.tell("memory has no room for a worker any more", whom, "fault")

    def resigned(self, whom: tuple[str, ...], step: Step) -> None:
        """That it has said why, and ended as is documented."""
        began = self._notes.last
        for name in whom:
            self._notes.over(name, NO_WORKER, GIVEN_UP_SECONDS)
            self._notes.measure("leaving_seconds", time.time() - began)
        self._said(whom)

    def _said(self, whom: tuple[str, ...]) -> None:
        for name in whom:
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
        wait(f"it was the worker of {name}", lambda: not _lives(worker), SAID_SECONDS)
        assert peer.running, f"the kernel killed {name} itself"

    def _limited(self, place: Group) -> bool:
        """Whether there is a limit just above what is in use: a worker that dies gives back what it had bit by bit."""
        with suppress(OSError):
            place.limit(place.used_bytes() + SPARE_BYTES)
            return True
        return False


@contextmanager
def _hog(place: Group) -> Iterator[subprocess.Popen[bytes]]:
    """Another program takes more and more memory in that group."""
    hog = subprocess.Popen([*place.inside, sys.executable, "-c", _HOG])
    try:
        yield hog
    finally:
        hog.kill()
        hog.wait(SAID_SECONDS)


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
