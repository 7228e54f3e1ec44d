"""Files that may not grow for ever: the last few are kept, in their order."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.storage import rotation as turning
from node.storage.rotation import KEEP_FILES, rotate, rotated_path


def test_full_file_is_rotated_and_oldest_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turning, "FILE_BYTES", 4)
    path = tmp_path / "a.log"
    assert not rotate(path), "there is none yet"
    for number in range(KEEP_FILES + 3):
        assert rotate(path, coming_bytes=4) is (number > 0)
        path.write_text(f"{number:04}")
        assert not rotate(path) and not rotate(path, coming_bytes=0)
    last = KEEP_FILES + 2
    assert [each.read_text() for each in (path, *(rotated_path(path, n) for n in range(1, KEEP_FILES + 1)))] == [
        f"{last - n:04}" for n in range(KEEP_FILES + 1)
    ]
    assert len(list(tmp_path.iterdir())) == KEEP_FILES + 1 and rotated_path(path).name == "a.1.log"
