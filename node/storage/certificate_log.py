"""The certificates of a peer's chain on disk: one file that grows by one entry a round.

`Chain(..., archive=CertificateLog(path))` resumes the chain in the file. Both read the whole file, which takes seconds
for thousands of rounds: construct them outside the event loop. The log belongs to one chain of one run. Call `sync`,
which makes appended certificates survive a power failure, before publishing a checkpoint that is later than those.

The file starts with eight bytes that name its format. An entry is length and checksum, 4 bytes each, and the encoded
certificate. When the file is opened, a damaged end, left by a crash or a bad disk, is cut off.
"""

from __future__ import annotations

import errno
import logging
import os
import tempfile
import weakref
import zlib
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

from protocols.history.round_log import Archive, ListArchive
from protocols.wire import MAX_HEADER_BYTES

log = logging.getLogger(__name__)

MAX_WAITING_BYTES = 32 << 20  # limit of certificates that wait in memory while the disk is full
_MAGIC = b"starcer1"
_PREFIX_BYTES = 8
_SCAN_BYTES = 1 << 20
_PIECE = 64


def spool(directory: Path) -> Archive:
    """An archive for certificates that are being verified: on disk, or in memory if that fails."""
    try:
        return CertificateLog.anonymous(directory)
    except OSError as error:
        log.warning("cannot store certificates in %s (%s): keeping them in memory instead", directory, error.strerror)
        return ListArchive()


def stored(path: Path) -> Iterator[bytes]:
    """Yield the encoded certificates of a file, which may grow, up to the first damaged one. Raises OSError."""
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            return
        while prefix := file.read(_PREFIX_BYTES):
            size = int.from_bytes(prefix[:4], "big")
            entry = _entry(prefix + file.read(min(size, MAX_HEADER_BYTES)), 0)
            if entry is None:
                return
            yield entry


class CertificateLog:
    """`protocols.history.round_log.Archive` in a file.

    While the disk accepts no more, certificates wait in memory, up to `MAX_WAITING_BYTES`; the oldest beyond that are
    lost. A round appends a few kilobytes on the event loop, which go to the page cache; only `sync` waits for the disk.
    """

    def __init__(self, path: Path, name: str = "") -> None:
        """Raises OSError. `name` is that of the file in log messages; empty: its path."""
        self._open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), name or str(path))

    @classmethod
    def anonymous(cls, directory: Path) -> Self:
        """Create an unnamed file, which is deleted with its last user. Raises OSError."""
        file = cls.__new__(cls)
        with tempfile.TemporaryFile(dir=directory) as temporary:
            file._open(os.dup(temporary.fileno()), f"a file in {directory}")
        return file

    def _open(self, file: int, name: str) -> None:
        self._file, self._name = file, name
        weakref.finalize(self, os.close, file)
        self._ends = array("Q", [len(_MAGIC)])  # ends of the entries; the first value is where they begin
        self._waiting: list[bytes] = []  # certificates after those on disk
        self._waiting_bytes = self._lost = 0  # `_lost`: number between those on disk and those that wait
        self._failing = False
        self._scan()

    def _scan(self) -> None:
        """Find the entries, and cut off the file after the last whole one."""
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
            self._warn("is not a file of certificates")
            os.ftruncate(self._file, 0)
        if self._ends[-1] < size:
            log.warning(
                "%s: the last %d bytes are damaged and are cut off: this peer fetches their rounds from other peers",
                self._name, size - self._ends[-1],
            )  # fmt: skip
            os.ftruncate(self._file, self._ends[-1])

    def _whole(self, data: bytes) -> int:
        """Register the whole entries at the beginning of `data`, and return their size in bytes."""
        at = 0
        while (entry := _entry(data, at)) is not None:
            at += _PREFIX_BYTES + len(entry)
            self._ends.append(self._ends[-1] + _PREFIX_BYTES + len(entry))
        return at

    # -- the methods of `Archive` -------------------------------------------------------------------------------------

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
            self._warn(f"cannot be read ({error.strerror})")
            return ()
        found: list[bytes] = []
        for each in range(count):
            entry = _entry(data, self._ends[place + each] - begin)
            if entry is None:
                self._warn(f"round {place + each} is damaged")
                break
            found.append(entry)
        return found

    def truncate(self, length: int) -> None:
        if length < self._written:
            del self._ends[length + 1 :]
            try:
                os.ftruncate(self._file, self._ends[-1])
            except OSError as error:  # harmless: later entries do not extend the chain, or are overwritten
                self._warn(f"cannot be cut ({error.strerror})")
        del self._waiting[max(0, length - self._written - self._lost) :]
        self._waiting_bytes = sum(map(len, self._waiting))
        self._lost = min(self._lost, length - self._written)

    # -- the disk -----------------------------------------------------------------------------------------------------

    def sync(self) -> None:
        """Flush appended certificates to disk. Blocks. Raises OSError if some certificates are not in the file, too."""
        os.fsync(self._file)
        if self._failing and (self._waiting or self._lost):
            raise OSError(errno.ENOSPC, f"{self._name} is incomplete: the disk does not take more certificates")

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
        self._warn(f"cannot be written ({why})")
        return False

    def _warn(self, what: str) -> None:
        """Log a problem, once until the next successful write."""
        if not self._failing:
            log.warning("%s: %s: rounds continue, but after a restart this peer may fetch some again", self._name, what)
        self._failing = True


def _checksum(certificate: bytes) -> bytes:
    return zlib.crc32(certificate).to_bytes(4, "big")


def _entry(data: bytes, at: int) -> bytes | None:
    """The certificate whose entry begins at an offset; None if the entry is incomplete or damaged."""
    size = int.from_bytes(data[at : at + 4], "big")
    certificate = data[at + _PREFIX_BYTES : at + _PREFIX_BYTES + size]
    if not 0 < len(certificate) == size <= MAX_HEADER_BYTES:
        return None
    return certificate if data[at + 4 : at + _PREFIX_BYTES] == _checksum(certificate) else None
