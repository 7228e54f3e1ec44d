"""Room in files: as many as one likes, none of them held open, nothing left of those that nobody needs."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import psutil
import pytest

from node import scratch
from node.scratch import Scratch, emptied


def test_what_is_written_is_read_and_no_file_is_held_open(tmp_path: Path) -> None:
    before = psutil.Process().num_fds()
    directory = emptied(tmp_path)
    rooms = [Scratch(directory, 100) for _ in range(50)]
    for number, room in enumerate(rooms):
        room.write(40, bytes([number]) * 60)
    held = bytearray(60)
    for number, room in enumerate(rooms):
        room.read(40, memoryview(held))
        assert held == bytes([number]) * 60
    assert psutil.Process().num_fds() == before
    assert directory.stat().st_mode & 0o077 == 0


def test_files_go_with_their_rooms_and_with_the_next_life(tmp_path: Path) -> None:
    directory = emptied(tmp_path)
    kept, gone = Scratch(directory, 8), Scratch(directory, 8)
    assert len(list(directory.iterdir())) == 2
    del gone
    gc.collect()
    assert len(list(directory.iterdir())) == 1
    kept.write(0, b"12345678")
    assert not emptied(tmp_path).exists(), "what a killed life has left is in the way of nobody"
    with pytest.raises(OSError):
        kept.read(0, memoryview(bytearray(8)))


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, size: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(scratch, "allocate", full)
    with pytest.raises(OSError):
        Scratch(emptied(tmp_path), 8)
    gc.collect()
    assert list((tmp_path / scratch.DIRECTORY).iterdir()) == []
