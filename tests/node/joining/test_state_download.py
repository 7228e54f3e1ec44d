"""Downloaded states in a stage's directory: a newer one replaces them, and what the peer trained itself stays."""

from __future__ import annotations

from pathlib import Path

from node.joining.state_download import clear
from node.storage.checkpoint import INNER, OUTER


def home(tmp_path: Path, *names: str) -> Path:
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / OUTER).touch()
    return tmp_path


def test_newer_state_replaces_downloads_but_not_own_checkpoints(tmp_path: Path) -> None:
    directory = home(tmp_path, "000005-aa", "000010-bb", "000015-cc", ".000015-cc", ".000020-dd")
    (directory / "000005-aa" / INNER).touch()
    clear(directory, "000015-cc", also_whole=False)
    assert not (directory / ".000020-dd").exists() and len(list(directory.iterdir())) == 4
    clear(directory, "000015-cc")
    assert sorted(each.name for each in directory.iterdir()) == [".000015-cc", "000005-aa", "000015-cc"]
    clear(directory)
    assert [each.name for each in directory.iterdir()] == ["000005-aa"]


def test_stage_without_a_directory_has_nothing_to_delete(tmp_path: Path) -> None:
    clear(tmp_path / "checkpoints")
