"""What this process may use, within its control groups: cores and memory. And how it stands back behind others.

Supports both versions of Linux control groups, also from inside a container. A value that cannot be read is unknown.
A container's CPU limit (`docker run --cpus 1.5`) is a quota of its group. The affinity still shows all cores of the
machine. The kernel stops threads beyond the quota in the middle of a step, and the other threads wait for them.

Source: https://docs.kernel.org/admin-guide/cgroup-v2.html and, for version 1, Documentation/admin-guide/cgroup-v1.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import ceil
from pathlib import Path, PurePosixPath

PROCESS = Path("/proc/self")
_MAX_FILE_BYTES = 1 << 20
_MAX_DEPTH = 32  # levels of groups to read, from the process's own upwards
_OCTAL = {"\\040": " ", "\\011": "\t", "\\012": "\n", "\\134": "\\"}
_UNLIMITED_BYTES = 1 << 60  # version 1 shows a number above this where there is no limit


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """A control group, of version 1 or 2. Its path is its directory; None if it is not known."""

    path: Path | None = None
    version: int = 2

    def read(self, name: str) -> str:
        return _text(self.path / name) if self.path else ""


def groups(controller: str, process: Path = PROCESS) -> Iterator[ControlGroup]:
    """Yield the groups whose limits apply to a process: in each hierarchy its own group first, then those above it.

    The controller is `cpu` or `memory`. Groups of version 1, which has a hierarchy for each controller, come first.
    """
    mounts = _text(process / "mountinfo")
    memberships = [line.split(":", 2) for line in _text(process / "cgroup").splitlines()]
    for version in (1, 2):
        for fields in memberships:
            controllers = fields[1].split(",") if len(fields) == 3 and fields[1] else []
            if len(fields) == 3 and (controller in controllers if version == 1 else not controllers):
                for root, point in _mounted(mounts, controller, version):
                    yield from (ControlGroup(path, version) for path in _upwards(root, point, PurePosixPath(fields[2])))
                    break


def _mounted(mounts: str, controller: str, version: int) -> Iterator[tuple[PurePosixPath, Path]]:
    """Yields (mounted part of the hierarchy, mount point). A container sees only its own part."""
    for line in mounts.splitlines():
        fields, _, source = line.partition(" - ")
        place, kind = fields.split(), source.split()
        if len(place) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2" if version == 2 else kind[0] == "cgroup" and controller in kind[2].split(","):
            yield PurePosixPath(_plain(place[3])), Path(_plain(place[4]))


def _upwards(root: PurePosixPath, point: Path, path: PurePosixPath) -> Iterator[Path]:
    """Yield a group's directory and those above it, as far as they are mounted."""
    inside = path.relative_to(root) if path.is_relative_to(root) and ".." not in path.parts else PurePosixPath()
    levels = [inside, *inside.parents]
    yield from (point / level for level in levels[:_MAX_DEPTH])


def _plain(field: str) -> str:
    """Decode a path of mountinfo, which escapes some characters in octal."""
    for octal, character in _OCTAL.items():
        field = field.replace(octal, character)
    return field


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_FILE_BYTES).decode(errors="replace")
    except OSError:
        return ""


# -- memory -----------------------------------------------------------------------------------------------------------


def memory_group(process: Path = PROCESS) -> ControlGroup:
    """The memory group of this process; one without a path if there is none, or outside Linux."""
    return next(groups("memory", process), ControlGroup())


def memory_kills(group: ControlGroup) -> int | None:
    """Number of processes in the group that the kernel has killed for lack of memory; None: not known."""
    for line in group.read("memory.events" if group.version == 2 else "memory.oom_control").splitlines():
        word, _, count = line.partition(" ")
        if word == "oom_kill" and count.isdigit():
            return int(count)
    return None


def memory_limit_bytes(group: ControlGroup) -> int | None:
    """Of all processes in the group together; None: no limit, or not known."""
    text = group.read("memory.max" if group.version == 2 else "memory.limit_in_bytes").strip()
    return int(text) if text.isdigit() and int(text) < _UNLIMITED_BYTES else None


# -- cores -------------------------------------------------------------------------------------------------------------

SPIN = {"GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "1"}
"""How long a waiting thread keeps its core before it sleeps: in turns for libgomp, in milliseconds for LLVM's and
Intel's libomp. Their defaults are 30 and 200 times as long. With those, as soon as another program takes a core, each
operation waits for a thread that cannot run. Fewer turns slow down an idle machine: see RESULTS.md."""
_WAITING = (*SPIN, "OMP_WAIT_POLICY", "KMP_LIBRARY")


def usable_cores(process: Path = PROCESS) -> int:
    """Return min(cores of the affinity, ceil(quota / period)), at least 1. A quota that cannot be read is ignored."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [cores_of(_quota(group)) for group in groups("cpu", process)]
    return max(1, min([cores, *(ceil(quota) for quota in quotas if quota is not None)]))


def _quota(group: ControlGroup) -> str:
    """In the format of `cpu.max`."""
    if group.version == 2:
        return group.read("cpu.max")
    return f"{group.read('cpu.cfs_quota_us')} {group.read('cpu.cfs_period_us')}"


def cores_of(text: str) -> float | None:
    """None without a limit: `max` or, in version 1, -1."""
    words = text.split()
    if len(words) != 2 or not all(word.isdecimal() and len(word) < 20 for word in words) or "0" in words:
        return None
    return int(words[0]) / int(words[1])


def bounded_spin(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that limit how long a worker's threads spin; empty if the user has set one of these variables."""
    return {} if any(environment.get(name) for name in _WAITING) else SPIN


_ATTEMPTS = 20
_PAUSE_SECONDS = 0.11  # The kernel accepts ten requests a second for session groups, from all users together


def stand_back(nice: int, sleep: Callable[[float], None]) -> None:
    """Raise the niceness of all threads, and of the session's scheduling group where the kernel makes such groups.

    With autogroups (`kernel.sched_autogroup_enabled`) each session is a group. The kernel divides the cores between
    the groups, and niceness has an effect only inside a group. A request that the kernel rejects has no effect: in a
    container the cgroup decides.
    """
    if nice == 0:
        return
    level = min(19, os.getpriority(os.PRIO_PROCESS, 0) + nice)
    for thread in _threads():  # each thread has its own niceness, and later threads inherit it
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, level)
    for _ in range(_ATTEMPTS):
        try:
            (PROCESS / "autogroup").write_text(str(level))
            return
        except BlockingIOError:
            sleep(_PAUSE_SECONDS)
        except OSError:
            return


def _threads() -> list[int]:
    try:
        return [int(name) for name in os.listdir(PROCESS / "task")]
    except OSError:
        return [0]
