"""The pure parts of `benchmarks.time_to_loss`: when a loss was reached, the share of steps, tables, arguments."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import time_to_loss as ttl
from benchmarks.time_to_loss import Point

FAST = [Point(10.0, 64, 3.0), Point(20.0, 128, 2.0), Point(30.0, 192, 2.5)]
SLOW = [Point(12.0, 64, 3.0), Point(24.0, 128, 2.5), Point(40.0, 192, 1.5)]


def test_the_last_peer_decides_when_a_loss_was_reached() -> None:
    assert ttl.first_at(FAST, 2.5) == Point(15.0, 96, 2.5)
    assert ttl.last_at([FAST, SLOW], 2.0) == Point(32.0, 160, 2.0)
    assert ttl.last_at([FAST, SLOW], 1.9) is None
    assert ttl.last_at([FAST, []], 3.0) is None
    assert ttl.first_at(FAST, 3.5) == FAST[0]  # nothing is known of the time before it


def test_own_reports_become_a_curve_and_a_share() -> None:
    reports: list[dict[str, Any]] = [
        {"time": 100.0, "tokens": 1024 * 10, "held_out_loss": 3.0},
        {"time": 102.0, "tokens": 1024 * 12, "held_out_loss": None},
        {"time": 104.0, "tokens": 1024 * 8, "held_out_loss": 2.0},
    ]
    assert ttl.own_curve(reports, 99.0, 1024) == [Point(1.0, 10, 3.0), Point(5.0, 30, 2.0)]
    assert ttl.utilisation(reports, 1, 0.1, 1024) == pytest.approx(0.5)


def test_tables_show_each_figure_at_its_link_and_why_one_is_absent() -> None:
    rows = [
        {"arm": "ddp", "megabits": 50.0, "seconds": 21.94, "steps": 74},
        {"arm": "torchft", "megabits": 10.0, "why": "torchft is not installed"},
    ]
    ddp, torchft = ttl.loss_table(rows, [10.0, 50.0]).splitlines()[2:]
    assert ddp.endswith("|  | 21.9 (74) |")
    assert torchft.endswith("| torchft is not installed |  |")
    shares = [{"arm": "plain-int8", "inner_steps": 8, "megabits": 50.0, "share": 0.347}]
    assert ttl.utilisation_table(shares, [10.0, 50.0]).endswith("| Starling, plain DiLoCo, int8 | 8 |  | 34.7% |")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("loss --links 10,fast", "'10,fast' is not a list of Mbit/s"),
        ("loss --links 0", "each link has 0.1 to 10000 Mbit/s"),
        ("loss --arms plain-int8,dpp", "'dpp' is not one of ddp,"),
        ("utilisation --arms ddp", "utilisation is of Starling only"),
        ("loss --loss 0", "'0' is not a number above 0"),
        ("loss --seconds nan", "'nan' is not a number above 0"),
        ("utilisation --inner-steps 8,0", "'0' is not a whole number of at least 1"),
    ],
)
def test_a_wrong_argument_is_one_line(arguments: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        ttl.parsed(arguments.split())
    said = capsys.readouterr().err
    assert (ended.value.code, said.count("\n")) == (2, 1)
    assert words in said
