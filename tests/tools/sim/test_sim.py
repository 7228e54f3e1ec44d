"""The simulator with the real protocols: they pass, lies and planted bugs are found, and the commands report both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.outer.outer_loop import RoundResult
from node.outer.replicated_loop import ReplicatedOuterLoop
from protocols.registry import INDEPENDENT_PROTOCOLS, REPLICATED_PROTOCOLS
from protocols.streams.endpoint import RoundAccounting
from tests.sim import scheduling
from tests.sim.__main__ import main
from tests.sim.byzantine.contributors import LIES
from tests.sim.independent_world import IndependentWorld, world_of
from tests.sim.invariants import InvariantBroken
from tests.sim.oracle_protocol import OracleProtocol
from tests.sim.scenario import Scenario
from tests.sim.world import Outcome, play
from tests.support.checkers import Report

SEEDS = st.integers(0, 2**63 - 1)


def found(outcome: Outcome) -> set[str]:
    return {violation.invariant for violation in outcome.violations}


def digests() -> list[str]:
    return [
        play(Scenario(peers=4, rounds=2, seed=3, fault="lies")).trace.digest(),
        play(Scenario(peers=4, rounds=2, seed=3, fault="mixed"), OracleProtocol).trace.digest(),
    ]


ELSEWHERE = """
import json, sys
import tests.sim.__main__, tests.sim.crashes, node.session.peer, node.training.worker
loaded = [name for name in sys.modules if "pipeline" in name]
from tests.tools.sim.test_sim import digests
print(json.dumps([loaded, digests()]))
"""


def test_trace_is_the_same_in_another_process() -> None:
    """With another hash seed. Runs without stages load nothing of pipelines there."""
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    command = [sys.executable, "-c", ELSEWHERE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=50)
    assert json.loads(done.stdout) == [[], digests()]


@settings(max_examples=10)
@given(protocol=st.sampled_from(sorted([*REPLICATED_PROTOCOLS, *INDEPENDENT_PROTOCOLS])), seed=SEEDS)
def test_any_63_bit_seed_plays_without_violation(protocol: str, seed: int) -> None:
    outcome = play(Scenario(protocol=protocol, peers=2, rounds=2, seed=seed, inner_steps=2), world_of(protocol))
    assert outcome.violations == []


@pytest.mark.parametrize("lie", LIES)
def test_every_lie_is_survived_in_all_rounds(lie: str) -> None:
    outcome = play(Scenario(peers=4, rounds=2, seed=11, fault="lies", lie=lie, inner_steps=4))
    assert outcome.violations == []
    assert len(outcome.reports("committed")) == 3 * 2


def test_reported_bytes_match_bytes_sent() -> None:
    """Except the bytes with which peers serve others after the last round."""
    outcome = play(Scenario(peers=4, rounds=4, seed=3, elements=20_000, codec="fp32", chunk_elements=1024))
    for peer, history in outcome.histories.items():
        reported = [report["bytes_sent"] for report in history]
        assert 0.9 * outcome.sent_bytes[peer] < sum(reported) <= outcome.sent_bytes[peer]
        assert max(reported[1:]) < 1.3 * min(reported[1:])


def test_single_peer_never_waits() -> None:
    outcome = play(Scenario(peers=1, rounds=5, seed=1, inner_steps=10))
    (history,) = outcome.histories.values()
    assert [report["outcome"] for report in history] == ["alone"] * 5
    assert all(report["seconds_wait"] + report["seconds_average"] < 0.01 for report in history)


def unequal(*step_seconds: float) -> tuple[Outcome, float]:
    """A run of peers that differ only in their speed, and the share of their time that the fast spent training."""
    count = len(step_seconds)
    scenario = Scenario(
        peers=count, rounds=4, seed=5, inner_steps=50, elements=20_000, codec="fp32", chunk_elements=4096,
        uplinks=(12.5e6,) * count, step_seconds=step_seconds,
    )  # fmt: skip
    outcome = play(scenario)
    assert outcome.violations == []
    fast = [outcome.histories[peer] for peer in ("p0", "p1", "p2")]
    ends = [history[-1]["time"] - 1_800_000_000.0 for history in fast]
    return outcome, min(total(history, "seconds_train") / end for history, end in zip(fast, ends, strict=True))


def total(history: Sequence[Report], what: str) -> float:
    return float(sum(report[what] for report in history))


def test_slow_peer_of_four_is_cut_and_counted() -> None:
    """Three ready peers of four suffice: the slow peer's tokens count, and the fast lose under 5 % of their time."""
    outcome, fast_share = unequal(0.1, 0.1, 0.1, 1.0)
    assert {tuple(sorted(report["peers"])) for report in outcome.reports("committed")} == {("p0", "p1", "p2", "p3")}
    slow, fast = outcome.histories["p3"], outcome.histories["p0"]
    assert all(0 < report["weight"] <= report["tokens"] for report in slow)
    assert total(slow, "weight") >= 0.8 * total(slow, "tokens") and total(slow, "tokens") >= 0.09 * total(
        fast, "tokens"
    )
    assert fast_share > 0.95


