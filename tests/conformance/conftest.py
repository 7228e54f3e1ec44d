"""Every suite of this directory runs in each world: simulated, over direct connections, and over libp2p alone."""

from __future__ import annotations

import zlib

import pytest

from tests.conformance.worlds import WORLDS, World


@pytest.fixture
def world(request: pytest.FixtureRequest) -> World:
    made: World = WORLDS[request.param]()
    return made


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
