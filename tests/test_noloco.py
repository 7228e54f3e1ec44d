"""NoLoCo's outer step against the same rule in float64, and what its pull does to a pair."""

from __future__ import annotations

import pytest
import torch

from protocols.noloco import NoLoCo


def draw(count: int, elements: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(elements, generator=generator) for _ in range(count)]


def test_steps_follow_the_rule() -> None:
    """Three rounds, element by element, over more than one piece."""
    elements, rule = (1 << 18) + 7, NoLoCo(0.5, 0.7, 0.9)
    phi, velocity = draw(1, elements, 1)[0], torch.zeros(elements)
    wide, momentum = phi.double(), torch.zeros(elements, dtype=torch.float64)
    for round_number in range(3):
        delta, others = draw(2, elements, 10 + round_number)
        mean_phi = (phi + others) / 2
        momentum = 0.5 * momentum + 0.7 * delta.double() + 0.9 * (wide - mean_phi.double())
        wide = wide - momentum
        assert rule.step(phi, velocity, delta, mean_phi)
    assert float((phi.double() - wide).abs().max()) < 1e-5
    assert float((velocity.double() - momentum).abs().max()) < 1e-5


def distance(momentum: float, pull: float, rounds: int) -> float:
    """Two peers that only have the pull: how far they are apart in the end, from 2."""
    rule = object.__new__(NoLoCo)
    rule.momentum, rule.learning_rate, rule.pull = momentum, 0.7, pull
    phis, velocities = [torch.tensor([1.0]), torch.tensor([-1.0])], [torch.zeros(1), torch.zeros(1)]
    for _ in range(rounds):
        mean = (phis[0] + phis[1]) / 2
        for phi, velocity in zip(phis, velocities, strict=True):
            rule.step(phi, velocity, torch.zeros(1), mean)
        assert abs(float(phis[0] + phis[1])) < 1e-3  # their mean stays
    return float((phis[0] - phis[1]).abs())


@pytest.mark.parametrize("momentum", (0.0, 0.5, 0.9))
def test_a_pair_comes_together_within_the_range_of_pulls_and_not_beyond(momentum: float) -> None:
    edge = 2 * (1 + momentum)
    assert distance(momentum, 0.95 * edge, 300) < 0.01
    assert distance(momentum, 0.3, 300) < 0.01
    assert distance(momentum, 1.05 * edge, 60) > 2
    assert distance(momentum, -0.05, 60) > 2


@pytest.mark.parametrize(
    "arguments, said",
    [
        ((1.0, 0.7, 0.5), "momentum"),
        ((0.9, 0.0, 0.5), "learning rate"),
        ((0.5, 0.7, 3.0), "pull"),
        ((0.5, 0.7, 0.0), "pull"),
    ],
)
def test_settings_that_cannot_work_are_refused(arguments: tuple[float, float, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        NoLoCo(*arguments)


def test_what_is_not_finite_is_told() -> None:
    assert not NoLoCo(0.5, 0.7, 0.9).step(
        torch.zeros(3), torch.zeros(3), torch.tensor([0.0, torch.inf, 0.0]), torch.zeros(3)
    )
