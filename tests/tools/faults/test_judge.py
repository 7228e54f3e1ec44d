"""The judge of the faults in real processes: a healthy play passes, and every planted violation is found and named."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.faults.judge import Verdict, judge
from tests.faults.picture import draw
from tests.faults.recording import Event, Life, Limits, Recording
from tests.faults.timeline import COLUMNS, timeline
from tests.support.checkers import Report

BEGAN = 1_000.0
PEERS = ("anna", "bert", "cleo")
IDS = {name: f"12D3KooW-{name}" for name in PEERS}


def report(name: str, number: int, peers: tuple[str, ...] = PEERS, **changes: Any) -> Report:
    """What a peer says of round `number`, which all of these are in: it ends `number` + 1 s after the beginning."""
    ids = tuple(IDS[each] for each in peers)
    ordinary: Report = {
        "run": "run",
        "peer": IDS[name],
        "incarnation": 0,
        "round": number,
        "parent": f"L{number}",
        "lineage": f"L{number + 1}",
        "anchor_lineage": f"L{number}",
        "outcome": "committed",
        "peers": ids,
        "contributions": {each: (f"L{number}", 4, 4) for each in ids},
        "finite": True,
        "weight": 100.0,
        "tokens": 110,
        "params_hash": f"params {number + 1}",
        "time": BEGAN + number + 1,
        "seconds_train": 0.7,
        "seconds_wait": 0.1,
        "seconds_average": 0.19,
        "rss_bytes": 600_000_000,
        "open_files": 30,
        "tasks": 20,
    }
    return {**ordinary, **changes}


def healthy() -> Recording:
    """30 rounds of 1 s, 100 tokens each of each peer; calm until 10 s, healed at 20 s."""
    return Recording(
        scenario="made-up",
        seed=7,
        protocol="butterfly",
        task="paced",
        limits=Limits(recovery_seconds=5.0),
        calm=(BEGAN, BEGAN + 10),
        healed=BEGAN + 20,
        ended=BEGAN + 30,
        should=PEERS,
        ids=IDS,
        events=(
            Event(BEGAN - 9, "started", PEERS, "start"),
            Event(BEGAN + 10, "cut off", ("bert",), "fault"),
            Event(BEGAN + 20, "healed", ("bert",), "heal"),
            Event(BEGAN + 30, "asked to finish", PEERS, "end"),
        ),
        histories={name: [report(name, number) for number in range(30)] for name in PEERS},
        logs={
            name: '{"event": "round 3 decided", "level": "warning", "logger": "node.session.peer"}\n' for name in PEERS
        },
        lives={name: (Life(BEGAN - 9, BEGAN + 31, 0, 0),) for name in PEERS},
        left={name: () for name in PEERS},
    )


def history(play: Recording, name: str) -> list[Report]:
    """Of a peer, to be changed in place."""
    found = play.histories[name]
    assert isinstance(found, list)
    return found


def after_death(pause_seconds: float = 0.0) -> Recording:
    """Cleo is killed at 15 s, in round 15, which then takes so much longer; what would come after the end does not."""
    play = healthy()
    del history(play, "cleo")[15:]
    for name in ("anna", "bert"):
        history(play, name)[15:] = [report(name, number, ("anna", "bert")) for number in range(15, 30)]
        for each in history(play, name)[15:]:
            each["time"] += pause_seconds
        history(play, name)[:] = [each for each in history(play, name) if each["time"] <= play.ended]
    lives = {**play.lives, "cleo": (Life(BEGAN - 9, BEGAN + 15, -9, -9),)}
    return replace(play, should=("anna", "bert"), lives=lives)


def found(play: Recording) -> list[tuple[str, str]]:
    """Which invariants are broken, and by whom."""
    verdict = judge(play)
    assert verdict.verdict == ("fail" if verdict.violations else "pass")
    json.dumps(verdict.as_dict(), allow_nan=False)
    return [(each["invariant"], each["peer"]) for each in verdict.violations]


def detail(play: Recording) -> str:
    return "; ".join(each["detail"] for each in judge(play).violations)


def test_healthy_play_passes() -> None:
    verdict = judge(healthy())
    assert replace(verdict, goodput=round(verdict.goodput, 9)) == Verdict(
        "made-up", 7, "pass", [], 30, 0, 1.0, 1.0, 1.0, {}, {}
    )


def test_expected_death_passes() -> None:
    assert found(after_death()) == []


# -- what the histories say -------------------------------------------------------------------------------------------


def flip(play: Recording) -> None:
    history(play, "bert")[8]["params_hash"] = "params 8'"


def count_twice(play: Recording) -> None:
    for name in PEERS:
        history(play, name)[9]["contributions"] |= {IDS["cleo"]: ("L8", 4, 4)}


def go_back(play: Recording) -> None:
    history(play, "cleo")[22]["round"] = 21


def diverge(play: Recording) -> None:
    history(play, "anna")[5]["finite"] = False


def stray(play: Recording) -> None:
    """Bert's last report, which nobody else has made: a fork of its own."""
    alone = {"outcome": "fork", "lineage": "B30", "params_hash": "b30"}
    history(play, "bert")[29].update(alone, peers=(IDS["bert"],))


