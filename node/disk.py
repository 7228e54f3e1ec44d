"""Room for snapshots in files without a name: their bytes are the disk's and its cache's, not this process's memory.

Files are read and written, not mapped: while a thread faults pages of a mapping in, all others wait for the process's
memory to be theirs again, the event loop's among them (measured: for 100 ms and more, at 200 MB).
"""

from __future__ import annotations

import logging
import os
import tempfile
import weakref
from pathlib import Path

from protocols.base import Buffer
from protocols.snapshot import Anonymous, Room

log = logging.getLogger(__name__)


class DiskRoom:
    """`protocols.snapshot.Room`."""

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
            raise OSError("a snapshot's file has become shorter")

    def write(self, offset: int, data: Buffer) -> None:
        """Put all of `data` there."""
        view = memoryview(data)
        while view:
            written = os.pwrite(self._file, view, offset)
            offset, view = offset + written, view[written:]


def room(directory: Path, size: int) -> Room:
    """Room on the disk, or in memory if the disk is full: a round does not fail for it."""
    try:
        return DiskRoom(directory, size)
    except OSError as error:
        log.warning(
            "no %d MiB on the disk of %s (%s): they are taken from memory", size >> 20, directory, error.strerror
        )
        return Anonymous(size)
