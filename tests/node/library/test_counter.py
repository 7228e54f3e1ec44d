"""Tokens and losses of a script, as it gives them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from node.library.adapter import Microbatches
from node.library.counter import StepCounter, TokensError, checked, weighted


def test_what_is_no_number_of_tokens_is_refused_and_counts_nothing() -> None:
    counter = StepCounter(None)
    for wrong in (-1, 0.5, math.nan, math.inf, None, "5", torch.tensor([1, 2]), torch.tensor(-3), torch.tensor(0.5)):
        with pytest.raises(TokensError, match="give a whole number from 0"):
            counter.count(wrong, 1.0)  # type: ignore[arg-type]
    assert counter.steps == 0 and counter.take() == (0.0, 0.0)
    assert [checked(each) for each in (3, 3.0, torch.tensor(3), torch.tensor([3]), True)] == [3, 3, 3, 3, 1]  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("where", [StepCounter, Microbatches])
def test_sums_of_short_floats_lose_nothing(where: type[Any], dtype: torch.dtype) -> None:
    """And a microbatch without tokens, whose mean loss is NaN, does not spoil the others'."""
    loss = torch.tensor(2.0, dtype=dtype, requires_grad=True)
    swarm = StepCounter(None)
    swarm.step = swarm.count  # type: ignore[attr-defined]
    counted: Any = swarm if where is StepCounter else where()
    for _ in range(1000):
        (counted.count if where is StepCounter else counted.add)(16384, loss)
    (counted.count if where is StepCounter else counted.add)(0, torch.tensor(math.nan))
    if where is Microbatches:
        counted.step(swarm)
    tokens, losses = swarm.take()
    assert (tokens, losses / tokens) == (16_384_000, 2.0)


def test_tensors_of_a_device_are_weighed_there() -> None:
    device = torch.tensor  # whose tokens are a tensor, as on a device
    assert float(weighted(torch.tensor(2.0), device(3))) == 6.0
    assert float(weighted(torch.tensor(math.nan), device(0))) == 0.0 and weighted(math.nan, 0) == 0.0
    assert math.isnan(float(weighted(None, device(3))))
