"""A `protocols.base.Trainer` in the event loop itself, for the simulator and tests. A node uses a worker process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import torch

from node.tasks.base import Step
from node.training.trainer import Learner, LocalTraining, RestGate
from protocols.base import ALL, Layout, LocalProgress, RoundKey, Vector


class InlineTrainer:
    """A `Trainer` over a `LocalTraining`.

    A step first sleeps for `step_seconds`, which lets time pass in the simulator, and then completes at once. Seconds
    are those of the running loop.
    """

    def __init__(self, learner: Learner, inner_steps: int, step_seconds: float = 0.0, fragments: int = 1) -> None:
        self.layout = learner.layout
        self.local_training = LocalTraining(learner, inner_steps, fragments=fragments)
        self.step_seconds = step_seconds
        self.resets = 0
        self._gate = RestGate()

    def rest(self, resting: bool) -> None:
        self._gate.rest(resting)

    async def release(self) -> None:
        """Without effect: there is no worker."""

    async def train(
        self, key: RoundKey, cut: asyncio.Event, progress: Callable[[LocalProgress], None], surplus: bool = True
    ) -> LocalProgress:
        """Train until `cut` is set; see `protocols.base.Trainer`. If it is set already, take no step."""
        loop = asyncio.get_running_loop()
        local_training = self.local_training
        local_training.begin(key.round, key.fragment)
        progress(local_training.work())
        mark = loop.time()
        while not cut.is_set():
            if self._gate.resting:
                progress(replace(local_training.work(), resting=True))
                await self._gate.opened(cut)
                mark = loop.time()
                continue
            if local_training.complete and not surplus:
                await cut.wait()
                break
            await asyncio.sleep(self.step_seconds)
            local_training.step()
            now = loop.time()
            local_training.spend(now - mark)
            mark = now
            if local_training.due():
                progress(local_training.work())
        return local_training.work()

    async def read(self, into: Vector, part: slice = ALL) -> None:
        self.local_training.read(into, part)

    async def write(self, source: Vector, anchor: Vector | None = None, tokens: int = 0, part: slice = ALL) -> None:
        self.local_training.write(source, anchor, tokens, part)

    evaluates = True

    async def evaluate(self) -> float:
        return self.local_training.evaluate()


ELEMENTS, STEP, TOKENS = 10, 0.125, 100


class PlainLearner:
    """What is the same in any `Learner` without data and without an optimiser's moments."""

    position = 0

    def moments(self, make: bool = False) -> dict[str, torch.Tensor]:
        return {}

    def evaluate(self) -> float:
        return 0.0


class LinearLearner(PlainLearner):
    """A `Learner` whose every step subtracts an eighth from each element, so that sums are exact."""

    def __init__(self) -> None:
        self.layout = Layout(((("slope", (ELEMENTS,)),),))
        self.vector: Vector = torch.ones(ELEMENTS)
        self.step_size: float | Vector = STEP

    def step(self, round_number: int, step: int) -> Step:
        self.vector.sub_(self.step_size)
        return Step(2.5, TOKENS)
