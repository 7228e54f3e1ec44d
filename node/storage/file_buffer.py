"""Buffers for snapshots in files of tensors. They use the disk and its cache, not this process's memory."""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Sequence
from pathlib import Path

from node.runtime import tensors
from protocols.base import Buffer
from protocols.sync.snapshot import buffer_bytes

PARAMETERS, VELOCITY = "parameters", "velocity"


class FileBuffer:
    """A `protocols.sync.snapshot.SnapshotBuffer` in a safetensors file.

    It stays readable if the file is renamed or deleted.

    Attributes:
        path: path under which the file was opened.
    """

    def __init__(self, path: Path, start: bytes, size: int, there: bool = False) -> None:
        """Open the file if it exists with this header and size; otherwise create it.

        Args:
            start: the file's header, from `outer_header`.
            size: number of bytes that follow it.
            there: the file must exist, and is only read.

        Raises:
            OSError: there is not enough space, no access, or no such file.
        """
        self.path, self._start = path, len(start)
        self._file = os.open(path, os.O_CLOEXEC | (os.O_RDONLY if there else os.O_RDWR | os.O_CREAT), 0o600)
        weakref.finalize(self, os.close, self._file)
        same = os.fstat(self._file).st_size == len(start) + size and os.pread(self._file, len(start), 0) == start
        self.fresh = not same
        if there and self.fresh:
            raise OSError(errno.ENOENT, "the file was replaced")
        if self.fresh:
            os.ftruncate(self._file, 0)
            allocate(self._file, len(start) + size)
            tensors.put(self._file, start, 0)

    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into` from an offset."""
        tensors.get(self._file, into, self._start + offset)

    def write(self, offset: int, data: Buffer) -> None:
        """Write all of `data` at an offset."""
        tensors.put(self._file, data, self._start + offset)


def allocate(file: int, size: int) -> None:
    """Allocate `size` bytes on disk, so that later writes do not fail on a full disk.

    Raises:
        OSError: there is not enough space.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
    else:
        os.ftruncate(file, size)


def outer_header(sizes: Sequence[int], round_number: int, lineage: bytes) -> bytes:
    """Header of a file that holds an outer state: the parameters, then the velocity, by fragment.

    Args:
        sizes: number of elements of each fragment.
    """
    about = {"format": "starling outer state 1", "round": str(round_number), "lineage": lineage.hex()}
    return tensors.header(tensors.fragments((PARAMETERS, VELOCITY), sizes), about)


def outer_buffer(
    path: Path, sizes: Sequence[int], round_number: int, lineage: bytes, there: bool = False
) -> FileBuffer:
    """Open or create the file of an outer state.

    Raises:
        OSError: as for `FileBuffer`.
    """
    return FileBuffer(path, outer_header(sizes, round_number, lineage), buffer_bytes(sum(sizes)), there)
