"""What is said to a person who asks for something that cannot be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def one_line(kind: type[Exception], call: Callable[..., object], *given: Any, **more: Any) -> str:
    """The message of the error by which a call refuses: one line, which can be printed."""
    with pytest.raises(kind) as caught:
        call(*given, **more)
    line = str(caught.value)
    assert line.isprintable(), line
    return line