@pytest.mark.parametrize(
    ("plant", "invariant", "name"),
    [
        (flip, "same-bits", "bert"),
        (count_twice, "counted-once", "anna"),
        (go_back, "never-back", "cleo"),
        (diverge, "finite", "anna"),
        (stray, "one-branch", "bert"),
    ],
)
def test_broken_invariant_is_reported_with_peer_name(
    plant: Callable[[Recording], None], invariant: str, name: str
) -> None:
    play = healthy()
    plant(play)
    assert (invariant, name) in found(play)
    assert "12D3KooW" not in detail(play)


def test_unknown_peer_is_reported() -> None:
    play = healthy()
    for name in PEERS:
        history(play, name)[4]["peers"] += ("12D3KooW-eve",)
    assert found(play) == [("stranger", "anna")]
    history(play, "bert")[0]["peer"] = "12D3KooW-dave"
    assert ("stranger", "…W-dave") in found(play)


# -- progress ---------------------------------------------------------------------------------------------------------


def test_missing_progress_after_healing_is_reported() -> None:
    play = healthy()
    for number in range(20, 30):
        history(play, "anna")[number]["peers"] = history(play, "bert")[number]["peers"] = (IDS["anna"], IDS["bert"])
    del history(play, "cleo")[20:]
    verdict = judge(play)
    assert [each["invariant"] for each in verdict.violations] == ["progress"]
    assert verdict.violations[0]["detail"] == "no round with anna, bert, cleo in it; due within 5 s"
    assert math.isnan(verdict.recovery_seconds) and verdict.as_dict()["recovery_seconds"] is None


def test_round_missing_a_peer_is_no_recovery() -> None:
    play = healthy()
    for name in PEERS:
        for number in (20, 21, 22):
            history(play, name)[number]["peers"] = (IDS["anna"], IDS["bert"])
    assert judge(play).recovery_seconds == 4.0


def test_recovery_ends_with_the_last_report() -> None:
    play = healthy()
    history(play, "cleo")[20]["time"] += 0.75
    assert judge(play).recovery_seconds == 1.75
    late = replace(play, limits=Limits(recovery_seconds=1.5))
    assert found(late) == [("progress", "")] and "after 1.8 s" in detail(late)


def test_long_rounds_extend_the_recovery_limit() -> None:
    aims = {"recovery_seconds": 30.0}
    assert Limits(aims=aims).beside((5.0, 10.0)) == Limits(aims=aims), "a minute is enough for rounds of one second"
    assert Limits(aims=aims).beside((5.0, 125.0)) == Limits(120.0, aims)


