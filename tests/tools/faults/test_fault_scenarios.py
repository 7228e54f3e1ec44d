"""Schedules are data: the same from the same seed, playable, each point of a round with its seed. Tables of results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from node.session.failpoints import POINTS
from tests.faults.__main__ import main
from tests.faults.nemesis import HANDS, Nemesis
from tests.faults.network import why_not
from tests.faults.runner import Options
from tests.faults.scenarios import SCENARIOS
from tests.faults.steps import STRUCK, Step
from tests.faults.table import add, load, order, table

NAMES = Options(4).names
ON_THE_NETWORK = {"part", "deafen", "mute", "lose", "slow", "delay", "corrupt"}
LASTING = ON_THE_NETWORK | {"fill", "choke", "skew", "squeeze", "confine", "lie"}


def steps(name: str, seeds: int = 20) -> list[Step]:
    return [step for seed in range(seeds) for step in SCENARIOS[name].schedule(name, seed, NAMES)]


@pytest.mark.parametrize("name", SCENARIOS)
def test_schedule_is_determined_by_its_seed(name: str) -> None:
    drawn = [SCENARIOS[name].schedule(name, seed, NAMES) for seed in range(20)]
    assert drawn == [SCENARIOS[name].schedule(name, seed, NAMES) for seed in range(20)]
    assert name == "joiners" or len({tuple(each) for each in drawn}) > 1


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_step_can_be_played(name: str) -> None:
    joined = set(NAMES)
    for step in steps(name):
        assert hasattr(Nemesis, f"_{step.act}") or any(hasattr(hand, step.act) for hand in HANDS)
        joined |= set(step.whom) if step.act == "join" else set()
        assert set(step.whom) <= joined | {STRUCK}
        assert SCENARIOS[name].network or step.act not in ON_THE_NETWORK


def test_lasting_faults_heal_and_stopped_peers_wake() -> None:
    for name in SCENARIOS:
        for seed in range(20):
            acts = [step.act for step in SCENARIOS[name].schedule(name, seed, NAMES)]
            lasting = max((index for index, act in enumerate(acts) if act in LASTING), default=-1)
            assert lasting < 0 or "heal" in acts[lasting:]
            assert acts.count("stop") == acts.count("wake")


def test_kill_schedule_covers_every_point_of_a_round() -> None:
    assert [step.role for step in steps("kill")] == list(POINTS)


def test_kills_always_leave_a_peer() -> None:
    drawn = [name for name in SCENARIOS if name != "everyone"]
    assert all(len(set(step.whom)) < len(NAMES) for name in drawn for step in steps(name) if step.act == "kill")
    assert {len(step.whom) for step in steps("all-but-one") if step.act == "kill"} == {3}


def test_schedule_prints_in_words() -> None:
    assert str(Step("trap", ("b",), role="send Chunk")) == "trap b send Chunk"
    assert str(Step("lose", (), 0.2)) == "lose 0.2"


def test_partial_results_give_a_table(tmp_path: Path) -> None:
    assert order(["kill", "stop"], [1])[:2] == [("kill", 20), ("kill", 21)]
    assert order(["kill", "stop"], [0, 1])[20] == ("stop", 0)
    figures = {
        "measures": {"suspected_seconds": {"median": 2.0, "worst": 7.5}},
        "missed": {"suspected_seconds": [7.5, 6]},
    }
    result = {"scenario": "stop", "seed": 0, "verdict": "pass", "recovery_seconds": 3.0, "goodput": None, **figures}
    result["participation"] = 0.75
    path = tmp_path / "build" / "results.jsonl"
    add(path, result | {"rounds_committed": 9, "rounds_skipped": 1})
    with path.open("ab") as file:
        file.write(b'{"scenario": "st')  # killed while it wrote
    add(
        path,
        result | {"seed": 1, "verdict": "fail", "recovery_seconds": None, "rounds_committed": 8, "rounds_skipped": 2},
    )
    found = load(path)
    assert [each["seed"] for each in found] == [0, 1]
    (row,) = table(found)[2:]
    assert row.startswith("| `stop` | 1 of 2 | 3.0, 3.0, 3.0; never in 1 | unknown | 75% | 3 of 20 |")
    assert "suspected 2.0, 7.5 (aim 6, missed 2 of 2)" in row


def test_table_includes_failed_plays() -> None:
    unknown = {"spread_at_the_end": {"median": None, "worst": None, "trials": 0}}
    told = {"goodput": None, "rounds_skipped": 0, "rounds_committed": 3, "missed": {}, "measures": unknown}
    failed = {"scenario": "partition", "seed": 0, "verdict": "fail", "recovery_seconds": None, **told}
    assert table([failed], "gossip")[-1].startswith("| `partition` | 0 of 1 | none |")
    rows = table([failed, {**failed, "seed": 1, "verdict": "pass", "recovery_seconds": 4.0}], "gossip")
    assert rows[-1].startswith("| `partition` | 1 of 2 | 4.0, 4.0, 4.0; never in 1 | unknown | unknown |")


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--scenario", "kil"], "invalid choice: 'kil'"),
        (["--scenario", "kill", "--peers", "2"], "at least 3"),
        (["--scenario", "kill", "--peers", "99"], "16 at most"),
        (["--scenario", "kill", "--patience", "0"], "at least 1"),
        (["--scenario", "kill", "--protocol", "ring"], "invalid choice: 'ring'"),
        (["--scenario", "kill", "--seed", "x"], "'x' is not a whole number"),
        ([], "--scenario"),
    ],
)
def test_wrong_arguments_give_one_line_error(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    told = capsys.readouterr()
    assert end.value.code == 2 and told.out == ""
    assert words in told.err and told.err.count("\n") == 1


@pytest.mark.real
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name, seed", [("kill", POINTS.index("send Reduced")), ("partition", 1)])
def test_real_peers_pass_scenarios(name: str, seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if SCENARIOS[name].network and (why := why_not()):
        pytest.skip(why)
    assert main(["--scenario", name, "--seed", str(seed), "--peers", "3", "--dir", str(tmp_path), "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    told = json.loads(line)
    assert (told["scenario"], told["seed"], told["verdict"], told["violations"]) == (name, seed, "pass", [])
    assert told["rounds_committed"] > 0 and told["recovery_seconds"] < 60
    assert (tmp_path / f"{name}-{seed}" / "picture.png").stat().st_size > 10_000
