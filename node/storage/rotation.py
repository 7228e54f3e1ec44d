"""Rotation of files that would grow for ever: a few older ones are kept, the newest of them as `name.1.suffix`."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

FILE_BYTES = 32 << 20
KEEP_FILES = 3
"""Number of older files that are kept besides the present one."""


def rotated_path(path: Path, number: int = 1) -> Path:
    """Path of the file that was the present one before the last `number` rotations."""
    return path.with_suffix(f".{number}{path.suffix}")


def rotate(path: Path, coming_bytes: int = 0) -> bool:
    """Rename a file if `coming_bytes` more would make it too large. Return whether it was renamed.

    Raises:
        OSError: it cannot be renamed.
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