def test_stuck_step_fails_the_play() -> None:
    play = replace(healthy(), stuck=("trap send Chunk: not within 60 s",))
    assert found(play) == [("stuck", "")] and detail(play) == "trap send Chunk: not within 60 s"


def test_play_without_expected_survivors_fails() -> None:
    assert found(replace(healthy(), should=())) == [("progress", "")]


# -- processes and logs -----------------------------------------------------------------------------------------------


def test_orphan_process_is_reported() -> None:
    play = replace(healthy(), left={"bert": ("python -m node.training.worker 7 8",)})
    assert found(play) == [("orphan", "bert")] and "node.training.worker 7 8" in detail(play)


def test_wrong_exit_code_is_reported_in_words() -> None:
    play = healthy()
    lives = {**play.lives, "anna": (Life(BEGAN - 9, BEGAN + 31, -9, 0),)}
    assert found(replace(play, lives=lives)) == [("exit-code", "anna")]
    assert detail(replace(play, lives=lives)) == "life 1 ended with SIGKILL, not exit code 0"


def test_premature_exit_is_reported() -> None:
    play = healthy()
    lives = {**play.lives, "anna": (Life(BEGAN - 9, BEGAN + 28, 0, 0),)}
    assert found(replace(play, lives=lives)) == [("exit-code", "anna")]


def test_unobserved_exit_is_reported() -> None:
    play = healthy()
    assert found(replace(play, lives={name: play.lives[name] for name in ("anna", "bert")})) == [("exit-code", "cleo")]
    for each in history(play, "bert")[20:]:
        each["incarnation"] = 1
    assert found(play) == [("exit-code", "bert")] and detail(play) == "ended unseen after 1 lives"


FAILED = {
    "event": "a handler failed",
    "level": "error",
    "exception": 'Traceback (most recent call last):\n  File "x"\nE: 1',
}


@pytest.mark.parametrize(
    ("log", "quoted"),
    [
        ('Traceback (most recent call last):\n  File "x.py", line 3\nValueError: 17\nmore', "ValueError: 17"),
        (json.dumps(FAILED), "a handler failed E: 1"),
        ('{"event": "all is lost", "level": "critical"}', "all is lost"),
        ("Task exception was never retrieved", "Task exception was never retrieved"),
        ("Task was destroyed but it is pending!", "Task was destroyed"),
        ("RuntimeWarning: coroutine 'f' was never awaited", "was never awaited"),
    ],
)
def test_log_alarm_is_reported_and_quoted(log: str, quoted: str) -> None:
    play = healthy()
    play = replace(play, logs={**play.logs, "cleo": f"{play.logs['cleo']}{log}\nand so on\n"})
    assert found(play) == [("log", "cleo")] and quoted in detail(play)


def test_long_log_line_is_quoted_in_part() -> None:
    play = replace(healthy(), logs={"cleo": "Traceback " + 5_000 * "x"})
    assert len(detail(play)) < 250


# -- levels -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "fine", "grown"),
    [("open_files", 45, 46), ("tasks", 33, 34), ("rss_bytes", 839_000_000, 841_000_000)],
)
def test_resource_growth_is_reported(what: str, fine: int, grown: int) -> None:
    play = healthy()
    for number in (28, 29):  # of three: the median
        history(play, "bert")[number][what] = fine
    assert found(play) == []
    for number in (28, 29):
        history(play, "bert")[number][what] = grown
    assert found(play) == [("level", "bert")] and f"{what} {grown:,}" in detail(play)


def test_single_high_reading_is_no_growth() -> None:
    play = healthy()
    history(play, "bert")[29]["open_files"] = 1_000
    assert found(play) == []


def test_zero_weight_contribution_is_no_recovery() -> None:
    play = healthy()
    for number in range(20, 30):
        history(play, "bert")[number].update(weight=0.0, tokens=0)
    assert found(play) == [("progress", "")]


