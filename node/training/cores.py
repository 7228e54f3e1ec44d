"""Number of cores that this process may use: those of its CPU affinity, within the quotas of its control groups.

A container's CPU limit (`docker run --cpus 1.5`) is a quota of its group. The affinity still shows all cores of the
machine. The kernel stops threads beyond the quota in the middle of a step, and the other threads wait for them.
"""

from __future__ import annotations

import os
from math import ceil
from pathlib import Path

from node.training import cgroup


def usable_cores(process: Path = cgroup.PROCESS) -> int:
    """Return min(cores of the affinity, ceil(quota / period)), at least 1.

    Args:
        process: the process's directory in /proc. A quota that cannot be read there, or is malformed, is ignored.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [cores_of(_quota(group)) for group in cgroup.groups("cpu", process)]
    return max(1, min([cores, *(ceil(quota) for quota in quotas if quota is not None)]))


def _quota(group: cgroup.ControlGroup) -> str:
    """A quota and its period, in the format of `cpu.max`."""
    if group.version == 2:
        return group.read("cpu.max")
    return f"{group.read('cpu.cfs_quota_us')} {group.read('cpu.cfs_period_us')}"


def cores_of(text: str) -> float | None:
    """Number of cores that a quota allows; None: there is no limit.

    Args:
        text: quota and period in microseconds, in the format of `cpu.max`. For "no limit", version 1 has -1 where
            version 2 has `max`.
    """
    words = text.split()
    if len(words) != 2 or not all(word.isdecimal() and len(word) < 20 for word in words) or "0" in words:
        return None
    return int(words[0]) / int(words[1])
