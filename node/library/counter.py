"""What a script has trained since it was last asked: steps of its optimizer, tokens and losses."""

from __future__ import annotations

import math
from typing import Any

import torch

_UNSTEPPED_CALLS = 3
UNSTEPPED = (
    "step() is called without an optimizer.step() before it: that counts nothing. Call it once after each "
    "optimizer.step(), with the tokens of all its batches"
)


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
        """Count a step with its tokens and their mean loss. False: there was no step, too often to be meant."""
        taken, self._stepped = self._stepped if self._hook else 1, 0
        self._calls += 1
        if not taken:  # a GradScaler has skipped it, or gradients are still accumulated
            self._unstepped += 1
            return self._unstepped < _UNSTEPPED_CALLS or 4 * self._unstepped <= self._calls
        self.steps += taken
        if not (on_device := isinstance(tokens, torch.Tensor) and tokens.device.type != "cpu"):
            tokens = int(tokens)
        if isinstance(loss, torch.Tensor):
            loss = float(loss) if loss.device.type == "cpu" else loss.detach()
        if on_device or tokens:
            self._tokens = self._tokens + tokens
            self._losses = self._losses + (math.nan if loss is None else loss * tokens)
        return True

    def take(self) -> tuple[float, float]:
        """Tokens, and their loss times tokens, since the last call. It waits for the device."""
        tokens, losses = float(self._tokens), float(self._losses)
        self._tokens, self._losses = 0, 0.0
        return tokens, losses

    def forget(self) -> None:
        """Nothing has been trained."""
        self.steps = self._stepped = 0
        self._tokens, self._losses = 0, 0.0

    def close(self) -> None:
        if self._hook:
            self._hook.remove()
            self._hook = None