def test_round_already_in_progress_is_no_recovery() -> None:
    play = replace(healthy(), healed=BEGAN + 20.5)  # in the middle of round 20
    assert judge(play).recovery_seconds == 1.5


def test_skipped_rounds_can_have_a_target() -> None:
    aims = {"rounds_skipped": 0, "skipped_share": 0.01}
    play = replace(healthy(), limits=Limits(aims=aims))
    assert judge(play).missed == {}
    for name in PEERS:
        history(play, name)[25].update(outcome="skipped", params_hash="params 25")
        for each in history(play, name)[26:]:
            each["params_hash"] = f"other {each['round']}"
    assert judge(play).missed == {"rounds_skipped": [1, 0], "skipped_share": [1 / 20, 0.01]}


def test_more_peers_may_use_more_resources() -> None:
    play = healthy()
    for number in (28, 29):
        history(play, "bert")[number]["open_files"] = 80
    newcomers = {name: (Life(BEGAN + 12, BEGAN + 31, 0, 0),) for name in ("dora", "emil", "finn")}
    assert found(play) == [("level", "bert")]
    assert found(replace(play, lives={**play.lives, **newcomers})) == []


def test_restarted_peer_is_not_compared_with_former_incarnation() -> None:
    play = healthy()
    for number in range(15, 30):
        history(play, "bert")[number].update(open_files=1_000, incarnation=1)
    lives = {**play.lives, "bert": (Life(BEGAN - 9, BEGAN + 14.1, -9, -9), Life(BEGAN + 14.2, BEGAN + 31, 0, 0))}
    assert found(replace(play, lives=lives)) == []


# -- figures ----------------------------------------------------------------------------------------------------------


def test_missed_target_is_reported_without_failing() -> None:
    aims = {"notice_seconds": 2.0, "rejoin_seconds": 9.0, "recovery_seconds": 0.5, "never": 1.0}
    measures = {"notice_seconds": (1.0, 3.0, 2.5), "rejoin_seconds": (8.0, 9.0), "endless": (1.0, math.nan)}
    verdict = judge(replace(healthy(), limits=Limits(aims=aims), measures=measures))
    assert verdict.verdict == "pass"
    assert verdict.measures["notice_seconds"] == {"median": 2.5, "worst": 3.0, "trials": 3}
    missed = verdict.as_dict()["missed"]
    assert missed == {"notice_seconds": [3.0, 2.0], "recovery_seconds": [1.0, 0.5], "never": [None, 1.0]}
    assert verdict.as_dict()["measures"]["endless"] == {"median": None, "worst": None, "trials": 2}


def test_fork_despite_majority_is_reported() -> None:
    play = healthy()
    for name in PEERS:
        for number in range(11, 14):
            history(play, name)[number]["outcome"] = "fork"
    assert found(play) == [("fork", "anna")] * 3, "one of each lineage"
    assert found(replace(play, limits=Limits(5.0, forks=True))) == []


def test_diverged_state_is_reported_without_hash_difference() -> None:
    """Cleo's parameters are those of the others and its momentum is not: it says so, and fetches theirs."""
    play = healthy()
    why = {IDS["cleo"]: "its state is not the one that the others hold"}
    history(play, "cleo")[12].update(outcome="superseded", peers=(), contributions={}, blamed=why)
    assert found(play) == [("same-bits", "cleo")]


def test_children_that_exit_unasked_are_reported() -> None:
    ends = (
        "worker 31 ended (killed by signal 11; last output: none): another is started",
        "p2pd 32 ended (exit code 2; …)",
    )
    for event in ends:
        line = json.dumps({"event": event, "level": "warning"})
        assert found(replace(healthy(), logs={"anna": line})) == [("log", "anna")]
    struck = json.dumps({"event": ends[0].replace("signal 11", "signal 9"), "level": "warning"})
    assert found(replace(healthy(), logs={"anna": struck})) == []


