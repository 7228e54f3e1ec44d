"""The outer step: Nesterov SGD checked by hand and by PyTorch, and the same bits on every machine."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator

import numpy
import pytest
import torch

from node.outer import state as outers
from node.outer.state import OuterSGD, pseudo_gradient
from protocols.base import Vector
from tests.golden import codecs
from tests.golden import outer as golden
from tests.support.paths import REPOSITORY


@pytest.fixture
def restored() -> Iterator[None]:
    """Restores torch's threads and its handling of subnormal numbers after the test."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)


def test_step_decays_to_a_plain_mean() -> None:
    """In equal parts over the last rounds, after which it stays one."""
    outer = OuterSGD(0.7, 0.8, rounds=8, decay=0.5)
    found = [outer.at(trained) for trained in range(10)]
    assert found[:4] == [outer] * 4
    assert [each.momentum for each in found] == pytest.approx([0.8] * 4 + [0.6, 0.4, 0.2, 0.0, 0.0, 0.0])
    assert [each.learning_rate for each in found] == pytest.approx([0.7] * 4 + [0.775, 0.85, 0.925, 1.0, 1.0, 1.0])
    peers, mean = torch.randn(4, 9), torch.empty(9)
    torch.sub(torch.ones(9), peers.mean(0), out=mean)
    anchor = torch.ones(9)
    found[7].step(anchor, torch.randn(9), mean)
    assert torch.allclose(anchor, peers.mean(0), atol=1e-6)


def test_fragments_decay_alike() -> None:
    outer = OuterSGD(0.7, 0.8, rounds=12, decay=0.5, fragments=3)
    momenta = [outer.at(trained).momentum for trained in range(12)]
    assert momenta == pytest.approx([0.8] * 6 + [0.4] * 3 + [0.0] * 3)


@pytest.mark.parametrize("learning_rate, momentum", golden.SETTINGS)
def test_every_operation_rounds_to_float32(learning_rate: float, momentum: float) -> None:
    """The same in numpy's scalars, which fuse no operations: the bits are the formula's, not only this torch's."""
    one = numpy.float32
    weight, moment = one(1), one(0)
    for delta, (our_weight, our_moment) in zip(golden.DELTAS, golden.walk(learning_rate, momentum), strict=True):
        moment = moment * one(momentum) + one(delta)
        weight = weight - (moment * one(momentum) + one(delta)) * one(learning_rate)
        assert (our_weight.hex(), our_moment.hex()) == (float(weight).hex(), float(moment).hex())


@pytest.mark.parametrize("threads", [1, 2])
def test_trajectories_match_the_golden_bits(threads: int, restored: None) -> None:
    torch.set_num_threads(threads)
    assert golden.trajectories() == json.loads(golden.FILE.read_text())


def test_golden_bits_do_not_depend_on_the_processor() -> None:
    """Nor do those of codecs. torch uses no vector instructions at all here, and the self-test passes."""
    program = "from tests.golden import codecs, outer; import json; outer.self_test(); "
    run = subprocess.run(
        [sys.executable, "-c", program + "print(json.dumps([outer.trajectories(), codecs.digests()]))"],
        cwd=REPOSITORY,
        env={**os.environ, "ATEN_CPU_CAPABILITY": "default"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(run.stdout) == [json.loads(each.FILE.read_text()) for each in (golden, codecs)]


def test_piece_size_does_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    start, delta = torch.randn(1000, generator=generator), torch.randn(1000, generator=generator)
    ends = []
    for piece in (1 << 18, 1000, 333, 1):
        monkeypatch.setattr(outers, "_PIECE_ELEMENTS", piece)
        anchor, velocity = start.clone(), torch.zeros(1000)
        for _ in range(3):
            assert OuterSGD(0.7, 0.9).step(anchor, velocity, delta)
        ends.append((anchor, velocity))
    assert all(torch.equal(anchor, ends[0][0]) and torch.equal(velocity, ends[0][1]) for anchor, velocity in ends)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38])
@pytest.mark.parametrize("place", [0, 4, 5, 11])
def test_non_finite_step_is_detected(bad: float, place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every piece; 3e38 is finite itself, but the step from it is not."""
    monkeypatch.setattr(outers, "_PIECE_ELEMENTS", 5)
    delta = torch.full((12,), 0.5)
    assert OuterSGD(0.9, 0.9).step(torch.ones(12), torch.zeros(12), delta) is True
    delta[place] = bad
    assert OuterSGD(0.9, 0.9).step(torch.ones(12), torch.zeros(12), delta) is False


BAD_RATES, BAD_MOMENTA = (0.0, -0.1, math.nan, math.inf, -math.inf), (-0.1, 1.0, 1.5, math.nan, math.inf)


@pytest.mark.parametrize(
    "rate, momentum, message",
    [
        *((rate, 0.9, f"outer learning rate must be positive and finite, not {rate}") for rate in BAD_RATES),
        *((0.7, momentum, f"outer momentum must be in [0, 1), not {momentum}") for momentum in BAD_MOMENTA),
    ],
)
def test_bad_setting_gives_one_line_error(rate: float, momentum: float, message: str) -> None:
    with pytest.raises(ValueError) as raised:
        OuterSGD(rate, momentum)
    assert str(raised.value) == message


def test_pseudo_gradient_points_back_to_the_anchor() -> None:
    anchor, local = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.5, 2.5, 3.0])
    into = torch.empty(3)
    pseudo_gradient(anchor, local, into)
    assert into.tolist() == [0.5, -0.5, 0.0] and local.tolist() == [0.5, 2.5, 3.0]
    pseudo_gradient(anchor, local, local)
    assert local.tolist() == [0.5, -0.5, 0.0] and anchor.tolist() == [1.0, 2.0, 3.0]


# -- the self-test ----------------------------------------------------------------------------------------------------


def test_this_machine_passes_the_self_test(restored: None) -> None:
    golden.self_test()
    torch.set_num_threads(2)
    golden.self_test()


def fused(self: OuterSGD, anchor: Vector, velocity: Vector, delta: Vector) -> bool:
    """The naive step: its multiplications are fused with additions on a processor with FMA."""
    velocity.mul_(self.momentum).add_(delta)
    wide = delta.double() + velocity.double() * self.momentum
    anchor.copy_(anchor.double() - wide * self.learning_rate)
    return True


def test_fused_rounding_fails_the_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OuterSGD, "step", fused)
    with pytest.raises(RuntimeError, match="differs from the reference") as raised:
        golden.self_test()
    assert "\n" not in str(raised.value)


def test_different_multiplication_fails_the_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = torch.mul
    last_bit = 1 + 2.0**-23

    def differently(left: Vector, right: float, *, out: Vector) -> Vector:
        multiply(left, right, out=out)
        return out[-1:].mul_(last_bit)

    monkeypatch.setattr(torch, "mul", differently)
    with pytest.raises(RuntimeError, match="differs from the reference"):
        golden.self_test()


def test_flushing_subnormals_fails_the_self_test(restored: None) -> None:
    assert torch.set_flush_denormal(True)
    with pytest.raises(RuntimeError, match="flushes subnormal numbers"):
        golden.self_test()


def test_pattern_has_both_signs_and_subnormals() -> None:
    for step in range(1, 7):
        pattern = golden.pattern(4096, step)
        subnormal = (pattern != 0) & (pattern.abs() < 2.0**-126)
        assert pattern.isfinite().all() and subnormal.any()
        assert (pattern < 0).any() and (pattern > 1e3).any()
