"""What `plan` promises: costs that fit the measured runs, limits that hold, and one line for what it cannot use."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from node.cli.app import main
from node.planning import costs
from node.planning.costs import HEADROOM, Outlook, Pipeline, Workload, pipeline, whole_model
from node.planning.machines import MOST_PEERS, Machine, PlannedSwarm
from node.planning.outlook import best
from node.tasks.partition import BlockCost
from protocols.pipeline.ways import Way

MEGABIT = 1e6 / 8


def work(inner_steps: int = 50, step_seconds: float = 0.5, parameters: int = 1_000_000) -> Workload:
    return Workload(step_seconds, 1024, inner_steps, parameters, lambda elements: elements)


def equal(count: int, **of_each: float) -> PlannedSwarm:
    return PlannedSwarm((Machine(**{"upload": 12.5e6, "download": 12.5e6, **of_each}),) * count)


@pytest.mark.parametrize(
    ("step_seconds", "overlaps", "measured"), [(0.05, False, 0.686), (0.05, True, 0.936), (0.25, True, 0.98)]
)
def test_utilisation_is_the_measured_one(step_seconds: float, overlaps: bool, measured: float) -> None:
    """RESULTS, "Utilisation": two peers at 50 Mbit/s, 10 million elements in int8, 100 steps a round."""
    peers = equal(2, upload=50 * MEGABIT, download=50 * MEGABIT)
    found = whole_model(work(100, step_seconds, 10_000_000), replace(peers, latency_seconds=0.0), overlaps)
    assert found.tokens_per_second * step_seconds / 1024 / 2 == pytest.approx(measured, abs=0.05)


SIMULATED = {
    0: {2: (0.95, 0.94, 0.98), 3: (0.78, 0.87, 0.93), 4: (0.59, 0.73, 0.86), 6: (0.33, 0.52, 0.73)},
    8: {2: (1.0, 1.0, 0.98), 3: (0.93, 0.96, 0.98), 4: (0.92, 0.91, 0.97), 6: (0.79, 0.86, 0.84)},
}
"""Lookahead -> stages -> shares of the capacity with 8, 16 and 32 microbatches: `benchmarks.pipeline microbatches`."""


@pytest.mark.parametrize("lookahead", SIMULATED)
def test_pipelines_fill_as_measured(monkeypatch: pytest.MonkeyPatch, lookahead: int) -> None:
    """RESULTS, "Pipelines, in virtual time": two replicas in each stage, .5 s a microbatch, trips of 50 ms."""
    monkeypatch.setattr(costs, "MICROBATCH_SECONDS", 0.0)
    for stages, shares in SIMULATED[lookahead].items():
        for batches, share in zip((8, 16, 32), shares, strict=True):
            cut_up = Pipeline((BlockCost("block", 0.2, 0.5, 4),) * stages, batches, 128, 256, 256, 32, lookahead)
            found = pipeline(work(inner_steps=1_000_000), cut_up, stages, equal(2 * stages))
            assert found.peers == (2,) * stages
            assert found.tokens_per_second / (128 * 2 / 0.5) == pytest.approx(share, abs=0.1), (stages, batches)


CHAINS = {0: (4.83, 7.37), 8: (7.22, 12.22)}
"""Lookahead -> microbatches/s in a star and in a chain: `benchmarks.pipeline chains`."""


@pytest.mark.parametrize("lookahead", CHAINS)
def test_chains_are_as_fast_as_simulated(monkeypatch: pytest.MonkeyPatch, lookahead: int) -> None:
    """RESULTS, "Chains": two replicas in each of four stages, .1 s a microbatch, 20 Mbit/s, trips of 50 ms."""
    monkeypatch.setattr(costs, "MICROBATCH_SECONDS", 0.0)
    monkeypatch.setattr(costs, "ROUND_SECONDS", 0.0)
    payload = 2 * 128 * 512
    cut_up = Pipeline((BlockCost("block", 0.04, 0.1, 4),) * 4, 16, 1, payload, payload, 128, lookahead)
    machines = equal(8, upload=20 * MEGABIT, download=20 * MEGABIT)
    chain = pipeline(work(), cut_up, 4, machines)
    monkeypatch.setattr(costs, "chosen_way", lambda *arguments: Way(False, ""))
    star = pipeline(work(), cut_up, 4, machines)
    assert (star.tokens_per_second, chain.tokens_per_second) == pytest.approx(CHAINS[lookahead], rel=0.15)
    assert chain.is_chain and not star.is_chain
    assert star.upload_bytes_per_token == pytest.approx(5 * payload, rel=0.01)
    assert chain.upload_bytes_per_token == pytest.approx(payload, rel=0.01)


def test_better_machines_are_never_slower() -> None:
    """With one peer in each stage: with more, they may be divided in another way."""
    rng = random.Random(0)
    for _ in range(300):
        peers = rng.choice((2, 4))
        blocks = tuple(BlockCost("block", 0.1, rng.uniform(0.01, 1), 4 * rng.randint(1, 10**7)) for _ in range(6))
        payload = rng.randint(10**3, 10**6)
        cut_up = Pipeline(blocks, rng.choice((8, 16)), 128, payload, payload, 512, rng.choice((0, 8)))
        one = Machine(upload=rng.uniform(1e5, 1e8), download=rng.uniform(1e5, 1e8))
        before = PlannedSwarm((one,) * peers, rng.uniform(0, 0.2))
        better = rng.choice(("speed", "upload", "download", "latency"))
        if better == "latency":
            after = replace(before, latency_seconds=before.latency_seconds / 2)
        else:
            after = replace(before, peers=(replace(one, **{better: 2 * getattr(one, better)}),) * peers)
        slow, fast = (
            [whole_model(work(), each, False), whole_model(work(), each, True), pipeline(work(), cut_up, peers, each)]
            for each in (before, after)
        )
        for was, now in zip(slow, fast, strict=True):
            assert now.tokens_per_second >= 0.999 * was.tokens_per_second, (better, before)


def test_no_machine_holds_more_than_its_memory() -> None:
    rng = random.Random(1)
    for _ in range(200):
        peers = tuple(Machine(1e6, 1e6, rng.uniform(0.5, 4), rng.choice((1e9, 2e9, 4e9))) for _ in range(8))
        parameters = rng.randint(10**6, 10**8)
        cut_up = Pipeline((BlockCost("block", 0.1, 0.2, parameters),) * 4, 8, 128, 10**5, 10**5, 512)
        ways = [whole_model(work(parameters=parameters), PlannedSwarm(peers), False)]
        ways += [pipeline(work(parameters=parameters), cut_up, stages, PlannedSwarm(peers)) for stages in (2, 4)]
        for found in ways:
            able = sum(found.memory_bytes <= HEADROOM * each.memory for each in peers)
            assert sum(found.peers) <= able and sum(found.peers) + found.idle_peers == 8
            assert (found.tokens_per_second > 0) == (able >= found.stages), found


def test_of_equal_ways_the_simplest_is_taken() -> None:
    ways = [Outlook(f"way {number}", 1, speed, "") for number, speed in enumerate((0.0, 97.0, 100.0, 101.0))]
    chosen = best(ways)
    assert chosen and chosen.way == "way 1"
    assert best(ways[:1]) is None


TINY = """
[gpt]
layers = 2
width = 16
heads = 2
context = 16
[recipe]
inner_steps = 4
rounds = 2
"""


def test_plan_of_a_model_that_machines_hold_or_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.toml").write_text(TINY)
    (tmp_path / "peers.toml").write_text('[[peers]]\ncount = 3\nupload = "1.25MB"\nmemory = "8GB"\n')
    files = ("--run", str(tmp_path / "run.toml"), "--machines", str(tmp_path / "peers.toml"))
    assert main(["plan", *files, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [each["stages"] for each in told["ways"]] == [1, 1, 2, 4, 8]
    assert told["best"].startswith("whole model") and sorted(told["ways"][2]["peers"]) == [1, 2]
    assert told["ways"][3]["limit"] == "fewer peers than stages"
    assert "the model has 4" in told["ways"][4]["limit"]
    assert main(["plan", "--run", str(tmp_path / "run.toml"), "--peers", "4", "--upload", "1", "--memory", "0.1"]) == 2
    out, err = capsys.readouterr()
    assert "no machine has the memory" in out and err.startswith("starling: none of these ways")
    assert main(["plan", "--run", str(tmp_path / "run.toml"), "--peers", "1", "--upload", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ways"][2]["limit"] == "fewer peers than stages"


@pytest.mark.parametrize(
    ("machines", "said"),
    [
        ("", "no peers"),
        ("peers = 3", "no peers"),
        ("[[peers]]\ncount = 2", '"upload" is missing'),
        ('[[peers]]\nupload = "fast"', "upload: 'fast' is not a number of bytes"),
        ("[[peers]]\nupload = 0", '"upload" must be a number from 1000'),
        ('[[peers]]\nupload = "1MB"\nspeed = nan', '"speed" must be a number'),
        ('[[peers]]\nupload = "1MB"\nuplod = 1', 'unknown key "uplod": did you mean "upload"?'),
        (
            f'[[peers]]\nupload = "1MB"\ncount = {MOST_PEERS}\n[[peers]]\nupload = "1MB"',
            f"more than {MOST_PEERS} peers",
        ),
        ('latency_seconds = "1"\n[[peers]]\nupload = "1MB"', '"latency_seconds" must be a number from 0 to 10'),
    ],
)
def test_unusable_machines_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], machines: str, said: str
) -> None:
    (path := tmp_path / "peers.toml").write_text(machines)
    assert main(["plan", "--machines", str(path)]) == 2
    out, err = capsys.readouterr()
    assert said in err and str(path) in err and err.count("\n") == 1 and not out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "which machines?"),
        (("--peers", "2"), "which machines?"),
        (("--peers", "2", "--upload", "1", "--latency-seconds", str(math.nan)), "--latency-seconds must be from 0"),
        (("--peers", "2", "--machines", "peers.toml"), "--machines names all machines"),
        (("--peers", "2", "--upload", "1", "--run", "absent.toml"), "absent.toml: No such file"),
    ],
)
def test_plan_needs_machines(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str) -> None:
    assert main(["plan", *arguments]) == 2
    out, err = capsys.readouterr()
    assert said in err and err.count("\n") == 1 and not out
