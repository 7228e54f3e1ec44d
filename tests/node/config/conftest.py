"""Fixtures of the tests of configuration."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The path of a run file that a test writes."""
    return tmp_path / "run.toml"
