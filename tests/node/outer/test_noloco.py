"""NoLoCo's outer step against the same rule in float64."""

from __future__ import annotations

import pytest
import torch

from node.outer.noloco import NoLoCo


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
