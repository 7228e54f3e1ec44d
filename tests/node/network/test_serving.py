"""What a server says of those who break its rules."""

from __future__ import annotations

import logging

import pytest

from node.network.serving import Serving
from protocols.base import BadPayload


def test_rule_breaker_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "node.network.serving")
    serving = Serving(4, 2)
    for number in range(100):
        serving._on_bad("liar", BadPayload(f"a body of {number} bytes"))
    serving._on_bad("other", BadPayload("nonsense"))
    warnings = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert warnings == ["liar broke the rules: a body of 0 bytes", "other broke the rules: nonsense"]
    assert len(caplog.records) == 101 and serving.refused["liar", "bad payload"] == 100
