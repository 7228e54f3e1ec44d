"""The command `swarm` without a process: its summary of the reports, and what it asks of its peers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from node.cli.swarm_command import LocalSwarm, Participant
from node.reporting.report import RoundEvaluation, RoundReport
from node.reporting.status import to_json
from node.runtime.child_process import ChildProcess
from node.storage.journal import Journal
from node.ui.swarm_summary import KEEP_ROUNDS, MAX_OPEN_ROUNDS, SwarmRound, SwarmSummary
from node.ui.swarm_view import picture, summary
from tests.golden.screens import SIX, story, text
from tests.golden.screens import swarm_report as report
from tests.support.status_examples import STATUS

NAMES = SIX[:3]


def verdict(tally: SwarmSummary) -> str:
    return text(summary(tally, dict.fromkeys(tally.tracks, "left"), 60.0), 200).splitlines()[-1]


def numbers(tally: SwarmSummary, running: tuple[str, ...] = ()) -> list[int]:
    return [each.number for each in tally.complete(running)]


# -- agreement --------------------------------------------------------------------------------------------------------


def test_long_run_keeps_first_loss_and_last_rounds() -> None:
    tally = story(KEEP_ROUNDS + 10, names=SIX[:1])
    assert [tally.rounds[0].number, tally.rounds[-1].number] == [10, KEEP_ROUNDS + 9]
    end = tally.as_json()
    assert tally.fell and (end["loss_first"], end["rounds"]) == (3.0, KEEP_ROUNDS + 10)
    assert end["loss_last"] == 3.0 / (KEEP_ROUNDS + 10)


def test_equal_final_states_agree() -> None:
    tally = story(4)
    end = tally.as_json()
    assert tally.agree and tally.fell
    assert (end["agree"], end["rounds"], end["loss_first"], end["loss_last"]) == (True, 4, 3.0, 0.75)
    assert end["stages"] == [{"stage": 0, "agree": True, "params_hash": "h4-0"}]
    assert end["peers"][1] == {
        "peer_id": "id-of-peer-2", "stage": 0, "rounds": 4, "lineage": "l4-0", "params_hash": "h4-0", "tokens": 4000,
        "bytes_sent": 40, "bytes_received": 80, "seconds_train": 8.0, "seconds_average": 2.0,
    }  # fmt: skip
    tally.add(SIX[0], report(SIX[0], 4, outcome="superseded", lineage="l9"))
    track = tally.tracks[SIX[0]]
    assert (track.rounds, track.lineage) == (4, "l9"), "catching up is not a round of its own"
    assert not story(1).fell, "of a single round"
    tally.add(SIX[0], report(SIX[0], 4, held_out_loss=3.5))
    assert numbers(tally) == [4] and not tally.fell


def test_independent_peers_agree_within_spread_limit() -> None:
    tally = story(4, names=NAMES)
    for name, spread in zip(NAMES, (0.01, 0.019, 0.0), strict=True):
        own: dict[str, Any] = {"lineage": f"l-{name}", "params_hash": f"h-{name}", "spread_limit": 0.02}
        tally.add(name, report(name, 4, spread=spread, **own))
    assert tally.agree and tally.spread == (0.019, 0.02)
    assert tally.as_json()["stages"] == [{"stage": 0, "agree": True, "params_hash": ""}], "they hold different ones"
    assert "a peer is 1.9 % from the mean of all, the limit is 2 %" in verdict(tally)
    tally.add(NAMES[0], report(NAMES[0], 5, spread=0.03, spread_limit=0.02))
    assert not tally.agree and json.loads(to_json(tally.as_json()))["spread"] == 0.03
    for name in NAMES:  # equal parameters count, not the older estimates
        tally.add(name, report(name, 6, spread=0.03, spread_limit=0.02, params_hash="h", lineage="l"))
    assert tally.spread == (0.0, 0.02)


@pytest.mark.parametrize("stage", range(3))
@pytest.mark.parametrize(
    "change",
    [
        lambda tally, name: tally.add(name, report(name, 1, 3, params_hash="other")),
        lambda tally, name: tally.add(name, report(name, 1, 3, lineage="other")),
        lambda tally, name: setattr(tally.tracks[name], "well", False),
    ],
    ids=["other parameters", "other lineage", "killed"],
)
def test_one_deviating_peer_spoils_its_stage_only(change: Callable[[SwarmSummary, str], None], stage: int) -> None:
    tally = story(2, 3)
    assert tally.agree and [each["stage"] for each in tally.as_json()["peers"]] == [0, 1, 2, 0, 1, 2]
    change(tally, SIX[3 + stage])
    stages = [{"stage": k, "agree": k != stage, "params_hash": "" if k == stage else f"h2-{k}"} for k in range(3)]
    assert not tally.agree and tally.as_json()["stages"] == stages
    assert f": stage {stage} does not agree" in verdict(tally)
    change(tally, SIX[(stage + 1) % 3])
    both = sorted((stage, (stage + 1) % 3))
    assert f": stages {both[0]} and {both[1]} do not agree" in verdict(tally)


def test_stage_without_peers_does_not_agree() -> None:
    tally = SwarmSummary(NAMES, 3)
    for name in NAMES:  # the last one holds stage 1, not 2 as asked
        tally.add(name, report(name if name != NAMES[2] else NAMES[1], 0, 3))
        tally.tracks[name].well = True
    assert [each.agree for each in tally.stages] == [True, True, False] and not tally.agree
    silent = SwarmSummary(NAMES, 3)
    for each in silent.tracks.values():
        each.well = True
    assert silent.as_json()["stages"] == [{"stage": k, "agree": False, "params_hash": ""} for k in range(3)]
    assert ": stages 0, 1 and 2 do not agree" in verdict(silent) and not silent.fell
    assert json.loads(to_json(silent.as_json()))["loss_last"] is None


# -- rounds -----------------------------------------------------------------------------------------------------------


def test_round_completes_when_all_running_peers_reported_or_passed_it() -> None:
    tally = SwarmSummary(NAMES)
    tally.add(NAMES[0], report(NAMES[0], 0, outcome="undecided"))
    assert numbers(tally) == []
    for name in NAMES[:2]:
        tally.add(name, report(name, 0))
    assert numbers(tally, NAMES) == []
    assert list(tally.complete(NAMES[:2])) == [SwarmRound(0, 3.0, 1000.0, 6, 2.6)]
    assert numbers(tally) == []
    for number in (1, 2, 3):
        tally.add(NAMES[0], report(NAMES[0], number))
    assert numbers(tally, NAMES) == [1, 2] and tally.rounds[-1].seconds == 3.0
    for name, number in ((NAMES[1], 2), (NAMES[1], 3), (NAMES[2], 3)):  # the first of them is late
        tally.add(name, report(name, number))
    assert numbers(tally, NAMES) == [3]
    tally.add(NAMES[0], report(NAMES[0], 4, outcome="skipped", held_out_loss=math.nan, peers=()))
    assert numbers(tally) == [4] and len(tally.losses) == 4 and tally.as_json()["rounds"] == 5


def test_losses_of_stages_come_after_their_rounds() -> None:
    """That of an open round, and of one that is complete; the first one of a round counts."""
    tally = SwarmSummary(NAMES, 3)
    for number in range(2):
        for name in NAMES[:2] if number else NAMES:
            tally.add(name, report(name, number, 3, held_out_loss=math.nan))
    assert numbers(tally, NAMES) == [0] and math.isnan(tally.first_loss)
    found = [RoundEvaluation(n, report(NAMES[0], n, 3).lineage, loss, 8, 0.0) for n, loss in ((0, 4.0), (1, 2.0))]
    done = [tally.evaluated(NAMES[0], each) for each in (*found, replace(found[0], held_out_loss=9.0))]
    assert [each and (each.number, each.held_out_loss) for each in done] == [(0, 4.0), None, None] and not tally.fell
    tally.add(NAMES[2], report(NAMES[2], 1, 3))
    assert numbers(tally, NAMES) == [1] and tally.losses == [4.0, 2.0] and tally.first_loss == 4.0 and tally.fell
    tally.evaluated(NAMES[0], RoundEvaluation(1, "", 9.0, 8, 0.0))
    assert tally.losses == [4.0, 2.0]
    short = SwarmSummary(NAMES, 3)
    for number in range(2):
        for name in NAMES:
            short.add(name, report(name, number, 3, held_out_loss=math.nan))
    assert numbers(short, NAMES) == [0, 1] and not short.fell
    short.evaluated(NAMES[0], RoundEvaluation(1, "", 2.0, 8, 0.0))
    assert short.fell, "nothing says that it did not: the first round was too short for an evaluation"


def test_round_waits_for_stage_0_while_another_stage_is_ahead() -> None:
    """A stage that has skipped a round counts one more."""
    tally = SwarmSummary(NAMES, 3)
    for number in range(3):
        for name in NAMES[1:]:
            tally.add(name, report(name, number, 3))
    assert numbers(tally, NAMES) == []
    for number in range(2):
        tally.add(NAMES[0], report(NAMES[0], number, 3))
    assert [each.held_out_loss for each in tally.complete(NAMES)] == [3.0, 1.5]
    for number in range(2, MAX_OPEN_ROUNDS + 9):  # a stage is silent for long
        tally.add(NAMES[0], report(NAMES[0], number, 3))
    assert len(numbers(tally, NAMES)) == 7, "one complete, and the oldest of the others"


# -- the peers' processes ---------------------------------------------------------------------------------------------


def after(flag: str, *commands: tuple[str, ...]) -> list[str]:
    """The values of an option in these commands."""
    return [value for words in commands for name, value in pairwise(words) if name == flag]


async def test_peers_join_the_stages_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: dict[str, tuple[str, ...]] = {}

    async def start(name: str, command: tuple[str, ...], take: object, environment: dict[str, str]) -> SimpleNamespace:
        assert environment["NODE_STAGE"] == "", "a variable of the user's would lead all peers into one stage"
        started[name] = command[command.index("join") :]
        return SimpleNamespace(code=None)

    async def look(peer: Participant, seconds: float) -> None:
        peer.status = STATUS

    monkeypatch.setattr(ChildProcess, "start", start)
    monkeypatch.setattr(Participant, "look", look)
    file = tmp_path / "run.toml"
    file.write_text("stages = 2\n")
    for stages, run, founder, others in (
        (3, None, ["3"], ["1", "2", "0", "1", "2"]),
        (1, file, ["1"], []),  # the option overrules the file
        (1, None, [], []),
    ):
        swarm = LocalSwarm(tmp_path, peers=6, run=run, stages=stages)
        assert await swarm._found(swarm._peers[0])
        await swarm._join(swarm._peers[0])
        assert after("--stages", *started.values()) == founder and after("--stage", *started.values()) == others


async def test_number_of_rounds_is_asked_for_without_a_live_view(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It grows by rounds that train nothing: else the last line would be of round 15/14."""
    child, asked = SimpleNamespace(code=None), list[str]()

    async def start(*given: object) -> SimpleNamespace:
        return child

    async def look(peer: Participant, seconds: float) -> None:
        asked.append(peer.name)
        peer.status, child.code = replace(STATUS, rounds=15), 0

    monkeypatch.setattr(ChildProcess, "start", start)
    monkeypatch.setattr(Participant, "look", look)
    swarm = LocalSwarm(tmp_path, peers=2)
    for each in swarm._peers:
        await each.start(())
    await swarm._watch()
    assert asked == [swarm._peers[0].name] and swarm._rounds == 15


