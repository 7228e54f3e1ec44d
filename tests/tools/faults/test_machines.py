"""What a nemesis does to machines is known to it afterwards."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.faults.event_log import EventLog
from tests.faults.machines import MachineFaults, clock_file
from tests.faults.steps import Step
from tests.support.real_swarm import RealSwarm


class Skewed:
    """A peer that has reported one round, and whose clock is then put wrong."""

    def __init__(self, directory: Path, seconds: float) -> None:
        self.reports = [_report(100.0)]
        self.peer: Any = SimpleNamespace(name="c", directory=directory / "c", reports=lambda: list(self.reports))
        self.notes = SimpleNamespace(tell=lambda *_: None, stuck=[])
        self.machines = MachineFaults(cast(EventLog, self.notes), cast(RealSwarm, {"c": self.peer}), None)
        self.machines.skew(("c",), Step("skew", ("c",), amount=seconds))

    @property
    def off(self) -> float:
        return float(clock_file(self.peer).read_text())


def _report(time: float) -> dict[str, float]:
    """Of a round of .9 seconds."""
    return {"time": time, "seconds_train": 0.5, "seconds_wait": 0.3, "seconds_average": 0.1}


def test_skewed_report_times_are_corrected(tmp_path: Path) -> None:
    skewed = Skewed(tmp_path, -600.0)
    skewed.reports.append(_report(101.0 + skewed.off))
    skewed.machines.heal()
    assert skewed.off == 0.0 and skewed.reports[1]["time"] == -499.0
    skewed.reports.append(_report(102.0))
    corrected = skewed.machines.right({"c": list(skewed.reports), "a": [_report(7.0)]})
    assert corrected == {"c": [_report(100.0), _report(101.0), _report(102.0)], "a": [_report(7.0)]}
    assert skewed.notes.stuck == []


@pytest.mark.parametrize("since", [(), (101.0, 102.0)])
def test_clock_without_skew_effect_is_noted(since: tuple[float, ...], tmp_path: Path) -> None:
    skewed = Skewed(tmp_path, 5.0)
    skewed.reports += map(_report, since)
    skewed.machines.heal()
    assert skewed.notes.stuck == ["the clock of c was never +5 s off"]
