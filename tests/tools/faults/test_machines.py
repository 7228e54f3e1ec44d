"""What a nemesis does to machines is known to it afterwards."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.faults.event_log import EventLog
from tests.faults.machines import MachineFaults, clock_file, small_disk
from tests.faults.steps import Step
from tests.support.real_swarm import RealSwarm


def test_skewed_report_times_are_corrected(tmp_path: Path) -> None:
    clock = 100.0
    reports: list[dict[str, Any]] = []
    peer = SimpleNamespace(name="c", directory=tmp_path / "c", reports=lambda: list(reports))
    notes = SimpleNamespace(tell=lambda *_: None, stuck=[])
    machines = MachineFaults(cast(EventLog, notes), cast(RealSwarm, {"c": peer}), None)
    reports.append(_report(clock))
    machines.skew(("c",), Step("skew", ("c",), amount=-600.0))
    off = float(clock_file(cast(Any, peer)).read_text())
    reports.append(_report(clock + 1 + off))
    machines.heal()
    assert float(clock_file(cast(Any, peer)).read_text()) == 0.0
    reports.append(_report(clock + 2))
    machines.heal()
    corrected = machines.right({"c": list(reports), "a": [_report(7.0)]})
    assert corrected == {"c": [_report(100.0), _report(101.0), _report(102.0)], "a": [_report(7.0)]}
    assert reports[1]["time"] == -499.0 and notes.stuck == []


def _report(time: float) -> dict[str, float]:
    """Of a round of .9 seconds."""
    return {"time": time, "seconds_train": 0.5, "seconds_wait": 0.3, "seconds_average": 0.1}


@pytest.mark.parametrize("since", [(), (101.0,), (101.0, 102.0)])
def test_clock_without_skew_effect_is_noted(since: tuple[float, ...], tmp_path: Path) -> None:
    reports = [_report(100.0)]
    peer = SimpleNamespace(name="c", directory=tmp_path / "c", reports=lambda: list(reports))
    notes = SimpleNamespace(tell=lambda *_: None, stuck=[])
    machines = MachineFaults(cast(EventLog, notes), cast(RealSwarm, {"c": peer}), None)
    machines.skew(("c",), Step("skew", ("c",), amount=5.0))
    reports += map(_report, since)
    machines.heal()
    assert notes.stuck == ["the clock of c was never +5 s off"]


@pytest.mark.skipif(os.geteuid() != 0, reason="a disk of its own takes root")
def test_files_on_small_disk_are_kept(tmp_path: Path) -> None:
    disk = tmp_path / "c"
    away = small_disk(disk)
    try:
        (disk / "checkpoints").mkdir()
        (disk / "checkpoints" / "one").write_text("kept")
        (disk / "ballast").write_bytes(bytes(1000))
        assert disk.is_mount()
    finally:
        away()
    assert not disk.is_mount()
    assert (disk / "checkpoints" / "one").read_text() == "kept" and not (disk / "ballast").exists()
