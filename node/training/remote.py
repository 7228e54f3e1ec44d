"""The peer's side of its worker: a `Trainer` whose steps are taken in another process, which may die at any moment.

Parameters and anchor stand in memory that this side owns (`node.training.shared`), so a round sends none through the
pipe, and a dead worker takes nothing along but its optimiser's moments and, if it died in the middle of a command, the
work since the anchor. Another is started in its place. Nobody is told: a caller sees work that grows from nothing
again.

The worker does one thing at a time: training is a sequence of legs, and whoever wants the vectors between two steps
ends a leg (`Shared.attention`) and takes the next turn. A worker that takes no step for much longer than its longest
one is killed, so that no turn lasts for ever.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import math
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from node.tasks.spec import WorkerSpec
from node.training import shared
from node.training.process import Hear, WorkerError, WorkerGone, WorkerProcess
from node.training.shared import Shared
from node.training.worker_supervisor import MENDING_SECONDS, WorkerSupervisor
from protocols.aio import Notifier, run_with_helper
from protocols.base import Compute, Layout, LocalProgress, RoundKey, Vector

log = logging.getLogger(__name__)

ATTEMPTS = 3
_PROMPT_BYTES = 64 << 10
DISK_SECONDS, DISK_BYTES_PER_SECOND = 60.0, 1e6
"""A file of the optimiser's state takes so long at most, and what the slowest of disks takes beyond that."""
_NOTHING = LocalProgress(0, math.nan, 0.0, 0.0)

__all__ = ["RemoteTrainer", "WorkerError", "WorkerSpec"]


