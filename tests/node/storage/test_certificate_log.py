"""Certificates on a disk: appended entries are read back; damaged and half-written ones are not."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from node.storage import certificate_log as archives
from node.storage.certificate_log import CertificateLog, spool, stored

ENTRIES = [bytes([number]) * (number + 1) for number in range(20)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "certificates.bin"


def filled(path: Path, count: int = 20) -> CertificateLog:
    file = CertificateLog(path)
    for each in ENTRIES[:count]:
        file.extend([each])
    return file


def content(file: CertificateLog) -> list[bytes]:
    return list(file.read(0, len(file)))


def test_reader_sees_whole_entries_and_changes_nothing(path: Path) -> None:
    filled(path)
    assert list(stored(path)) == ENTRIES
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:-22], whole[:-1] + b"x", whole[:-30]):
        path.write_bytes(damaged)
        assert list(stored(path)) == ENTRIES[: 18 if damaged == whole[:-30] else 19]
        assert path.read_bytes() == damaged
    for other in (b"", b"something else"):
        path.write_bytes(other)
        assert list(stored(path)) == []
    path.unlink()
    with pytest.raises(FileNotFoundError):
        list(stored(path))
    assert not path.exists()


def test_truncated_entries_are_gone(path: Path) -> None:
    file = filled(path)
    assert list(file.read(3, 2)) == ENTRIES[3:5] and list(file.read(18, 9)) == ENTRIES[18:]
    assert path.stat().st_mode & 0o777 == 0o600
    file.truncate(20)
    file.truncate(5)
    file.extend([b"new"])
    assert content(file) == content(CertificateLog(path)) == [*ENTRIES[:5], b"new"]
    file.truncate(0)
    assert len(CertificateLog(path)) == 0
    file.extend([b"first"])
    assert content(CertificateLog(path)) == [b"first"]


@pytest.mark.parametrize("torn", range(1, 12))
def test_torn_tail_is_cut_with_one_warning(path: Path, torn: int, caplog: pytest.LogCaptureFixture) -> None:
    filled(path, 6)
    os.truncate(path, path.stat().st_size - torn)
    with caplog.at_level(logging.WARNING):
        file = CertificateLog(path)
    assert content(file) == ENTRIES[:5] and len(caplog.records) == 1 and "cut off" in caplog.text
    file.extend([ENTRIES[5]])
    caplog.clear()
    assert content(CertificateLog(path)) == ENTRIES[:6] and not caplog.records


@pytest.mark.parametrize("at", range(8, 60, 3))
def test_flipped_bit_ends_the_valid_prefix(path: Path, at: int) -> None:
    filled(path, 8)
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)
    file = CertificateLog(path)
    assert content(file) == ENTRIES[: len(file)] and len(file) < 8
    assert path.stat().st_size <= at, "the disk no longer holds the damaged entries"


@pytest.mark.parametrize("foreign", [b"x", b"something else, and longer", bytes(300_000)])
def test_foreign_file_is_not_used(path: Path, foreign: bytes) -> None:
    path.write_bytes(foreign)
    assert len(filled(path, 3)) == 3
    assert content(CertificateLog(path)) == ENTRIES[:3]


def test_entry_damaged_later_is_not_returned(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = filled(path, 6)
    data = bytearray(path.read_bytes())
    data[data.index(ENTRIES[3])] ^= 1
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        assert list(file.read(0, 6)) == ENTRIES[:3] and list(file.read(3, 1)) == []
        assert list(file.read(4, 2)) == ENTRIES[4:6]
    assert len(caplog.records) == 1 and "round 3 is damaged" in caplog.text


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """Sets how many bytes of each write the disk accepts; None: all."""
    real, room = os.pwrite, None

    def pwrite(file: int, data: bytes, at: int) -> int:
        if room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, data[:room], at)

    def accept(size: int | None) -> None:
        nonlocal room
        room = size

    monkeypatch.setattr(os, "pwrite", pwrite)
    return accept


@pytest.mark.parametrize("room", [0, 5])
def test_full_disk_costs_one_warning(
    path: Path, room: int, disk: Callable[[int | None], None], caplog: pytest.LogCaptureFixture
) -> None:
    file = filled(path, 4)
    with caplog.at_level(logging.WARNING):
        disk(room)
        for each in ENTRIES[4:8]:
            file.extend([each])
    assert len(caplog.records) == 1 and str(path) in caplog.text
    assert content(file)[:4] == ENTRIES[:4] and list(file.read(4, 9)) == ENTRIES[4:8] and len(file) == 8
    assert content(CertificateLog(path)) == ENTRIES[:4]
    with pytest.raises(OSError, match="is incomplete"):
        file.sync()
    file.truncate(7)
    disk(None)
    file.extend([b"and on"])
    file.sync()
    assert content(file) == content(CertificateLog(path)) == [*ENTRIES[:7], b"and on"]


def test_unwritten_bytes_are_bounded(
    path: Path, disk: Callable[[int | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "MAX_WAITING_BYTES", 60)
    file = filled(path, 4)
    disk(0)
    for each in ENTRIES[4:]:
        file.extend([each])
    assert len(file) == 20 and file._waiting_bytes <= 60 and list(file.read(4, 9)) == []
    assert list(file.read(18, 9)) == ENTRIES[18:]
    disk(None)
    file.extend([b"more"])
    with pytest.raises(OSError, match="is incomplete"):
        file.sync()
    assert len(file) == 21 and content(CertificateLog(path)) == ENTRIES[:4], "the entries after a gap are not used"
    file.truncate(10)
    file.truncate(4)
    file.extend([b"new"])
    assert content(file) == content(CertificateLog(path)) == [*ENTRIES[:4], b"new"]


def test_disk_full_from_the_start_recovers(path: Path, disk: Callable[[int | None], None]) -> None:
    disk(0)
    file = filled(path, 3)
    disk(None)
    file.extend([ENTRIES[3]])
    assert content(CertificateLog(path)) == ENTRIES[:4]


def test_spool_leaves_no_file_and_needs_no_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for log in (CertificateLog.anonymous(tmp_path), spool(tmp_path)):
        log.extend([b"one"])
        assert isinstance(log, CertificateLog) and content(log) == [b"one"] and not list(tmp_path.iterdir())
    assert not caplog.records
    archive = spool(tmp_path / "missing")
    archive.extend([b"one"])
    assert list(archive.read(0, 1)) == [b"one"] and len(caplog.records) == 1
