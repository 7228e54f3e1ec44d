"""Room for snapshots in files without a name: their bytes are the disk's and its cache's, not this process's memory."""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
from pathlib import Path

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
            # Space is taken now: a file with holes would kill this process when the disk is full (SIGBUS).
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                file.truncate(size)
            self.memory = mmap.mmap(file.fileno(), size)

    def rest(self) -> None:
        """Its pages go back to the cache; they are read again when they are wanted."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self.memory.madvise(mmap.MADV_DONTNEED)


def room(directory: Path, size: int) -> Room:
    """Room on the disk, or in memory if the disk is full: a round does not fail for it."""
    try:
        return DiskRoom(directory, size)
    except OSError as error:
        log.warning(
            "no %d MiB on the disk of %s (%s): they are taken from memory", size >> 20, directory, error.strerror
        )
        return Anonymous(size)
