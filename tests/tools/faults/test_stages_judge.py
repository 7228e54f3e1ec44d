"""The judge on runs in stages: a healthy recording passes, every planted violation is named, and figures are right."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults import stage_figures
from tests.faults.judge import judge
from tests.faults.recording import Event, Incarnation, Recording
from tests.faults.runner import Options, Unplayable, play
from tests.faults.scenarios import SCENARIOS
from tests.faults.timeline import timeline
from tests.support.real_swarm import _ROLES
from tests.support.recordings import BEGAN, NO_CONTRIBUTIONS, detail, found, history
from tests.support.staged_recordings import IDS, NAMES, STAGES, samples, staged, staged_report
from tests.support.staged_swarm import StagedSwarm


def test_healthy_stages_pass() -> None:
    verdict = judge(staged())
    assert (verdict.verdict, verdict.violations) == ("pass", [])
    assert verdict.recovery_seconds == 1.0 and verdict.rounds_committed == 30, "those of stage 0, once each"
    assert verdict.goodput == pytest.approx(1.0)


def test_stages_are_compared_within_themselves_only() -> None:
    whole = {invariant for invariant, _ in found(replace(staged(), stages=1))}
    assert "one-branch" in whole, "as one chain, the stages contradict each other"


# -- planted violations -----------------------------------------------------------------------------------------------


def other_parameters(play: Recording) -> None:
    history(play, "e")[8]["params_hash"] = "S1 other"


def other_branch(play: Recording) -> None:
    alone = {"outcome": "fork", "lineage": "B30", "params_hash": "b30"}
    history(play, "c")[29].update(alone, peers=(IDS["c"],))


def second_child(play: Recording) -> None:
    history(play, "f")[12].update(lineage="S2 beside", params_hash="beside")


def other_stage(play: Recording) -> None:
    for each in history(play, "e")[10:]:
        each.update(stage=2)


def lost_round(play: Recording) -> None:
    for name in ("a", "d"):
        history(play, name)[17].update(outcome="undecided", **NO_CONTRIBUTIONS)


def too_many_before(play: Recording) -> None:
    """Stage 1 claims more microbatches than the last stage, which must have counted each of them before."""
    history(play, "b")[20]["microbatches"] = 500


def too_many_drawn(play: Recording) -> None:
    history(play, "a")[20]["microbatches"] = 900


def stage_behind(play: Recording) -> None:
    for name in ("c", "f"):
        del history(play, name)[27:]


def nobody_left(play: Recording) -> None:
    for name in ("c", "f"):
        del history(play, name)[:]


@pytest.mark.parametrize(
    "plant, invariant, name",
    [
        (other_parameters, "same-bits", "e"),
        (other_branch, "one-branch", "f"),
        (second_child, "one-child", "f"),
        (other_stage, "one-stage", "e"),
        (lost_round, "stage-round", ""),
        (too_many_before, "counted-below", ""),
        (too_many_drawn, "counted-below", ""),
        (stage_behind, "one-pace", ""),
        (nobody_left, "one-stage", ""),
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


def test_a_fork_costs_no_training_round() -> None:
    """A stage forks when one of its two peers is gone. Its chain is a round longer then, and it is not ahead."""
    play = staged()
    for name in ("b", "e"):
        for number in (20, 21):
            next(each for each in history(play, name) if each["round"] == number).update(
                outcome="fork", weight=0, **NO_CONTRIBUTIONS
            )
    assert [each for each in found(play) if each[0] == "one-pace"] == [("one-pace", "")], "28 rounds, and 30"
    for name in ("b", "e"):
        history(play, name).extend(staged_report(name, number, incarnation=int(name == "e")) for number in (30, 31))
        for each in history(play, name)[-2:]:
            each["time"] = BEGAN + 29.9
    assert ("one-pace", "") not in found(play)


def test_a_report_later_than_the_end_does_not_set_the_pace() -> None:
    play = staged()
    history(play, "a").append(staged_report("a", 30))
    history(play, "a").append(staged_report("a", 31))
    assert ("one-pace", "") not in found(play), "peers leave one after the other"


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
    (row,) = stage_figures.rows(dead)
    assert row["back_seconds"] == 2.0, "the first five seconds in which enough was trained"
    stopped = {name: [(t, min(n, 1100)) for t, n in each] for name, each in samples().items()}
    verdict = judge(replace(staged(), samples=stopped))
    assert verdict.verdict == "pass" and math.isnan(verdict.missed["back_seconds"][0])
    assert verdict.missed["rate_lost"] == [1.0, 0.6]


def test_a_stopped_peer_is_judged_after_twenty_seconds() -> None:
    (killed,) = stage_figures.rows(staged())
    event = replace(staged().events[0], what="SIGSTOP to all", time=BEGAN + 5)
    (stopped,) = stage_figures.rows(replace(staged(), events=(event, *staged().events[1:])))
    assert (killed["after_seconds"], stopped["after_seconds"]) == (10.0, 20.0)
    assert stopped["rate_after"] > 1, "it has been back for long"


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


def test_timeline_has_a_line_for_each_fault() -> None:
    play = staged()
    lines = timeline(play, judge(play))
    assert any("SIGKILL to peer of stage 1" in line and "tokens" not in line for line in lines)


# -- the swarm --------------------------------------------------------------------------------------------------------


def test_workers_of_stages_and_of_whole_models_are_found() -> None:
    for command in ("python -P -m node.training.worker 1 2 3", "python -P -m node.training.stage_worker 1 2 3"):
        assert _ROLES["worker"].search(command)
    assert not _ROLES["worker"].search("python -m node.training.worker_supervisor")


def test_each_stage_has_two_peers() -> None:
    options = Options().beside(SCENARIOS["stages"])
    assert (options.peers, options.stages, options.names) == (6, STAGES, NAMES)
    assert options.run.startswith("stages = 3") and "batches = 8" in options.run
    assert Options(9).beside(SCENARIOS["stages"]).peers == 9 and Options().beside(SCENARIOS["kill"]) == Options()


def test_stages_are_refused_with_another_protocol(tmp_path: Path) -> None:
    with pytest.raises(Unplayable, match="by butterfly, not by gossip"):
        play("stages", SCENARIOS["stages"], 0, Options(protocol="gossip"), tmp_path, lambda line: None)


def test_a_peer_names_its_stage_at_its_first_start_only(tmp_path: Path) -> None:
    swarm = StagedSwarm(tmp_path, "", names=NAMES, stages=STAGES)
    peers = [swarm.peer(name) for name in NAMES]
    assert swarm.arguments("e") == ("--stage", "1")
    peers[4].directory.mkdir()
    assert swarm.arguments("e") == (), "its directory tells"
    assert swarm.can_go_on(peers[2:5]) and not swarm.can_go_on(peers[::3])
