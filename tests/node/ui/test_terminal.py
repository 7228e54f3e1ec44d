"""The live view as a pure function of values, and the lines that replace it without a terminal."""

from __future__ import annotations

import asyncio
import io
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console

from node.reporting.report import RoundReport
from node.reporting.status import PeerStatus, Status, SyncStatus
from node.ui import screen
from node.ui.terminal import MAX_REPORTS, Terminal, count, duration, plain_line, render, size, sparkline, syncing_line
from tests.support.status_examples import PEER, STATUS

BUSY = replace(
    STATUS,
    peers=(
        PeerStatus(PEER, "bob", True, True, 5, ""),
        PeerStatus("12D3KooWabcdefghij", "", False, True, 5, ""),
        PeerStatus("12D3KooWzzzzzzzzzz", "carol", True, False, 4, ""),
        PeerStatus("12D3KooWyyyyyyyyyy", "dave", False, False, 4, "", left=True),
    ),
    loss=1.923,
    held_out_loss=2.041,
    eta_seconds=92.0,
    tokens=1_203_344,
    tokens_per_second=3912.4,
    bytes_sent=48_100_000,
    rss_bytes=792_000_000,
)

STAGED = replace(
    BUSY,
    stage=1,
    stages=3,
    peers=tuple(replace(each, stage=k) for each, k in zip(BUSY.peers[:3], (1, 2, 0), strict=True)),
)


def report(number: int, **changes: object) -> RoundReport:
    made = RoundReport(
        "r", PEER, 1, number, "a", "b", "c", "committed", ("p", "q", "s"), {}, {}, True, 0.5, 31232, 5.2 * 0.8**number,
        "h", 8.2, 0.1, 0.6, 3_100_000, 12_100_000, 0.0, held_out_loss=1.2 + 4 * 0.8**number,
    )  # fmt: skip
    return replace(made, **changes)  # type: ignore[arg-type]


