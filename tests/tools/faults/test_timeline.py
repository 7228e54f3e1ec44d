"""The timeline and the picture of a recording: what a person reads after a play."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.faults.judge import judge
from tests.faults.picture import draw
from tests.faults.recording import Event, Limits, Recording
from tests.faults.timeline import COLUMNS, timeline
from tests.support.recordings import (
    BEGAN,
    IDS,
    NO_CONTRIBUTIONS,
    after_death,
    history,
    mixed,
    voted,
    voted_report,
)

EMPTY = replace(voted(), events=(), histories={}, incarnations={}, logs={}, left={})


def troubled() -> Recording:
    """A death, a round whose end bert did not see, a skipped round, an orphan and a missed aim."""
    play = after_death()
    for name in ("anna", "bert"):
        history(play, name)[29].update(outcome="skipped", params_hash="params 29", **NO_CONTRIBUTIONS)
    missed = voted_report("bert", 17, outcome="undecided", lineage="L17", params_hash="params 17", **NO_CONTRIBUTIONS)
    behind = voted_report("bert", 17, parent="L17", outcome="superseded", **NO_CONTRIBUTIONS, lost_tokens=20_480)
    history(play, "bert")[17:18] = [missed, behind]
    events = [*play.events, Event(BEGAN + 15, "SIGKILL at send Chunk", ("cleo",), "fault")]
    limits = Limits(recovery_seconds=5.0, aims={"notice_seconds": 2.0})
    left = {"cleo": ("python -m node.training.worker " + 30 * "--more-of-it ",)}
    return replace(play, events=events, limits=limits, left=left, measures={"notice_seconds": (3.0,)})


def test_timeline_lists_events_rounds_and_violations_in_order() -> None:
    play = troubled()
    lines = timeline(play, judge(play))
    text = "\n".join(lines)
    assert all(f"{event.what}: {', '.join(event.peers)}" in text for event in play.events)
    assert all(f"round {number} " in text for number in range(30))
    assert "   19.0  FAULT  cut off: bert" in lines and "   24.0  exit   cleo: SIGKILL" in lines
    assert "   10.0         round 0 committed    anna bert cleo       anna, bert, cleo" in lines
    assert "   39.0         round 29 skipped     -                    anna, bert" in lines
    assert "   27.0         round 17 undecided   -                    bert" in lines
    assert "   27.0         round 17 superseded  now at round 18      bert; lost 20,480 tokens" in lines
    assert "FAIL  made-up, seed 7: 29 rounds committed, 1 skipped; recovery 1.00 s of 5 s" in text
    assert "  orphan         cleo: is left of it: python" in text
    assert "  missed: notice_seconds is 3.00, should be at most 2" in lines
    assert max(map(len, lines)) <= COLUMNS
    seconds = [float(line[:7]) for line in lines if line[:7].strip().replace(".", "").isdigit()]
    assert seconds == sorted(seconds) and len(seconds) > 35


def test_timeline_shows_mixing_partners() -> None:
    lines = timeline(mixed(), judge(mixed()))
    assert "   10.0         round 0 committed    cleo                 anna" in lines
    assert any("all who should have mixed" in line for line in lines)


def test_timeline_without_data_says_unknown() -> None:
    words = " ".join(" ".join(timeline(EMPTY, judge(EMPTY))).split())
    assert "recovery unknown s of 5 s; goodput unknown, participation unknown" in words


def test_timeline_of_many_peers_names_the_missing() -> None:
    play = voted()
    ids = {**IDS, **{f"newcomer-{number}": f"12D3KooW-{number}" for number in range(3)}}
    histories = {
        name: [{**voted_report("anna", 0), "peer": ids[name], "peers": tuple(ids.values())[1:]}] for name in ids
    }
    play = replace(play, ids=ids, histories=histories, incarnations=dict.fromkeys(ids, play.incarnations["anna"]))
    assert "round 0 committed    5 peers, without anna " in "\n".join(timeline(play, judge(play)))


def test_picture_is_a_png(tmp_path: Path) -> None:
    for number, play in enumerate((voted(), mixed(), troubled(), EMPTY)):
        draw(play, judge(play), path := tmp_path / f"{number}.png")
        assert path.read_bytes().startswith(b"\x89PNG\r\n") and path.stat().st_size > 10_000
