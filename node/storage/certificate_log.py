"""The certificates of a peer's chain on its disk: one file that grows by one entry a round.

`CertificateLog(path)` opens it, or makes it; `Chain(..., archive=CertificateFile(path))` goes on from what it holds.
Both read the whole file, for seconds if it holds thousands of rounds: they are made off the event loop. It has to
be at hand before the chain moves, and belongs to one chain of one run: with another run, another file
(`node.storage.statedir` puts files aside). `sync` makes what was appended survive a power cut; it is worth its
milliseconds before a checkpoint is put in place that lies beyond what was synced. With
`ChainSyncOptions(make_archive=partial(spool, directory))` long trails are verified on the disk, too
(`protocols.sync.head_verifier`).

An entry is its length and checksum, 4 bytes each, and the encoded certificate; eight bytes at the beginning of the file
name its form. What a crash or a bad disk made of the end is cut off when the file is opened.
"""

from __future__ import annotations

import errno
import logging
import os
import tempfile
import weakref
import zlib
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from protocols.history.round_log import Archive, ListArchive
from protocols.wire import MAX_HEADER_BYTES

log = logging.getLogger(__name__)

MAX_WAITING_BYTES = 32 << 20
"""Of certificates that a full disk does not take, so much is kept in memory, until it does."""
_MAGIC = b"starcer1"
_PREFIX_BYTES = 8
_SCAN_BYTES = 1 << 20
_PIECE = 64


def spool(directory: Path) -> Archive:
    """Room for certificates that are being judged: on the disk, or in memory where that fails."""
    try:
        return CertificateLog.anonymous(directory)
    except OSError as error:
        log.warning(
            "no room for certificates on the disk of %s (%s): they are kept in memory", directory, error.strerror
        )
        return ListArchive()