def text(status: Status, reports: Sequence[RoundReport], width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(render(status, reports, width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_screen_shows_every_part(width: int) -> None:
    shown = text(BUSY, [report(n) for n in range(6)], width)
    for words in (
        "starling  ada  run default cdcdcdcd", "waiting: for the others", "waits for  bob", "6 of 16",
        "about 1 min 32 s left", "1.923 training", "2.041 held out", "3,912 tokens/s", "1.20 M tokens so far",
        "48.1 MB sent", "2 B received", "792 MB memory", "4 ms loop lag", "4 other peers, 2 live, 1 left, 1 lost",
    ):  # fmt: skip
        assert words in shown
    rows = shown.splitlines()
    assert any("● live" in row and "bob" in row and "member" in row for row in rows)
    assert any("● live" in row and "…efghij" in row and "observer" in row for row in rows)
    assert any("○ lost" in row and "carol" in row and "round 5" in row for row in rows)
    assert any("○ left" in row and "dave" in row for row in rows)
    assert all(cell_len(row) <= width for row in rows)
    assert ("█" in shown and "5.200 → 2.511" in shown) == (width >= 80)
    assert "join --bootstrap" not in shown


@pytest.mark.parametrize("width", [60, 80, 120])
def test_stages_and_their_peers_are_shown(width: int) -> None:
    rows = text(STAGED, [], width).splitlines()
    assert "stage      1 (of 0 to 2)   live peers in each: 0, 2, 1" in [row.rstrip() for row in rows]
    assert any("bob" in row and "stage 1" in row and "round 6" in row and "member" in row for row in rows)
    assert any("carol" in row and "stage 0" in row for row in rows)
    assert all(cell_len(row) <= width for row in rows)
    assert "stage" not in text(BUSY, [], width)
    line = plain_line(report(3, stage=1, stages=3))
    assert line == plain_line(report(3)) + " in stage 1"


@pytest.mark.parametrize("width", [1, 2, 5, 20, 40])
def test_tiny_terminals_do_not_break_the_layout(width: int) -> None:
    for status in (BUSY, STAGED, STATUS, replace(STATUS, rounds=0, peers=())):
        assert all(cell_len(row) <= width for row in text(status, [report(n) for n in range(6)], width).splitlines())


def test_join_command_is_shown_until_a_peer_joins() -> None:
    alone = replace(BUSY, peers=())
    shown = "".join(text(alone, [], 200))
    assert f"join --bootstrap {STATUS.addresses[1]} --run-id {STATUS.run_id}" in shown
    here = text(replace(alone, addresses=STATUS.addresses[:1]), [], 200)
    assert "from this machine only" in here


def test_unknown_values_are_shown_as_dashes_or_omitted() -> None:
    shown = text(replace(BUSY, checkpoint_age_seconds=125.0), (), 80)
    assert "checkpoint" in shown and "2 min 5 s old" in shown
    assert "checkpoint" not in text(BUSY, (), 80)
    fresh = replace(STATUS, tokens_per_second=math.nan, held_out_loss=math.nan, rounds=0, waiting_for=())
    shown = text(fresh, [], 80)
    assert "nan" not in shown and "–" in shown and "waits for" not in shown


def test_foreign_names_cannot_control_or_fill_terminal() -> None:
    evil = PeerStatus("12D3KooW\x1b[2J", "\x1b]0;title\x07[red]" + "x" * 500, True, True, 5, "")
    shown = text(replace(BUSY, peers=(evil,) * 50, waiting_for=("\x1b[2J" * 50,) * 20), [], 80)
    assert "\x1b" not in shown and "\x07" not in shown and "[red]" in shown
    assert "and 42 more" in shown and "and 16 more" in shown
    assert len(shown.splitlines()) < 25
    for name in ("[/b]", "[link=http://example.org]x[/link]", ":smile:"):
        line = PeerStatus(PEER, name[:16], True, True, 5, "")
        evil_names = replace(BUSY, reason=name, run=name, nickname=name, waiting_for=(name,), peers=(line,))
        assert f"waits for  {name}" in text(evil_names, [], 120)


@pytest.mark.parametrize("members", [True, False])
def test_fork_message_depends_on_the_roster(members: bool, capfd: pytest.CaptureFixture[str]) -> None:
    elsewhere = PeerStatus("12D3KooWx", "eve", True, True, 5, "", stage=0)
    peers = (PeerStatus(PEER, "bob", members, True, 5, "", stage=1), elsewhere)
    status = replace(STATUS, rounds=16, stage=1, stages=2, peers=peers)
    terminal = Terminal(as_json=False)
    with asyncio.Runner() as runner:

        async def main() -> None:
            async with terminal.showing(lambda: status):
                terminal.report(report(5, outcome="fork", peers=()))

        runner.run(main())
    terminal.close()
    words = "continued without a majority" if members else "continues alone"
    assert words in capfd.readouterr().err


def test_spread_is_shown_only_for_independent_protocols() -> None:
    mixed = replace(BUSY, protocol="gossip", spread=0.0123, spread_limit=0.02)
    words = "protocol   gossip   at most 1.2 % from the mean of all, the limit is 2 %"
    assert words in text(mixed, [], 120)
    alike = text(replace(BUSY, protocol="butterfly"), [], 120)
    assert "protocol   butterfly" in alike and "from the mean" not in alike
    met = report(3, peers=("p", PEER), spread=1.504, spread_limit=0.02)
    assert plain_line(met).endswith("mixed with 1, at most 150 % from the mean")
    assert plain_line(replace(met, peers=(), spread=0.0)).endswith("mixed with no peer, at most 0 % from the mean")


def test_plain_lines_are_aligned() -> None:
    lines = [plain_line(report(n, outcome=outcome), 16) for n, outcome in ((3, "committed"), (12, "alone"))]
    lines.append(plain_line(report(5, outcome="undecided", loss=math.nan, held_out_loss=math.nan), 16))
    assert lines[0].startswith("round  4/16  loss 2.662  held out 3.248   3,809 tokens/s")
    for line, end in zip(lines, ("mean of 3", "alone", "not decided, training continues"), strict=True):
        assert line.endswith(end)
    for word in ("loss", "held out", "tokens/s", "sent", "received"):
        assert len({line.index(word) for line in lines}) == 1
    assert "nan" not in lines[2]


def test_sparkline_scales_to_its_range() -> None:
    assert sparkline([4, 3, 2, 1], 10) == "█▆▃▁"
    assert sparkline([1, 1, 1], 10) == "▁▁▁"
    assert sparkline(range(1000), 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([], 8) == sparkline([1.0], 0) == ""


@pytest.mark.parametrize(
    "written, values",
    [
        (count, {0: "0", 950: "950", 12345: "12,345", 1_203_344: "1.20 M", 4.56e9: "4.56 G", math.nan: "–"}),
        (size, {0: "0 B", 999: "999 B", 1000: "1.00 kB", 12_340: "12.3 kB", 999_700: "1.00 MB", 1e15: "1000 TB"}),
        (
            duration,
            {3.21: "3.2 s", 45: "45 s", 59.7: "1 min 0 s", 125: "2 min 5 s", 11520: "3 h 12 min", 183600: "2 d 3 h"},
        ),
    ],
    ids=["counts", "sizes", "durations"],
)
def test_figures_are_written_with_units(written: Callable[[float], str], values: dict[float, str]) -> None:
    assert {value: written(value) for value in values} == values


# -- the view itself --------------------------------------------------------------------------------------------------


async def test_without_terminal_stdout_has_only_data(capfd: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal(as_json=True)
    assert not terminal.is_live and not terminal.is_terminal
    async with terminal.showing(lambda: BUSY):
        terminal.say("hello\nthere\x1b[2J")
        terminal.report(report(1))
        await asyncio.sleep(0.01)
    terminal.close()
    out, err = capfd.readouterr()
    assert json.loads(out)["round"] == 1 and out.count("\n") == 1
    assert err.splitlines()[0] == "hello there [2J"
    assert err.splitlines()[1].startswith("round  2/16") and len(err.splitlines()) == 2


def test_catch_up_progress_is_shown() -> None:
    way = SyncStatus(412_000_000, 800_000_000, 3, 11_200_000.0, 1, 4, 35.2)
    for syncing, words in (
        (way, "412 MB of 800 MB of the state, from 3 peers   11.2 MB/s   about 35 s left"),
        (replace(way, donors=1, eta_seconds=None), "412 MB of 800 MB of the state, from 1 peer   11.2 MB/s"),
        (
            replace(way, bytes_here=way.bytes_whole, rounds_whole=0),
            "the state has arrived   11.2 MB/s   about 35 s left",
        ),
        (SyncStatus(0, 0, 0, 0.0, 0, 0, None), "looking for peers with the state   0 B/s"),
        (replace(way, bytes_here=way.bytes_whole), "1 of 4 rounds replayed   11.2 MB/s   about 35 s left"),
    ):
        status = replace(BUSY, state="syncing", syncing=syncing)
        assert syncing_line(status) == f"catching up: {words}" and f"state      {words}" in text(status, [], 120)
    assert syncing_line(BUSY) == "" and "catching up" not in text(BUSY, [], 120)


async def test_without_terminal_catch_up_prints_occasional_lines(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screen, "LINE_SECONDS", 0.03)
    monkeypatch.setattr(screen, "REFRESH_SECONDS", 0.01)
    way = SyncStatus(1, 10, 3, 1.0, 0, 4, 35.2)
    now = [replace(BUSY, syncing=way)]
    terminal = Terminal(as_json=False)
    async with terminal.showing(lambda: now[0]):
        await asyncio.sleep(0.2)
        now[0] = replace(BUSY, syncing=replace(way, bytes_here=2))
        await asyncio.sleep(0.1)
        now[0] = BUSY
        await asyncio.sleep(0.1)
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
