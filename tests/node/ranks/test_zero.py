"""Gradients in buckets: all of them are summed, in one order, and each where it is trained."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from node.ranks.collectives import GradientSum
from node.ranks.division import cuts
from node.ranks.zero import GradientBuckets
from node.tasks.flat import View
from node.tasks.name import TaskError


@dataclass(frozen=True)
class Sum(GradientSum):
    """Stands for a sum over all ranks: the others' gradients are 1."""

    bounds: list[int]
    bucket: int
    places: list[tuple[int, int]] = field(default_factory=list)

    def __call__(self, part: torch.Tensor, low: int) -> None:
        self.places.append((low, low + len(part)))
        part.add_(1)


@given(
    tensors=st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=8),
    bucket=st.integers(1, 12),
    ranks=st.integers(1, 3),
)
def test_buckets_cover_the_vector_from_its_end(tensors: list[tuple[int, bool]], bucket: int, ranks: int) -> None:
    """Also with tensors that a backward pass does not reach; and the next pass adds to what is there.

    A backward pass before it, of a loss() whose zero_grad() follows, does not count.
    """
    total = sum(size for size, _ in tensors)
    weights = (torch.arange(total) + 1.0).split([size for size, _ in tensors])
    whole = torch.cat([each * used + 1 for each, (_, used) in zip(weights, tensors, strict=True)])
    bounds = cuts(total, ranks)
    for rank in range(ranks):
        parameters = [nn.Parameter(torch.zeros(size)) for size, _ in tensors]
        views = [View("", each, each.detach(), None, False) for each in parameters]
        add, into = Sum(bounds, bucket), torch.zeros(bounds[rank + 1] - bounds[rank])
        buckets = GradientBuckets(views, add, rank, into)
        for passes in (1, 2):
            add.places.clear()
            sum(each.sum() for each in parameters).backward()  # type: ignore[union-attr]
            assert not add.places and all(each.grad is not None for each in parameters)
            for each in parameters:
                each.grad = None
            buckets.begin()
            for parameter, weight, (_, used) in zip(parameters, weights, tensors, strict=True):
                if used:
                    (parameter * weight).sum().backward()
            buckets.finish()
            ends = [total, *(low for low, _ in add.places)]
            assert [high for _, high in add.places] == ends[:-1] and ends[-1] == 0
            assert all(high - low >= bucket for low, high in add.places[:-1])
            assert torch.equal(into, passes * whole[bounds[rank] : bounds[rank + 1]])
            assert all(each.grad is None for each in parameters)


def test_gradient_that_comes_too_late_is_refused() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    views = [View("scale", parameter, parameter.detach(), None, False)]
    buckets = GradientBuckets(views, Sum([0, 3], 3), 0, torch.zeros(3))
    buckets.begin()
    parameter.sum().backward()
    with pytest.raises(TaskError, match="parameter scale gets its gradient in several parts"):
        parameter.sum().backward()
