"""A peer's history: the sums over its lines, its rotated files, and the effect of a full disk or a crash."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from node.reporting.report import RoundReport, tokens_counted
from node.reporting.status import to_json
from node.storage.journal import AT_ONCE, KEEP_FILES, Journal
from tests.support.status_examples import REPORT


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_bytes().splitlines()]


def test_totals_sum_over_all_reports(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "rounds.jsonl")
    for outcome, tokens, seconds in (("undecided", 100, 2.0), ("undecided", 50, 1.0), ("committed", 30, 1.0)):
        journal.write(replace(REPORT, outcome=outcome, tokens=tokens, seconds_train=seconds))
    journal.write(replace(REPORT, anchor_lineage="anchor1", tokens=70, seconds_train=1.0))
    totals = journal.totals
    assert (totals.tokens, totals.seconds_train) == (250, 5.0)
    assert (totals.bytes_sent, totals.bytes_received, totals.seconds_average) == pytest.approx((20, 24, 0.8))
    assert journal.last and journal.last.tokens == 70


def test_lines_are_strict_json_and_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    journal = Journal(path)
    journal.write(REPORT)
    journal.write(replace(REPORT, loss=math.inf, held_out_loss=1.5))
    first, second = lines(path)
    assert first["loss"] is None and first["held_out_loss"] is None and second["loss"] is None
    back = RoundReport.from_json(path.read_bytes().splitlines()[0])
    assert math.isnan(back.loss) and math.isnan(back.held_out_loss) and back.round == REPORT.round


@pytest.mark.parametrize("torn", [b'{"run": "r', b"x" * 3000, b"\0"])
def test_line_truncated_by_crash_spoils_no_other(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "rounds.jsonl"
    Journal(path).write(REPORT)
    with path.open("ab") as file:
        file.write(torn)
    Journal(path).write(replace(REPORT, round=1))
    assert [line["round"] for line in lines(path)] == [0, 1]


def test_full_disk_warns_once_and_loses_no_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With a real limit on the size of files, which cuts off writes beyond it."""
    import resource
    import signal

    path = tmp_path / "rounds.jsonl"
    journal = Journal(path)
    journal.write(REPORT)
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, before[1]))
        with caplog.at_level(logging.WARNING):
            for number in (1, 2, 3):
                journal.write(replace(REPORT, round=number))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert len(caplog.records) == 1 and "rounds continue" in caplog.text
    journal.write(replace(REPORT, round=4))
    assert [line["round"] for line in lines(path)] == [0, 1, 2, 3, 4]
    assert journal.totals.bytes_sent == 25 and journal.last and journal.last.round == 4


def test_queued_lines_are_bounded_and_written_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rounds.jsonl"
    path.mkdir()
    journal = Journal(path)
    journal.write(REPORT)
    assert journal.totals.tokens == 100
    monkeypatch.setattr("node.storage.journal.MAX_WAITING_BYTES", 25 * (len(to_json(REPORT)) + 9))
    for number in range(1, 40):
        journal.write(replace(REPORT, round=number))
    path.rmdir()
    journal.write(replace(REPORT, round=40))
    assert len(lines(path)) == AT_ONCE
    journal.write(replace(REPORT, round=41))
    first, *_, last = [line["round"] for line in lines(path)]
    assert [line["round"] for line in lines(path)] == list(range(first, 42)) and 14 <= first <= 18 and last == 41


def test_next_incarnation_continues_lines_and_totals(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    for number in range(3):
        journal = Journal(path)
        journal.write(replace(REPORT, round=number))
    assert [line["round"] for line in lines(path)] == [0, 1, 2]
    assert vars(journal.totals) == {
        "tokens": 300, "bytes_sent": 15, "bytes_received": 18,
        "seconds_train": 6.0, "seconds_average": pytest.approx(0.6),
    }  # fmt: skip
    assert Journal(path).last is None, "the last report is of this incarnation"


@pytest.mark.parametrize("damaged", [b"", b"{", b"[]", b"{}", b'{"tokens": "many"}', b"\xff" * 9000])
def test_unreadable_totals_start_again(tmp_path: Path, damaged: bytes) -> None:
    (tmp_path / "totals.json").write_bytes(damaged)
    journal = Journal(tmp_path / "rounds.jsonl")
    journal.write(REPORT)
    assert journal.totals.tokens == 100 and Journal(tmp_path / "rounds.jsonl").totals.tokens == 100


def test_history_file_size_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rounds.jsonl"
    journal = Journal(path)
    journal.write(replace(REPORT, round=0))
    most = 3 * path.stat().st_size + 10
    monkeypatch.setattr("node.storage.journal.FILE_BYTES", most)
    for number in range(1, 30):
        journal.write(replace(REPORT, round=number))
        assert path.stat().st_size <= most
    names = [*(f"rounds.{number}.jsonl" for number in range(KEEP_FILES, 0, -1)), "rounds.jsonl"]
    assert sorted(each.name for each in tmp_path.glob("rounds*")) == sorted(names)
    kept = [line["round"] for name in names for line in lines(tmp_path / name)]
    assert kept == list(range(30 - len(kept), 30)) and len(kept) > 3 * KEEP_FILES
    assert journal.totals.tokens == 3000


def test_damaged_lines_are_left_out_of_recent_reports(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    good = replace(REPORT, lineage="b0")
    for _ in range(3):
        Journal(path).write(good)
    whole = path.read_bytes().splitlines()
    damaged = [whole[0].replace(b'"b0"', b'"z0"'), whole[1].replace(b'"tokens":100', b'"tokens":null')]
    assert damaged[0] != whole[0] and damaged[1] != whole[1]
    path.write_bytes(b"\n".join([*damaged, b"{", b"{}", b"[]", b"null", b"", whole[2], b""]))
    assert len(Journal(path).recent()) == 1


def test_tokens_are_credited_to_the_counting_round() -> None:
    """Tokens of undecided rounds count in the next; dropped ones, and those of a former incarnation, count in none."""
    rounds: list[tuple[str, tuple[str, ...], int, int]] = [
        ("committed", ("p",), 50, 1), ("skipped", (), 50, 1), ("committed", ("p",), 50, 1),
        ("committed", ("q",), 50, 1), ("committed", ("p",), 50, 1), ("undecided", (), 50, 1),
        ("fork", (), 50, 2), ("alone", ("p",), 50, 2),
    ]  # fmt: skip
    reports = [
        replace(REPORT, outcome=outcome, peers=peers, tokens=tokens, incarnation=incarnation, lineage=f"{number:02x}")
        for number, (outcome, peers, tokens, incarnation) in enumerate(rounds)
    ]
    assert tokens_counted(reports) == {b"\x00": 50, b"\x02": 100, b"\x04": 50, b"\x07": 100}


def test_overlapped_tokens_are_credited_to_the_round_after() -> None:
    """Those of an undecided round, to the one that counts them; nothing is left when the state of others is taken."""
    rounds: list[tuple[str, tuple[str, ...], int]] = [
        ("committed", ("p",), 20), ("committed", ("p",), 10), ("undecided", (), 5), ("committed", ("p",), 0),
        ("committed", ("p",), 30), ("superseded", (), 0), ("committed", ("p",), 0),
    ]  # fmt: skip
    reports = [
        replace(REPORT, outcome=outcome, peers=peers, tokens=50, tokens_overlap=overlap, lineage=f"{number:02x}")
        for number, (outcome, peers, overlap) in enumerate(rounds)
    ]
    assert tokens_counted(reports) == {b"\x00": 30, b"\x01": 60, b"\x03": 110, b"\x04": 20, b"\x06": 50}
