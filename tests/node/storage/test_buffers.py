"""Scratch files: any number of them, none held open, and none left when its buffer is gone."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import psutil
import pytest

from node.storage import buffers
from node.storage.buffers import ScratchFile, ScratchSpace
from node.storage.statedir import SCRATCH
from tests.sim.host import SimCompute


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / SCRATCH


def count(directory: Path) -> int | None:
    """The number of files there; None: there is no directory."""
    return len([*directory.iterdir()]) if directory.exists() else None


def test_written_bytes_are_read_without_open_files(directory: Path) -> None:
    files = [ScratchFile(directory, 100) for _ in range(50)]
    for number, file in enumerate(files):
        file.write(40, bytes([number]) * 60)
    held = bytearray(60)
    for number, file in enumerate(files):
        file.read(40, memoryview(held))
        assert held == bytes([number]) * 60
    assert not [each.path for each in psutil.Process().open_files() if directory in Path(each.path).parents]
    assert directory.stat().st_mode & 0o077 == 0


def test_file_is_deleted_with_its_buffer(directory: Path) -> None:
    kept, gone = ScratchFile(directory, 8), ScratchFile(directory, 8)
    assert count(directory) == 2
    del gone
    gc.collect()
    assert count(directory) == 1
    kept.write(0, b"12345678")


async def test_leftovers_of_killed_incarnation_are_removed(tmp_path: Path, directory: Path) -> None:
    left = ScratchFile(directory, 8)
    async with ScratchSpace(tmp_path, SimCompute()) as space:
        assert count(directory) is None
        with pytest.raises(OSError):
            left.read(0, memoryview(bytearray(8)))
        file = space.allocate(8)
        assert count(directory) == 1
    assert count(directory) is None, "the next incarnation finds nothing"
    with pytest.raises(OSError):
        file.read(0, memoryview(bytearray(8)))


async def test_freed_files_are_deleted_at_next_allocation(tmp_path: Path, directory: Path) -> None:
    async with ScratchSpace(tmp_path, SimCompute()) as space:
        files = [space.allocate(8) for _ in range(3)]
        files.clear()
        gc.collect()
        assert count(directory) == 3, "deleting takes time, and the event loop must not wait for it"
        kept = space.allocate(8)
        assert count(directory) == 1
        kept.write(0, b"12345678")


def test_full_disk_leaves_nothing_behind(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, size: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(buffers, "allocate", full)
    with pytest.raises(OSError):
        ScratchFile(directory, 8)
    gc.collect()
    assert list(directory.iterdir()) == []
