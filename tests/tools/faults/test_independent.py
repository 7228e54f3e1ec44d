"""The judge of plays without a shared anchor: a healthy one passes, and every planted violation is found and named."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from protocols import INDEPENDENT_PROTOCOLS
from tests.faults.__main__ import main
from tests.faults.independent import APART
from tests.faults.judge import judge
from tests.faults.picture import draw
from tests.faults.points import POINTS
from tests.faults.recording import Life, Limits, Recording
from tests.faults.runner import Options
from tests.faults.scenarios import SCENARIOS, scenario_of
from tests.faults.steps import Step, left
from tests.faults.table import order
from tests.faults.timeline import timeline
from tests.support.checkers import Report
from tests.support.independent_checkers import mixed
from tests.tools.faults.test_judge import BEGAN, IDS, PEERS, detail, found, history
from tests.tools.faults.test_judge import healthy as shared
from tests.tools.faults.test_judge import report as reported

SPREAD, LIMIT = 0.1, 0.02


def report(name: str, number: int, **changes: Any) -> Report:
    """What a peer says of its round: it has counted a message of its neighbour's."""
    partner = IDS[PEERS[PEERS.index(name) - 1]]
    own: Report = {
        "parent": f"{name} {number}",
        "lineage": f"{name} {number + 1}",
        "anchor_lineage": f"{name} {number}",
        "peers": (partner,),
        "contributions": {partner: (f"{name} {number}", 4, 4)},
        "messages": (f"{partner} {number}",),
        "group": "",
        "weight": 0.5,
        "tokens": 100,
        "params_hash": f"{name} {number + 1}",
        "half_exchanges": 0,
        "spread": SPREAD,
        "spread_limit": LIMIT,
    }
    return {**reported(name, number), **own, **changes}


def healthy() -> Recording:
    """30 rounds of 1 s of each of three peers, each of which counts a message of the one before it in all of them."""
    histories = {name: [report(name, number) for number in range(30)] for name in PEERS}
    return replace(shared(), protocol="gossip", histories=histories)


def test_healthy_play_passes() -> None:
    verdict = judge(healthy())
    assert (verdict.verdict, verdict.violations) == ("pass", [])
    assert verdict.recovery_seconds == 1.0 and verdict.goodput == pytest.approx(1.0)
    assert verdict.measures["spread_at_the_end"] == {"median": SPREAD, "worst": SPREAD, "trials": 3}
    assert verdict.measures["half_exchanges"]["worst"] == 0


# -- what is planted is found -----------------------------------------------------------------------------------------


def go_back(play: Recording) -> None:
    history(play, "cleo")[22]["round"] = 20


def count_twice(play: Recording) -> None:
    history(play, "bert")[9]["messages"] = history(play, "bert")[8]["messages"]


def diverge(play: Recording) -> None:
    history(play, "anna")[5]["finite"] = False


def break_off(play: Recording) -> None:
    history(play, "anna")[7]["parent"] = "another's"


def vote(play: Recording) -> None:
    history(play, "bert")[12]["outcome"] = "undecided"


def commit_nothing(play: Recording) -> None:
    history(play, "cleo")[6]["messages"] = ()


def disagree(play: Recording) -> None:
    for name in ("anna", "bert"):
        history(play, name)[8]["group"] = "8/x"


@pytest.mark.parametrize(
    ("plant", "invariant", "name"),
    [
        (go_back, "never-back", "cleo"),
        (count_twice, "counted-once", "bert"),
        (diverge, "finite", "anna"),
        (break_off, "never-back", "anna"),
        (vote, "outcome", "bert"),
        (commit_nothing, "outcome", "cleo"),
        (disagree, "one-group", "bert"),
    ],
)
def test_broken_invariant_is_reported_with_peer_name(
    plant: Callable[[Recording], None], invariant: str, name: str
) -> None:
    play = healthy()
    plant(play)
    assert (invariant, name) in found(play)
    assert "12D3KooW" not in detail(play)


