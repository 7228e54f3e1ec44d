"""Real transports among routers choose the four ways of bulk data, and refuse it through a relay."""

from __future__ import annotations

import json

import pytest

from benchmarks.routes import WAYS, main
from tests.faults.network import why_not

pytestmark = [pytest.mark.real, pytest.mark.long, pytest.mark.timeout(240)]


def test_each_way_is_chosen_and_relayed_bulk_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    if reason := why_not():
        pytest.skip(reason)
    assert main(["--megabytes", "2", "--repeats", "1", "--links", "0"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["way"] for row in rows] == [*WAYS, "relayed", "relayed"]
    assert all("carries no bulk data" in row["refused"] and row["open"] < 2.0 for row in rows[len(WAYS) :])
