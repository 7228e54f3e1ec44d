"""The mixing laboratory: its effect on means, and figures that are known exactly."""

from __future__ import annotations

import random

import pytest
import torch

from benchmarks.mixers import MIXERS, TooMany, pushed, simulate, taken
from benchmarks.mixing import groups_factor, main
from tests.support.mixing_matrices import mixing_matrix

PEERS = 64
KEEP_THE_MEAN = ("ring", "torus", "random matching", "groups of 32", "Moshpit 32 x 32", "Moshpit seats of 8")


@pytest.mark.parametrize("name", [name for name in MIXERS if name != "all-reduce"])
def test_down_peer_keeps_its_value_while_others_mix(name: str) -> None:
    mix, draw = MIXERS[name](PEERS, random.Random(1)), torch.Generator().manual_seed(1)
    values = torch.randn(PEERS, 3, dtype=torch.float64, generator=draw)
    for number in range(5):
        up = torch.rand(PEERS, generator=draw) >= 0.2
        mixed = mix(number, up, values)
        assert torch.equal(mixed[~up], values[~up])
        assert float(mixed.var(0).sum()) < float(values.var(0).sum())
        if name in KEEP_THE_MEAN:
            assert float((mixed.mean(0) - values.mean(0)).abs().max()) < 1e-12
        values = mixed


def test_pushed_mass_is_conserved() -> None:
    draw = torch.Generator().manual_seed(2)
    mass, up = torch.rand(16, 2, dtype=torch.float64, generator=draw), torch.rand(16, generator=draw) >= 0.3
    pushing = mixing_matrix("one-peer-exponential", [f"{index:02}" for index in range(16)], 1, "").T
    assert float((pushed(pushing, up, mass).sum(0) - mass.sum(0)).abs().max()) < 1e-12


def test_mixing_rows_sum_to_one_with_peers_down() -> None:
    mixing = mixing_matrix("exponential", [f"{index:02}" for index in range(16)], 0, "")
    up = torch.arange(16) % 3 > 0
    ones = torch.ones(16, 1, dtype=torch.float64)
    torch.testing.assert_close(taken(mixing, up, ones), ones)


@pytest.mark.parametrize(
    "name, peers, rounds",
    [
        ("all-reduce", 100, 1),
        ("one-peer exponential", 64, 6),
        ("push-sum", 64, 6),
        ("Moshpit 8 x 8 x 8", 512, 3),
        ("Moshpit seats of 8", 64, 2),
    ],
)
def test_mixing_is_exact_after_expected_rounds(name: str, peers: int, rounds: int) -> None:
    trial = simulate(MIXERS[name], peers, 0.0, 10, seed=0, elements=2, until=1e-20)
    assert trial.rounds_to(1e-20) == rounds
    assert trial.drift < 1e-12


def test_one_failure_spoils_an_all_reduce() -> None:
    trial = simulate(MIXERS["all-reduce"], 1000, 0.02, 10, seed=0, elements=1, until=1e-9)
    assert len(trial.variances) == 11 and trial.variances[-1] == trial.variances[0]


def test_grid_peer_count_is_limited() -> None:
    with pytest.raises(TooMany, match="513 peers on 512 cells"):
        MIXERS["Moshpit 8 x 8 x 8"](513, random.Random(0))


def test_random_groups_factor_matches_theory() -> None:
    measured, exact = groups_factor(48, 4, 1000)
    assert measured == pytest.approx(exact, rel=0.03)


def test_command_prints_measured_beside_published_values(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = ["table", "--peers", "512", "--failures", "0.01", "--only", "groups of 32", "--trials", "2"]
    assert main(wanted) == 0
    (line,) = [each.split() for each in capsys.readouterr().out.splitlines() if "groups of 32" in each]
    assert line[-3:-1] == ["3.0", "6.6"]
    with pytest.raises(SystemExit):
        main(["table", "--failures", "1"])
    assert len(capsys.readouterr().err.splitlines()) == 1