def test_standstill_is_measured() -> None:
    aims = Limits(5.0, aims={"standstill_seconds": 3})
    assert judge(replace(healthy(), limits=aims)).missed == {}
    assert judge(replace(after_death(4.0), limits=aims)).missed == {"standstill_seconds": [5.0, 3]}
    play = replace(healthy(), limits=aims)
    for name in PEERS:
        del history(play, name)[20:]
    assert judge(play).missed == {"standstill_seconds": [10.0, 3]}, "up to the end"


def test_goodput_of_abandoned_calm_phase_is_known() -> None:
    """All are killed at 11.5 s and go on from round 3, alone: 8 rounds are lost, and 9 of 3 peers come after them."""
    play = healthy()
    for name in PEERS:
        del history(play, name)[11:]
        for number in range(3, 12):
            told = {"parent": f"F{number}", "lineage": f"F{number + 1}", "time": BEGAN + number + 18, "incarnation": 1}
            whole = {IDS[each]: (f"F{number}", 4, 4) for each in PEERS}
            again = report(name, number, **told, params_hash=f"f{number + 1}", anchor_lineage=f"F{number}")
            again["contributions"] = whole
            if number == 3:
                again.update(parent="L3", outcome="fork", peers=(), contributions={}, weight=0.0)
            history(play, name).append(again)
    lives = (Life(BEGAN - 9, BEGAN + 11.5, -9, -9), Life(BEGAN + 14, BEGAN + 31, 0, 0))
    verdict = judge(replace(play, lives=dict.fromkeys(PEERS, lives), limits=Limits(60, forks=True)))
    assert verdict.violations == []
    assert verdict.goodput == pytest.approx(8 / 17.5, rel=0.1)  # eight rounds of three, in 17.5 s of three


def test_participation_matches_hand_calculation() -> None:
    """Cleo is killed in round 15 of 30, and brings nothing to round 3; round 20 is skipped."""
    play = after_death()
    history(play, "cleo")[3]["weight"] = 0.0
    for name in ("anna", "bert"):
        history(play, name)[20].update(outcome="skipped", peers=(), contributions={})
    assert judge(play).participation == pytest.approx((2 / 3 + 28) / 30)


def test_goodput_matches_hand_calculation() -> None:
    """In the calm 9 rounds of 300 tokens in 27 seconds of peers: 100 tokens each. Cleo dies 5 s after it.

    Then 5 rounds of 300 and 15 of 200 in 60 - 15 seconds of peers; of those of 200, the last 5 do not happen.
    """
    assert judge(after_death()).goodput == pytest.approx((5 * 300 + 15 * 200) / (100 * 45))
    assert judge(after_death(5.0)).goodput == pytest.approx((5 * 300 + 10 * 200) / (100 * 45))


def test_goodput_counts_the_share_in_the_mean() -> None:
    """Of bert's 100 tokens in one round of 20 a quarter; cleo does not know its weight once, and has trained on 110."""
    play = healthy()
    for name in PEERS:
        history(play, name)[25]["contributions"][IDS["bert"]] = ("L25", 1, 4)
    history(play, "cleo")[26]["weight"] = None
    assert judge(play).goodput == pytest.approx((6_000 - 75 + 10) / 6_000)


def test_abandoned_rounds_do_not_count_as_goodput() -> None:
    """Cleo goes on alone for three rounds, and comes back to what the others decided."""
    play = healthy()
    for name in ("anna", "bert"):
        for number in (12, 13, 14):
            history(play, name)[number] = report(name, number, ("anna", "bert"))
    mine = [report("cleo", number, ("cleo",), parent=f"C{number}", lineage=f"C{number + 1}") for number in (12, 13, 14)]
    mine[0].update(parent="L12", outcome="fork")
    for each in mine:
        each["params_hash"] = each["lineage"]
    back = report("cleo", 15, (), parent="C15", lineage="L15", outcome="superseded", params_hash="params 15")
    back.update(lost_rounds=3, lost_tokens=300, weight=0.0, time=BEGAN + 15.5)
    history(play, "cleo")[12:15] = [*mine, back]
    verdict = judge(replace(play, limits=Limits(5.0, forks=True)))
    assert verdict.violations == [] and verdict.rounds_committed == 33
    assert verdict.goodput == pytest.approx(5_700 / 6_000)


