"""What a script has trained since it was last asked: steps of its optimizer, tokens and losses."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import torch

from node.library.parameters import SwarmError

_UNSTEPPED_CALLS = 3
UNSTEPPED = (
    "step() is called without an optimizer.step() before it: that counts nothing. Call it once after each "
    "optimizer.step(), with the tokens of all its batches"
)


class TokensError(SwarmError):
    """`tokens` is no number of tokens. Nothing was counted, and nothing else has changed."""


def checked(tokens: int | torch.Tensor) -> int | torch.Tensor:
    """A whole number from 0; a tensor on a device is not waited for. Raises `TokensError`."""
    if type(tokens) is int and tokens >= 0:
        return tokens
    what = str(tokens)
    if isinstance(tokens, torch.Tensor):
        if tokens.numel() != 1:
            what = f"a tensor of {tokens.numel()} elements"
        elif tokens.device.type != "cpu":
            return tokens.detach()
    with suppress(TypeError, ValueError, OverflowError, RuntimeError):
        if (number := int(tokens)) == tokens and number >= 0:
            return number
    raise TokensError(f"tokens={what}: give a whole number from 0, of the tokens or samples that the step learnt from")


def weighted(loss: float | torch.Tensor | None, tokens: int | torch.Tensor) -> float | torch.Tensor:
    """The mean loss of some tokens times their number: NaN without a loss, 0 without tokens, whose mean may be NaN.

    Sums of it are of float64 where the device has that: in float16 they would soon be infinite.
    """
    if isinstance(loss, torch.Tensor):
        loss = loss.detach()
        loss = (
            float(loss) if loss.device.type == "cpu" else loss.float() if loss.device.type == "mps" else loss.double()
        )
    elif loss is None:
        loss = math.nan
    if isinstance(tokens, torch.Tensor):
        product = loss * tokens
        return torch.where(tokens > 0, product, torch.zeros_like(product))
    return loss * tokens if tokens else 0.0


class StepCounter:
    """Sums that may stay on a device: counting waits for none. `steps` are those of the optimizer since `take`."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = getattr(optimizer, "optimizer", optimizer)  # of a wrapper, as accelerate's
        self.steps = self._stepped = self._calls = self._unstepped = 0
        self._tokens: Any = 0
        self._losses: Any = 0.0  # times tokens
        self._hook: Any = None
        if hasattr(self.optimizer, "register_step_post_hook"):
            self._hook = self.optimizer.register_step_post_hook(self._on_step)

    def _on_step(self, optimizer: Any, *_: object) -> None:
        found = getattr(optimizer, "found_inf", None)  # a GradScaler lets a fused optimizer skip the step itself
        if found is None or not bool(found):
            self._stepped += 1

    def count(self, tokens: int | torch.Tensor, loss: float | torch.Tensor | None) -> bool:
        """Count a step with its tokens and their mean loss. False: there was no step, too often to be meant.

        Raises `TokensError`, and has counted nothing.
        """
        tokens = checked(tokens)
        taken, self._stepped = self._stepped if self._hook else 1, 0
        self._calls += 1
        if not taken:  # a GradScaler has skipped it, or gradients are still accumulated
            self._unstepped += 1
            return self._unstepped < _UNSTEPPED_CALLS or 4 * self._unstepped <= self._calls
        self.steps += taken
        self._tokens = self._tokens + tokens
        self._losses = self._losses + weighted(loss, tokens)
        return True

    def take(self) -> tuple[float, float]:
        """Tokens, and their loss times tokens, since the last call. It waits for the device."""
        tokens, losses = float(self._tokens), float(self._losses)
        self._tokens, self._losses = 0, 0.0
        if not tokens >= 0:  # on a device, which is not waited for before
            raise SwarmError(f"the tokens since the last report add up to {tokens:g}: give numbers from 0")
        return tokens, losses

    def forget(self) -> None:
        """Nothing has been trained."""
        self.steps = self._stepped = 0
        self._tokens, self._losses = 0, 0.0

    def close(self) -> None:
        if self._hook:
            self._hook.remove()
            self._hook = None
