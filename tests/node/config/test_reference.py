"""The reference pages are those of the code, and explain every field."""

from __future__ import annotations

import pytest

from node.reporting.report import RoundEvaluation, RoundReport
from node.reporting.status import PeerStatus, Status
from protocols.base import SyncStatus
from tests.golden import reference

PLAIN = {
    *("peer", "nickname", "round", "pid", "seconds_train", "seconds_average", "bytes_sent", "bytes_received"),
    *("tokens_per_second", "loop_lag_max_seconds", "spread_limit"),
}
"""Fields whose names say it."""


def test_pages_are_current() -> None:
    """If not: python -m tests.golden.reference."""
    assert reference.SETTINGS_PAGE.read_text() == reference.settings_page()
    assert reference.REPORT_PAGE.read_text() == reference.report_page()


@pytest.mark.parametrize("kind", [RoundReport, RoundEvaluation, Status, PeerStatus, SyncStatus])
def test_each_reported_field_has_a_meaning(kind: type) -> None:
    assert {name for name, _, text in reference.meanings(kind) if not text} <= PLAIN
