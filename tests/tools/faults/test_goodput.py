"""The figures of a verdict of `tests.faults`: goodput, participation, standstill, skipped rounds and missed aims."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.faults.judge import judge
from tests.faults.recording import Limits
from tests.support.recordings import (
    BEGAN,
    NO_CONTRIBUTIONS,
    PEERS,
    after_death,
    history,
    mixed,
    skip_mixing,
    voted,
    voted_report,
)


def test_missed_target_is_reported_without_failing() -> None:
    aims = {"notice_seconds": 2.0, "rejoin_seconds": 9.0, "recovery_seconds": 0.5, "never": 1.0}
    measures = {"notice_seconds": (1.0, 3.0, 2.5), "rejoin_seconds": (8.0, 9.0), "endless": (1.0, math.nan)}
    verdict = judge(replace(voted(), limits=Limits(aims=aims), measures=measures))
    assert verdict.verdict == "pass"
    assert verdict.measures["notice_seconds"] == {"median": 2.5, "worst": 3.0, "trials": 3}
    missed = verdict.as_dict()["missed"]
    assert missed == {"notice_seconds": [3.0, 2.0], "recovery_seconds": [1.0, 0.5], "never": [None, 1.0]}
    assert verdict.as_dict()["measures"]["endless"] == {"median": None, "worst": None, "trials": 2}


def test_standstill_is_measured() -> None:
    aims = Limits(5.0, aims={"standstill_seconds": 3})
    assert judge(replace(voted(), limits=aims)).missed == {}
    assert judge(replace(after_death(4.0), limits=aims)).missed == {"standstill_seconds": [5.0, 3]}
    play = replace(voted(), limits=aims)
    for name in PEERS:
        del history(play, name)[20:]
    assert judge(play).missed == {"standstill_seconds": [10.0, 3]}, "up to the end"


def test_skipped_rounds_are_counted_and_can_have_a_target() -> None:
    play = replace(voted(), limits=Limits(aims={"rounds_skipped": 0, "skipped_share": 0.01}))
    assert judge(play).missed == {}
    for name in PEERS:
        history(play, name)[29].update(outcome="skipped", params_hash="params 29", **NO_CONTRIBUTIONS)
    verdict = judge(play)
    assert (verdict.verdict, verdict.rounds_committed, verdict.rounds_skipped) == ("pass", 29, 1)
    assert verdict.missed == {"rounds_skipped": [1, 0], "skipped_share": [1 / 20, 0.01]}


def test_participation_matches_hand_calculation() -> None:
    """Cleo is killed in round 15 of 30, and contributes nothing to round 3; round 20 is skipped."""
    play = after_death()
    history(play, "cleo")[3]["weight"] = 0.0
    for name in ("anna", "bert"):
        history(play, name)[20].update(outcome="skipped", **NO_CONTRIBUTIONS)
    assert judge(play).participation == pytest.approx((2 / 3 + 28) / 30)


# -- goodput by rounds that are voted on ------------------------------------------------------------------------------


def test_goodput_matches_hand_calculation() -> None:
    """In the calm 9 rounds of 300 tokens take 27 seconds of peers: 100 tokens a second. Cleo dies 5 s after it.

    Then 5 rounds of 300 and 15 of 200 take 60 - 15 seconds of peers; after a pause, the last 5 of 200 are missing.
    """
    assert judge(after_death()).goodput == pytest.approx((5 * 300 + 15 * 200) / (100 * 45))
    assert judge(after_death(5.0)).goodput == pytest.approx((5 * 300 + 10 * 200) / (100 * 45))


def test_abandoned_rounds_do_not_count_as_goodput() -> None:
    """Cleo goes on alone for three rounds, and returns to what the others decided."""
    play = voted()
    for name in ("anna", "bert"):
        for number in (12, 13, 14):
            history(play, name)[number] = voted_report(name, number, ("anna", "bert"))
    mine = [
        voted_report("cleo", number, ("cleo",), parent=f"C{number}", lineage=f"C{number + 1}")
        for number in (12, 13, 14)
    ]
    mine[0].update(parent="L12", outcome="fork")
    for each in mine:
        each["params_hash"] = each["lineage"]
    back = voted_report("cleo", 15, (), parent="C15", lineage="L15", outcome="superseded", params_hash="params 15")
    back.update(lost_rounds=3, lost_tokens=300, weight=0.0, time=BEGAN + 15.5)
    history(play, "cleo")[12:15] = [*mine, back]
    verdict = judge(replace(play, limits=Limits(5.0, forks=True)))
    assert verdict.violations == [] and verdict.rounds_committed == 33
    assert verdict.goodput == pytest.approx(5_700 / 6_000)


def test_calm_phase_without_two_rounds_has_no_rate() -> None:
    for healthy in (voted(), mixed()):
        assert math.isnan(judge(replace(healthy, calm=(BEGAN, BEGAN + 1))).goodput)


# -- goodput by mixing ------------------------------------------------------------------------------------------------


def test_work_done_alone_counts_once_mixed() -> None:
    play = mixed()
    skip_mixing(history(play, "anna")[12:20])
    assert judge(play).goodput == pytest.approx(1.0)
    skip_mixing(history(play, "anna")[20:])
    assert judge(play).goodput == pytest.approx((6_000 - 1_800) / 6_000)
    play = mixed()
    skip_mixing(history(play, "anna")[12:16])
    history(play, "anna")[15].update(outcome="superseded", round=15, lineage="anna 16")
    assert judge(play).goodput == pytest.approx((6_000 - 400) / 6_000), "another's state took the place of its work"
