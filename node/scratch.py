"""Room in files of a life of this peer: their bytes are the disk's and its cache's, and go when nobody needs them.

There may be a hundred of them, so each is open only while it is used. What a killed life left is removed by the next.
Files are read and written, not mapped: while a thread faults pages of a mapping in, all others wait for the process's
memory to be theirs again, the event loop's among them (docs/decisions/0012-snapshots-on-the-disk.md).
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from node import tensors
from node.disk import allocate
from protocols.base import Buffer

DIRECTORY = "scratch"


def emptied(home: Path) -> Path:
    """The directory for it, without anything in it."""
    shutil.rmtree(home / DIRECTORY, ignore_errors=True)
    return home / DIRECTORY


class Scratch:
    """`protocols.snapshot.Room`."""

    fresh = True

    def __init__(self, directory: Path, size: int) -> None:
        """
        Raises:
            OSError: there is no room.
        """
        directory.mkdir(mode=0o700, exist_ok=True)
        file, name = tempfile.mkstemp(dir=directory)
        self._path = Path(name)
        weakref.finalize(self, _remove, self._path)
        try:
            allocate(file, size)
        finally:
            os.close(file)

    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into`."""
        with self._opened(os.O_RDONLY) as file:
            tensors.get(file, into, offset)

    def write(self, offset: int, data: Buffer) -> None:
        """Put all of `data` there."""
        with self._opened(os.O_WRONLY) as file:
            tensors.put(file, data, offset)

    @contextmanager
    def _opened(self, how: int) -> Iterator[int]:
        file = os.open(self._path, how | os.O_CLOEXEC)
        try:
            yield file
        finally:
            os.close(file)


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()
