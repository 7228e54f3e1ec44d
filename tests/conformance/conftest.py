"""Every suite of this directory runs in each world."""

from __future__ import annotations

import pytest

from tests.conformance.worlds import WORLDS, World


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.real) if name != "sim" else name for name in WORLDS])
def world(request: pytest.FixtureRequest) -> World:
    made: World = WORLDS[request.param]()
    return made