def test_orphan_process_is_reported() -> None:
    assert found(replace(healthy(), left={"bert": ("python -m node.training.worker 7 8",)})) == [("orphan", "bert")]


def test_shared_anchor_invariants_apply_only_to_replicated_protocols() -> None:
    assert ("same-bits", "bert") not in found(healthy())
    assert ("one-branch", "bert") in found(replace(healthy(), protocol="butterfly"))


# -- how far apart they are -------------------------------------------------------------------------------------------


def spread(play: Recording, value: float | None, since: int) -> Recording:
    for name in PEERS:
        for each in history(play, name)[since:]:
            each["spread"] = value
    return play


def test_paced_peers_must_end_within_the_spread_limit() -> None:
    limit = APART * math.sqrt(2)
    assert found(spread(healthy(), 0.99 * limit, 20)) == []
    assert found(spread(healthy(), 1.01 * limit, 20)) == [("spread", "")]
    assert found(spread(spread(healthy(), 5.0, 20), SPREAD, 25)) == [], "what it came to in between heals"


def test_trained_peers_must_end_within_the_spread_limit() -> None:
    play = replace(healthy(), task="gpt")
    assert found(play) == [("spread", "")] and detail(play) == "0.1000 apart at the end; at most 0.0200"
    assert found(spread(play, LIMIT, 25)) == []


def test_peers_with_equal_parameters_have_no_spread() -> None:
    play = spread(replace(healthy(), task="gpt"), 0.3, 0)
    for name in PEERS:
        history(play, name)[28].update(params_hash="all of them")
    assert found(play) == [] and judge(play).measures["spread_at_the_end"]["worst"] == 0.0
    history(play, "bert")[28].update(params_hash="its own")
    assert found(play) == [("spread", "")]


def test_unknown_spread_is_a_violation() -> None:
    assert found(spread(healthy(), None, 0)) == [("spread", "")]
    assert found(spread(replace(healthy(), task="gpt"), math.nan, 0)) == [("spread", "")]


# -- who has mixed ----------------------------------------------------------------------------------------------------


def alone(each: Report) -> None:
    each.update(outcome="skipped", messages=(), peers=(), contributions={}, weight=0.0)


def test_peer_that_does_not_mix_is_not_recovered() -> None:
    play = healthy()
    for each in history(play, "bert")[20:]:
        alone(each)
    assert found(play) == [("progress", "")]
    assert detail(play) == "no mixing with anna, bert, cleo in it; due within 5 s"


def test_recovery_ends_when_the_last_peer_has_mixed() -> None:
    play = healthy()
    for each in history(play, "anna")[20:23]:
        alone(each)
    assert judge(play).recovery_seconds == 4.0
    assert judge(replace(healthy(), healed=BEGAN + 20.5)).recovery_seconds == 1.5


def test_disjoint_pairs_do_not_count_as_mixed() -> None:
    pairs = {"a": "b", "b": "a", "c": "d", "d": "c"}
    reports = [{**report("anna", 1), "peer": peer, "peers": (other,)} for peer, other in pairs.items()]
    assert mixed(reports, "abcd") is None and mixed(reports[:2], "ab") is reports[1]
    bridge = {**reports[0], "peers": ("b", "c"), "time": BEGAN + 9}
    assert mixed([*reports, bridge], "abcd") is bridge
    assert mixed(reports[:1], "a") is None and mixed([], "") is None


# -- figures ----------------------------------------------------------------------------------------------------------


def test_work_done_alone_counts_once_mixed() -> None:
    play = healthy()
    for each in history(play, "anna")[12:20]:
        alone(each)
    assert judge(play).goodput == pytest.approx(1.0)
    for each in history(play, "anna")[20:]:
        alone(each)
    assert judge(play).goodput == pytest.approx((6_000 - 1_800) / 6_000)


