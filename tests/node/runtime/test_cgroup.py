"""The usable cores, by cgroup files as kernels, Docker and systemd write them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from node.runtime.cgroup import cores_of, usable_cores

V1_MOUNT = "30 24 0:26 {root} {point} rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
V2_MOUNT = "31 24 0:27 {root} {point} rw,relatime - cgroup2 cgroup2 rw\n"


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


def cores(tmp_path: Path, memberships: str, mounts: str, files: dict[str, str]) -> int:
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "cgroup").write_text(memberships)
    (proc / "mountinfo").write_text("22 1 0:5 / / rw - ext4 /dev/vda rw\nnonsense\n" + mounts)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return usable_cores(proc)


@pytest.mark.parametrize(
    "limits, expected",
    [
        ({"": "max 100000"}, 8),
        ({"a/b": "150000 100000"}, 2),
        ({"a/b": "max 100000", "a": "50000 100000"}, 1),  # an ancestor's
        ({"a/b": "400000 100000", "a": "300000 100000", "": "700000 100000"}, 3),
        ({"a/b": "9900000 100000"}, 8),
        ({"a/b": "nonsense"}, 8),
        ({}, 8),
    ],
)
def test_v2_quota_on_the_path_limits_cores(tmp_path: Path, limits: dict[str, str], expected: int) -> None:
    files = {f"cg/{group}/cpu.max": f"{text}\n" for group, text in limits.items()}
    assert cores(tmp_path, "0::/a/b\n", V2_MOUNT.format(root="/", point=tmp_path / "cg"), files) == expected


@pytest.mark.parametrize("root, path", [("/", "/docker/c1"), ("/docker/c1", "/docker/c1"), ("/docker/c1", "/")])
def test_v1_quota_is_found_inside_a_container(tmp_path: Path, root: str, path: str) -> None:
    """Docker mounts the container's part of the hierarchy; /proc may name the group from the machine's root."""
    inside = path.removeprefix(root) if root != "/" else path
    group = f"cpu,cpu acct/{inside.strip('/')}"
    point = str(tmp_path / "cpu,cpu acct").replace(" ", "\\040")
    files = {f"{group}/cpu.cfs_quota_us": "250000\n", f"{group}/cpu.cfs_period_us": "100000\n"}
    memberships = f"4:memory:/other\n3:cpu,cpuacct:{path}\n0::/\n"
    assert cores(tmp_path, memberships, V1_MOUNT.format(root=root, point=point), files) == 3


def test_path_cannot_leave_the_mount(tmp_path: Path) -> None:
    files = {"cpu.max": "100000 100000\n", "cg/cpu.max": "max 100000\n"}
    assert cores(tmp_path, "0::/../../x\n", V2_MOUNT.format(root="/", point=tmp_path / "cg"), files) == 8


@pytest.mark.parametrize("text", ["", "max 100000", "-1\n100000\n", "0 100000", "1 0", "1", "1 2 3", "9" * 30 + " 1"])
def test_invalid_quota_limits_nothing(text: str) -> None:
    assert cores_of(text) is None
