"""What a user may do in a loop: it never hangs, the anchor stays the peer's, the script trains right or is told."""

from __future__ import annotations

import contextlib
import math
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from node.library import StepResult, Swarm, SwarmError
from node.library import peer as library
from node.library.parameters import Parameters
from node.training import script
from node.training.remote import NOTHING
from tests.node.library.peer_side import Rounds
from tests.support.long import long

STEPS, LONGEST_SECONDS = 80, 20.0


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(script, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(library, "_ATTACH_PAUSE_SECONDS", 0.02)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
        self.tied, self.frozen = self.layers[2], nn.Linear(2, 2).requires_grad_(False)
        self.rounded = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layers(batch).square().mean() + self.rounded.float().square().mean()


class Loop:
    """A user's loop with a swarm, and the acts of a user. Those that raise `SwarmError` end with the model mended."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        self.model = Model()
        self.optimizer = torch.optim.AdamW([each for each in self.model.parameters() if each.requires_grad], lr=0.01)
        self.schedule = torch.optim.lr_scheduler.ConstantLR(self.optimizer)
        self.scaler = torch.amp.GradScaler("cpu")
        self.evaluated = 0
        self.swarm = Swarm.join(
            self.model, self.optimizer, attach=directory, evaluate=self.evaluate, wait_seconds=2, quiet=True
        )
        self.trained: dict[str, torch.Tensor] = {}  # the parameters when `step` was called last

    def evaluate(self) -> float:
        self.evaluated += 1
        if self.random.random() < 0.2:
            raise RuntimeError("a user's evaluation fails")
        return 1.0

    def backward(self) -> torch.Tensor:
        loss: torch.Tensor = self.model(torch.randn(5, 4))
        loss.backward()
        return loss.detach()

    def step(self, tokens: int | torch.Tensor = 5) -> StepResult:
        self.trained = {name: each.detach().clone() for name, each in self.model.named_parameters()}
        return self.swarm.step(tokens, loss=1.0)

    # -- acts ---------------------------------------------------------------------------------------------------------

    def usual(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=self.random.random() < 0.5)
        self.schedule.step()
        counts: list[int | torch.Tensor] = [5, torch.tensor(5)]
        self.step(self.random.choice(counts))

    def accumulated(self) -> None:
        for _ in range(3):
            self.backward()
        self.usual()

    def scaled(self) -> None:
        loss = self.model(torch.randn(5, 4))
        self.scaler.scale(loss).backward()
        if self.random.random() < 0.3:
            gradient = self.model.get_parameter("layers.0.weight").grad
            assert gradient is not None
            gradient.fill_(float("inf"))  # the scaler skips the step
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.step()

    def unstepped(self) -> None:
        self.step()

    def rebound(self) -> None:
        for each in self.model.parameters():
            each.data = each.data.clone()

    def evaluating(self) -> None:
        self.model.eval()
        self.model(torch.randn(2, 4))
        self.model.train()

    def frozen_later(self) -> None:
        self.model.layers[2].bias.requires_grad_(self.random.random() < 0.5)

    def silent(self) -> None:
        time.sleep(self.random.choice([0.05, 0.5]))

    def stray_thread(self) -> None:
        """Another thread that steps meanwhile is refused, or served; neither may hang."""
        other = threading.Thread(target=lambda: _suppressed(self.step))
        other.start()
        _suppressed(self.step)
        other.join(LONGEST_SECONDS)
        assert not other.is_alive()

    def forked(self) -> None:
        if not (child := os.fork()):
            refused = False
            try:
                self.swarm.step(1)
            except SwarmError:
                refused = True
            os._exit(0 if refused else 1)
        assert os.waitpid(child, 0)[1] == 0, "a forked process must not step"

    def other_dtype(self) -> None:
        self.model.layers[0].to(torch.float64)
        try:
            _suppressed(self.step)
        finally:
            self.model.layers[0].to(torch.float32)

    def replaced(self) -> None:
        old = self.model.layers[0].weight
        self.model.layers[0].weight = nn.Parameter(torch.zeros(6, 3))
        _suppressed(self.step)
        self.model.layers[0].weight = old

    def interrupted(self) -> None:
        """Ctrl-C somewhere in a step: when parameters are copied, or while it waits."""
        where = self.random.choice(["copy_out", "_copy_in", "checked"])
        usual, times = getattr(Parameters, where), [self.random.randint(0, 1)]

        def raises(parameters: Parameters, *arguments: object, **named: object) -> object:
            found = usual(parameters, *arguments, **named)
            if not times[0]:
                times[0] -= 1
                raise KeyboardInterrupt
            times[0] -= 1
            return found

        setattr(Parameters, where, raises)
        try:
            for _ in range(4):
                self.backward()
                self.optimizer.step()
                _suppressed(self.step)
        finally:
            setattr(Parameters, where, usual)

    def rounds_go_on(self, rounds: Rounds) -> None:
        """Two more rounds, in which what the script hands over is what it has, and what it gets is the anchor."""
        until, ended = time.monotonic() + LONGEST_SECONDS, 0
        while ended < 2:
            assert time.monotonic() < until, "no round ends any more"
            self.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            result = self.step(7)
            if result.ended:
                ended += 1
                self.check(rounds, result)
            time.sleep(0.001)

    def check(self, rounds: Rounds, result: StepResult) -> None:
        anchor = rounds.anchors[result.round]
        work, handed = rounds.contributions[result.round - 1] if result.round else (NOTHING, anchor)
        assert self.swarm._worker
        if self.swarm._worker.training.work().carried:  # it attached again, and goes on from what it had handed over
            return
        low = 0
        for name, (shape, dtype) in self.swarm._worker.parameters._expected.items():
            high = low + math.prod(shape)
            now, outer, mine = self.model.get_parameter(name).detach(), anchor[low:high], handed[low:high]
            assert torch.equal(now.flatten(), outer.to(dtype)), f"{name} is not that of the anchor"
            if work.tokens and result.waited_seconds and dtype == torch.float32:
                assert torch.equal(self.trained[name].flatten(), mine), f"{name} is not what was trained"
            low = high


def _suppressed(act: Callable[[], object]) -> None:
    with contextlib.suppress(SwarmError, KeyboardInterrupt):
        act()


ACTS = (
    *("usual", "usual", "usual", "accumulated", "scaled", "unstepped", "rebound", "evaluating", "frozen_later"),
    *("silent", "stray_thread", "forked", "other_dtype", "replaced", "interrupted"),
)


def play(directory: Path, seed: int) -> Iterator[str]:
    with Rounds(directory, round_seconds=1.0) as rounds:
        loop = Loop(directory, seed)
        try:
            for _ in range(STEPS):
                act = loop.random.choice(ACTS)
                yield act
                getattr(loop, act)()
            loop.rounds_go_on(rounds)
        finally:
            loop.swarm.leave()


@pytest.mark.parametrize("seed", [0, 1, *long(*range(2, 40))])
@pytest.mark.timeout(120)
def test_acts_of_a_user_neither_hang_nor_spoil(tmp_path: Path, seed: int) -> None:
    acts: list[str] = []
    try:
        acts.extend(play(tmp_path, seed))
    except BaseException as error:
        error.add_note(f"seed {seed}: {acts}")
        raise
