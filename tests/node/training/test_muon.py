"""Muon: torch's steps, in batches of one shape, and its iterations in both precisions."""

from __future__ import annotations

import copy

import pytest
import torch

from node.training import muon as module
from node.training.muon import Muon, fast_dtype, orthogonalized

SHAPES = ((8, 8), (24, 8), (8, 8), (8, 24), (24, 8), (8, 8))


def test_steps_equal_torchs_muon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the matrices of one shape are more than may be iterated over at once."""
    monkeypatch.setattr(module, "fast_dtype", lambda _: torch.bfloat16)
    monkeypatch.setattr(module, "_BATCH_ELEMENTS", 2 * 8 * 8)
    draw = torch.Generator().manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(shape, generator=draw)) for shape in SHAPES]
    theirs = copy.deepcopy(ours)
    optimizer, other = Muon(ours, 1e-2, 0.3), torch.optim.Muon(theirs, 1e-2, 0.3, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        for one, twin in zip(ours, theirs, strict=True):
            one.grad = twin.grad = torch.randn(one.shape, generator=draw)
        optimizer.step()
        other.step()
    for one, twin in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, twin, rtol=1e-4, atol=1e-4)  # of steps of 1e-2
        momenta = (
            each[parameter]["momentum_buffer"] for each, parameter in ((optimizer.state, one), (other.state, twin))
        )
        torch.testing.assert_close(*momenta)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 48, 16), (2, 16, 48)])
def test_iterations_make_matrices_nearly_orthogonal(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    given = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    given[0, :, 1] = given[0, :, 0] + 0.1 * given[0, :, 1]  # badly conditioned
    found = orthogonalized(given, dtype).float()
    values = torch.linalg.svdvals(found)
    assert found.shape == given.shape and float(values.min()) > 0.5 and float(values.max()) < 1.3
    left, _, right = torch.linalg.svd(given, full_matrices=False)
    assert float((found * (left @ right)).sum()) > 0.85 * shape[0] * 16, "and keep their singular vectors"
    assert torch.equal(orthogonalized(torch.zeros(shape), dtype), torch.zeros(shape, dtype=dtype))


@pytest.mark.parametrize("is_fast", [True, False])
def test_devices_that_are_slow_in_bfloat16_iterate_in_float32(is_fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512" if is_fast else "AVX2")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: is_fast)
    for name in ("cpu", "cuda"):
        assert fast_dtype(torch.device(name)) == (torch.bfloat16 if is_fast else torch.float32)
