"""Exports of these tests are not loaded again one by one, as a process for each would take seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.export import hugging_face
from node.export.checking import Expected


@pytest.fixture(autouse=True)
def written(monkeypatch: pytest.MonkeyPatch) -> dict[Path, Expected]:
    """What each export must load as, by the folder that it was written to."""
    found: dict[Path, Expected] = {}
    monkeypatch.setattr(hugging_face, "require_loading", found.__setitem__)
    return found
