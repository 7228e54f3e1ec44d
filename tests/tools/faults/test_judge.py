"""The judge of `tests.faults`: a healthy recording passes, and every planted violation is found and named."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.faults.independent import APART
from tests.faults.judge import Verdict, judge
from tests.faults.recording import Incarnation, Limits, Recording
from tests.support.independent_checkers import mixed as last_to_mix
from tests.support.recordings import (
    BEGAN,
    IDS,
    NO_CONTRIBUTIONS,
    PEERS,
    SPREAD,
    SPREAD_LIMIT,
    after_death,
    detail,
    found,
    history,
    mixed,
    mixed_report,
    skip_mixing,
    voted,
    with_incarnations,
)

PROTOCOLS = pytest.mark.parametrize("healthy", [voted, mixed], ids=["butterfly", "gossip"])


def test_healthy_recordings_pass() -> None:
    verdict = judge(voted())
    assert replace(verdict, goodput=round(verdict.goodput, 9)) == Verdict(
        "made-up", 7, "pass", [], 30, 0, 1.0, 1.0, 1.0, {}, {}
    )
    verdict = judge(mixed())
    assert (verdict.verdict, verdict.violations) == ("pass", [])
    assert verdict.recovery_seconds == 1.0 and verdict.goodput == pytest.approx(1.0)
    assert verdict.measures["spread_at_the_end"] == {"median": SPREAD, "worst": SPREAD, "trials": 3}
    assert verdict.measures["half_exchanges"]["worst"] == 0


def test_expected_death_passes() -> None:
    assert found(after_death()) == []


# -- histories --------------------------------------------------------------------------------------------------------


def other_parameters(play: Recording) -> None:
    history(play, "bert")[8]["params_hash"] = "params 8'"


def contribution_counted_twice(play: Recording) -> None:
    for name in PEERS:
        history(play, name)[9]["contributions"] |= {IDS["cleo"]: ("L8", 4, 4)}


def message_counted_twice(play: Recording) -> None:
    history(play, "bert")[9]["messages"] = history(play, "bert")[8]["messages"]


def earlier_round(play: Recording) -> None:
    history(play, "cleo")[22]["round"] = 20


def repeated_round(play: Recording) -> None:
    history(play, "cleo")[22]["round"] = 21


def not_finite(play: Recording) -> None:
    history(play, "anna")[5]["finite"] = False


def fork_at_the_end(play: Recording) -> None:
    """Bert's last report is a fork that no other peer has made."""
    alone = {"outcome": "fork", "lineage": "B30", "params_hash": "b30"}
    history(play, "bert")[29].update(alone, peers=(IDS["bert"],))


def broken_chain(play: Recording) -> None:
    history(play, "anna")[7]["parent"] = "another's"


def voted_outcome(play: Recording) -> None:
    history(play, "bert")[12]["outcome"] = "undecided"


def committed_without_messages(play: Recording) -> None:
    history(play, "cleo")[6]["messages"] = ()


def different_states_in_a_group(play: Recording) -> None:
    for name in ("anna", "bert"):
        history(play, name)[8]["group"] = "8/x"


@pytest.mark.parametrize(
    "healthy, plant, invariant, name",
    [
        (voted, other_parameters, "same-bits", "bert"),
        (voted, contribution_counted_twice, "counted-once", "anna"),
        (voted, repeated_round, "never-back", "cleo"),
        (voted, not_finite, "finite", "anna"),
        (voted, fork_at_the_end, "one-branch", "bert"),
        (mixed, earlier_round, "never-back", "cleo"),
        (mixed, message_counted_twice, "counted-once", "bert"),
        (mixed, not_finite, "finite", "anna"),
        (mixed, broken_chain, "never-back", "anna"),
        (mixed, voted_outcome, "outcome", "bert"),
        (mixed, committed_without_messages, "outcome", "cleo"),
        (mixed, different_states_in_a_group, "one-group", "bert"),
    ],
)
def test_broken_invariant_is_reported_with_peer_name(
    healthy: Callable[[], Recording], plant: Callable[[Recording], None], invariant: str, name: str
) -> None:
    play = healthy()
    plant(play)
    assert (invariant, name) in found(play)
    assert "12D3KooW" not in detail(play)


