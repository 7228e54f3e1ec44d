"""Room for snapshots in files of tensors: their bytes are the disk's and its cache's, not this process's memory."""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Sequence
from pathlib import Path

from node.storage import tensors
from protocols.base import Buffer
from protocols.sync.snapshot import buffer_bytes

PARAMETERS, VELOCITY = "parameters", "velocity"


class FileBuffer:
    """`protocols.sync.snapshot.Room` in a safetensors file; it stays readable if the file is renamed or deleted
    meanwhile.

    Attributes:
        path: where it was opened.
    """

    def __init__(self, path: Path, start: bytes, size: int, there: bool = False) -> None:
        """Take the file that is there, if it is one of this header, else make it.

        Args:
            start: the file's header, as `outer_header` makes it.
            size: bytes that follow it.
            there: it has to be there, and is only read.

        Raises:
            OSError: there is no room, no access, or no such file.
        """
        self.path, self._start = path, len(start)
        self._file = os.open(path, os.O_CLOEXEC | (os.O_RDONLY if there else os.O_RDWR | os.O_CREAT), 0o600)
        weakref.finalize(self, os.close, self._file)
        same = os.fstat(self._file).st_size == len(start) + size and os.pread(self._file, len(start), 0) == start
        self.fresh = not same
        if there and self.fresh:
            raise OSError(errno.ENOENT, "it is another file than it was")
        if self.fresh:
            os.ftruncate(self._file, 0)
            allocate(self._file, len(start) + size)
            tensors.put(self._file, start, 0)

    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into`."""
        tensors.get(self._file, into, self._start + offset)

    def write(self, offset: int, data: Buffer) -> None:
        """Put all of `data` there."""
        tensors.put(self._file, data, self._start + offset)


def allocate(file: int, size: int) -> None:
    """Take so many bytes of the disk, so that one that fills up later does not matter.

    Raises:
        OSError: there are not so many.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
    else:
        os.ftruncate(file, size)


def outer_header(sizes: Sequence[int], round_number: int, lineage: bytes) -> bytes:
    """Of a file that holds an outer state: the parameters, then the velocity, by fragment.

    Args:
        sizes: elements of each fragment.
    """
    about = {"format": "starling outer state 1", "round": str(round_number), "lineage": lineage.hex()}
    return tensors.header(tensors.fragments((PARAMETERS, VELOCITY), sizes), about)


def outer_buffer(
    path: Path, sizes: Sequence[int], round_number: int, lineage: bytes, there: bool = False
) -> FileBuffer:
    """Room for an outer state.

    Raises:
        OSError: as `FileBuffer`.
    """
    return FileBuffer(path, outer_header(sizes, round_number, lineage), buffer_bytes(sum(sizes)), there)
