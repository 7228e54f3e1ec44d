"""Directories for unix sockets. They go with whoever made them; of one that was killed, the next one removes them."""

from __future__ import annotations

import os
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
    """A new directory that only this user can enter, until left; None: in the system's place.

    Where nothing can be locked it is as good as any other, only that nobody removes it if this process is killed.

    Raises:
        DaemonError: it cannot be made, or its path is too long for a socket's.
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
    """A directory, and the descriptor by which it is known to be in use; None if there is no such thing here."""
    for _ in range(_TRIES):
        directory = _new(parent)
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
            pass  # swept before it was locked
        except OSError:
            return directory, None
    raise DaemonError(f"no directory for sockets can be made beside {directory}: something removes them at once")


def _new(parent: Path | None) -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    except OSError as error:
        place = parent or "the temporary directory"
        raise DaemonError(
            f"no directory for sockets can be made in {place} ({error.strerror}): make room there, or set TMPDIR"
        ) from None


def _sweep(parent: Path) -> None:
    """Remove what was left by those of this user who were killed: directories that nobody locks any more."""
    with suppress(OSError):
        names = [name for name in os.listdir(parent) if name.startswith(_PREFIX)]
        for left in (parent / name for name in names[:_MAX_SWEPT]):
            with suppress(OSError):
                if left.lstat().st_uid == os.getuid() and (held := hold(left / _LOCK)) is not None:
                    _remove(left)
                    os.close(held)


def _remove(directory: Path) -> None:
    """Its sockets and its lock, and the directory if it holds nothing else."""
    with suppress(OSError):
        for each in directory.iterdir():
            if each.is_socket():
                each.unlink(missing_ok=True)
        (directory / _LOCK).unlink(missing_ok=True)
        directory.rmdir()
