"""The summary of the reports of a swarm's peers, without a process."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from node.cli.swarm_command import Participant, Swarm
from node.reporting.report import RoundReport
from node.reporting.status import to_json
from node.runtime.child_process import ChildProcess
from node.storage.journal import Journal
from node.ui.screen import Screen
from node.ui.swarm_summary import KEEP_ROUNDS, MAX_OPEN_ROUNDS, SwarmRound, SwarmSummary
from node.ui.swarm_view import picture, plain_line, sample, summary
from tests.support.status_examples import STATUS

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


def verdict(tally: SwarmSummary) -> str:
    return text(summary(tally, dict.fromkeys(tally.tracks, "left"), 60.0)).splitlines()[-1]


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
    assert end["stages"] == [{"stage": 0, "agree": True, "params_hash": "h4"}]
    assert end["peers"][1] == {
        "peer_id": "id-of-peer-2",
        "stage": 0,
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
    assert tally.as_json()["stages"] == [{"stage": 0, "agree": True, "params_hash": ""}], "they hold different ones"
    assert "a peer is 1.9 % from the mean of all, the limit is 2 %" in text(
        summary(tally, dict.fromkeys(NAMES, ""), 1.0)
    )
    tally.add(NAMES[0], report(NAMES[0], 5, spread=0.03, spread_limit=0.02))
    assert not tally.agree and json.loads(to_json(tally.as_json()))["spread"] == 0.03
    for name in NAMES[:3]:  # equal parameters count, not the older estimates
        tally.add(name, report(name, 6, spread=0.03, spread_limit=0.02, params_hash="h", lineage="l"))
    assert tally.spread == (0.0, 0.02)


# -- stages -----------------------------------------------------------------------------------------------------------

SIX = tuple(f"peer-{number}" for number in range(1, 7))


def in_stage(name: str, number: int, **more: object) -> RoundReport:
    """A report of a peer of a run with three stages, of which each has a lineage of its own."""
    stage = SIX.index(name) % 3
    own = {"lineage": f"l{number + 1}-{stage}", "params_hash": f"h{number + 1}-{stage}", "peers": SIX[stage::3]}
    loss = 3.0 / (number + 1) if stage == 0 else math.nan
    return report(name, number, **{"stage": stage, "stages": 3, "held_out_loss": loss, **own, **more})


def pipeline(rounds: int) -> SwarmSummary:
    tally = SwarmSummary(SIX, 3)
    for number in range(rounds):
        for name in reversed(SIX):  # stage 0 is the last to report
            tally.add(name, in_stage(name, number))
            assert len(list(tally.complete(SIX))) == (name == SIX[0])
    for name in SIX:
        tally.tracks[name].well = True
    return tally


def test_each_stage_agrees_by_itself() -> None:
    tally = pipeline(2)
    assert tally.agree and tally.fell and [each["stage"] for each in tally.as_json()["peers"]] == [0, 1, 2, 0, 1, 2]
    assert tally.as_json()["stages"] == [{"stage": k, "agree": True, "params_hash": f"h2-{k}"} for k in range(3)]
    assert "all 3 stages agree, bit for bit; held-out loss 3.000 -> 1.500" in verdict(tally)


@pytest.mark.parametrize("stage", range(3))
@pytest.mark.parametrize(
    "change",
    [
        lambda tally, name: tally.add(name, in_stage(name, 1, params_hash="other")),
        lambda tally, name: tally.add(name, in_stage(name, 1, lineage="other")),
        lambda tally, name: setattr(tally.tracks[name], "well", False),
    ],
    ids=["other parameters", "other lineage", "killed"],
)
def test_one_deviating_peer_spoils_its_stage_only(change: Callable[[SwarmSummary, str], None], stage: int) -> None:
    tally = pipeline(2)
    change(tally, SIX[3 + stage])
    end = tally.as_json()
    assert not end["agree"] and [each["agree"] for each in end["stages"]] == [k != stage for k in range(3)]
    assert [each["params_hash"] for each in end["stages"]] == ["" if k == stage else f"h2-{k}" for k in range(3)]
    assert f": stage {stage} does not agree" in verdict(tally)
    change(tally, SIX[(stage + 1) % 3])
    both = sorted((stage, (stage + 1) % 3))
    assert f": stages {both[0]} and {both[1]} do not agree" in verdict(tally)


def test_stage_without_peers_does_not_agree() -> None:
    tally = SwarmSummary(SIX[:3], 3)
    for name in SIX[:3]:  # the last one holds stage 1, not 2 as asked
        tally.add(name, in_stage(name if name != SIX[2] else SIX[1], 0))
        tally.tracks[name].well = True
    assert [each.agree for each in tally.stages] == [True, True, False] and not tally.agree
    silent = SwarmSummary(SIX[:3], 3)
    for each in silent.tracks.values():
        each.well = True
    assert silent.as_json()["stages"] == [{"stage": k, "agree": False, "params_hash": ""} for k in range(3)]
    assert ": stages 0, 1 and 2 do not agree" in verdict(silent) and not silent.fell
    assert json.loads(to_json(silent.as_json()))["loss_last"] is None


def test_tokens_and_mean_of_a_round_are_those_of_stage_0() -> None:
    tally = pipeline(1)
    (done,) = tally.rounds
    assert (done.held_out_loss, done.in_mean) == (3.0, 2)
    assert done.tokens_per_second == 2 * 1000 / 2.0, "the same tokens pass every stage"
    assert plain_line(done, 16).endswith("1,000 tokens/s     2.6 s  mean of 2 in stage 0")


def test_round_waits_for_stage_0_while_another_stage_is_ahead() -> None:
    """A stage that has skipped a round counts one more."""
    tally = SwarmSummary(SIX[:3], 3)
    for number in range(3):
        for name in SIX[1:3]:
            tally.add(name, in_stage(name, number))
    assert not list(tally.complete(SIX[:3]))
    for number in range(2):
        tally.add(SIX[0], in_stage(SIX[0], number))
    assert [each.held_out_loss for each in tally.complete(SIX[:3])] == [3.0, 1.5]
    for number in range(2, MAX_OPEN_ROUNDS + 9):  # a stage is silent for long
        tally.add(SIX[0], in_stage(SIX[0], number))
    assert len(list(tally.complete(SIX[:3]))) == 7, "one complete, and the oldest of the others"


def test_stage_column_appears_only_with_stages() -> None:
    tally = pipeline(2)
    statuses = {SIX[1]: replace(STATUS, stage=1, stages=3)}
    live = text(picture(tally, dict.fromkeys(SIX, "starts"), statuses, 80)).splitlines()
    assert live[0].startswith("starling swarm  6 peers in 3 stages  round 2 of 16 ")
    assert live[2].split()[:3] == ["peer", "stage", "state"]
    assert live[4].split()[:3] == ["peer-2", "1", "waiting"] and live[5].split() == ["peer-3", "2", "starts"]
    end = text(summary(tally, dict.fromkeys(SIX, "left"), 200.0)).splitlines()
    assert end[1].split()[:3] == ["peer", "stage", "rounds"] and end[4].split()[2:4] == ["2", "2"]
    assert max(map(len, live)) <= 80 and max(map(len, end)) <= 100 and "…" not in "".join(end).replace("…peer-", "")
    for shown in (picture(story(1), dict.fromkeys(NAMES, ""), {}, 80), summary(story(1), dict.fromkeys(NAMES, ""), 1)):
        assert "stage" not in text(shown)


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
        swarm = Swarm(tmp_path, Screen(False), peers=6, run=run, stages=stages)
        assert await swarm._found(swarm._peers[0])
        await swarm._join(swarm._peers[0])
        assert after("--stages", *started.values()) == founder and after("--stage", *started.values()) == others


async def test_number_of_rounds_is_asked_for_without_a_live_view(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It grows by rounds that train nothing: else the last line would be of round 15/14."""
    child, asked = SimpleNamespace(code=None), list[str]()

    async def start(name: str, command: tuple[str, ...], take: object, environment: dict[str, str]) -> SimpleNamespace:
        return child

    async def look(peer: Participant, seconds: float) -> None:
        asked.append(peer.name)
        peer.status, child.code = replace(STATUS, rounds=15), 0

    monkeypatch.setattr(ChildProcess, "start", start)
    monkeypatch.setattr(Participant, "look", look)
    swarm = Swarm(tmp_path, Screen(False), peers=2)
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
    swarm = Swarm(tmp_path, Screen(False), peers=2)
    for each in swarm._peers:
        await each.start(())
        swarm._tally.add(each.name, report(each.name, 1, params_hash="h" if agrees else each.name))
    swarm._read()
    assert swarm._conclude(1.0) == (1 if code == 3 or not agrees else code)
    said = capfd.readouterr().err
    assert "peer-2: the worker was replaced 7 times" in said
    assert said.endswith("starling: peer-2: none of 3 rounds counted\n") == (code == 4)


