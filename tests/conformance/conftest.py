"""Every suite of this directory runs in each world: simulated, over direct connections, and over libp2p alone."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.conformance.worlds import WORLDS, World
from tests.support.transport_pool import Pool


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with closing(Pool(connected=True)) as opened:
        yield opened


@pytest.fixture
def world(request: pytest.FixtureRequest, pool: Pool) -> World:
    return WORLDS[request.param](pool)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Most tests over libp2p alone are long: direct connections use its control streams, too."""
    if "world" not in metafunc.fixturenames:
        return
    is_sample = zlib.crc32(metafunc.function.__name__.encode()) % 4 == 0
    marks = {
        "sim": (),
        "direct": (pytest.mark.real,),
        "libp2p": (pytest.mark.real, *(() if is_sample else (pytest.mark.long,))),
    }
    metafunc.parametrize("world", [pytest.param(name, marks=marks[name]) for name in WORLDS], indirect=True)
