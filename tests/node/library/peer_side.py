"""The peer's side of a script's connection, in a thread: rounds without a network, whose mean is known."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
import uvloop

from node.tasks.recipe import Recipe
from node.tasks.spec import LoopValues, WorkerSpec
from node.training.process import WorkerError
from node.training.script import ScriptEntrance, ScriptTrainer
from protocols.base import LocalProgress, RoundKey, Vector
from tests.sim.host import SimCompute


class Rounds:
    """Rounds of `inner_steps`, each of which adds 1 to the anchor. A context manager; `directory` is for `attach`."""

    def __init__(self, directory: Path, inner_steps: int = 3, round_seconds: float = 2.0) -> None:
        self.directory, self._round_seconds = directory, round_seconds
        recipe = Recipe(inner_steps, 1000, learning_rate=1.0, outer_learning_rate=1.0, outer_momentum=0.0)
        self._spec = WorkerSpec(LoopValues(), recipe, stream_seed=0)
        self.anchors: list[Vector] = []  # that of each round
        self.contributions: list[tuple[LocalProgress, Vector]] = []  # of each round: work, and the parameters read
        self.reports: list[LocalProgress] = []
        self.evaluations: list[float] = []
        self.failure: BaseException | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)
        assert not self._thread.is_alive(), "the peer's side hangs"
        if self.failure and error is None:
            raise self.failure

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._main())
        except BaseException as error:  # noqa: BLE001 - the test raises it
            self.failure = error

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with ScriptEntrance(self.directory, lambda why: None) as entrance:
            self._ready.set()
            trainer = ScriptTrainer(self._spec, SimCompute(), entrance)
            waiting = asyncio.create_task(trainer.__aenter__())
            stop = asyncio.create_task(self._stop.wait())
            await asyncio.wait([waiting, stop], return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                waiting.cancel()
                return
            await waiting
            try:
                while not self._stop.is_set():
                    await self._round(trainer)
            finally:
                await trainer.__aexit__(None, None, None)

    async def _round(self, trainer: ScriptTrainer) -> None:
        number, cut = len(self.anchors), asyncio.Event()
        self.anchors.append(trainer.anchor().clone())

        def on_progress(work: LocalProgress) -> None:
            self.reports.append(work)
            if work.complete:
                cut.set()

        timer = asyncio.get_running_loop().call_later(self._round_seconds, cut.set)
        stop = asyncio.create_task(self._cut_at_stop(cut))
        work = await trainer.train(RoundKey(bytes(32), "run", bytes(32), number), cut, on_progress)
        timer.cancel()
        stop.cancel()
        local = torch.empty_like(trainer.anchor())
        await trainer.read(local)
        self.contributions.append((work, local))
        assert torch.equal(trainer.anchor(), self.anchors[number]), "only the peer changes the anchor"
        trainer.anchor().add_(1)
        await trainer.write(trainer.anchor())
        if trainer.evaluates:
            with suppress(WorkerError):  # the script's own function fails, or the script is silent
                self.evaluations.append(await trainer.evaluate())

    async def _cut_at_stop(self, cut: asyncio.Event) -> None:
        await self._stop.wait()
        cut.set()
