"""Scenarios of `tests.faults`: their schedules, what differs by protocol, and two real plays."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from protocols.registry import INDEPENDENT_PROTOCOLS
from tests.faults.__main__ import main
from tests.faults.failpoints import POINTS
from tests.faults.nemesis import HANDS, Nemesis
from tests.faults.network import why_not
from tests.faults.runner import Options
from tests.faults.scenarios import SCENARIOS, scenario_of
from tests.faults.steps import STRUCK, Step, left
from tests.faults.table import order
from tests.support.long import long

NAMES = Options(4).names
ON_THE_NETWORK = {"part", "deafen", "mute", "lose", "slow", "delay", "corrupt"}
LASTING = ON_THE_NETWORK | {"fill", "choke", "skew", "squeeze", "confine", "lie"}


def drawn(name: str, protocol: str = "butterfly") -> list[list[Step]]:
    return [scenario_of(name, protocol).schedule(name, seed, NAMES) for seed in range(20)]


@pytest.mark.parametrize("name", SCENARIOS)
def test_schedule_is_seeded_and_every_step_can_be_played(name: str) -> None:
    schedules = drawn(name)
    assert schedules == drawn(name)
    assert name == "joiners" or len({tuple(each) for each in schedules}) > 1
    joined = set(NAMES)
    for step in itertools.chain(*schedules):
        assert hasattr(Nemesis, f"_{step.act}") or any(hasattr(hand, step.act) for hand in HANDS)
        joined |= set(step.targets) if step.act in ("join", "intrude") else set()
        assert set(step.targets) <= joined | {STRUCK}
        assert SCENARIOS[name].network or step.act not in ON_THE_NETWORK
        assert name == "everyone" or step.act != "kill" or len(set(step.targets)) < len(NAMES), "a peer is left"
    for acts in ([step.act for step in schedule] for schedule in schedules):
        lasting = max((index for index, act in enumerate(acts) if act in LASTING), default=-1)
        assert (lasting < 0 or "heal" in acts[lasting:]) and acts.count("stop") == acts.count("wake")


@pytest.mark.parametrize("protocol", ["butterfly", *sorted(set(POINTS) & set(INDEPENDENT_PROTOCOLS))])
def test_kill_schedule_covers_every_point_of_a_round(protocol: str) -> None:
    points, scenario = POINTS[protocol], scenario_of("kill", protocol)
    schedules = [scenario.schedule("kill", seed, NAMES) for seed in range(len(points))]
    assert [step.role for (step,) in schedules] == list(points)
    assert order(["kill", "stop"], [0, 1], protocol)[len(points)] == ("stop", 0)
    assert order(["kill", "stop"], [1], protocol)[:2] == [("kill", len(points)), ("kill", len(points) + 1)]


def test_plays_fit_their_protocol() -> None:
    """Nothing is excluded where nothing is voted on, and only states of independent peers have a limit of spread."""
    for name in SCENARIOS:
        steps = [step for schedule in drawn(name, "gossip") for step in schedule]
        assert steps and not any(step.act == "excluded" for step in steps)
        assert not {"excluded_seconds", "decided_seconds"} & set(scenario_of(name, "gossip").limits.aims)
    assert scenario_of("stop", "butterfly") is SCENARIOS["stop"]
    assert "spread_limit" in Options(protocol="moshpit").run and "spread_limit" not in Options().run
    stages = Options().beside(SCENARIOS["stages"])
    assert (stages.peers, stages.stages) == (6, 3) and stages.run.startswith("stages = 3")


def test_scenario_that_leaves_one_peer_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert left([Step("trap", role="train"), Step("restart", (STRUCK,))], NAMES) == 4
    assert left([Step("kill", ("a",), role="peer"), Step("kill", ("b",), role="worker")], NAMES) == 3
    assert left([Step("kill", NAMES, role="peer"), Step("back", NAMES)], NAMES) == 4
    assert {name for name in SCENARIOS if left(drawn(name, "moshpit")[0], NAMES) < 2} == {"all-but-one"}
    assert main(["--protocol", "gossip", "--dir", str(tmp_path), "--json", "--scenario", "all-but-one"]) == 2
    printed = capsys.readouterr()
    words = "all-but-one leaves one of 4 peers: by gossip it has no peer to mix with; take more peers"
    assert printed.out == "" and words in printed.err.splitlines()[-1]


@pytest.mark.real
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "name, seed",
    long(("kill", POINTS["butterfly"].index("send Reduced")), ("partition", 1), ("liar", 1), ("private", 1)),
)
def test_real_peers_pass_scenarios(name: str, seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if SCENARIOS[name].network and (why := why_not()):
        pytest.skip(why)
    assert main(["--scenario", name, "--seed", str(seed), "--peers", "3", "--dir", str(tmp_path), "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    result = json.loads(line)
    assert (result["scenario"], result["seed"], result["verdict"], result["violations"]) == (name, seed, "pass", [])
    assert result["rounds_committed"] > 0 and result["recovery_seconds"] < 60
    assert (tmp_path / f"{name}-{seed}" / "timeline.txt").stat().st_size > 1_000