def after(flag: str, *commands: tuple[str, ...]) -> list[str]:
    """The values of an option in these commands."""
    return [value for words in commands for name, value in pairwise(words) if name == flag]


# -- losses -----------------------------------------------------------------------------------------------------------


def test_single_or_rising_loss_is_no_fall() -> None:
    assert not story(1).fell
    tally = story(2)
    tally.add("peer-1", report("peer-1", 2, held_out_loss=3.5))
    list(tally.complete(()))
    assert not tally.fell


# -- sums -------------------------------------------------------------------------------------------------------------


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


def test_reports_are_read_across_file_rotation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = Participant("peer-1", tmp_path)
    peer.directory.mkdir()
    journal = Journal(peer.directory / "rounds.jsonl")
    monkeypatch.setattr("node.storage.journal.FILE_BYTES", 5000)
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


def test_names_in_picture_and_summary_are_not_markup() -> None:
    name = "[/b]"
    tally = SwarmSummary([name])
    shown = text(picture(tally, {name: "[/x]"}, {}, 80)) + text(summary(tally, {name: "[/y]"}, 1.0))
    assert shown.count(name) == 2 and "[/x]" in shown and "[/y]" in shown


def test_model_output_cannot_control_the_terminal() -> None:
    shown = text(sample("def f():\n    \x1b[2Jreturn [bold]x\r\n"))
    assert "\x1b" not in shown and "    ·[2Jreturn [bold]x·" in shown