@pytest.mark.parametrize(("code", "agrees"), [(4, True), (4, False), (0, True), (3, True)])
async def test_fruitless_peer_gives_the_swarm_its_code(
    code: int, agrees: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = ["the worker was replaced 7 times, at last because of this: it hangs", "starling: none of 3 rounds counted"]

    async def start(name: str, command: object, take: Callable[[str], None], environment: object) -> SimpleNamespace:
        for line in lines if name == "peer-2" else ["well"]:
            take(line)
        return SimpleNamespace(code=code if name == "peer-2" else 0)

    monkeypatch.setattr(ChildProcess, "start", start)
    swarm = LocalSwarm(tmp_path, peers=2)
    for each in swarm._peers:
        await each.start(())
        swarm._tally.add(each.name, report(each.name, 1, params_hash="h" if agrees else each.name))
    swarm._read()
    assert swarm._conclude(1.0) == (1 if code == 3 or not agrees else code)
    said = capfd.readouterr().err
    assert "peer-2: the worker was replaced 7 times" in said
    assert said.endswith("starling: peer-2: none of 3 rounds counted\n") == (code == 4)


def test_reports_are_read_once_each_across_file_rotation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = Participant("peer-1", tmp_path)
    assert peer.reports() == [] and peer.end == "did not start"
    peer.directory.mkdir()
    journal = Journal(peer.directory / "rounds.jsonl")
    monkeypatch.setattr("node.storage.journal.FILE_BYTES", 5000)
    seen: list[int] = []
    for number in range(40):
        journal.write(report("peer-1", number))
        if number == 20:
            journal.evaluated(RoundEvaluation(19, "", 2.0, 8, 0.0))
        if number % 3 == 0:
            while new := peer.reports():
                seen += [each.round if isinstance(each, RoundReport) else -each.evaluated for each in new]
    assert len(list(peer.directory.glob("rounds*"))) > 2 and seen == [*range(21), -19, *range(21, 40)]
    line = to_json(report("peer-1", 40))
    for part in (line[:-10], f"{line[-10:]}\n"):
        assert peer.reports() == []
        with (peer.directory / "rounds.jsonl").open("a") as file:
            file.write(part)
    assert [each.round for each in peer.reports() if isinstance(each, RoundReport)] == [40]


def test_names_in_picture_and_summary_are_not_markup() -> None:
    name = "[/b]"
    tally = SwarmSummary([name])
    shown = text(picture(tally, {name: "[/x]"}, {}, 80), 80) + text(summary(tally, {name: "[/y]"}, 1.0), 100)
    assert shown.count(name) == 2 and "[/x]" in shown and "[/y]" in shown
