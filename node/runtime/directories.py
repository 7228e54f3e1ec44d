"""Directories of this user, on machines where there is no home, or none that can be written."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import BinaryIO

from node.runtime.notes import note

_VARIABLE = "XDG_CACHE_HOME"


def user_directory(variable: str, below_home: str) -> Path:
    """The directory that a variable of the XDG base directories names, or its default below the home directory.

    FileNotFoundError: this user has no home directory, or the variable does not hold a whole path.
    """
    if given := os.environ.get(variable):
        if not os.path.isabs(given):  # it would be another directory from each place; quotes look like this, too
            raise FileNotFoundError(f"{variable} is {given[:200]!a}, which is not a whole path")
        return Path(given)
    try:
        return Path.home() / below_home
    except RuntimeError:
        raise FileNotFoundError("this user has no home directory") from None


def cache_directory() -> Path:
    """Directory of what can be computed again; it may be deleted. Raises OSError.

    Where this user's own cannot be written, one among the temporary files is used, also by libraries. A note says so.
    """
    return _cache_directory(os.environ.get(_VARIABLE), os.environ.get("HOME"))


def cached_file(name: str, write: Callable[[BinaryIO], object]) -> Path:
    """Have a file of the cache written, atomically: other peers on this machine may be writing it, too."""
    place = cache_directory() / name
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, draft = tempfile.mkstemp(dir=place.parent)
    try:
        with open(descriptor, "wb") as file:
            write(file)
        os.replace(draft, place)
    except BaseException:
        os.unlink(draft)
        raise
    return place


@cache
def _cache_directory(given: str | None, home: str | None) -> Path:
    """Looked for, and reported, once for these values of the variables."""
    try:
        own = user_directory(_VARIABLE, ".cache") / "starling"
        own.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(own, os.W_OK | os.X_OK):
            return own
        why = f"{own} cannot be written"
    except OSError as error:
        why = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    instead = _temporary()
    note(f"{why}: caches are kept in {instead}; name a lasting directory by {_VARIABLE}")
    os.environ[_VARIABLE] = str(instead)  # Hugging Face's and torch's libraries read it when they are loaded
    return _cache_directory(str(instead), home)


def _temporary() -> Path:
    """A directory among the temporary files. It is named by the user's number, so another user may have made it."""
    try:
        place = Path(tempfile.gettempdir()) / f"starling-cache-{os.getuid()}"
    except FileNotFoundError:
        why = "no directory for caches can be written, nor one for temporary files: name one"
        raise FileNotFoundError(errno.ENOENT, why, _VARIABLE) from None
    place.mkdir(mode=0o700, exist_ok=True)
    found = place.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        why = f"it is not this user's own: remove it, or name another directory by {_VARIABLE}"
        raise PermissionError(errno.EACCES, why, str(place))
    return place