def test_shared_anchor_invariants_apply_only_to_replicated_protocols() -> None:
    assert ("same-bits", "bert") not in found(mixed())
    assert ("one-branch", "bert") in found(replace(mixed(), protocol="butterfly"))


def test_unknown_peer_is_reported() -> None:
    play = voted()
    for name in PEERS:
        history(play, name)[4]["peers"] += ("12D3KooW-eve",)
    assert found(play) == [("stranger", "anna")]
    history(play, "bert")[0]["peer"] = "12D3KooW-dave"
    assert ("stranger", "…W-dave") in found(play)


def test_fork_despite_majority_is_reported() -> None:
    play = voted()
    for name in PEERS:
        for number in range(11, 14):
            history(play, name)[number]["outcome"] = "fork"
    assert found(play) == [("fork", "anna")] * 3, "one of each lineage"
    assert found(replace(play, limits=Limits(5.0, forks=True))) == []


def test_diverged_state_is_reported_without_hash_difference() -> None:
    """Cleo's momentum differs, its parameters do not: cleo reports that, and fetches the others' state."""
    play = voted()
    why = {IDS["cleo"]: "its state is not the one that the others hold"}
    history(play, "cleo")[12].update(outcome="superseded", blamed=why, **NO_CONTRIBUTIONS)
    assert found(play) == [("same-bits", "cleo")]


# -- progress ---------------------------------------------------------------------------------------------------------


def test_missing_progress_after_healing_is_reported() -> None:
    play = voted()
    for number in range(20, 30):
        history(play, "anna")[number]["peers"] = history(play, "bert")[number]["peers"] = (IDS["anna"], IDS["bert"])
    del history(play, "cleo")[20:]
    verdict = judge(play)
    assert [each["invariant"] for each in verdict.violations] == ["progress"]
    assert verdict.violations[0]["detail"] == "no round with anna, bert, cleo in it; due within 5 s"
    assert math.isnan(verdict.recovery_seconds) and verdict.as_dict()["recovery_seconds"] is None
    play = mixed()
    skip_mixing(history(play, "bert")[20:])
    assert found(play) == [("progress", "")]
    assert detail(play) == "no mixing with anna, bert, cleo in it; due within 5 s"


def test_recovery_needs_a_round_with_all_peers() -> None:
    play = voted()
    for name in PEERS:
        for number in (20, 21, 22):
            history(play, name)[number]["peers"] = (IDS["anna"], IDS["bert"])
    assert judge(play).recovery_seconds == 4.0
    play = mixed()
    skip_mixing(history(play, "anna")[20:23])
    assert judge(play).recovery_seconds == 4.0


@PROTOCOLS
def test_round_already_in_progress_is_no_recovery(healthy: Callable[[], Recording]) -> None:
    play = replace(healthy(), healed=BEGAN + 20.5)  # in the middle of round 20
    assert judge(play).recovery_seconds == 1.5


def test_recovery_ends_with_the_last_report() -> None:
    play = voted()
    history(play, "cleo")[20]["time"] += 0.75
    assert judge(play).recovery_seconds == 1.75
    late = replace(play, limits=Limits(recovery_seconds=1.5))
    assert found(late) == [("progress", "")] and "after 1.8 s" in detail(late)


def test_zero_weight_contribution_is_no_recovery() -> None:
    play = voted()
    for number in range(20, 30):
        history(play, "bert")[number].update(weight=0.0, tokens=0)
    assert found(play) == [("progress", "")]


