"""What a transport serves, and what it logs about peers that break its rules."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from node.network.libp2p import LibP2PTransport
from node.runtime import identity
from node.streams.serving import Serving
from node.streams.traffic import Traffic
from protocols.base import BadPayload
from tests.conformance.other_process import echo


def test_rule_breaker_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "node.streams.serving")
    serving = Serving(4, 2, Traffic())
    for number in range(100):
        serving._on_bad("liar", BadPayload(f"a body of {number} bytes"))
    serving._on_bad("other", BadPayload("nonsense"))
    warnings = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert warnings == ["liar broke the rules: a body of 0 bytes", "other broke the rules: nonsense"]
    assert len(caplog.records) == 101 and serving.refused["liar", "bad payload"] == 100


def test_serving_a_method_twice_is_an_error(tmp_path: Path) -> None:
    transport = LibP2PTransport(identity.create(tmp_path / "key"))
    transport.serve("echo", echo)
    for method in ("echo", "", "m" * 65):
        with pytest.raises(ValueError, match="is served already, or is not a name"):
            transport.serve(method, echo)


async def test_scope_ends_what_was_served_in_it(tmp_path: Path) -> None:
    """So a process can serve the same methods for its next incarnation. What was served before it stays."""
    transport = LibP2PTransport(identity.create(tmp_path / "key"))
    transport.serve("before", echo)
    for _ in range(2):
        async with transport.scope():
            transport.serve("echo", echo)
    with pytest.raises(ValueError, match="is served already"):
        transport.serve("before", echo)
