"""The outer step of DiLoCo: Nesterov SGD over flat vectors, with the same bits on every machine.

Separate multiplications and additions only, in float32 on the CPU: `add(alpha=)`, `lerp` and `addcmul` may or may not
be fused, depending on the processor. `self_test` runs the arithmetic that all members must agree on over a fixed
vector and compares a hash, so that a machine that computes differently is found before it joins a run.

Source: Douillard et al. 2023, algorithm 1; the update rule is PyTorch's SGD(nesterov=True).
"""

from __future__ import annotations

import hashlib
import math

import torch

from protocols.base import Vector
from protocols.vectors.codec import CODECS
from protocols.vectors.views import norm, root

_PIECE_ELEMENTS = 1 << 18


class OuterSGD:
    """m ← μm + Δ; θ ← θ − η(Δ + μm), with Δ the mean pseudo-gradient."""

    def __init__(
        self, learning_rate: float, momentum: float, rounds: int = 0, decay: float = 0.0, extra: int = 0
    ) -> None:
        """The step goes in equal parts to a plain mean of the peers' parameters (learning rate 1, momentum 0) in the
        last training rounds of a run, a share `decay` of its `rounds`. For the last `extra` elements it is that
        mean in all rounds (`node.tasks.extra`). Raises ValueError for a rate that is not positive and finite, or a
        momentum outside [0, 1).
        """
        if not (math.isfinite(learning_rate) and learning_rate > 0):
            raise ValueError(f"outer learning rate must be positive and finite, not {learning_rate}")
        if not 0 <= momentum < 1:
            raise ValueError(f"outer momentum must be in [0, 1), not {momentum}")
        self.learning_rate = learning_rate
        self.momentum = momentum
        self._rounds, self._decay, self._extra = rounds, decay, extra

    def at(self, trained: int) -> OuterSGD:
        if not self._decay * self._rounds:
            return self
        left = max(0.0, (1 - (trained + 1) / self._rounds) / self._decay)
        if left >= 1:
            return self
        return OuterSGD(left * self.learning_rate + (1 - left), left * self.momentum, extra=self._extra)

    def step(self, anchor: Vector, velocity: Vector, delta: Vector) -> bool:
        """Apply a mean pseudo-gradient Δ to θ and m in place. Returns whether every new parameter is finite."""
        scratch = torch.empty(min(_PIECE_ELEMENTS, len(anchor)))
        trained = len(anchor) - self._extra
        means = anchor[trained:].sub_(delta[trained:])
        finite = not self._extra or math.isfinite(norm([means]))
        for low in range(0, trained, _PIECE_ELEMENTS):
            piece = slice(low, min(low + _PIECE_ELEMENTS, trained))
            theta, m, d = anchor[piece], velocity[piece], delta[piece]
            update = scratch[: len(theta)]
            m.mul_(self.momentum)
            m.add_(d)
            torch.mul(m, self.momentum, out=update)
            update.add_(d)
            update.mul_(self.learning_rate)
            theta.sub_(update)
            low_value, high_value = theta.aminmax()
            finite = finite and math.isfinite(low_value) and math.isfinite(high_value)
        return finite


def pseudo_gradient(anchor: Vector, local: Vector, into: Vector) -> None:
    """Δ_i = θ − θ_i; `into` may be `local`."""
    torch.sub(anchor, local, out=into)


SELF_TEST_DIGEST = "334c929d3f97405650dde84a8e2a4e6bba38796b1ff1b1a6f7a1cc20b9636a44"


def _pattern(count: int, step: int) -> Vector:
    """Numbers of both signs over many magnitudes, subnormal ones included, from integers alone."""
    index = torch.arange(count, dtype=torch.int64)
    mantissa = (index * (2 * step + 2654435761) % 65521 - 32760).to(torch.float32)
    exponent = (index * 7 + step) % 151 - 140
    return torch.ldexp(mantissa, exponent)


def self_test_digest() -> str:
    anchor, velocity = _pattern(4096, 1), torch.zeros(4096)
    outer = OuterSGD(0.7, 0.9)
    digest = hashlib.sha256()
    sides = dict.fromkeys(side for codec in CODECS.values() for side in (codec, codec.reduced(4)))
    for step, codec in enumerate(sides):
        delta = _pattern(4096, step + 2)
        encoded = bytearray(codec.encoded_bytes(len(delta)))
        codec.encode(delta, memoryview(encoded))
        codec.decode(encoded, delta)
        outer.step(anchor, velocity, delta)
        digest.update(memoryview(encoded))
        digest.update(root([anchor, velocity]))
    return digest.hexdigest()


def self_test() -> None:
    """Raises RuntimeError if this machine does not compute the bits that all others do."""
    if float(torch.tensor([1e-40]) * torch.tensor([0.5])) == 0.0:
        raise RuntimeError("this process flushes subnormal numbers to zero; call torch.set_flush_denormal(False)")
    if self_test_digest() != SELF_TEST_DIGEST:
        raise RuntimeError("this machine's float32 arithmetic differs from the reference: it cannot join a run")
