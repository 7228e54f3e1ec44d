"""Fixtures of the tests of storage."""

from __future__ import annotations

import pytest

from node.storage import checkpoint_manager as keepers


@pytest.fixture
def small_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reserves and waits of the checkpoint manager that suit checkpoints of some kilobytes."""
    monkeypatch.setattr(keepers, "SMALL_BYTES", 4096)
    monkeypatch.setattr(keepers, "SLOW_SECONDS", 0.05)
