"""Files that grow for ever and may not: the last few of a set size are kept, `name.1.suffix` being the one before."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

FILE_BYTES = 32 << 20
KEEP_FILES = 3
"""Older ones, besides the present one."""


def rotated_path(path: Path, number: int = 1) -> Path:
    """The file that was the present one so many turns ago."""
    return path.with_suffix(f".{number}{path.suffix}")


def rotate(path: Path, coming_bytes: int = 0) -> bool:
    """Put a file aside that is full, before so many bytes more are written to a new one; returns whether it was.

    Raises:
        OSError: it cannot be.
    """
    try:
        if path.stat().st_size + coming_bytes <= FILE_BYTES:
            return False
    except FileNotFoundError:
        return False
    for number in range(KEEP_FILES, 1, -1):
        with suppress(FileNotFoundError):
            rotated_path(path, number - 1).replace(rotated_path(path, number))
    path.replace(rotated_path(path))
    return True