def test_disjoint_pairs_do_not_count_as_mixed() -> None:
    pairs = {"a": "b", "b": "a", "c": "d", "d": "c"}
    reports = [{**mixed_report("anna", 1), "peer": peer, "peers": (other,)} for peer, other in pairs.items()]
    assert last_to_mix(reports, "abcd") is None and last_to_mix(reports[:2], "ab") is reports[1]
    bridge = {**reports[0], "peers": ("b", "c"), "time": BEGAN + 9}
    assert last_to_mix([*reports, bridge], "abcd") is bridge
    assert last_to_mix(reports[:1], "a") is None and last_to_mix([], "") is None


def test_long_rounds_extend_the_recovery_limit() -> None:
    aims = {"recovery_seconds": 30.0}
    assert Limits(aims=aims).beside((5.0, 10.0)) == Limits(aims=aims), "a minute is enough for rounds of one second"
    assert Limits(aims=aims).beside((5.0, 125.0)) == Limits(120.0, aims)


def test_stuck_step_fails_the_play() -> None:
    play = replace(voted(), stuck=("trap send Chunk: not within 60 s",))
    assert found(play) == [("stuck", "")] and detail(play) == "trap send Chunk: not within 60 s"


def test_play_without_expected_survivors_fails() -> None:
    assert found(replace(voted(), should=())) == [("progress", "")]


# -- the spread of peers that share no anchor -------------------------------------------------------------------------


def spread(play: Recording, value: float | None, since: int) -> Recording:
    """The recording with another spread in each report from round `since` on."""
    for name in PEERS:
        for each in history(play, name)[since:]:
            each["spread"] = value
    return play


def test_paced_peers_must_end_within_the_spread_limit() -> None:
    limit = APART * math.sqrt(2)
    assert found(spread(mixed(), 0.99 * limit, 20)) == []
    assert found(spread(mixed(), 1.01 * limit, 20)) == [("spread", "")]
    assert found(spread(spread(mixed(), 5.0, 20), SPREAD, 25)) == [], "a spread that falls again is no violation"


def test_trained_peers_must_end_within_the_spread_limit() -> None:
    play = replace(mixed(), task="gpt")
    assert found(play) == [("spread", "")] and detail(play) == "0.1000 apart at the end; at most 0.0200"
    assert found(spread(play, SPREAD_LIMIT, 25)) == []


def test_peers_with_equal_parameters_have_no_spread() -> None:
    play = spread(replace(mixed(), task="gpt"), 0.3, 0)
    for name in PEERS:
        history(play, name)[28].update(params_hash="all of them")
    assert found(play) == [] and judge(play).measures["spread_at_the_end"]["worst"] == 0.0
    history(play, "bert")[28].update(params_hash="its own")
    assert found(play) == [("spread", "")]


def test_unknown_spread_is_a_violation() -> None:
    assert found(spread(mixed(), None, 0)) == [("spread", "")]
    assert found(spread(replace(mixed(), task="gpt"), math.nan, 0)) == [("spread", "")]


# -- processes and logs -----------------------------------------------------------------------------------------------


@PROTOCOLS
def test_orphan_process_is_reported(healthy: Callable[[], Recording]) -> None:
    play = replace(healthy(), left={"bert": ("python -m node.training.worker 7 8",)})
    assert found(play) == [("orphan", "bert")] and "node.training.worker 7 8" in detail(play)


@pytest.mark.parametrize(
    "incarnation, words",
    [
        (Incarnation(BEGAN - 9, BEGAN + 31, -9, 0), "incarnation 1 ended with SIGKILL, not exit code 0"),
        (Incarnation(BEGAN - 9, BEGAN + 28, 0, 0), "ended 2.0 s before it was asked to"),
    ],
    ids=["wrong-exit-code", "premature"],
)
def test_wrong_exit_is_reported_in_words(incarnation: Incarnation, words: str) -> None:
    play = with_incarnations(voted(), "anna", incarnation)
    assert found(play) == [("exit-code", "anna")] and detail(play) == words


