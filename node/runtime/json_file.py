"""Small files of JSON that hold state of a peer. (What a crash must not lose is written by `write_atomically`.)"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

MAX_BYTES = 1 << 12


def read_json(path: Path, most_bytes: int = MAX_BYTES) -> Any:
    """The value in a file; None if there is no file. Raises OSError, and ValueError if it is damaged or too long."""
    try:
        with path.open("rb") as file:
            data = file.read(most_bytes + 1)
    except FileNotFoundError:
        return None
    if len(data) > most_bytes:
        raise ValueError(f"longer than {most_bytes} bytes")
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("nested too deep") from None


def replace_private(path: Path, text: str) -> None:
    """Replace a file that only this user may read, at once for readers but not durably. Raises OSError."""
    draft = path.with_name(f".{path.name}.new")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    draft.replace(path)
