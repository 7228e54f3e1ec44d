"""NoLoCo's outer step against the same rule in float64, and what its pull does to pairs."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from node.noloco import NoLoCo, most_pull


def draw(count: int, elements: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(elements, generator=generator) for _ in range(count)]


def mean(rule: NoLoCo, phis: list[torch.Tensor], deltas: list[torch.Tensor]) -> torch.Tensor:
    """ū: of what each of these brings."""
    brought = [delta.clone() for delta in deltas]
    for phi, each in zip(phis, brought, strict=True):
        rule.offer(phi, each, each)
    return torch.stack(brought).mean(dim=0)


def test_steps_follow_the_rule_as_the_paper_has_it() -> None:
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


def test_alone_it_is_heavy_ball_momentum() -> None:
    rule, (phi, delta) = NoLoCo(0.5, 0.75, 0.5), draw(2, 100, 2)
    before, velocity = phi.clone(), torch.full((100,), 0.25)
    assert rule.step(phi, velocity, mean(rule, [phi], [delta]))
    torch.testing.assert_close(velocity, 0.125 + 0.75 * delta, rtol=0, atol=1e-6)
    torch.testing.assert_close(phi, before - velocity, rtol=0, atol=1e-6)


def test_a_partner_that_comes_later_is_made_good() -> None:
    """Step alone, then learn the pair's mean: as if both had met before."""
    rule, (phi, other, mine, theirs, start) = NoLoCo(0.5, 0.7, 0.9), draw(5, 1000, 3)
    met, late = (phi.clone(), start.clone()), (phi.clone(), start.clone())
    alone, both = mean(rule, [phi], [mine]), mean(rule, [phi, other], [mine, theirs])
    assert rule.step(*met, both) and rule.step(*late, alone)
    rule.amend(*late, both - alone)
    for one, two in zip(met, late, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-5)


def squares(rule: NoLoCo, phi: torch.Tensor, work: float, rounds: int) -> Iterator[float]:
    """Peers of one parameter each, in pairs that are drawn anew: the mean of (φ - mean)² after each round."""
    generator = torch.Generator().manual_seed(5)
    velocity, count = torch.zeros_like(phi), len(phi)
    for _ in range(rounds):
        brought = work * torch.randn(count, generator=generator)
        rule.offer(phi, brought, brought)
        order = torch.randperm(count, generator=generator)
        both = (brought[order[::2]] + brought[order[1::2]]) / 2
        brought[order[::2]], brought[order[1::2]] = both, both
        rule.step(phi, velocity, brought)
        yield float((phi - phi.mean()).square().mean())


def apart(rule: NoLoCo, rounds: int) -> float:
    """How far they are apart in the end, from 1, if they only have the pull."""
    (phi,) = draw(1, 256, 4)
    middle = float(phi.mean())
    *_, last = squares(rule, phi, 0.0, rounds)
    assert abs(float(phi.mean()) - middle) < 1e-3 * max(1.0, float(phi.abs().max()))
    return math.sqrt(last)


@pytest.mark.parametrize("momentum", (0.0, 0.5, 0.9))
def test_pairs_that_are_drawn_come_together_within_the_range_of_pulls_and_not_beyond(momentum: float) -> None:
    edge = most_pull(momentum)
    assert apart(NoLoCo(momentum, 0.7, 0.8 * edge), 800) < 0.01
    assert apart(NoLoCo(momentum, 0.7, 0.5 * edge), 800) < 0.01
    beyond = NoLoCo(momentum, 0.7, 0.5 * edge)
    beyond.pull = 1.25 * edge
    assert apart(beyond, 200) > 5


@pytest.mark.parametrize("momentum", (0.0, 0.5, 0.8))
def test_half_of_the_largest_pull_is_best_against_what_work_drives_apart(momentum: float) -> None:
    """Squares of 1 / ((1 - α)²(1 + α)) times the work's; near either end 2.78 times as much: see the module."""
    edge, told = most_pull(momentum), 1 / ((1 - momentum) ** 2 * (1 + momentum))
    found = {}
    for share in (0.1, 0.5, 0.9):
        late = list(squares(NoLoCo(momentum, 1.0, share * edge), torch.zeros(1000), 1.0, 300))[150:]
        found[share] = sum(late) / len(late)
    assert found == pytest.approx({0.1: 2.78 * told, 0.5: told, 0.9: 2.78 * told}, rel=0.15)


@pytest.mark.parametrize(
    "arguments, said",
    [
        ((1.0, 0.7, 0.5), "momentum"),
        ((0.9, 0.0, 0.5), "learning rate"),
        ((0.5, 0.7, 1.5), "pull"),
        ((0.9, 0.7, 0.4), "pull"),
        ((0.5, 0.7, 0.0), "pull"),
    ],
)
def test_settings_that_cannot_work_are_refused(arguments: tuple[float, float, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        NoLoCo(*arguments)


def test_what_is_not_finite_is_told() -> None:
    assert not NoLoCo(0.5, 0.7, 0.9).step(torch.zeros(3), torch.zeros(3), torch.tensor([0.0, torch.inf, 0.0]))
