"""Training in float16: overflows leave their step out, the scale follows them, and it changes no step otherwise."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from node.tasks.recipe import Recipe
from node.training.inner_optimizer import FIRST_SCALE, GROWTH_STEPS, LEAST_SCALE, SKIPPED_IN_A_ROW, LossScale
from node.training.task_learner import TaskLearner
from tests.node.training.test_task_learner import RECIPE, Layered

EACH = pytest.mark.parametrize("values", [{}, {"mean": "batch"}, {"inner_optimizer": "muon"}])


class Loud(Layered):
    """A task whose loss is multiplied, at each batch, by the next of these factors; the last one stays."""

    def __init__(self, *factors: float) -> None:
        super().__init__()
        self.words, self.labels = self.words.repeat(99, 1), self.labels.repeat(99, 1)
        self.bounds = list(range(0, 8 * 100, 8))
        self._factors = list(factors)

    def loss(self, *batch: torch.Tensor) -> torch.Tensor:
        factor = self._factors.pop(0) if len(self._factors) > 1 else self._factors[0]
        return super().loss(*batch) * factor


def learner(*factors: float, autocast: torch.dtype | None = torch.float16, **values: Any) -> TaskLearner:
    recipe: Recipe = replace(RECIPE, **values)
    return TaskLearner(Loud(*factors), recipe, seed=0, autocast=autocast)


def scale_of(each: TaskLearner) -> list[float]:
    assert each.loss_scale
    scale: list[float] = each.loss_scale.state.tolist()
    return scale


@EACH
def test_overflow_leaves_its_step_out_and_halves_the_scale(values: dict[str, Any]) -> None:
    trained = learner(1.0, 1e7, 1.0, **values)
    assert trained.step(0, 0).tokens == 8 * 13 and scale_of(trained) == [FIRST_SCALE, 1]
    before = {name: each.clone() for name, each in {"vector": trained.vector, **trained.moments()}.items()}
    skipped = trained.step(0, 1)
    assert math.isnan(skipped.loss) and skipped.tokens == 0 and scale_of(trained) == [FIRST_SCALE / 2, 0]
    after = {"vector": trained.vector, **trained.moments()}
    assert all(torch.equal(before[name], after[name]) for name in before if name != "loss_scale")
    assert trained.step(0, 2).tokens and scale_of(trained) == [FIRST_SCALE / 2, 1]
    assert trained.vector.isfinite().all() and not torch.equal(before["vector"], trained.vector)


@EACH
@given(exponent=st.integers(0, 40))
def test_scale_changes_no_bit_of_a_step(exponent: int, values: dict[str, Any]) -> None:
    plain, scaled = (learner(1.0, autocast=None, batches=3, **values) for _ in range(2))
    scaled.loss_scale = scaled._optimizer._loss_scale = LossScale()
    scaled.loss_scale.state[0] = 2.0**exponent
    for step in range(2):
        assert plain.step(0, step) == scaled.step(0, step)
    assert torch.equal(plain.vector, scaled.vector)


@EACH
def test_float16_trains_as_float32_does(values: dict[str, Any]) -> None:
    ends = []
    for autocast in (None, torch.float16):
        trained = learner(1.0, autocast=autocast, **values)
        losses = [trained.step(0, step).loss for step in range(20)]
        ends.append(losses[-1])
    assert ends[0] < losses[0] and ends[1] == pytest.approx(ends[0], rel=0.01) and ends[0] != ends[1]


def test_scale_doubles_after_good_steps_in_a_row() -> None:
    scale = LossScale()
    for is_finite in [*[True] * (GROWTH_STEPS - 1), False, *[True] * GROWTH_STEPS]:
        scale.update(is_finite)
    assert scale.state.tolist() == [FIRST_SCALE, 0], "halved once, doubled once"


def test_lasting_overflow_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    trained = learner(math.inf)
    halvings = int(math.log2(FIRST_SCALE / LEAST_SCALE))
    for step in range(halvings):
        trained.step(0, step)
    assert scale_of(trained) == [LEAST_SCALE, 0] and not capsys.readouterr().err
    for step in range(30):
        assert trained.step(0, step).tokens == 0
    assert scale_of(trained) == [LEAST_SCALE, 0]
    assert capsys.readouterr().err == (
        "warning: 17 training steps in a row were left out, because the gradient is not finite in float16, even "
        "without loss scaling: try --precision bfloat16 or float32\n"
    )


def test_lasting_nan_is_told_once_in_each_series(capsys: pytest.CaptureFixture[str]) -> None:
    series = [math.nan] * 30
    trained = learner(*series, 1.0, *series, 1.0, autocast=None)
    for step in range(61):
        trained.step(0, step)
    line = (
        f"warning: {SKIPPED_IN_A_ROW} training steps in a row were left out, because the gradient is not finite: is "
        "the learning rate too high, or is something in the data not a number?\n"
    )
    assert capsys.readouterr().err == line * 2
