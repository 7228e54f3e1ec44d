"""Directories for sockets: removed by the process that made them, or by the next one if that was killed."""

from __future__ import annotations

import errno
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from node.network import sockets
from node.network.daemon import DaemonError
from node.network.sockets import socket_directory
from node.runtime.locks import hold

KILLED = """
import os, signal, socket, sys
from pathlib import Path
from node.network.sockets import socket_directory

with socket_directory(Path(sys.argv[1])) as directory:
    socket.socket(socket.AF_UNIX).bind(str(directory / "control"))
    print(directory, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def left_by_a_killed_process(directory: Path) -> Path:
    died = subprocess.run((sys.executable, "-c", KILLED, str(directory)), capture_output=True, text=True)
    assert died.returncode == -signal.SIGKILL, died.stderr
    left = Path(died.stdout.strip())
    assert (left / "control").is_socket()
    return left


def test_socket_directory_is_removed_with_its_sockets(directory: Path) -> None:
    with socket_directory(directory) as made:
        assert made.parent == directory and made.stat().st_mode & 0o777 == 0o700
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(made / "s"))
    assert list(directory.iterdir()) == []


def test_directory_of_killed_process_is_removed_by_next(directory: Path) -> None:
    left = left_by_a_killed_process(directory)
    with socket_directory(directory) as first, socket_directory(directory) as second:
        assert set(directory.iterdir()) == {first, second} and not left.exists()


def test_used_or_foreign_directories_are_kept(directory: Path) -> None:
    foreign, kept = directory / "starling-swarm-x", directory / "starling-kept"
    for each in (foreign, kept):
        each.mkdir()
        (each / "precious").write_text("mine")
    (kept / "lock").touch()
    with socket_directory(directory) as first:
        with socket_directory(directory):
            assert (first / "lock").exists()
        assert first.exists()
    assert (foreign / "precious").exists() and (kept / "precious").exists()


def test_other_entries_do_not_stop_the_cleanup(directory: Path) -> None:
    left = left_by_a_killed_process(directory)
    (directory / "starling-file").touch()
    (directory / "starling-loop").symlink_to(directory / "starling-loop")
    (directory / "starling-long").symlink_to("a" * 300)
    (directory / "long").symlink_to("a" * 300)
    with socket_directory(directory):
        assert not left.exists()


def test_directories_work_without_file_locks(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(lock: Path) -> int | None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(sockets, "hold", refused)
    with socket_directory(directory) as first, socket_directory(directory) as second:
        assert set(directory.iterdir()) == {first, second}
    assert list(directory.iterdir()) == []


def test_missing_parent_gives_one_line_with_a_remedy(directory: Path) -> None:
    with pytest.raises(DaemonError, match=r"No such file.*set TMPDIR"), socket_directory(directory / "gone"):
        pass


def test_directory_removed_before_locking_is_recreated(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = 0

    def swept(lock: Path) -> int | None:
        nonlocal lost
        if lost < limit:
            lost += 1
            sockets._remove(lock.parent)
        return hold(lock)

    monkeypatch.setattr(sockets, "hold", swept)
    limit = 2
    with socket_directory(directory) as made:
        assert list(directory.iterdir()) == [made] and lost == 2
    limit = 1000
    with pytest.raises(DaemonError, match="removes them at once"), socket_directory(directory):
        pass
