"""The summary of the reports of a swarm's peers, without a process."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest
from rich.console import Console

from node.cli.swarm_command import Participant
from node.reporting.report import RoundReport, Totals
from node.reporting.status import to_json
from node.storage.journal import Journal
from node.ui.swarm_summary import KEEP_ROUNDS, SwarmRound, SwarmSummary
from node.ui.swarm_view import picture, plain_line, sample, summary
from tests.support.paths import REPOSITORY

NAMES = ("peer-1", "peer-2", "peer-3")


def report(name: str, number: int, **more: object) -> RoundReport:
    made = RoundReport(
        "run", f"id-of-{name}", 1, number, f"l{number}", f"l{number + 1}", f"l{number}", "committed", NAMES, {}, {},
        True, 1.0, 1000, 3.0, f"h{number + 1}", 2.0, 0.1, 0.5, 10, 20, 100.0 + 3 * number,
        held_out_loss=3.0 / (number + 1),
    )  # fmt: skip
    return replace(made, **more)  # type: ignore[arg-type]


def story(rounds: int, names: tuple[str, ...] = NAMES) -> SwarmSummary:
    tally = SwarmSummary(NAMES)
    for number in range(rounds):
        for name in names:
            tally.add(name, report(name, number))
    for name in names:
        tally.tracks[name].well = True
    assert len(list(tally.complete(()))) == rounds
    return tally


def text(shown: object) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(shown)
    return console.file.getvalue()  # type: ignore[attr-defined]


# -- agreement --------------------------------------------------------------------------------------------------------


def test_long_run_keeps_first_loss_and_last_rounds() -> None:
    tally = story(KEEP_ROUNDS + 10)
    assert [tally.rounds[0].number, tally.rounds[-1].number] == [10, KEEP_ROUNDS + 9]
    end = tally.as_json()
    assert tally.fell and (end["loss_first"], end["rounds"]) == (3.0, KEEP_ROUNDS + 10)
    assert end["loss_last"] == 3.0 / (KEEP_ROUNDS + 10)


def test_equal_final_states_agree() -> None:
    tally = story(4)
    assert tally.agree and tally.fell
    end = tally.as_json()
    assert (end["agree"], end["rounds"], end["loss_first"], end["loss_last"]) == (True, 4, 3.0, 0.75)
    assert end["peers"][1] == {
        "peer_id": "id-of-peer-2",
        "rounds": 4,
        "lineage": "l4",
        "params_hash": "h4",
        "tokens": 4000,
        "bytes_sent": 40,
        "bytes_received": 80,
        "seconds_train": 8.0,
        "seconds_average": 2.0,
    }


def test_independent_peers_agree_within_spread_limit() -> None:
    tally = story(4)
    for name, spread in zip(NAMES, (0.01, 0.019, 0.0), strict=False):
        own = {"lineage": f"l-{name}", "params_hash": f"h-{name}", "spread_limit": 0.02}
        tally.add(name, report(name, 4, spread=spread, **own))
    assert tally.agree and tally.spread == (0.019, 0.02)
    assert "a peer is 1.9 % from the mean of all, the limit is 2 %" in text(
        summary(tally, dict.fromkeys(NAMES, ""), 1.0)
    )
    tally.add(NAMES[0], report(NAMES[0], 5, spread=0.03, spread_limit=0.02))
    assert not tally.agree and json.loads(to_json(tally.as_json()))["spread"] == 0.03
    for name in NAMES[:3]:  # equal parameters count, not the older estimates
        tally.add(name, report(name, 6, spread=0.03, spread_limit=0.02, params_hash="h", lineage="l"))
    assert tally.spread == (0.0, 0.02)


@pytest.mark.parametrize(
    "change",
    [
        lambda tally: tally.add("peer-2", report("peer-2", 4, lineage="l4", params_hash="other")),
        lambda tally: tally.add("peer-2", report("peer-2", 4)),
        lambda tally: setattr(tally.tracks["peer-3"], "well", False),
    ],
    ids=["other parameters", "later final round", "failed exit"],
)
def test_one_deviating_peer_does_not_agree(change: Callable[[SwarmSummary], None]) -> None:
    tally = story(4)
    change(tally)
    assert not tally.agree


def test_peers_without_reports_do_not_agree() -> None:
    tally = story(4, NAMES[:2])
    tally.tracks["peer-3"].well = True
    assert not tally.agree
    assert tally.as_json()["peers"][2]["params_hash"] == ""
    tally = SwarmSummary(NAMES)
    assert not tally.agree and not tally.fell
    assert json.loads(to_json(tally.as_json()))["loss_last"] is None


def test_single_or_rising_loss_is_no_fall() -> None:
    assert not story(1).fell
    tally = story(2)
    tally.add("peer-1", report("peer-1", 2, held_out_loss=3.5))
    list(tally.complete(()))
    assert not tally.fell


# -- sums -------------------------------------------------------------------------------------------------------------


def test_totals_are_plain_sums() -> None:
    totals = Totals()
    for each in (
        report("a", 0, outcome="undecided", tokens=100, seconds_train=1.0),
        report("a", 0, outcome="undecided", tokens=150, seconds_train=1.5),
        report("a", 0, outcome="superseded", tokens=0, seconds_train=0.0),
        report("a", 0, tokens=50, seconds_train=0.5),
        report("a", 1, tokens=200, seconds_train=2.0),
    ):
        totals.add(each)
    assert (totals.tokens, totals.seconds_train, totals.seconds_average) == (500, 5.0, 2.5)
    assert (totals.bytes_sent, totals.bytes_received) == (50, 100)


def test_catching_up_is_not_an_own_round() -> None:
    tally = story(2)
    tally.add("peer-1", report("peer-1", 2, outcome="superseded", lineage="l9"))
    track = tally.tracks["peer-1"]
    assert (track.rounds, track.lineage) == (2, "l9")


# -- rounds -----------------------------------------------------------------------------------------------------------


def test_round_completes_when_all_running_peers_reported() -> None:
    tally = SwarmSummary(NAMES)
    tally.add("peer-1", report("peer-1", 0))
    tally.add("peer-2", report("peer-2", 0))
    assert not list(tally.complete(NAMES))
    assert list(tally.complete(NAMES[:2])) == [SwarmRound(0, 3.0, 1000.0, 3, 2.6)]
    assert not list(tally.complete(()))


def test_round_completes_when_others_are_beyond_it() -> None:
    tally = SwarmSummary(NAMES)
    for number in range(3):
        tally.add("peer-1", report("peer-1", number))
    done = list(tally.complete(NAMES))
    assert [each.number for each in done] == [0, 1] and done[1].seconds == 3.0
    tally.add("peer-2", report("peer-2", 1))  # late
    tally.add("peer-2", report("peer-2", 2))
    tally.add("peer-3", report("peer-3", 2))
    assert [each.number for each in tally.complete(NAMES)] == [2]


def test_undecided_and_skipped_rounds_have_no_loss() -> None:
    tally = SwarmSummary(NAMES)
    tally.add("peer-1", report("peer-1", 0, outcome="undecided"))
    assert not list(tally.complete(()))
    tally = story(1)
    tally.add("peer-1", report("peer-1", 1, outcome="skipped", held_out_loss=math.nan, peers=()))
    (done,) = tally.complete(())
    assert math.isnan(done.held_out_loss) and tally.losses == [3.0] and tally.as_json()["rounds"] == 2
    assert plain_line(done, 16).endswith("nothing to apply")


def test_round_of_independent_peers_shows_largest_spread() -> None:
    tally = SwarmSummary(NAMES[:2])
    for name, spread in zip(NAMES, (0.011, 0.024), strict=False):
        tally.add(name, report(name, 0, spread=spread, spread_limit=0.02))
    (done,) = tally.complete(())
    assert plain_line(done, 16).endswith("mixed, at most 2.4 % from the mean"), "the peers share no mean"


# -- what is read and shown -------------------------------------------------------------------------------------------


def test_report_round_trips_as_json() -> None:
    made = report("a", 1, held_out_loss=math.nan)
    read = RoundReport.from_json(to_json(made))
    assert math.isnan(read.held_out_loss) and to_json(read) == to_json(made)


def test_manual_documents_every_report_field() -> None:
    manual = (REPOSITORY / "docs" / "running.md").read_text()
    table = manual.partition("### `rounds.jsonl`")[2]
    documented = {name for row in table.splitlines() if row.startswith("| `") for name in row.split("`")[1].split(", ")}
    assert documented == {each.name for each in fields(RoundReport)}


@pytest.mark.parametrize("line", ["", "[]", "{}", "null", "nonsense"])
def test_invalid_report_is_rejected(line: str) -> None:
    with pytest.raises(ValueError):
        RoundReport.from_json(line)


def test_reports_are_read_across_file_rotation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = Participant("peer-1", tmp_path)
    peer.directory.mkdir()
    journal = Journal(peer.directory / "rounds.jsonl")
    monkeypatch.setattr("node.storage.rotation.FILE_BYTES", 5000)
    seen: list[int] = []
    for number in range(40):
        journal.write(report("peer-1", number))
        if number % 3 == 0:
            while new := peer.reports():
                seen += [each.round for each in new]
    assert len(list(peer.directory.glob("rounds*"))) > 2 and seen == list(range(40))


def test_reports_are_read_incrementally(tmp_path: Path) -> None:
    peer = Participant("peer-1", tmp_path)
    assert peer.reports() == [] and peer.end == "did not start"
    peer.directory.mkdir()
    file = peer.directory / "rounds.jsonl"
    lines = "".join(f"{to_json(report('peer-1', number))}\n" for number in range(3))
    file.write_text(lines[:-10])
    assert [each.round for each in peer.reports()] == [0, 1]
    assert peer.reports() == []
    file.write_text(lines)
    assert [each.round for each in peer.reports()] == [2]


def test_picture_and_summary_fit_the_width() -> None:
    tally = story(16)
    for shown in (
        picture(tally, dict.fromkeys(NAMES, "starts"), {}, 80),
        summary(tally, dict.fromkeys(NAMES, "left"), 200.0),
        picture(SwarmSummary(NAMES), dict.fromkeys(NAMES, "starts"), {}, 80),
        summary(SwarmSummary(NAMES), dict.fromkeys(NAMES, "did not start"), 1.0),
    ):
        assert max(map(len, text(shown).splitlines())) <= 100
    assert "all peers agree" in text(summary(tally, dict.fromkeys(NAMES, "left"), 200.0))
    assert "3.000 -> 0.188" in text(summary(tally, dict.fromkeys(NAMES, "left"), 200.0))


def test_names_in_picture_and_summary_are_not_markup() -> None:
    name = "[/b]"
    tally = SwarmSummary([name])
    shown = text(picture(tally, {name: "[/x]"}, {}, 80)) + text(summary(tally, {name: "[/y]"}, 1.0))
    assert shown.count(name) == 2 and "[/x]" in shown and "[/y]" in shown


def test_model_output_cannot_control_the_terminal() -> None:
    shown = text(sample("def f():\n    \x1b[2Jreturn [bold]x\r\n"))
    assert "\x1b" not in shown and "    ·[2Jreturn [bold]x·" in shown