class RemoteTrainer:
    """A `protocols.base.Trainer` over a worker process. Use as an async context manager, from the main thread.

    A worker that dies or hangs is replaced, at the anchor if it was busy, else where it stood. All methods raise
    `WorkerError` once that has failed for good; but with `on_given_up`, `train` trains nothing until it is cut.

    Attributes:
        layout: of the parameters.
        restarts: how often a worker was replaced.
    """

    layout: Layout

    def __init__(self, spec: WorkerSpec, compute: Compute, on_given_up: Callable[[str], None] | None = None) -> None:
        """
        Args:
            on_given_up: called with one line when there will be no other worker; it has to end this trainer soon.
        """
        self._on_given_up = on_given_up
        self.restarts = 0
        self._spec, self._compute = spec, compute
        self._life: WorkerProcess | None = None
        self._torn: WorkerProcess | None = None  # its command was not answered: the local parameters are anything
        self._carried, self._untold = 0, False  # tokens in the local parameters; whether the worker has to hear of it
        self._turn, self._waiting = asyncio.Lock(), 0
        self._notifier = Notifier()

    async def __aenter__(self) -> Self:
        """
        Raises:
            WorkerError: data, device or memory are not to be had, or the worker does not start; one line.
        """
        self._descriptor = shared.create()
        self._succession = WorkerSupervisor(self._spec, self._descriptor)
        try:
            life = self._life = await WorkerProcess.start(self._spec, self._descriptor)
            self.layout = life.layout
            self._shared = Shared(self._descriptor, life.layout.sizes())
        except BaseException as error:
            os.close(self._descriptor)
            if isinstance(error, OSError):
                raise WorkerError(f"the worker cannot be started: {error.strerror}") from error
            if isinstance(error, WorkerError) and error.is_killed:
                raise WorkerError(self._succession.explained(str(error), True)) from error
            raise
        self._minding = asyncio.create_task(self._mind(life), name="worker")
        self._minding.add_done_callback(lambda _: self._notifier.notify())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._minding.cancel()
        await asyncio.gather(self._minding, return_exceptions=True)
        del self._shared  # unmapped, whatever still refers to us
        os.close(self._descriptor)

    @property
    def pid(self) -> int | None:
        """The worker's process id; None while there is none."""
        return self._life.child.pid if self._life else None

    # -- the contract -------------------------------------------------------------------------------------------------

    async def train(
        self, key: RoundKey, cut: asyncio.Event, progress: Callable[[LocalProgress], None], surplus: bool = True
    ) -> LocalProgress:
        """Train until `cut` is set; see `protocols.base.Trainer`.

        Where a worker died, `progress` is told nothing again. Cut while there is none, it does not wait for the next.
        """
        return await run_with_helper(self._train(key, cut, progress, surplus), self._watch(cut))

    async def read(self, into: Vector, fragment: int = 0) -> None:
        """Copy the local parameters out, between two steps."""
        async with self._boundary():
            await self._compute.run(lambda: into.copy_(self._shared.local[fragment]), 4 * len(into))

    async def write(self, source: Vector, fragment: int = 0, anchor: Vector | None = None, tokens: int = 0) -> None:
        """Replace the local parameters and their anchor, between two steps; see `protocols.base.Trainer`."""

        def copy() -> None:
            shared, measured = self._shared.anchor[fragment], source if anchor is None else anchor
            if measured.data_ptr() != shared.data_ptr():
                shared.copy_(measured)
            self._shared.local[fragment].copy_(source)

        async with self._boundary():
            self._carried, self._untold = tokens, True
            await self._compute.run(copy, 8 * len(source))

    def anchor(self, fragment: int = 0) -> Vector:
        """The anchor itself, float32: for its owner, who may change it between two rounds and writes it then.

        It is not copied by that `write`: parameters that stand here anyway need no vector of their own.
        """
        return self._shared.anchor[fragment]

    async def evaluate(self) -> float:
        """Held-out loss of the outer parameters, between two steps."""
        return float(await self._order({"do": "evaluate"}))

    @property
    def position(self) -> int:
        """Batches that workers have drawn from this peer's stream of data."""
        return self._shared.position

    @property
    def carried(self) -> int:
        """Tokens of work in the local parameters that no round has counted."""
        return self._carried

    @property
    def threads(self) -> int:
        """Threads that the worker computes with."""
        return self._shared.threads

    async def save(self, path: Path) -> bool:
        """Have the worker write its optimiser's state to a file, between two steps; False if there is no worker now.

        Raises:
            WorkerError: it cannot be written, or the worker did not live to the end of that.
        """
        if self._life is None:
            return False
        try:
            async with self._boundary():
                await self._ask({"do": "save", "path": str(path)}, self._disk_seconds())
        except WorkerGone:
            raise WorkerError("the worker was gone before the inner state was written") from None
        return True

    async def load(self, path: Path | None, position: int, threads: int = 0) -> None:
        """Have the worker take up an optimiser's state that `save` wrote, None for none, and go on at a position.

        Args:
            threads: to begin with, where they are measured; 0: as if it were new.

        Raises:
            WorkerError: it cannot be read, or is of another model.
        """
        command = {"do": "load", "path": str(path) if path else None, "position": position, "threads": threads}
        await self._order(command, self._disk_seconds())

    def _disk_seconds(self) -> float:
        moments_bytes = 8 * sum(self.layout.sizes())  # two float32 of AdamW for each parameter
        return DISK_SECONDS + moments_bytes / DISK_BYTES_PER_SECOND

    async def held_out(self) -> bytes:
        """The evaluation sample, at most 256 KiB; empty where the task has none."""
        return base64.b64decode(await self._order({"do": "held_out"}))

    async def generate(self, prompt: bytes, tokens: int, temperature: float = 0.0, seed: int = 0) -> bytes:
        """Continue `prompt` by `tokens` bytes, with the outer parameters; the likeliest at temperature 0.

        Of a long prompt the last 64 KiB are seen.

        Raises:
            WorkerError: the task generates no text, or the prompt is empty.
        """
        command: dict[str, Any] = {"do": "generate", "tokens": tokens, "temperature": temperature, "seed": seed}
        # A token is one row through the model, a step is several, there and back.
        extra_seconds = tokens * (self._shared.longest_step_seconds or 1.0)
        command["prompt"] = base64.b64encode(prompt[-_PROMPT_BYTES:]).decode()
        return base64.b64decode(await self._order(command, extra_seconds))

    # -- turns --------------------------------------------------------------------------------------------------------

    async def _train(
        self, key: RoundKey, cut: asyncio.Event, progress: Callable[[LocalProgress], None], surplus: bool
    ) -> LocalProgress:
        begun: WorkerProcess | None = None
        while True:
            if self._life is None:
                progress(_NOTHING)
            if not await self._alive(cut):
                return _NOTHING
            with suppress(WorkerGone):
                async with self._boundary():
                    self._shared.attention = cut.is_set() or self._waiting > 0
                    begin = self._life is not begun
                    command = {"do": "train", "round": key.round, "begin": begin, "surplus": surplus}
                    begun = self._life
                    work = LocalProgress(
                        **await self._ask(command, hear=lambda values: progress(LocalProgress(**values)))
                    )
                    self._carried = work.tokens
                if work.complete and not surplus:
                    await self._rest(begun, cut)
                if cut.is_set():
                    return work

    async def _rest(self, life: WorkerProcess | None, cut: asyncio.Event) -> None:
        """Wait for the cut, which comes at the round's deadline at the latest, or for another worker."""
        await self._notifier.until(lambda: cut.is_set() or self._life is not life, math.inf)

    async def _watch(self, cut: asyncio.Event) -> None:
        await cut.wait()
        self._shared.attention = True
        self._notifier.notify()

    async def _order(self, command: dict[str, Any], extra_seconds: float = 0.0) -> Any:
        for _ in range(ATTEMPTS):
            await self._alive()
            with suppress(WorkerGone):
                async with self._boundary():
                    return await self._ask(command, extra_seconds)
        raise WorkerError(f"the worker died {ATTEMPTS} times when it was to {command['do']}")

    async def _ask(self, command: dict[str, Any], extra_seconds: float = 0.0, hear: Hear = lambda _: None) -> Any:
        """Have the worker do something; only inside a boundary."""
        life = self._life
        if life is None:
            raise WorkerGone
        if self._untold:
            command = command | {"carried": self._carried}
        self._torn = life
        try:
            answer = await life.ask(command, self._shared, extra_seconds, hear)
        except WorkerError:  # refused: it changed nothing
            self._torn, self._untold = None, False
            raise
        except BaseException:  # dead, or our caller was cancelled, and nobody will read the answer
            life.child.send_kill()
            if self._life is life:
                self._life = None
            raise
        self._torn, self._untold = None, False
        return answer

    @asynccontextmanager
    async def _boundary(self) -> AsyncIterator[None]:
        """One's turn between two steps. Whoever has it is done within a worker's patience, or a copy."""
        self._waiting += 1
        self._shared.attention = True
        try:
            await self._turn.acquire()
        finally:
            self._waiting -= 1
        try:
            if self._torn:
                await self._heal(self._torn)
            yield
        finally:
            self._turn.release()

    async def _heal(self, torn: WorkerProcess) -> None:
        """Put the local parameters back at the anchor, once nobody can write them any more."""
        await torn.child.kill()
        for local, anchor in zip(self._shared.local, self._shared.anchor, strict=True):
            await self._compute.run(partial(local.copy_, anchor), 4 * len(anchor))
        self._torn, self._carried, self._untold = None, 0, True

    # -- lives --------------------------------------------------------------------------------------------------------

    async def _alive(self, cut: asyncio.Event | None = None) -> bool:
        """Wait for a worker, until `cut` at the longest; returns whether there is one.

        Raises:
            WorkerError: there will be none.
        """

        def settled() -> bool:
            return self._life is not None or self._minding.done() or (cut is not None and cut.is_set())

        await self._notifier.until(settled, asyncio.get_running_loop().time() + MENDING_SECONDS)
        if self._minding.cancelled():
            raise WorkerError("the worker was sent home")
        if self._minding.done():
            if cut is None or self._on_given_up is None:
                self._minding.result()
            else:  # the last rounds of a peer that leaves: others need it in them
                await cut.wait()
        return self._life is not None

    async def _mind(self, life: WorkerProcess) -> None:
        """Replace the worker whenever it has died.

        Raises:
            WorkerError: it dies again and again.
        """
        try:
            while True:
                how = await life.child.ended()
                if self._life is life:
                    self._life = None
                await life.end()
                try:
                    life = await self._succession.restart(life, how)
                except WorkerError as error:
                    if self._on_given_up:
                        self._on_given_up(str(error))
                    raise
                self.restarts += 1
                self._life, self._untold = life, True
                self._notifier.notify()
        finally:
            self._life = None
            await life.end()
