"""Temporary files of one incarnation of this peer. They use the disk instead of memory, and are deleted after use.

There may be a hundred of them, so each is open only during an access. The next incarnation removes the files of a
killed one. Files are read and written, not mapped: while one thread faults in pages of a mapping, all other threads,
the event loop's among them, wait for the lock of the process's memory (docs/decisions/0014-checkpoints.md).
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from node.runtime import tensors
from node.storage.file_buffer import allocate
from node.storage.statedir import SCRATCH
from protocols.base import Buffer, Compute


class ScratchSpace:
    """The directory of the temporary files. An async context manager, which empties it at the start and at the end."""

    def __init__(self, home: Path, disk: Compute) -> None:
        self._directory, self._disk = home / SCRATCH, disk
        self._unused: deque[Path] = deque()

    async def __aenter__(self) -> Self:
        await self._disk.run(self._empty, 0)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        await self._disk.run(self._empty, 0)

    def allocate(self, size: int) -> ScratchFile:
        """Create a file of this many bytes. Blocks: call it on the disk's thread.

        It first deletes files that are no longer used. That is not done earlier because the last reference to a file is
        usually dropped on the event loop, and deleting a large file may take long.

        Raises:
            OSError: there is not enough space.
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
        """
        Args:
            size: in bytes; they are allocated at once.
            remove: called on any thread with the file's path when the file is no longer used; None: delete it.

        Raises:
            OSError: there is not enough space.
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
        """Fill `into` from an offset."""
        with self._opened(os.O_RDONLY) as file:
            tensors.get(file, into, offset)

    def write(self, offset: int, data: Buffer) -> None:
        """Write all of `data` at an offset."""
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
