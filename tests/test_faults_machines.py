"""What a nemesis does to machines is known to it afterwards."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from tests.faults.machines import Machines, clock_file
from tests.faults.notes import Notes
from tests.faults.scenarios import Step
from tests.realswarm import RealSwarm


def test_what_a_wrong_clock_said_is_put_right_and_nothing_else(tmp_path: Path) -> None:
    clock = 100.0
    reports: list[dict[str, Any]] = []
    peer = SimpleNamespace(name="c", directory=tmp_path / "c", reports=lambda: list(reports))
    notes = SimpleNamespace(tell=lambda *_: None)
    machines = Machines(cast(Notes, notes), cast(RealSwarm, {"c": peer}), None)
    reports.append({"time": clock})
    machines.skew(("c",), Step("skew", ("c",), amount=-600.0))
    off = float(clock_file(cast(Any, peer)).read_text())
    reports.append({"time": clock + 1 + off})
    machines.heal()
    assert float(clock_file(cast(Any, peer)).read_text()) == 0.0
    reports.append({"time": clock + 2})
    machines.heal()
    told = machines.right({"c": list(reports), "a": [{"time": 7.0}]})
    assert told == {"c": [{"time": 100.0}, {"time": 101.0}, {"time": 102.0}], "a": [{"time": 7.0}]}
    assert reports[1]["time"] == -499.0