def test_three_fast_peers_barely_wait_for_three_slow() -> None:
    """Half is less than two thirds: the call comes at 1.5 times the first third; the fast peers train on until then."""
    outcome, fast_share = unequal(0.1, 0.1, 0.1, 1.0, 1.0, 1.0)
    for report in outcome.histories["p0"]:
        assert set(report["peers"]) == {f"p{index}" for index in range(6)} and 7.5 <= report["seconds_train"] <= 9.0
    tokens = {peer: total(history, "tokens") for peer, history in outcome.histories.items()}
    assert all(0.08 * tokens["p0"] <= tokens[slow] <= 0.12 * tokens["p0"] for slow in ("p3", "p4", "p5"))
    assert fast_share > 0.95


def test_step_longer_than_a_round_delays_no_others() -> None:
    """The slow peer's first step is still under way when the round is called: that step counts in a later round.

    A peer whose step lasts several rounds cannot keep up yet: it has missed records that it needs.
    """
    outcome, fast_share = unequal(0.1, 0.1, 0.1, 7.0)
    assert fast_share > 0.9 and max(report["weight"] for report in outcome.histories["p3"]) > 0


# -- protocols without a shared anchor --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "protocol, lie, seed",
    [
        ("gossip", "scaled", 0), ("gossip", "replayed", 1), ("gossip", "hanging", 3),
        ("gossip", "ahead", 4), ("moshpit", "scaled", 0), ("moshpit", "nan", 1),
        ("moshpit", "ahead", 14), ("push_sum", "norm", 0),
    ],
)  # fmt: skip
def test_honest_peers_survive_beside_a_liar(protocol: str, lie: str, seed: int) -> None:
    """Every refused lie is named, and no lie moves an honest peer's round."""
    worlds: list[IndependentWorld] = []

    def made(scenario: Scenario) -> IndependentWorld:
        worlds.append(IndependentWorld(scenario))
        return worlds[0]

    scenario = Scenario(protocol=protocol, peers=4, rounds=4, seed=seed, fault="lies", lie=lie, elements=1000)
    outcome = play(scenario, made)
    assert outcome.violations == [] and len(outcome.liars) == 1
    assert sum(liar.lies for liar in worlds[0].byzantine_peers.values()) > 0
    assert worlds[0].spread() < 0.11, "three peers that never mix are 0.14 apart"


@pytest.mark.parametrize("protocol", ["gossip", "butterfly"])
def test_unnamed_lie_is_found(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RoundAccounting, "name", lambda self, peer, why: None)
    lie = "scaled" if protocol == "gossip" else "codec"
    scenario = Scenario(protocol=protocol, peers=4, rounds=2, seed=0, fault="lies", lie=lie)
    assert "named" in found(play(scenario, world_of(protocol)))


# -- the command line ------------------------------------------------------------------------------------------------


def test_violation_output_names_seed_and_replay_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The planted bug: one peer steps twice as far as the others."""
    step = ReplicatedOuterLoop._step

    async def wrong(self: ReplicatedOuterLoop, *arguments: Any, **more: Any) -> RoundResult:
        done = await step(self, *arguments, **more)
        if self.averager.me.peer == "p1":
            self.anchor.mul_(2.0)
            await self.settle()
        return done

    monkeypatch.setattr(ReplicatedOuterLoop, "_step", wrong)
    assert main(["--peers", "3", "--rounds", "1", "--seeds", "4"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out.splitlines()[-1])["violations"][0]["invariant"] == "same-bits"
    assert "python -m tests.sim --protocol butterfly --peers 3 --rounds 1 --seeds 4 --faults none" in err


def test_broken_vote_fails_its_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(self: scheduling.Schedule) -> None:
        raise InvariantBroken("planted", "by this test")

    with pytest.raises(SystemExit):
        scheduling.main(["--seeds", "6:3"])  # which would find nothing
    assert scheduling.main(["--seeds", "3:6"]) == 0
    monkeypatch.setattr(scheduling.Schedule, "heal", broken)
    assert scheduling.main(["--seeds", "3:6"]) == 1
    out = capsys.readouterr().out
    assert "3 seeds, 0 broken {}" in out and "3 seeds, 3 broken {'planted': 3}" in out
