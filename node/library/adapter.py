"""What the callbacks and helpers for other libraries' loops have in common.

node/library/transformers.py    SwarmCallback: for transformers' Trainer
node/library/lightning.py       LightningSwarm: for Lightning's Trainer
node/library/accelerate.py      AcceleratedSwarm: for a loop of one's own with accelerate
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch

from node.library.counter import checked, weighted
from node.library.swarm import StepResult, Swarm

IGNORED = -100
"""The label of what is not to be learnt, as in PyTorch's cross-entropy."""


def targets(batch: Any) -> int | torch.Tensor:
    """How many labels of a batch are to be learnt; of one without `labels`, how many samples it has."""
    if isinstance(batch, Mapping):
        if isinstance(labels := batch.get("labels"), torch.Tensor):
            return labels.ne(IGNORED).sum()
        batch = tuple(batch.values())
    if isinstance(batch, tuple | list):
        return next((found for each in batch if (found := targets(each))), 0)
    return len(batch) if isinstance(batch, torch.Tensor) and batch.dim() else 0


class Microbatches:
    """What was trained since the last step of the optimizer. It does not wait for a device."""

    def __init__(self) -> None:
        self._tokens: int | torch.Tensor = 0
        self._loss: float | torch.Tensor | None = 0.0  # times tokens; None once it is not known

    def add(self, tokens: int | torch.Tensor, loss: float | torch.Tensor | None = None) -> None:
        """Count a microbatch, with the mean loss of its tokens."""
        tokens = checked(tokens)
        self._tokens = self._tokens + tokens
        self._loss = None if loss is None or self._loss is None else self._loss + weighted(loss, tokens)

    def step(self, swarm: Swarm) -> StepResult:
        """Tell the swarm of all that was counted."""
        tokens, loss = self._tokens, self._loss
        self._tokens, self._loss = 0, 0.0
        if loss is not None:
            loss = loss / (tokens.clamp(min=1) if isinstance(tokens, torch.Tensor) else max(1, tokens))
        return swarm.step(tokens, loss)


class JoinsLater:
    """A swarm that is joined when the training begins, since there is no model before.

    It takes the keyword arguments of `Swarm.join`; `start` makes one with those of `Swarm.start`. A training that
    begins again with it goes on in the same run, by the same state directory. It is a context manager, for a script
    that continues after an exception in its training: it leaves at its end.
    """

    swarm: Swarm | None = None

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self._enter_by(Swarm.join, arguments)

    @classmethod
    def start(cls, **arguments: Any) -> Self:
        """Start a run from the parameters that the model has when the training begins."""
        starting = cls()
        starting._enter_by(Swarm.start, arguments)
        return starting

    def _enter_by(self, entry: Callable[..., Swarm], arguments: dict[str, Any]) -> None:
        inspect.signature(entry).bind(None, None, **arguments)  # a wrong name is told now, not when it trains
        self._entry, self._arguments, self._trained = entry, arguments, Microbatches()

    def _enter(self, model: torch.nn.Module, optimizer: Any, step: int) -> Swarm:
        """Join, before this step of the training."""
        arguments = dict(self._arguments)
        if self.swarm:
            self.leave()
            if self.swarm.has_own_peer and (directory := self.swarm.state_dir):
                arguments.setdefault("state_dir", directory)
        self._trained = Microbatches()
        self.swarm = self._entry(model, optimizer, **arguments)
        if step and self.swarm.active:
            self._say(f"the training resumes at step {step} with the swarm's parameters, not those of its checkpoint")
        return self.swarm

    def _say(self, line: str) -> None:
        if not self._arguments.get("quiet"):
            print(f"starling: {line}", file=sys.stderr, flush=True)

    def leave(self) -> None:
        """Leave the run, if it is joined. The model gets the last mean."""
        if self.swarm:
            self.swarm.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()
