"""Muon: momentum whose matrices are made nearly orthogonal by Newton-Schulz iterations (Jordan et al. 2024).

The same steps as `torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"`, with two differences that make it fast on
CPUs: it iterates over all small matrices of one shape at once, and in float32 where a CPU multiplies bfloat16 slowly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

MOMENTUM = 0.95
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of x, x^3 and x^5: chosen for a steep slope at 0, so that singular values end between about .7 and 1.2."""
_ITERATIONS, _SMALLEST_NORM = 5, 1e-7
_RMS_OF_ADAMW = 0.2
"""The step is as long as AdamW's usual one (Liu et al. 2025, arXiv 2502.16982, section 2.2)."""
_BATCH_ELEMENTS = 1 << 22
"""Elements that are iterated over at once: larger batches are no faster, and take memory."""


def fast_dtype(device: torch.device) -> torch.dtype:
    """The precision for the iterations: bfloat16, or float32 where that is faster.

    Without AVX-512, a CPU takes 12 to 19 times as long in bfloat16 as in float32; without its bfloat16 instructions,
    1.1 to 1.3 times.
    """
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        fast = device.type != "cpu" or torch.backends.cpu.get_cpu_capability() == "AVX512"
    return torch.bfloat16 if fast else torch.float32


def orthogonalized(matrices: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """For each matrix (batch, rows, columns) with the singular value decomposition USV', about UV', in `dtype`."""
    tall = matrices.shape[1] > matrices.shape[2]
    found = (matrices.mT if tall else matrices).to(dtype, copy=True)
    found.div_(torch.linalg.matrix_norm(found, keepdim=True).clamp_(min=_SMALLEST_NORM))
    first, third, fifth = _COEFFICIENTS
    for _ in range(_ITERATIONS):
        gram = found @ found.mT
        found = torch.baddbmm(found, torch.baddbmm(gram, gram, gram, beta=third, alpha=fifth), found, beta=first)
    return found.mT if tall else found


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum and decoupled weight decay; `rate` is of the size of AdamW's."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], rate: float, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": rate, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        for batch in _batches(group["params"]):
            directions = torch.stack([self._direction(each) for each in batch])
            found = orthogonalized(directions, fast_dtype(directions.device))
            length = self.length(group["lr"], directions.shape[1:])
            for parameter, direction in zip(batch, found, strict=True):
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(direction, alpha=-length)

    @staticmethod
    def length(rate: float, shape: Sequence[int]) -> float:
        return float(rate * _RMS_OF_ADAMW * max(shape) ** 0.5)

    def _direction(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """The gradient, looked at through the momentum that it has been added to."""
        assert parameter.grad is not None
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        momentum: torch.Tensor = state["momentum_buffer"]
        momentum.lerp_(parameter.grad, 1 - MOMENTUM)
        return parameter.grad.lerp(momentum, MOMENTUM)


def _batches(parameters: Sequence[torch.nn.Parameter]) -> Iterator[list[torch.nn.Parameter]]:
    shapes: dict[torch.Size, list[torch.nn.Parameter]] = {}
    for each in parameters:
        shapes.setdefault(each.shape, []).append(each)
    for shape, found in shapes.items():
        most = max(1, _BATCH_ELEMENTS // max(1, shape.numel()))
        for low in range(0, len(found), most):
            yield found[low : low + most]
