"""How many cores this process may use: those of its CPU affinity, and no more than its cgroups' quotas allow.

A container's CPU limit (`docker run --cpus 1.5`) is a quota of its cgroup. The affinity still shows all cores of the
machine; threads beyond the quota are stopped in the middle of a step, while the others wait for them.

Source: https://docs.kernel.org/admin-guide/cgroup-v2.html (cpu.max) and Documentation/scheduler/sched-bwc.rst
(cpu.cfs_quota_us and cpu.cfs_period_us, cgroup v1)
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from math import ceil
from pathlib import Path, PurePosixPath

_MAX_FILE_BYTES = 1 << 20
_MAX_DEPTH = 32
"""Levels of cgroups that are looked at, from the process's own upwards."""
_OCTAL = {"\\040": " ", "\\011": "\t", "\\012": "\n", "\\134": "\\"}


def usable_cores(proc: Path = Path("/proc/self")) -> int:
    """min(cores of the affinity, ceil(quota / period)), at least 1.

    Args:
        proc: the process's directory. What cannot be read there, or makes no sense, limits nothing.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [
        quota for directory in groups(_text(proc / "cgroup"), _text(proc / "mountinfo")) for quota in _of(directory)
    ]
    return max(1, min([cores, *map(ceil, quotas)]))


def groups(memberships: str, mounts: str) -> Iterator[Path]:
    """Directories of the cgroups that a process is in and that may limit its CPU time, ancestors included.

    Args:
        memberships: of /proc/PID/cgroup.
        mounts: of /proc/PID/mountinfo, whose mounts of cgroups may show a part of the hierarchy only: a container's.
    """
    for line in memberships.splitlines():
        _, _, rest = line.partition(":")
        controllers, separator, path = rest.partition(":")
        wanted = controllers.split(",") if controllers else []
        if separator and (not wanted or "cpu" in wanted):
            for root, point in _mounted(mounts, v1=bool(wanted)):
                yield from _upwards(root, point, PurePosixPath(path))
                break


def _mounted(mounts: str, v1: bool) -> Iterator[tuple[PurePosixPath, Path]]:
    """(the part of the hierarchy that is mounted, where) of cgroup v2, or of v1's cpu controller."""
    for line in mounts.splitlines():
        fields, _, source = line.partition(" - ")
        place, kind = fields.split(), source.split()
        if len(place) < 5 or len(kind) < 3:
            continue
        if (kind[0] == "cgroup" and "cpu" in kind[2].split(",")) if v1 else kind[0] == "cgroup2":
            yield PurePosixPath(_plain(place[3])), Path(_plain(place[4]))


def _upwards(root: PurePosixPath, point: Path, path: PurePosixPath) -> Iterator[Path]:
    """A cgroup's directory and those above it, as far as they are mounted."""
    inside = path.relative_to(root) if path.is_relative_to(root) and ".." not in path.parts else PurePosixPath()
    levels = [inside, *inside.parents]
    yield from (point / level for level in levels[:_MAX_DEPTH])


def _of(directory: Path) -> Iterator[float]:
    """The quotas that a cgroup sets, in cores."""
    both = _text(directory / "cpu.max") or _text(directory / "cpu.cfs_quota_us") + _text(
        directory / "cpu.cfs_period_us"
    )
    quota = cores_of(both)
    if quota is not None:
        yield quota


def cores_of(text: str) -> float | None:
    """Cores of a quota and its period in microseconds, as `cpu.max` has them; None: there is no limit.

    v1 has -1 where v2 has `max`.
    """
    words = text.split()
    if len(words) != 2 or not all(word.isdecimal() and len(word) < 20 for word in words) or "0" in words:
        return None
    return int(words[0]) / int(words[1])


def _plain(field: str) -> str:
    """A path of mountinfo, where some characters are octal."""
    for octal, character in _OCTAL.items():
        field = field.replace(octal, character)
    return field


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_FILE_BYTES).decode(errors="replace")
    except OSError:
        return ""
