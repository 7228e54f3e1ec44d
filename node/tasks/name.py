"""Names of built-in tasks and of users' own tasks, the latter's options and errors. This module imports no task."""

from __future__ import annotations

import math
import re
from typing import Any

HUGGING_FACE = "hf"
LOOP = "loop"  # each peer trains by a script of its user's own
BUILT_IN = ("gpt", "paced", HUGGING_FACE, LOOP)
MAX_NAME_CHARACTERS = 128
MAX_OPTIONS = 64
MAX_OPTION_CHARACTERS = 1024
_OWN = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)


class TaskError(ValueError):
    """A user's task cannot be built, or breaks its contract. The message is one line that names the task."""


def is_own(name: str) -> bool:
    """Whether a name is that of a user's own task: package.module:factory, in ASCII, at most 128 characters."""
    return len(name) <= MAX_NAME_CHARACTERS and _OWN.fullmatch(name) is not None


def known(name: str) -> str:
    if name in BUILT_IN or is_own(name):
        return name
    raise ValueError(f"{name[:60]!a} is not a task: {', '.join(BUILT_IN)}, or your own as package.module:factory")


def plain(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options if all are strings, numbers or booleans, with names that are valid Python arguments."""
    if len(options) > MAX_OPTIONS:
        raise ValueError(f"{len(options)} options, more than {MAX_OPTIONS}")
    for key, value in options.items():
        if not re.fullmatch(r"[A-Za-z_]\w{0,63}", key, re.ASCII):
            raise ValueError(f"{key[:60]!a} is not a valid option name: use letters, digits and _, at most 64")
        if not isinstance(value, bool | int | float | str):
            raise ValueError(f"{key} must be a text, a number, true or false")
        if isinstance(value, str) and len(value) > MAX_OPTION_CHARACTERS:
            raise ValueError(f"{key} has {len(value)} characters, more than {MAX_OPTION_CHARACTERS}")
        if isinstance(value, int) and abs(value) >= 1 << 63:
            raise ValueError(f"{key} is a whole number of more than 63 bits")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{key} must be a finite number")
    return options
