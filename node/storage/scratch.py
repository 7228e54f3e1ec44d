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
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from node.storage import tensors
from node.storage.file_buffer import allocate
from protocols.base import Buffer, Compute

DIRECTORY = "scratch"


class ScratchSpace:
    """The directory for it. An async context manager: it is empty at the beginning, and gone at the end."""

    def __init__(self, home: Path, disk: Compute) -> None:
        self._directory, self._disk = home / DIRECTORY, disk
        self._useless: deque[Path] = deque()

    async def __aenter__(self) -> Self:
        await self._disk.run(self._empty, 0)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        await self._disk.run(self._empty, 0)

    def room(self, size: int) -> ScratchFile:
        """Room of so many bytes; blocks: to be called on the disk's thread.

        Files that nobody needs any more go first: a disk may take its time over large ones, and the last reference to
        a room is as a rule dropped on the event loop.

        Raises:
            OSError: there is none.
        """
        while self._useless:
            _remove(self._useless.popleft())
        return ScratchFile(self._directory, size, self._useless.append)

    def _empty(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)


class ScratchFile:
    """`protocols.sync.snapshot.Room`."""

    fresh = True

    def __init__(self, directory: Path, size: int, remove: Callable[[Path], None] | None = None) -> None:
        """
        Args:
            remove: called with the file once nobody needs it, on any thread; None: it is deleted there and then.

        Raises:
            OSError: there is no room.
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