def test_abandoned_or_lost_work_does_not_count() -> None:
    play = healthy()
    for each in history(play, "anna")[12:15]:
        alone(each)
    alone(history(play, "anna")[15])
    history(play, "anna")[15].update(outcome="superseded", round=15, lineage="anna 16")
    assert judge(play).goodput == pytest.approx((6_000 - 400) / 6_000)
    play = healthy()
    del history(play, "cleo")[15:]
    lives = {**play.lives, "cleo": (Life(BEGAN - 9, BEGAN + 15, -9, -9),)}
    play = replace(play, lives=lives, should=("anna", "bert"))
    for name in ("anna", "bert"):
        for each in history(play, name)[15:]:
            each["peers"] = (IDS["bert" if name == "anna" else "anna"],)
    assert judge(play).goodput == pytest.approx(4_500 / 4_500) and found(play) == []


def test_calm_phase_without_two_rounds_has_no_rate() -> None:
    assert math.isnan(judge(replace(healthy(), calm=(BEGAN, BEGAN + 1))).goodput)


def test_timeline_and_picture_show_mixing_partners(tmp_path: Path) -> None:
    play = healthy()
    lines = timeline(play, judge(play))
    assert "   10.0         round 0 committed    cleo                 anna" in lines
    assert any("all who should have mixed" in line for line in lines)
    draw(play, judge(play), tmp_path / "picture.png")


# -- what is played ---------------------------------------------------------------------------------------------------


def test_protocols_without_votes_schedule_no_exclusion() -> None:
    for name in SCENARIOS:
        scenario = scenario_of(name, "gossip")
        drawn = [step for seed in range(20) for step in scenario.schedule(name, seed, Options().names)]
        assert drawn and not any(step.act == "excluded" for step in drawn)
        assert not {"excluded_seconds", "decided_seconds"} & set(scenario.limits.aims)
    assert scenario_of("stop", "butterfly") is SCENARIOS["stop"]


@pytest.mark.parametrize("protocol", sorted(set(POINTS) & set(INDEPENDENT_PROTOCOLS)))
def test_kills_cover_the_protocols_points(protocol: str) -> None:
    scenario = scenario_of("kill", protocol)
    drawn = [scenario.schedule("kill", seed, Options().names) for seed in range(len(POINTS[protocol]))]
    assert [step.role for (step,) in drawn] == list(POINTS[protocol])
    assert order(["kill", "stop"], [0, 1], protocol)[len(POINTS[protocol])] == ("stop", 0)


def test_remaining_peers_of_a_schedule_are_counted() -> None:
    names = Options().names
    assert left([Step("trap", role="train"), Step("restart", ("the one struck",))], names) == 4
    assert left([Step("kill", ("a",), role="peer"), Step("kill", ("b",), role="worker")], names) == 3
    assert left([Step("kill", names, role="peer"), Step("back", names)], names) == 4
    counts = {name: left(scenario_of(name, "moshpit").schedule(name, 0, names), names) for name in SCENARIOS}
    assert {name for name, count in counts.items() if count < 2} == {"all-but-one"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["all-but-one"], "all-but-one leaves one of 4 peers: by gossip it has nobody to mix with; take more peers"),
        (["kill-two", "--peers", "3"], "kill-two leaves one of 3 peers"),
    ],
)
def test_invalid_arguments_give_one_line_error(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["--protocol", "gossip", "--dir", str(tmp_path), "--json", "--scenario", *arguments]) == 2
    told = capsys.readouterr()
    assert told.out == "" and words in told.err.splitlines()[-1] and "Traceback" not in told.err


def test_spread_limit_is_set_only_for_independent_protocols() -> None:
    assert Options(protocol="gossip").loose and not Options().loose
    assert "spread_limit" in Options(protocol="moshpit").run and "spread_limit" not in Options().run
    assert "spread_limit" not in Options(protocol="gossip", task="gpt").run, "what a run bears that trains is judged"
    assert SCENARIOS["kill"].limits == Limits(aims={"decided_seconds": 2})
