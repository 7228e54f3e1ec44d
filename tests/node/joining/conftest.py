from __future__ import annotations

from pathlib import Path

import pytest

from node.storage.statedir import StateDir


@pytest.fixture
def here(tmp_path: Path) -> StateDir:
    return StateDir.open(tmp_path / "peer")
