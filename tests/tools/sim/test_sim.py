"""The simulator with the real protocols: they pass, lies and planted bugs are found, and the commands report both."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stdout
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from node.outer.outer_loop import RoundResult
from node.outer.replicated_loop import ReplicatedOuterLoop
from protocols.allreduce.reducer import Reducer
from protocols.base import PeerId
from protocols.control_channel import RoundAccounting
from protocols.moshpit.peer_tracker import PeerTracker
from protocols.pairwise.claimed_rounds import ClaimedRounds
from protocols.registry import INDEPENDENT_PROTOCOLS, REPLICATED_PROTOCOLS
from tests.sim import crashes, scheduling
from tests.sim.__main__ import main
from tests.sim.byzantine.contributors import LIES
from tests.sim.families import CALM
from tests.sim.independent_world import IndependentWorld
from tests.sim.oracle_protocol import OracleProtocol
from tests.sim.scenario import Scenario
from tests.sim.world import Outcome, play
from tests.sim.worlds import world_of
from tests.support.checkers import Report, Violation

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


@pytest.fixture(scope="module")
def elsewhere() -> tuple[list[str], list[str]]:
    """Of a process with another hash seed: the modules of pipelines that it has loaded, and its digests."""
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    command = [sys.executable, "-c", ELSEWHERE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=50)
    loaded, found = json.loads(done.stdout)
    return loaded, found


def test_runs_without_stages_load_no_pipeline(elsewhere: tuple[list[str], list[str]]) -> None:
    assert elsewhere[0] == []


def test_trace_does_not_depend_on_the_hash_seed(elsewhere: tuple[list[str], list[str]]) -> None:
    assert elsewhere[1] == digests()


def test_seeds_play_without_violation() -> None:
    """Every honest peer commits every round with the same bits; liars are named; no task is left over."""
    for seed in range(2 * len(CALM)):
        outcome = play(Scenario(peers=5, rounds=3, seed=seed, fault=CALM[seed % len(CALM)]))
        assert outcome.violations == [], f"seed {seed}"


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
    outcome = play(Scenario(peers=4, rounds=8, seed=3, elements=20_000, codec="fp32", chunk_elements=1024))
    for peer, history in outcome.histories.items():
        reported = [report["bytes_sent"] for report in history]
        assert 0.9 * outcome.sent_bytes[peer] < sum(reported) <= outcome.sent_bytes[peer]
        assert max(reported[1:]) < 1.3 * min(reported[1:])


def test_single_peer_never_waits() -> None:
    outcome = play(Scenario(peers=1, rounds=5, seed=1, inner_steps=10))
    (history,) = outcome.histories.values()
    assert [report["outcome"] for report in history] == ["alone"] * 5
    assert all(report["seconds_wait"] + report["seconds_average"] < 0.01 for report in history)


def unequal(*step_seconds: float) -> Outcome:
    """A run of peers that differ only in their speed; rounds of 50 inner steps."""
    count = len(step_seconds)
    scenario = Scenario(
        peers=count,
        rounds=4,
        seed=5,
        inner_steps=50,
        elements=20_000,
        codec="fp32",
        chunk_elements=4096,
        uplinks=(12.5e6,) * count,
        step_seconds=step_seconds,
    )
    outcome = play(scenario)
    assert outcome.violations == []
    return outcome


def training_share(outcome: Outcome, peer: str) -> float:
    """The share of its rounds' time that a peer spent training."""
    history = outcome.histories[peer]
    trained = sum(report["seconds_train"] for report in history)
    return trained / (history[-1]["time"] - 1_800_000_000.0)


def test_slow_peer_of_four_is_cut_and_counted() -> None:
    """Three ready peers of four suffice: the slow peer's tokens count, and the fast lose under 5 % of their time."""
    outcome = unequal(0.1, 0.1, 0.1, 1.0)
    for report in outcome.reports("committed"):
        assert set(report["peers"]) == {"p0", "p1", "p2", "p3"}
    slow, fast = outcome.histories["p3"], outcome.histories["p0"]
    assert all(0 < report["weight"] <= report["tokens"] for report in slow)
    assert sum(report["weight"] for report in slow) >= 0.8 * sum(report["tokens"] for report in slow)
    assert sum(report["tokens"] for report in slow) >= 0.09 * sum(report["tokens"] for report in fast)
    assert min(training_share(outcome, peer) for peer in ("p0", "p1", "p2")) > 0.95


def test_three_fast_peers_barely_wait_for_three_slow() -> None:
    """Half is less than two thirds: the call comes at 1.5 times the first third; the fast peers train on until then."""
    outcome = unequal(0.1, 0.1, 0.1, 1.0, 1.0, 1.0)
    history = outcome.histories["p0"]
    for report in history:
        assert set(report["peers"]) == {f"p{index}" for index in range(6)}
        assert 7.5 <= report["seconds_train"] <= 9.0
    assert min(training_share(outcome, peer) for peer in ("p0", "p1", "p2")) > 0.95
    tokens = {peer: sum(report["tokens"] for report in outcome.histories[peer]) for peer in outcome.histories}
    assert all(0.08 * tokens["p0"] <= tokens[slow] <= 0.12 * tokens["p0"] for slow in ("p3", "p4", "p5"))


def test_step_longer_than_a_round_delays_no_others() -> None:
    """The slow peer's first step is still under way when the round is called: that step counts in a later round.

    A peer whose step lasts several rounds cannot keep up yet: it has missed records that it needs.
    """
    outcome = unequal(0.1, 0.1, 0.1, 7.0)
    assert min(training_share(outcome, peer) for peer in ("p0", "p1", "p2")) > 0.9
    assert max(report["weight"] for report in outcome.histories["p3"]) > 0


