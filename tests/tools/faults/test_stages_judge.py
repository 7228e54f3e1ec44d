"""The judge on runs in stages: a healthy recording passes, every planted violation is named, and figures are right."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.faults import stages
from tests.faults.judge import judge
from tests.faults.recording import Event, Incarnation, Recording
from tests.support.recordings import BEGAN, NO_CONTRIBUTIONS, detail, found, history
from tests.support.staged_recordings import IDS, NAMES, samples, staged, staged_report


def test_healthy_stages_pass() -> None:
    verdict = judge(staged())
    assert (verdict.verdict, verdict.violations) == ("pass", [])
    assert verdict.recovery_seconds == 1.0 and verdict.rounds_committed == 30, "those of stage 0, once each"
    assert verdict.goodput == pytest.approx(1.0)


# -- planted violations -----------------------------------------------------------------------------------------------


def says(names: str, numbers: range, **changes: Any) -> Callable[[Recording], None]:
    """These peers report other rounds."""

    def plant(play: Recording) -> None:
        for name in names:
            for number in numbers:
                history(play, name)[number].update(changes)

    return plant


def ends_before(names: str, number: int) -> Callable[[Recording], None]:
    """These peers report no more from that round on."""

    def plant(play: Recording) -> None:
        for name in names:
            del history(play, name)[number:]

    return plant


OTHER_BRANCH = {"outcome": "fork", "lineage": "B30", "params_hash": "b30", "peers": (IDS["c"],)}


@pytest.mark.parametrize(
    "plant, invariant, name",
    [
        (says("e", range(8, 9), params_hash="S1 other"), "same-bits", "e"),
        (says("c", range(29, 30), **OTHER_BRANCH), "one-branch", "f"),
        (says("e", range(10, 25), stage=2), "one-stage", "e"),
        (says("ad", range(17, 18), outcome="undecided", **NO_CONTRIBUTIONS), "stage-round", ""),
        (says("b", range(20, 21), microbatches=500), "counted-below", ""),
        (ends_before("cf", 27), "one-pace", ""),
        (ends_before("cf", 0), "one-stage", ""),
    ],
)
def test_planted_violation_is_named(plant: Callable[[Recording], None], invariant: str, name: str) -> None:
    play = staged()
    plant(play)
    assert (invariant, name) in found(play)
    assert "12D3KooW" not in detail(play)


def test_a_skipped_round_is_explained_and_counted() -> None:
    play = staged()
    for name in ("a", "d"):
        changes = {"outcome": "skipped", "params_hash": history(play, name)[16]["params_hash"], **NO_CONTRIBUTIONS}
        history(play, name)[17].update(changes)
    assert ("stage-round", "") not in found(play)
    assert judge(play).faults[0]["rounds_lost"] == 1 and judge(play).missed["stage_rounds_lost"] == [1, 0]


def test_killed_peers_may_have_counted_what_they_did_not_report() -> None:
    play = staged()
    history(play, "b")[20]["microbatches"] += 30  # stage 2 had counted 30 more than stage 1
    assert found(play) == []
    history(play, "b")[20]["microbatches"] += 30
    assert found(play) == [("counted-below", "")]
    killed = (Incarnation(BEGAN - 9, BEGAN + 5, -9, -9), Incarnation(BEGAN + 6, BEGAN + 31, 0, 0))
    assert found(replace(play, incarnations={**play.incarnations, "f": killed})) == []


def test_pace_counts_training_rounds_until_the_end() -> None:
    """A stage forks when one of its two peers is gone: its chain is a round longer then, and it is not ahead."""
    play = staged()
    says("b", range(20, 22), outcome="fork", weight=0, **NO_CONTRIBUTIONS)(play)
    says("e", range(15, 17), outcome="fork", weight=0, **NO_CONTRIBUTIONS)(play)  # after five rounds without it
    assert [each for each in found(play) if each[0] == "one-pace"] == [("one-pace", "")], "28 rounds, and 30"
    for name in ("b", "e"):
        history(play, name).extend(staged_report(name, number, incarnation=int(name == "e")) for number in (30, 31))
    assert ("one-pace", "") in found(play), "peers leave one after the other: reports after the end do not count"
    for name in ("b", "e"):
        for each in history(play, name)[-2:]:
            each["time"] = BEGAN + 29.9
    assert ("one-pace", "") not in found(play)


# -- figures ----------------------------------------------------------------------------------------------------------


def test_figures_of_a_lost_replica() -> None:
    (row,) = judge(staged()).faults
    assert (row["fault"], row["peers"], row["whole"]) == ("SIGKILL to peer of stage 1", ["e"], False)
    assert row["tokens_per_second"] == pytest.approx(220 * 10 / 12), "the play began only ten seconds before"
    assert row["back_seconds"] == 0 and row["next_round_seconds"] == 1.0
    assert (row["rounds_lost"], row["away_seconds"]) == (0, 4.0)
    assert row["loss_before"] > row["loss_after"]


def test_rate_that_does_not_come_back_is_missed() -> None:
    dead = replace(staged(), samples=samples(share=0.0))
    (row,) = stages.rows(dead)
    assert row["back_seconds"] == 2.0, "the first five seconds in which enough was trained"
    stopped = {name: [(t, min(n, 1100)) for t, n in each] for name, each in samples().items()}
    verdict = judge(replace(staged(), samples=stopped))
    assert verdict.verdict == "pass" and math.isnan(verdict.missed["back_seconds"][0])
    assert verdict.missed["rate_lost"] == [1.0, 0.6]


def test_figures_of_a_whole_stage() -> None:
    events = (
        Event(BEGAN + 10, "SIGKILL to peer", ("b", "e"), "fault"),
        Event(BEGAN + 14, "started, through d", ("b", "e"), "start"),
        Event(BEGAN + 30, "asked to finish", NAMES, "end"),
    )
    verdict = judge(replace(staged(), events=events))
    (row,) = verdict.faults
    assert row["whole"] and row["fault"] == "SIGKILL to peer of all of stage 1"
    assert verdict.measures["whole_stage_seconds"]["worst"] == pytest.approx(row["next_round_seconds"])
    assert row["next_round_seconds"] < 3, "from the start on, not from the kill"
