"""A stand-in for `Swarm` that keeps what an adapter tells it, and sees the optimizer's steps as `Swarm` does."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from node.library import StepResult, Swarm


class StandIn:
    """Rounds of two steps. The state of its swarm, and its last mean, are each the parameters plus 1."""

    has_own_peer = True

    def __init__(self, crowd: StandIns, model: torch.nn.Module, optimizer: Any, arguments: dict[str, Any]) -> None:
        self.crowd, self.model, self.arguments, self.state_dir = crowd, model, arguments, "there"
        self.optimizer = getattr(optimizer, "optimizer", optimizer)
        self.tokens: list[int] = []
        self.losses: list[float] = []
        self.left = False
        self._taken = 0
        if crowd.given:
            self._add_one()
            if self.optimizer is not None:
                self.optimizer.register_step_post_hook(self._on_step)

    @torch.no_grad()
    def _add_one(self) -> None:
        for each in self.model.parameters():
            each.add_(1)

    def _on_step(self, *_: object) -> None:
        self._taken += 1

    @property
    def over(self) -> bool:
        return len(self.tokens) >= 2 * self.crowd.rounds

    @property
    def active(self) -> bool:
        return self.crowd.given and not self.left and not self.over

    def step(self, tokens: Any, loss: Any = None) -> StepResult:
        assert not self.left, "a step after it has left"
        taken, self._taken = self._taken, 0
        if not taken and self.optimizer is not None:
            return StepResult(len(self.tokens) // 2)
        self.tokens.append(int(tokens))
        self.losses.append(float("nan" if loss is None else loss))
        return StepResult(len(self.tokens) // 2, ended=len(self.tokens) % 2 == 0, over=self.over)

    def metrics(self) -> dict[str, float]:
        return {"swarm/round": float(len(self.tokens) // 2)} if self.crowd.given else {}

    def leave(self) -> None:
        if self.crowd.given and not self.left:
            self.left = True
            self._add_one()


class StandIns(list[StandIn]):
    """Those that `Swarm.join` and `Swarm.start` have made, in place of swarms."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.given, self.rounds = True, 1000
        for name in ("join", "start"):
            patch.setattr(Swarm, name, self._entry(getattr(Swarm, name)))

    def _entry(self, usual: Any) -> Any:
        def enter(model: torch.nn.Module, optimizer: Any = None, **arguments: Any) -> StandIn:
            self.append(StandIn(self, model, optimizer, arguments))
            return self[-1]

        enter.__signature__ = inspect.signature(usual)  # type: ignore[attr-defined]
        return enter
