"""A swarm for a loop with accelerate: `AcceleratedSwarm.join(accelerator, model, optimizer, bootstrap=...)`.

See docs/own-loop.md.
"""

from __future__ import annotations

from typing import Any, Self

import torch

from node.library import StepResult, Swarm
from node.library.adapter import Microbatches
from node.runtime.program import install

try:
    from accelerate import Accelerator
except ImportError as error:
    raise ImportError(f"AcceleratedSwarm needs accelerate: {install('hf')}") from error


class AcceleratedSwarm:
    """A `Swarm` whose `step` is called after each microbatch: it knows where gradients are accumulated.

    `join` and `start` take what those of `Swarm` take, with the accelerator first, and model and optimizer as
    `accelerator.prepare` has returned them. It is a context manager that leaves at its end.
    """

    def __init__(self, accelerator: Accelerator, swarm: Swarm) -> None:
        self.swarm = swarm
        self._accelerator, self._trained, self._last = accelerator, Microbatches(), StepResult(-1)

    @classmethod
    def join(cls, accelerator: Accelerator, model: torch.nn.Module, optimizer: Any = None, **arguments: Any) -> Self:
        """Take part in a run, as by `Swarm.join`."""
        return cls(accelerator, Swarm.join(accelerator.unwrap_model(model), optimizer, **arguments))

    @classmethod
    def start(cls, accelerator: Accelerator, model: torch.nn.Module, optimizer: Any = None, **arguments: Any) -> Self:
        """Start a run, as by `Swarm.start`."""
        return cls(accelerator, Swarm.start(accelerator.unwrap_model(model), optimizer, **arguments))

    def step(self, tokens: int | torch.Tensor, loss: float | torch.Tensor | None = None) -> StepResult:
        """Call it after each `optimizer.step()` of the loop, with what this microbatch has learnt from, and its loss.

        Where accelerate only accumulates gradients, it counts; else it does what `Swarm.step` does, for all of them.
        """
        self._trained.add(tokens, loss)
        if not self._accelerator.sync_gradients:
            return StepResult(self._last.round, over=self._last.over)
        self._last = self._trained.step(self.swarm)
        return self._last

    def metrics(self) -> dict[str, float]:
        """The last round's figures, for `accelerator.log`."""
        return self.swarm.metrics()

    @property
    def over(self) -> bool:
        return self.swarm.over

    def leave(self) -> None:
        self.swarm.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()
