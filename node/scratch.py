"""Room in a file without a name: its bytes are the disk's and its cache's, and go back when nobody refers to it.

Files are read and written, not mapped: while a thread faults pages of a mapping in, all others wait for the process's
memory to be theirs again, the event loop's among them (docs/decisions/0012-snapshots-on-the-disk.md).
"""

from __future__ import annotations

import os
import tempfile
import weakref
from pathlib import Path

from protocols.base import Buffer


class Scratch:
    """`protocols.snapshot.Room`."""

    fresh = True

    def __init__(self, directory: Path, size: int) -> None:
        """
        Raises:
            OSError: there is no room.
        """
        with tempfile.TemporaryFile(dir=directory) as file:
            if hasattr(os, "posix_fallocate"):  # so that a disk that fills up later does not matter
                os.posix_fallocate(file.fileno(), 0, size)
            self._file = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._file)

    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into`."""
        if os.preadv(self._file, [into], offset) != len(into):
            raise OSError("a file has become shorter")

    def write(self, offset: int, data: Buffer) -> None:
        """Put all of `data` there."""
        view = memoryview(data)
        while view:
            written = os.pwrite(self._file, view, offset)
            offset, view = offset + written, view[written:]
