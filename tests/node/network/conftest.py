from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.real_transports import TransportMaker


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory with a short path: the path of a socket has about a hundred bytes at most."""
    with tempfile.TemporaryDirectory(prefix="st") as made:
        yield Path(made)


@pytest.fixture
def make(directory: Path) -> TransportMaker:
    return TransportMaker(directory)
