"""Workers that are replaced when they die, in virtual time: how often, and when the peer gives up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from node.runtime.cgroup import ControlGroup, memory_group
from node.tasks.spec import WorkerSpec
from node.training.process import WorkerError, WorkerProcess
from node.training.worker_supervisor import DEATHS, DEATHS_AN_HOUR, WorkerSupervisor
from tests.sim import loop as simloop


def worker(command: str, *finished: str, failure: str = "") -> WorkerProcess:
    child = SimpleNamespace(pid=1, is_killed=True)
    made = SimpleNamespace(command=command, finished=set(finished), failure=failure, child=child)
    return cast(WorkerProcess, made)


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The times at which workers were started."""
    made: list[float] = []

    async def start(spec: WorkerSpec, memory: int) -> Any:
        made.append(asyncio.get_running_loop().time())

    monkeypatch.setattr(WorkerProcess, "start", start)
    return made


def replace_workers(
    count: int, seconds: float, useful: bool, group: ControlGroup | None = None, die: Callable[[], None] = lambda: None
) -> None:
    """Replace `count` workers that each run for `seconds`; `die` is called at each death."""

    async def main() -> None:
        supervisor = WorkerSupervisor(cast(WorkerSpec, None), 0, group)
        for _ in range(count):
            await asyncio.sleep(seconds)
            die()
            await supervisor.restart(worker("train", *["train"] * useful), "killed by signal 9; last output: farewell")

    simloop.run(main())


@pytest.mark.parametrize("seconds", [1.0, 89.0])
def test_constantly_dying_worker_is_given_up(starts: list[float], seconds: float) -> None:
    with pytest.raises(WorkerError) as caught:
        replace_workers(100, seconds, useful=True)
    assert len(starts) == DEATHS_AN_HOUR - 1
    line = str(caught.value)
    start = "the worker died 40 times within an hour, at last: killed by signal 9; last output: farewell;"
    assert line.startswith(start)
    assert "memory" in line and "a restart of this peer" in line and "\n" not in line


def test_worker_dying_occasionally_is_always_replaced(starts: list[float]) -> None:
    replace_workers(500, 95.0, useful=True)
    assert len(starts) == 500


def test_useless_worker_is_given_up_after_growing_pauses(starts: list[float]) -> None:
    message = f"died {DEATHS} times in a row: killed by signal 9; .*; check its last output"
    with pytest.raises(WorkerError, match=message):
        replace_workers(100, 0.0, useful=False)
    assert starts == [0.0, 0.5, 1.5, 3.5]


def test_deaths_in_a_row_are_of_one_command(starts: list[float]) -> None:
    """That a worker trains well says nothing of evaluations that kill it; only an evaluation that ends well does."""

    async def main() -> None:
        supervisor = WorkerSupervisor(cast(WorkerSpec, None), 0, ControlGroup())
        for _ in range(DEATHS - 1):
            await supervisor.restart(worker("evaluate", "train"), "")
        await supervisor.restart(worker("train", "train", "evaluate"), "")
        for _ in range(DEATHS - 1):
            await supervisor.restart(worker("evaluate", "train", failure="the worker hangs in evaluate"), "")
        await supervisor.restart(worker("train", "train"), "")
        await supervisor.restart(worker("evaluate", "train", failure="the worker hangs in evaluate"), "")

    with pytest.raises(WorkerError, match=f"died {DEATHS} times in a row: the worker hangs in evaluate; fix that"):
        simloop.run(main())
    assert len(starts) == 2 * DEATHS


# -- memory -----------------------------------------------------------------------------------------------------------


class Kernel:
    """A memory control group of that version, in which the kernel kills processes."""

    def __init__(self, path: Path, version: int) -> None:
        self.group, self._count = ControlGroup(path, version), 3
        self._file = path / ("memory.events" if version == 2 else "memory.oom_control")
        (path / ("memory.max" if version == 2 else "memory.limit_in_bytes")).write_text("512000000\n")
        self._write()

    def kill(self) -> None:
        self._count += 1
        self._write()

    def _write(self) -> None:
        self._file.write_text(f"low 0\nunder_oom 0\noom_kill {self._count}\n")


@pytest.mark.parametrize("version", [1, 2])
def test_three_out_of_memory_deaths_end_the_peer(
    version: int, starts: list[float], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kernel = Kernel(tmp_path, version)
    with pytest.raises(
        WorkerError, match=r"probably out of memory \(limit 512 MB\): .* 3 times within 10 minutes; give"
    ):
        replace_workers(100, 60.0, useful=True, group=kernel.group, die=kernel.kill)
    assert starts == [61.0, 126.0]
    warnings = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert len(warnings) == 3 and all("probably out of memory" in line for line in warnings)


def test_out_of_memory_requires_a_kernel_kill(
    starts: list[float], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    replace_workers(10, 60.0, useful=True, group=Kernel(tmp_path, 2).group)
    assert "memory" not in caplog.text
    replace_workers(10, 60.0, useful=True, group=ControlGroup())
    assert caplog.text.count("memory may have run out") == 10 and "probably" not in caplog.text


def test_occasional_out_of_memory_deaths_are_tolerated(starts: list[float], tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, 2)
    replace_workers(100, 301.0, useful=True, group=kernel.group, die=kernel.kill)
    assert len(starts) == 100


_V1 = "9:name=systemd:/\n4:memory:/docker/{}\n0::/\n"
_V1_MOUNT = "35 31 0:32 {} /sys/fs/cgroup/memory rw,relatime shared:7 - cgroup cgroup rw,memory\n"
_V2_MOUNT = "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n"


@pytest.mark.parametrize(
    "groups, mounts, path, version",
    [
        (_V1.format("ab"), _V1_MOUNT.format("/"), "/sys/fs/cgroup/memory/docker/ab", 1),
        (_V1.format("ab"), _V1_MOUNT.format("/docker/ab"), "/sys/fs/cgroup/memory", 1),  # in the container
        ("0::/user.slice/a.scope\n", _V2_MOUNT, "/sys/fs/cgroup/user.slice/a.scope", 2),
        ("0::/\n", _V2_MOUNT, "/sys/fs/cgroup", 2),
        ("0::/\n", "23 1 8:1 / / rw - ext4 /dev/sda1 rw\n", None, 2),
    ],
)
def test_own_memory_cgroup_is_found(groups: str, mounts: str, path: str | None, version: int, tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text(groups)
    (tmp_path / "mountinfo").write_text(mounts)
    assert memory_group(tmp_path) == ControlGroup(Path(path) if path else None, version)
