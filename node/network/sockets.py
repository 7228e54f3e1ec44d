"""Directories for unix sockets. Their owner removes them; if it was killed, the next process to create one does."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from node.network.daemon import DaemonError
from node.runtime.locks import hold

_PREFIX = "starling-"
_LOCK = "lock"
_MAX_LENGTH = 76  # Linux allows a socket's path 107 bytes, macOS 103; hivemind's file names take 26
_MAX_SWEPT = 2000
_TRIES = 8


@contextmanager
def socket_directory(parent: Path | None = None) -> Iterator[Path]:
    """Create a directory that only this user can enter, and remove it on exit. None: among the temporary files.

    On a file system without locks, it stays behind if this process is killed. Raises `DaemonError`.
    """
    directory, held = _made(parent)
    try:
        _sweep(directory.parent)
        yield directory
    finally:
        _remove(directory)
        if held is not None:
            os.close(held)


def _made(parent: Path | None) -> tuple[Path, int | None]:
    """A new directory with the descriptor of its lock, or None where locks do not work."""
    for _ in range(_TRIES):
        try:
            directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        except OSError as error:
            raise DaemonError(
                f"cannot create a directory for sockets in {parent or 'the temporary directory'} ({error.strerror}): "
                "free space in it, or set TMPDIR"
            ) from None
        if len(bytes(directory)) > _MAX_LENGTH:
            directory.rmdir()
            raise DaemonError(
                f"{directory} is too long a path for sockets (over {_MAX_LENGTH} bytes): "
                "set TMPDIR, or the runtime directory, to a shorter one"
            )
        lock = directory / _LOCK
        try:
            lock.touch(0o600)
            if (held := hold(lock)) is not None:
                if lock.exists():
                    return directory, held
                os.close(held)
        except FileNotFoundError:
            pass  # another process removed it before it was locked
        except OSError:
            return directory, None
    raise DaemonError(f"cannot create a directory for sockets beside {directory}: another program removes them at once")


def dead_socket_directories() -> list[Path]:
    """Those among the temporary files that killed processes of this user have left."""
    return [*_dead(Path(tempfile.gettempdir()))]


def _sweep(parent: Path) -> None:
    for left in _dead(parent):
        _remove(left)


def _dead(parent: Path) -> Iterator[Path]:
    """Directories that killed processes of this user have left: those that no process locks any more. Each is locked
    until the next is asked for."""
    with suppress(OSError):
        names = [name for name in os.listdir(parent) if name.startswith(_PREFIX)]
        for left in (parent / name for name in names[:_MAX_SWEPT]):
            with suppress(OSError):
                seen = left.lstat()  # never a link's target
                is_ours = seen.st_uid == os.getuid() and stat.S_ISDIR(seen.st_mode)
                if is_ours and (held := hold(left / _LOCK)) is not None:
                    try:
                        yield left
                    finally:
                        os.close(held)


def _remove(directory: Path) -> None:
    with suppress(OSError):
        for each in directory.iterdir():
            if each.is_socket():
                each.unlink(missing_ok=True)
        (directory / _LOCK).unlink(missing_ok=True)
        directory.rmdir()
