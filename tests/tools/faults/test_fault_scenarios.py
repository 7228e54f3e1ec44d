"""Scenarios of `tests.faults`: their schedules, what differs by protocol, the table of results, and two real plays."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from protocols.registry import INDEPENDENT_PROTOCOLS
from tests.faults.__main__ import main
from tests.faults.nemesis import HANDS, Nemesis
from tests.faults.network import why_not
from tests.faults.points import POINTS
from tests.faults.recording import Limits
from tests.faults.runner import Options
from tests.faults.scenarios import SCENARIOS, scenario_of
from tests.faults.steps import STRUCK, Step, left
from tests.faults.table import add, load, order, table
from tests.support.long import long

NAMES = Options(4).names
ON_THE_NETWORK = {"part", "deafen", "mute", "lose", "slow", "delay", "corrupt"}
LASTING = ON_THE_NETWORK | {"fill", "choke", "skew", "squeeze", "confine", "lie"}


def steps(name: str, seeds: int = 20) -> list[Step]:
    return [step for seed in range(seeds) for step in SCENARIOS[name].schedule(name, seed, NAMES)]


@pytest.mark.parametrize("name", SCENARIOS)
def test_schedule_is_seeded_and_every_step_can_be_played(name: str) -> None:
    drawn = [SCENARIOS[name].schedule(name, seed, NAMES) for seed in range(20)]
    assert drawn == [SCENARIOS[name].schedule(name, seed, NAMES) for seed in range(20)]
    assert name == "joiners" or len({tuple(each) for each in drawn}) > 1
    joined = set(NAMES)
    for step in itertools.chain(*drawn):
        assert hasattr(Nemesis, f"_{step.act}") or any(hasattr(hand, step.act) for hand in HANDS)
        joined |= set(step.targets) if step.act == "join" else set()
        assert set(step.targets) <= joined | {STRUCK}
        assert SCENARIOS[name].network or step.act not in ON_THE_NETWORK


def test_lasting_faults_heal_and_stopped_peers_wake() -> None:
    for name in SCENARIOS:
        for seed in range(20):
            acts = [step.act for step in SCENARIOS[name].schedule(name, seed, NAMES)]
            lasting = max((index for index, act in enumerate(acts) if act in LASTING), default=-1)
            assert lasting < 0 or "heal" in acts[lasting:]
            assert acts.count("stop") == acts.count("wake")


@pytest.mark.parametrize("protocol", ["butterfly", *sorted(set(POINTS) & set(INDEPENDENT_PROTOCOLS))])
def test_kill_schedule_covers_every_point_of_a_round(protocol: str) -> None:
    points, scenario = POINTS[protocol], scenario_of("kill", protocol)
    drawn = [scenario.schedule("kill", seed, NAMES) for seed in range(len(points))]
    assert [step.role for (step,) in drawn] == list(points)
    assert order(["kill", "stop"], [0, 1], protocol)[len(points)] == ("stop", 0)
    assert order(["kill", "stop"], [1], protocol)[:2] == [("kill", len(points)), ("kill", len(points) + 1)]


def test_kills_always_leave_a_peer() -> None:
    drawn = [name for name in SCENARIOS if name != "everyone"]
    assert all(len(set(step.targets)) < len(NAMES) for name in drawn for step in steps(name) if step.act == "kill")
    assert {len(step.targets) for step in steps("all-but-one") if step.act == "kill"} == {3}


def test_schedule_prints_in_words() -> None:
    assert str(Step("trap", ("b",), role="send Chunk")) == "trap b send Chunk"
    assert str(Step("lose", (), 0.2)) == "lose 0.2"


def test_remaining_peers_of_a_schedule_are_counted() -> None:
    assert left([Step("trap", role="train"), Step("restart", (STRUCK,))], NAMES) == 4
    assert left([Step("kill", ("a",), role="peer"), Step("kill", ("b",), role="worker")], NAMES) == 3
    assert left([Step("kill", NAMES, role="peer"), Step("back", NAMES)], NAMES) == 4
    counts = {name: left(scenario_of(name, "moshpit").schedule(name, 0, NAMES), NAMES) for name in SCENARIOS}
    assert {name for name, count in counts.items() if count < 2} == {"all-but-one"}


# -- protocols without votes ------------------------------------------------------------------------------------------


def test_protocols_without_votes_schedule_no_exclusion() -> None:
    for name in SCENARIOS:
        scenario = scenario_of(name, "gossip")
        drawn = [step for seed in range(20) for step in scenario.schedule(name, seed, NAMES)]
        assert drawn and not any(step.act == "excluded" for step in drawn)
        assert not {"excluded_seconds", "decided_seconds"} & set(scenario.limits.aims)
    assert scenario_of("stop", "butterfly") is SCENARIOS["stop"]


def test_spread_limit_is_set_only_for_independent_protocols() -> None:
    assert Options(protocol="gossip").loose and not Options().loose
    assert "spread_limit" in Options(protocol="moshpit").run and "spread_limit" not in Options().run
    assert "spread_limit" not in Options(protocol="gossip", task="gpt").run, "the trained task's own limit is judged"
    assert SCENARIOS["kill"].limits == Limits(aims={"decided_seconds": 2})


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["all-but-one"], "all-but-one leaves one of 4 peers: by gossip it has no peer to mix with; take more peers"),
        (["kill-two", "--peers", "3"], "kill-two leaves one of 3 peers"),
    ],
)
def test_scenario_that_leaves_one_peer_is_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["--protocol", "gossip", "--dir", str(tmp_path), "--json", "--scenario", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and words in printed.err.splitlines()[-1] and "Traceback" not in printed.err


# -- results ----------------------------------------------------------------------------------------------------------


def test_partial_results_give_a_table(tmp_path: Path) -> None:
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
    figures = {"goodput": None, "rounds_skipped": 0, "rounds_committed": 3, "missed": {}, "measures": unknown}
    failed = {"scenario": "partition", "seed": 0, "verdict": "fail", "recovery_seconds": None, **figures}
    assert table([failed], "gossip")[-1].startswith("| `partition` | 0 of 1 | none |")
    rows = table([failed, {**failed, "seed": 1, "verdict": "pass", "recovery_seconds": 4.0}], "gossip")
    assert rows[-1].startswith("| `partition` | 1 of 2 | 4.0, 4.0, 4.0; never in 1 | unknown | unknown |")


@pytest.mark.real
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name, seed", [("partition", 1), *long(("kill", POINTS["butterfly"].index("send Reduced")))])
def test_real_peers_pass_scenarios(name: str, seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if SCENARIOS[name].network and (why := why_not()):
        pytest.skip(why)
    assert main(["--scenario", name, "--seed", str(seed), "--peers", "3", "--dir", str(tmp_path), "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    result = json.loads(line)
    assert (result["scenario"], result["seed"], result["verdict"], result["violations"]) == (name, seed, "pass", [])
    assert result["rounds_committed"] > 0 and result["recovery_seconds"] < 60
    assert (tmp_path / f"{name}-{seed}" / "picture.png").stat().st_size > 10_000
