"""Tests of the user's directories, on machines without a usable home."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from node.runtime import directories
from node.runtime.directories import cache_directory, user_directory


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, "")  # and set back, whatever sets it
    directories._cache_directory.cache_clear()
    return tmp_path


def no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


@pytest.mark.parametrize("kind", ["none", "file", "absent", "relative", "read-only"])
def test_unusable_home_puts_caches_among_temporary_files(
    kind: str, temporary: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (temporary / "file").touch()
    match kind:
        case "none":
            monkeypatch.setattr(Path, "home", no_home)
        case "relative":
            monkeypatch.setenv("XDG_CACHE_HOME", '"/quoted"')
        case "read-only":
            monkeypatch.setenv("XDG_CACHE_HOME", "/proc")
        case _:
            monkeypatch.setenv("HOME", str(temporary / "file" if kind == "file" else "/proc/absent"))
    instead = temporary / f"starling-cache-{os.getuid()}"
    assert cache_directory() == cache_directory() == instead / "starling"
    assert os.environ["XDG_CACHE_HOME"] == str(instead) and instead.stat().st_mode & 0o777 == 0o700
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and f"caches are kept in {instead}; name a lasting directory" in lines[0]


def test_cache_that_another_user_may_write_is_refused(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", no_home)
    place = temporary / f"starling-cache-{os.getuid()}"
    place.mkdir()
    place.chmod(0o777)
    with pytest.raises(PermissionError, match="not this user's own"):
        cache_directory()
    with pytest.raises(FileNotFoundError, match="no home directory"):
        user_directory("XDG_STATE_HOME", ".local/state")
