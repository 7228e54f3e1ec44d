"""Real peers whose lines a round's data fills: heartbeats and votes pass, and no live peer is taken for lost."""

from __future__ import annotations

import pytest

from benchmarks.full_line import play
from node.membership.failure_detector import GRACE_SECONDS, PULSE_SECONDS
from tests.faults.network import why_not

pytestmark = [pytest.mark.real, pytest.mark.long, pytest.mark.timeout(600)]


def test_full_lines_with_long_queues_lose_nobody() -> None:
    """Ten megabits a second, in queues of a second, as of many home routers. TCP alone fills them."""
    if reason := why_not():
        pytest.skip(reason)
    row = play(1000, "cubic", rounds=2, joins=False)
    assert row["averaging"]["mean"] > 20, row  # the data did fill the lines
    assert row["lost"] == row["other"] == 0, row
    patience_seconds = PULSE_SECONDS + GRACE_SECONDS
    assert row["heartbeat"]["worst"] < patience_seconds and row["heartbeat"]["mean"] < patience_seconds / 4, row
    assert row["vote"]["worst"] < patience_seconds and not row["status"]["failed"], row