def test_unobserved_exit_is_reported() -> None:
    play = voted()
    assert found(replace(play, incarnations={name: play.incarnations[name] for name in ("anna", "bert")})) == [
        ("exit-code", "cleo")
    ]
    for each in history(play, "bert")[20:]:
        each["incarnation"] = 1
    assert found(play) == [("exit-code", "bert")] and detail(play) == "ended unseen after 1 incarnations"


FAILED = {
    "event": "a handler failed",
    "level": "error",
    "exception": 'Traceback (most recent call last):\n  File "x"\nE: 1',
}
WORKER_ENDED = "worker 31 ended (killed by signal 11; last output: none): another is started"


def warning(event: str) -> str:
    return json.dumps({"event": event, "level": "warning"})


@pytest.mark.parametrize(
    "log, quoted",
    [
        ('Traceback (most recent call last):\n  File "x.py", line 3\nValueError: 17\nmore', "ValueError: 17"),
        (json.dumps(FAILED), "a handler failed E: 1"),
        ('{"event": "all is lost", "level": "critical"}', "all is lost"),
        ("Task exception was never retrieved", "Task exception was never retrieved"),
        ("Task was destroyed but it is pending!", "Task was destroyed"),
        ("RuntimeWarning: coroutine 'f' was never awaited", "was never awaited"),
        (warning(WORKER_ENDED), "worker 31 ended"),
        (warning("p2pd 32 ended (exit code 2; …)"), "p2pd 32 ended"),
    ],
)
def test_log_alarm_is_reported_and_quoted(log: str, quoted: str) -> None:
    play = voted()
    play = replace(play, logs={**play.logs, "cleo": f"{play.logs['cleo']}{log}\nand so on\n"})
    assert found(play) == [("log", "cleo")] and quoted in detail(play)


def test_long_log_line_is_quoted_in_part() -> None:
    play = replace(voted(), logs={"cleo": "Traceback " + 5_000 * "x"})
    assert len(detail(play)) < 250


def test_child_killed_by_the_harness_is_no_alarm() -> None:
    killed = warning(WORKER_ENDED.replace("signal 11", "signal 9"))
    assert found(replace(voted(), logs={"anna": killed})) == []


# -- resources --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "what, fine, grown", [("open_files", 45, 46), ("tasks", 33, 34), ("rss_bytes", 839_000_000, 841_000_000)]
)
def test_resource_growth_is_reported(what: str, fine: int, grown: int) -> None:
    play = voted()
    for number in (28, 29):  # of three: the median
        history(play, "bert")[number][what] = fine
    assert found(play) == []
    for number in (28, 29):
        history(play, "bert")[number][what] = grown
    assert found(play) == [("level", "bert")] and f"{what} {grown:,}" in detail(play)


def test_single_high_reading_is_no_growth() -> None:
    play = voted()
    history(play, "bert")[29]["open_files"] = 1_000
    assert found(play) == []


def test_more_peers_may_use_more_resources() -> None:
    play = voted()
    for number in (28, 29):
        history(play, "bert")[number]["open_files"] = 80
    newcomers = {name: (Incarnation(BEGAN + 12, BEGAN + 31, 0, 0),) for name in ("dora", "emil", "finn")}
    assert found(play) == [("level", "bert")]
    assert found(replace(play, incarnations={**play.incarnations, **newcomers})) == []


def test_restarted_peer_is_not_compared_with_former_incarnation() -> None:
    play = voted()
    for number in range(15, 30):
        history(play, "bert")[number].update(open_files=1_000, incarnation=1)
    incarnations = (Incarnation(BEGAN - 9, BEGAN + 14.1, -9, -9), Incarnation(BEGAN + 14.2, BEGAN + 31, 0, 0))
    assert found(with_incarnations(play, "bert", *incarnations)) == []
