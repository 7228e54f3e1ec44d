"""The cores that this process may use, those of its CPU affinity within the quotas of its control groups, and how.

A container's CPU limit (`docker run --cpus 1.5`) is a quota of its group. The affinity still shows all cores of the
machine. The kernel stops threads beyond the quota in the middle of a step, and the other threads wait for them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from math import ceil
from pathlib import Path

from node.training import cgroup

SPIN = {"GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "1"}
"""How long a waiting thread keeps its core before it sleeps: in turns for libgomp, in milliseconds for LLVM's and
Intel's libomp. Their defaults are 30 and 200 times as long. With those, as soon as another program takes a core, each
operation waits for a thread that cannot run. Fewer turns slow down an idle machine: see RESULTS.md."""
_WAITING = (*SPIN, "OMP_WAIT_POLICY", "KMP_LIBRARY")


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


def bounded_spin(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that limit how long a worker's threads spin; empty if the user has set one of these variables."""
    return {} if any(environment.get(name) for name in _WAITING) else SPIN