def test_calm_phase_without_two_rounds_has_no_rate() -> None:
    assert math.isnan(judge(replace(healthy(), calm=(BEGAN, BEGAN + 1))).goodput)
    assert judge(replace(healthy(), calm=(BEGAN, BEGAN))).as_dict()["goodput"] is None


def test_skipped_rounds_are_distinguished() -> None:
    play = healthy()
    for name in PEERS:
        skipped = {"outcome": "skipped", "peers": (), "contributions": {}, "params_hash": "params 29"}
        history(play, name)[29].update(skipped)
    verdict = judge(play)
    assert (verdict.verdict, verdict.rounds_committed, verdict.rounds_skipped) == ("pass", 29, 1)


# -- for people -------------------------------------------------------------------------------------------------------


def troubled() -> Recording:
    """A death, a round that one of two did not see the end of, a skipped one, an orphan, a missed aim."""
    play = after_death()
    nothing: dict[str, Any] = {"peers": (), "contributions": {}}
    skipped = {"outcome": "skipped", "params_hash": "params 29", **nothing}
    for name in ("anna", "bert"):
        history(play, name)[29].update(skipped)
    missed = report("bert", 17, outcome="undecided", lineage="L17", params_hash="params 17", **nothing)
    behind = report("bert", 17, parent="L17", outcome="superseded", **nothing, lost_tokens=20_480)
    history(play, "bert")[17:18] = [missed, behind]
    events = [*play.events, Event(BEGAN + 15, "SIGKILL at send Chunk", ("cleo",), "fault")]
    limits = Limits(recovery_seconds=5.0, aims={"notice_seconds": 2.0})
    left = {"cleo": ("python -m node.training.worker " + 30 * "--more-of-it ",)}
    return replace(play, events=events, limits=limits, left=left, measures={"notice_seconds": (3.0,)})


def test_timeline_lists_all_events_rounds_and_violations() -> None:
    play = troubled()
    lines = timeline(play, judge(play))
    text = "\n".join(lines)
    assert all(f"{event.what}: {', '.join(event.whom)}" in text for event in play.events)
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


def test_timeline_is_chronological() -> None:
    play = troubled()
    seconds = [float(line[:7]) for line in timeline(play, judge(play)) if line[:7].strip().replace(".", "").isdigit()]
    assert seconds == sorted(seconds) and len(seconds) > 35


def test_play_without_data_has_a_timeline() -> None:
    play = replace(healthy(), events=(), histories={}, lives={}, logs={}, left={})
    assert "recovery unknown s of 5 s; goodput unknown, participation unknown" in " ".join(
        " ".join(timeline(play, judge(play))).split()
    )


def test_timeline_of_many_peers_names_the_missing() -> None:
    play = healthy()
    ids = {**IDS, **{f"newcomer-{number}": f"12D3KooW-{number}" for number in range(3)}}
    histories = {name: [{**report("anna", 0), "peer": ids[name], "peers": tuple(ids.values())[1:]}] for name in ids}
    play = replace(play, ids=ids, histories=histories, lives=dict.fromkeys(ids, play.lives["anna"]))
    assert "round 0 committed    5 peers, without anna " in "\n".join(timeline(play, judge(play)))


def test_picture_is_a_png(tmp_path: Path) -> None:
    for number, play in enumerate((healthy(), troubled(), replace(healthy(), events=(), histories={}, lives={}))):
        draw(play, judge(play), path := tmp_path / f"{number}.png")
        assert path.read_bytes().startswith(b"\x89PNG\r\n") and path.stat().st_size > 10_000