# -- protocols without a shared anchor --------------------------------------------------------------------------------


class CountingWorld(IndependentWorld):
    """Keeps the number of lies that were sent, and the spread of the honest peers at the end."""

    lies, apart = 0, 0.0

    def check(self, histories: dict[PeerId, list[Report]]) -> list[Violation]:
        CountingWorld.lies = sum(liar.lies for liar in self.byzantine_peers.values())
        CountingWorld.apart = self.spread()
        return super().check(histories)


@pytest.mark.parametrize(
    "protocol, lie, seed",
    [
        ("gossip", "scaled", 0), ("gossip", "replayed", 1), ("gossip", "hanging", 3),
        ("gossip", "ahead", 4), ("moshpit", "scaled", 0), ("moshpit", "nan", 1),
        ("moshpit", "ahead", 14), ("push_sum", "norm", 0),
    ],
)  # fmt: skip
def test_honest_peers_survive_beside_a_liar(protocol: str, lie: str, seed: int) -> None:
    """Every refused lie is named, and no lie moves an honest peer's round; the next test shows that both are judged."""
    scenario = Scenario(protocol=protocol, peers=4, rounds=4, seed=seed, fault="lies", lie=lie, elements=1000)
    outcome = play(scenario, CountingWorld)
    assert outcome.violations == [] and CountingWorld.lies and len(outcome.liars) == 1
    assert CountingWorld.apart < 0.11, "three peers that never mix are 0.14 apart"


def test_unnamed_lie_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RoundAccounting, "name", lambda self, peer, why: None)
    scenario = Scenario(protocol="gossip", peers=4, rounds=4, seed=0, fault="lies", lie="scaled")
    assert found(play(scenario, IndependentWorld)) == {"named"}


@pytest.mark.parametrize(
    "scenario, owner, method, wrong, invariant",
    [
        (
            Scenario(protocol="gossip", peers=4, rounds=4, seed=4, fault="lies", lie="ahead"),
            ClaimedRounds, "round", lambda self, mine, others: max([mine, *self._said.values()]), "clock",
        ),
        (
            Scenario(protocol="gossip", peers=4, rounds=5, fault="slow"),
            ClaimedRounds, "round", lambda self, mine, others: mine, "spread",
        ),
        (
            Scenario(protocol="moshpit", peers=4, rounds=5, seed=71, fault="partition", chunk_elements=4096),
            PeerTracker, "leads", lambda self, round: False, "progress",
        ),
    ],
    ids=["round-follows-a-liar", "slow-peer-ignores-the-round", "leader-does-not-wait"],
)  # fmt: skip
def test_planted_bug_in_mixing_is_found(
    scenario: Scenario, owner: type, method: str, wrong: Any, invariant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.sim.world.HEALED_SECONDS", 40.0)  # without progress, all of it is played
    assert play(scenario, IndependentWorld).violations == []
    monkeypatch.setattr(owner, method, wrong)
    assert invariant in found(play(scenario, IndependentWorld))


# -- the command line ------------------------------------------------------------------------------------------------


def test_last_output_is_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--peers", "3", "--rounds", "2", "--seeds", "0:2", "--faults", "calm", "--json"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert err == ""
    assert result["protocol"] == "butterfly" and result["peers"] == 3
    assert result["rounds_committed"] == 2 * 2 * len(CALM) and result["rounds_skipped"] == 0
    assert result["violations"] == []
    assert result["rounds_could_commit"] == result["rounds_did_commit"] == result["rounds_committed"]
    assert result["commit_share"] == 1.0 and result["seeds_per_minute"] > 0
    assert result["virtual_seconds"] > 0 and result["real_seconds"] > 0


@settings(max_examples=2)
@given(seed=SEEDS)
def test_every_command_accepts_any_63_bit_seed(seed: int) -> None:
    with redirect_stdout(io.StringIO()):
        assert main(["--protocol", "gossip", "--peers", "2", "--rounds", "1", "--seeds", str(seed)]) == 0
        assert crashes.main(["--protocol", "gossip", "--seed", str(seed), "--sample", "1"]) == 0
        assert scheduling.main(["--seeds", str(seed)]) == 0


def test_single_vote_seed_prints_its_events(capsys: pytest.CaptureFixture[str]) -> None:
    assert scheduling.main(["--seeds", "3"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") > 20 and "1 seeds, 0 broken {}" in out
    assert scheduling.main(["--seeds", "3:6"]) == 0
    assert capsys.readouterr().out.startswith("3 seeds, 0 broken {}")


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


def test_code_error_output_names_its_seed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(self: Reducer, index: int) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(Reducer, "_close", broken)
    assert main(["--peers", "3", "--rounds", "1", "--seeds", "4:6"]) == 1
    out, err = capsys.readouterr()
    found = json.loads(out.splitlines()[-1])["violations"]
    assert [(v["seed"], v["invariant"], v["detail"]) for v in found] == [
        (seed, "crash", "ZeroDivisionError: planted") for seed in (4, 5)
    ]
    assert "--seeds 4 --faults none" in err and "--seeds 5 --faults none" in err


def test_reducer_sending_different_bytes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: the reducer keeps other bits than those that it sends."""
    close = Reducer._close

    def wrong(self: Reducer, index: int) -> tuple[int, dict[str, str]]:
        result = close(self, index)
        self.task.into.write(self.held.elements(index)[0], torch.ones(1))
        return result

    monkeypatch.setattr(Reducer, "_close", wrong)
    assert play(Scenario(peers=3, rounds=1, seed=4)).violations