class CertificateLog:
    """`protocols.history.round_log.Archive`. Certificates that the disk does not take wait in memory, those that do not
    fit there are lost: whoever restarts then goes on from the last one before them.

    A round appends a few kilobytes, on the event loop: they go to the cache, and only `sync` waits for the disk.
    """

    def __init__(self, path: Path, name: str = "") -> None:
        """
        Args:
            name: what a person is told that it is; else its path.

        Raises:
            OSError: it can neither be read nor made.
        """
        self._open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), name or str(path))

    @classmethod
    def anonymous(cls, directory: Path) -> Self:
        """One without a name, which goes with its last user: for certificates that are being judged.

        Raises:
            OSError: it cannot be made.
        """
        file = cls.__new__(cls)
        with tempfile.TemporaryFile(dir=directory) as temporary:
            file._open(os.dup(temporary.fileno()), f"a file in {directory}")
        return file

    def _open(self, file: int, name: str) -> None:
        self._file, self._name = file, name
        weakref.finalize(self, os.close, file)
        self._ends = array("Q", [len(_MAGIC)])  # of the entries; the first is where they begin
        self._waiting: list[bytes] = []  # after those on the disk
        self._waiting_bytes = self._lost = 0  # how many are lost between those on the disk and those that wait
        self._failing = False
        self._scan()

    def _scan(self) -> None:
        """Find the entries; cut off what is none."""
        size = os.fstat(self._file).st_size
        if os.pread(self._file, len(_MAGIC), 0) == _MAGIC:
            at, data = len(_MAGIC), b""
            while piece := os.pread(self._file, _SCAN_BYTES, at + len(data)):
                data += piece
                used = self._whole(data)
                if not used and len(data) > _PREFIX_BYTES + MAX_HEADER_BYTES:
                    break
                at, data = at + used, data[used:]
        elif size:
            self._tell("does not begin as a file of certificates")
            os.ftruncate(self._file, 0)
        if self._ends[-1] < size:
            log.warning(
                "%s: the last %d bytes are damaged and are cut off: the rounds in them are asked of others",
                self._name, size - self._ends[-1],
            )  # fmt: skip
            os.ftruncate(self._file, self._ends[-1])

    def _whole(self, data: bytes) -> int:
        """Note the whole entries at the beginning of `data`; returns the bytes that they take."""
        at = 0
        while (entry := _entry(data, at)) is not None:
            at += _PREFIX_BYTES + len(entry)
            self._ends.append(self._ends[-1] + _PREFIX_BYTES + len(entry))
        return at

    # -- protocols.history.round_log.Archive
    # --------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._written + self._lost + len(self._waiting)

    @property
    def _written(self) -> int:
        return len(self._ends) - 1

    def extend(self, certificates: Sequence[bytes]) -> None:
        self._waiting += certificates
        self._waiting_bytes += sum(map(len, certificates))
        self._flush()
        while self._waiting_bytes > MAX_WAITING_BYTES:
            self._waiting_bytes -= len(self._waiting.pop(0))
            self._lost += 1

    def read(self, place: int, count: int) -> Sequence[bytes]:
        if place >= self._written:
            at = place - self._written - self._lost
            return self._waiting[at : at + count] if at >= 0 else ()
        count = min(count, self._written - place)
        begin, end = self._ends[place], self._ends[place + count]
        try:
            data = os.pread(self._file, end - begin, begin)
        except OSError as error:
            self._tell(f"cannot be read ({error.strerror})")
            return ()
        found: list[bytes] = []
        for each in range(count):
            entry = _entry(data, self._ends[place + each] - begin)
            if entry is None:
                self._tell(f"round {place + each} is damaged")
                break
            found.append(entry)
        return found

    def truncate(self, length: int) -> None:
        if length < self._written:
            del self._ends[length + 1 :]
            try:
                os.ftruncate(self._file, self._ends[-1])
            except OSError as error:  # what follows does not link, or is written over
                self._tell(f"cannot be cut ({error.strerror})")
        del self._waiting[max(0, length - self._written - self._lost) :]
        self._waiting_bytes = sum(map(len, self._waiting))
        self._lost = min(self._lost, length - self._written)

    # -- the disk -----------------------------------------------------------------------------------------------------

    def sync(self) -> None:
        """Have the disk keep what was appended; blocks: to be called off the event loop.

        Raises:
            OSError: it does not, or has not taken all of it.
        """
        os.fsync(self._file)
        if self._failing and (self._waiting or self._lost):
            raise OSError(errno.ENOSPC, f"{self._name} is not whole: certificates wait for room")

    def _flush(self) -> None:
        while self._waiting and not self._lost:
            piece = self._waiting[:_PIECE]
            entries = [len(each).to_bytes(4, "big") + _checksum(each) + each for each in piece]
            begin = (_MAGIC, 0) if not self._written else (b"", self._ends[-1])
            if not self._write(begin[0] + b"".join(entries), begin[1]):
                break
            for each in entries:
                self._ends.append(self._ends[-1] + len(each))
            del self._waiting[:_PIECE]
            self._waiting_bytes, self._failing = sum(map(len, self._waiting)), False

    def _write(self, data: bytes, at: int) -> bool:
        try:
            if os.pwrite(self._file, data, at) == len(data):
                return True
            why = "no space left"
        except OSError as error:
            why = error.strerror or str(error)
        self._tell(f"cannot be written ({why})")
        return False

    def _tell(self, what: str) -> None:
        """One line, until the disk takes something again."""
        if not self._failing:
            log.warning("%s: %s: rounds go on, others may have to be asked for some that were", self._name, what)
        self._failing = True


def _checksum(certificate: bytes) -> bytes:
    return zlib.crc32(certificate).to_bytes(4, "big")


def _entry(data: bytes, at: int) -> bytes | None:
    """The certificate whose entry begins there; None if no whole one does."""
    size = int.from_bytes(data[at : at + 4], "big")
    certificate = data[at + _PREFIX_BYTES : at + _PREFIX_BYTES + size]
    if not 0 < len(certificate) == size <= MAX_HEADER_BYTES:
        return None
    return certificate if data[at + 4 : at + _PREFIX_BYTES] == _checksum(certificate) else None
