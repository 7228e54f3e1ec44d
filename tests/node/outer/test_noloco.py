"""NoLoCo's outer step against the same rule in float64, and what its pull does to pairs."""

from __future__ import annotations

import math

import pytest
import torch

from node.outer.noloco import NoLoCo
from node.tasks.recipe import most_pull


def draw(count: int, elements: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(elements, generator=generator) for _ in range(count)]


def mean(rule: NoLoCo, phis: list[torch.Tensor], deltas: list[torch.Tensor]) -> torch.Tensor:
    """ū: the mean of what these peers bring."""
    brought = [delta.clone() for delta in deltas]
    for phi, each in zip(phis, brought, strict=True):
        rule.offer(phi, each, each)
    return torch.stack(brought).mean(dim=0)


def test_steps_follow_the_papers_rule() -> None:
    """Three rounds, element by element, over more than one piece."""
    elements, rule = (1 << 18) + 7, NoLoCo(0.5, 0.7, 0.9)
    phi, velocity = draw(1, elements, 1)[0], torch.zeros(elements)
    wide, momentum = phi.double(), torch.zeros(elements, dtype=torch.float64)
    for round_number in range(3):
        mine, theirs, other = draw(3, elements, 10 + round_number)
        both = mean(rule, [phi, other], [mine, theirs])
        momentum = 0.5 * momentum + 0.7 * (mine.double() + theirs.double()) / 2
        momentum = momentum + 0.9 * (wide - (wide + other.double()) / 2)
        wide = wide - momentum
        assert rule.step(phi, velocity, both)
    assert float((phi.double() - wide).abs().max()) < 1e-5
    assert float((velocity.double() - momentum).abs().max()) < 1e-5


def test_late_partner_is_compensated() -> None:
    """Step alone, then learn the pair's mean: as if both had met before."""
    rule, (phi, other, mine, theirs, start) = NoLoCo(0.5, 0.7, 0.9), draw(5, 1000, 3)
    met, late = (phi.clone(), start.clone()), (phi.clone(), start.clone())
    alone, both = mean(rule, [phi], [mine]), mean(rule, [phi, other], [mine, theirs])
    assert rule.step(*met, both) and rule.step(*late, alone)
    rule.amend(*late, both - alone)
    for one, two in zip(met, late, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-5)


def apart(rule: NoLoCo, rounds: int, met: float) -> float:
    """The spread of peers of one parameter each at the end, from 1 at the start, with the pull alone.

    A share of them meets in random pairs each round.
    """
    generator, (phi,) = torch.Generator().manual_seed(5), draw(1, 512, 4)
    velocity, count, middle = torch.zeros_like(phi), len(phi), float(phi.mean())
    for _ in range(rounds):
        brought = torch.zeros(count)
        rule.offer(phi, brought, brought)
        order = torch.randperm(count, generator=generator)[: 2 * int(met * count / 2)]
        both = (brought[order[::2]] + brought[order[1::2]]) / 2
        brought[order[::2]], brought[order[1::2]] = both, both
        rule.step(phi, velocity, brought)
    assert abs(float(phi.mean()) - middle) < 1e-3 * max(1.0, float(phi.abs().max()))
    return math.sqrt(float((phi - phi.mean()).square().mean()))


def edge(momentum: float, met: float) -> float:
    return 2 * (1 - momentum**2) / (1 + momentum * (1 - met))


@pytest.mark.parametrize("met", (1.0, 0.5, 0.1))
@pytest.mark.parametrize("momentum", (0.0, 0.5, 0.9))
def test_pairs_converge_only_within_the_pull_range(momentum: float, met: float) -> None:
    assert apart(NoLoCo(momentum, 0.7, 0.6 * most_pull(momentum)), 1500, met) < 0.01
    beyond = NoLoCo(momentum, 0.7, 0.5 * most_pull(momentum))
    beyond.pull = 1.3 * edge(momentum, met)
    assert apart(beyond, 200, met) > 3


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((1.0, 0.7, 0.5), "momentum"),
        ((0.9, 0.0, 0.5), "learning rate"),
        ((0.5, 0.7, 1.0), "pull"),
        ((0.9, 0.7, 0.2), "pull"),
        ((0.5, 0.7, 0.0), "pull"),
    ],
)
def test_invalid_settings_are_rejected(arguments: tuple[float, float, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        NoLoCo(*arguments)


def test_non_finite_step_is_reported() -> None:
    assert not NoLoCo(0.5, 0.7, 0.9).step(torch.zeros(3), torch.zeros(3), torch.tensor([0.0, torch.inf, 0.0]))
