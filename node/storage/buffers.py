"""Files that hold large data instead of memory: those of snapshots, and temporary ones that are deleted after use.

There may be a hundred temporary files, so each is open only during an access. The next incarnation removes the files of
a killed one. Files are read and written, not mapped: while one thread faults in pages of a mapping, all other threads,
the event loop's among them, wait for the lock of the process's memory (docs/decisions/0014-checkpoints.md).
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from node.runtime import tensors
from node.storage.statedir import SCRATCH
from protocols.base import Buffer, Compute
from protocols.sync.snapshot import buffer_bytes

"""Directory of the temporary files, in the state directory."""
PARAMETERS, VELOCITY = "parameters", "velocity"


class FileBuffer:
    """A `protocols.sync.snapshot.SnapshotBuffer` in a safetensors file, readable even if that is renamed or deleted."""

    def __init__(self, path: Path, start: bytes, size: int, there: bool = False) -> None:
        """Open the file if it exists with this header (`outer_header`) and `size` bytes after it; otherwise create it.

        With `there`, the file must exist, and is only read. Raises OSError.
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
        tensors.get(self._file, into, self._start + offset)

    def write(self, offset: int, data: Buffer) -> None:
        tensors.put(self._file, data, self._start + offset)


def allocate(file: int, size: int) -> None:
    """Allocate `size` bytes on disk, so that later writes do not fail on a full disk. Raises OSError."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
    else:
        os.ftruncate(file, size)


def outer_header(sizes: Sequence[int], round_number: int, lineage: bytes) -> bytes:
    """Header of a file that holds an outer state: the parameters, then the velocity, by fragment of these `sizes`."""
    about = {"format": "starling outer state 1", "round": str(round_number), "lineage": lineage.hex()}
    return tensors.header(tensors.fragments((PARAMETERS, VELOCITY), sizes), about)


def outer_buffer(
    path: Path, sizes: Sequence[int], round_number: int, lineage: bytes, there: bool = False
) -> FileBuffer:
    return FileBuffer(path, outer_header(sizes, round_number, lineage), buffer_bytes(sum(sizes)), there)


class ScratchSpace:
    """The directory of the temporary files. An async context manager, which empties it at the start and at the end."""

    def __init__(self, home: Path, disk: Compute) -> None:
        self._directory, self._disk = home / SCRATCH, disk
        self._unused: deque[Path] = deque()

    async def __aenter__(self) -> Self:
        await self._disk.run(self._empty, 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._disk.run(self._empty, 0)

    def allocate(self, size: int) -> ScratchFile:
        """Create a file of this many bytes. Blocks: call it on the disk's thread. Raises OSError.

        It first deletes unused files: the last reference is usually dropped on the event loop, where that may take
        long.
        """
        while self._unused:
            _remove(self._unused.popleft())
        return ScratchFile(self._directory, size, self._unused.append)

    def _empty(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)


class ScratchFile:
    """A `protocols.sync.snapshot.SnapshotBuffer` in a temporary file."""

    fresh = True

    def __init__(self, directory: Path, size: int, remove: Callable[[Path], None] | None = None) -> None:
        """Allocate `size` bytes at once. Raises OSError.

        `remove` is called on any thread with the file's path when the file is no longer used; None: delete it.
        """
        directory.mkdir(mode=0o700, exist_ok=True)
        file, name = tempfile.mkstemp(dir=directory)
        self._path = Path(name)
        weakref.finalize(self, remove or _remove, self._path)
        try:
            allocate(file, size)
        finally:
            os.close(file)

    def read(self, offset: int, into: memoryview) -> None:
        with self._opened(os.O_RDONLY) as file:
            tensors.get(file, into, offset)

    def write(self, offset: int, data: Buffer) -> None:
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
