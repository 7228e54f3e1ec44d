"""Peers behind routers that no one can dial: they meet through a public peer, and average with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.homes import Router
from tests.faults.network import why_not
from tests.faults.pairs import is_good, play

pytestmark = [pytest.mark.real, pytest.mark.long, pytest.mark.timeout(300)]


def test_two_homes_meet_through_founder_also_after_its_restart(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    result = play((Router.SYMMETRIC, Router.CGNAT), 10, tmp_path)
    assert is_good(result), result
