"""The live view as a pure function of values, and the lines that replace it without a terminal."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from node.reporting.status import PeerStatus, Status
from node.ui import screen
from node.ui.terminal import MAX_REPORTS, Terminal, count, duration, render, size, sparkline
from tests.golden import screens
from tests.golden.screens import BUSY, CATCHING_UP, report, text
from tests.support.status_examples import PEER, STATUS


def test_views_are_the_golden_screens() -> None:
    """If not, and as wanted: python -m tests.golden.screens > tests/golden/screens.txt."""
    assert screens.screens() == screens.FILE.read_text()


@given(
    st.integers(1, 130), st.sampled_from([BUSY, replace(BUSY, stage=1, stages=3), STATUS, replace(STATUS, peers=())])
)
def test_no_line_is_wider_than_the_terminal(width: int, status: Status) -> None:
    shown = text(render(status, [report(n) for n in range(6)], width), width)
    assert all(cell_len(row) <= width for row in shown.splitlines())


def test_foreign_names_cannot_control_or_fill_terminal() -> None:
    evil = PeerStatus("12D3KooW\x1b[2J", "\x1b]0;title\x07[red]" + "x" * 500, True, True, 5, "")
    shown = text(render(replace(BUSY, peers=(evil,) * 50, waiting_for=("\x1b[2J" * 50,) * 20), (), 80), 80)
    assert "\x1b" not in shown and "\x07" not in shown and "[red]" in shown
    assert "and 42 more" in shown and "and 16 more" in shown
    assert len(shown.splitlines()) < 25
    for name in ("[/b]", "[link=http://example.org]x[/link]", ":smile:"):
        line = PeerStatus(PEER, name[:16], True, True, 5, "")
        evil_names = replace(BUSY, reason=name, run=name, nickname=name, waiting_for=(name,), peers=(line,))
        assert f"waits for  {name}" in text(render(evil_names, (), 120), 120)


def test_sparkline_scales_to_its_range() -> None:
    assert sparkline([4, 3, 2, 1], 10) == "█▆▃▁"
    assert sparkline([1, 1, 1], 10) == "▁▁▁"
    assert sparkline(range(1000), 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([], 8) == sparkline([1.0], 0) == ""


@pytest.mark.parametrize(
    "written, values",
    [
        (count, {0: "0", 950: "950", 12345: "12,345", 1_203_344: "1.20 M", 4.56e9: "4.56 G", float("nan"): "–"}),
        (size, {0: "0 B", 999: "999 B", 1000: "1.00 kB", 12_340: "12.3 kB", 999_700: "1.00 MB", 1e15: "1000 TB"}),
        (duration, {3.21: "3.2 s", 45: "45 s", 59.7: "1 min 0 s", 125: "2 min 5 s", 11520: "3 h 12 min",
                    183600: "2 d 3 h"}),
    ],
    ids=["counts", "sizes", "durations"],
)  # fmt: skip
def test_figures_are_written_with_units(written: Callable[[float], str], values: dict[float, str]) -> None:
    assert {value: written(value) for value in values} == values


# -- the view itself --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("member", [True, False])
async def test_without_terminal_stdout_has_only_data(member: bool, capfd: pytest.CaptureFixture[str]) -> None:
    """A fork's line tells whether the roster has another peer of this peer's stage."""
    terminal = Terminal(as_json=True)
    assert not terminal.is_live and terminal.log_style == "json"
    peers = (PeerStatus(PEER, "bob", member, True, 5, ""), PeerStatus("12D3KooWx", "eve", True, True, 5, "", stage=1))
    async with terminal.showing(lambda: replace(BUSY, peers=peers)):
        terminal.say("hello\nthere\x1b[2J")
        terminal.report(report(1, outcome="fork", peers=()))
        await asyncio.sleep(0.01)
    terminal.close()
    out, err = capfd.readouterr()
    assert json.loads(out)["round"] == 1 and out.count("\n") == 1
    said, line = err.splitlines()
    assert said == "hello there [2J" and line.startswith("round  2/16")
    assert line.endswith("continued without a majority" if member else "continues alone")


async def test_without_terminal_catch_up_prints_occasional_lines(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screen, "LINE_SECONDS", 0.03)
    monkeypatch.setattr(screen, "REFRESH_SECONDS", 0.01)
    shown = [replace(BUSY, syncing=replace(CATCHING_UP, bytes_here=size)) for size in (1, 2)]
    now = [shown[0]]
    terminal = Terminal(as_json=False)
    async with terminal.showing(lambda: now[0]):
        for now[0] in (shown[0], shown[1], BUSY):
            await asyncio.sleep(0.15)
    terminal.close()
    lines = capfd.readouterr().err.splitlines()
    assert [line.split(" of ")[0] for line in lines] == ["catching up: 1 B", "catching up: 2 B"], "no line twice"


async def test_failing_view_does_not_end_the_peer(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    terminal = Terminal(as_json=False)
    terminal.is_live = True

    def broken() -> Status:
        raise ZeroDivisionError("a mistake of ours")

    async with terminal.showing(broken):
        await asyncio.sleep(0.05)
    assert "a mistake of ours" in caplog.text


def test_kept_reports_are_bounded(capfd: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal(as_json=False)
    for number in range(MAX_REPORTS + 10):
        terminal.report(report(number % 10))
    assert len(terminal._reports) == MAX_REPORTS
