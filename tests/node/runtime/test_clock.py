"""The wall clock, and the file that shifts it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from node.runtime.clock import VARIABLE, WallClock


@pytest.mark.parametrize(
    "said, seconds",
    [
        ("90", 90.0),
        ("-600.5\n", -600.5),
        *((said, 0.0) for said in ("", "nan", "inf", "1e300", "soon", "1" * 10_000, None)),
    ],
)
def test_clock_file_shifts_time_at_once(
    said: str | None, seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert abs(WallClock().wall() - time.time()) < 1.0
    file = tmp_path / "clock"
    monkeypatch.setenv(VARIABLE, str(file))
    clock = WallClock()
    assert abs(clock.wall() - time.time()) < 1.0
    if said is not None:
        file.write_text(said)
    assert clock.wall() - time.time() == pytest.approx(seconds, abs=1.0)
