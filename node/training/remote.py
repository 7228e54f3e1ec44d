"""A `Trainer` that takes its steps in a worker process, which may die at any moment.

Parameters and anchor are in memory that the peer owns (`node.training.shared`). A worker that dies loses its
optimiser's moments and, in the middle of a command, the training since the anchor. The trainer starts another one and
does not tell its caller, which sees progress that starts again from zero.

The worker does one thing at a time: a caller that wants the vectors between two steps ends the present `train` command
(`Shared.attention`) and takes the next turn. A worker that hangs is killed, so no turn lasts for ever.

A trainer that rests gives no command, and no clock runs for it. One that is released has no worker until the next
command; its optimiser's moments are lost.
"""

from __future__ import annotations

import asyncio
import base64
import math
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from node.tasks.hf.settings import HfValues, ModelPins
from node.tasks.spec import WorkerSpec
from node.training import shared
from node.training.process import OnProgress, WorkerError, WorkerGone, WorkerProcess
from node.training.shared import Shared
from node.training.worker_supervisor import Supervisor, WorkerSupervisor, mending_seconds
from protocols.aio import Notifier, run_with_helper
from protocols.base import ALL, Compute, Layout, LocalProgress, RoundKey, Vector

ATTEMPTS = 3
_PROMPT_BYTES = 64 << 10
NOTHING = LocalProgress(0, math.nan, 0.0, 0.0)

__all__ = ["RemoteTrainer", "WorkerError", "WorkerSpec"]


def _absolute(path: Path) -> str:
    """For the worker, whose user's code may have changed the current directory."""
    return str(path.absolute())


SAMPLE_PROMPT = b"def "


class RemoteTrainer:
    """A `protocols.base.Trainer` over a worker process. Use as an async context manager, from the main thread.

    The next worker starts from the anchor if the one before was busy, and else from the local parameters. If no worker
    can be started any more, all methods raise `WorkerError`; with `on_given_up` (called with a one-line reason),
    `train` waits for its cut without training, and its owner should close this trainer soon.
    """

    layout: Layout
    _shared: Shared

    def __init__(self, spec: WorkerSpec, compute: Compute, on_given_up: Callable[[str], None] | None = None) -> None:
        self._on_given_up = on_given_up
        self.restarts = self.resets = 0
        self.last_failure = ""  # why the last worker that died or hung did so, in one line
        self._spec, self._compute = spec, compute
        self._worker: WorkerProcess | None = None
        # A worker that did not answer its command: the local parameters may be inconsistent.
        self._unanswered: WorkerProcess | None = None
        # Tokens of uncounted work in the local parameters, and whether the worker must still be notified of them.
        self._carried, self._notify_carried = 0, False
        self._turn, self._waiting = asyncio.Lock(), 0
        self._resting = self._released = False
        self._ended: WorkerProcess | None = None  # the worker that `release` ended last
        self._without_worker = NOTHING
        self.device = ""  # on which the worker trains, in words
        self._notifier = Notifier()

    async def __aenter__(self) -> Self:
        """Raises `WorkerError` if data, device or memory are not available, or the worker does not start."""
        self._descriptor = shared.create()
        self._supervisor = self._supervisor_of(self._descriptor)
        try:
            worker = self._worker = await self._supervisor.start()
            self.layout, self.device = worker.layout, worker.device
            self._shared = self._memory(worker)
        except BaseException as error:
            os.close(self._descriptor)
            if isinstance(error, OSError):
                raise WorkerError(f"the worker cannot be started: {error.strerror}") from error
            if isinstance(error, WorkerError) and error.is_killed:
                raise WorkerError(self._supervisor.explained(str(error), True)) from error
            raise
        self._supervision = asyncio.create_task(self._supervise(worker), name="worker")
        self._supervision.add_done_callback(lambda _: self._notifier.notify())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._supervision.cancel()
        await asyncio.gather(self._supervision, return_exceptions=True)
        del self._shared  # unmap it, even if this object is still referenced
        os.close(self._descriptor)

    def _supervisor_of(self, descriptor: int) -> Supervisor:
        return WorkerSupervisor(self._spec, descriptor)

    def _memory(self, worker: WorkerProcess) -> Shared:
        return Shared(self._descriptor, sum(worker.layout.sizes()))

    def _mending_seconds(self) -> float:
        return mending_seconds(self._spec)

    @property
    def evaluates(self) -> bool:
        """Whether `evaluate` can be expected to work now."""
        return True

    @property
    def resting_reason(self) -> str:
        """Why it takes no steps, if it marks its work as resting and nobody has asked for that."""
        return ""

    @property
    def sample_prompt(self) -> bytes:
        """What a text begins with; empty for a task that takes a prompt from its held-out texts."""
        return b"" if isinstance(self._spec.values, HfValues) else SAMPLE_PROMPT

    @property
    def pid(self) -> int | None:
        return self._worker.child.pid if self._worker else None

    # -- the contract -------------------------------------------------------------------------------------------------

    async def train(
        self, key: RoundKey, cut: asyncio.Event, progress: Callable[[LocalProgress], None], surplus: bool = True
    ) -> LocalProgress:
        """After the death of a worker, `progress` starts again from zero. A cut ends it even without a worker."""
        return await run_with_helper(self._train(key, cut, progress, surplus), self._watch(cut))

    def rest(self, resting: bool) -> None:
        self._resting = resting
        if resting:
            self._shared.attention = True
        self._notifier.notify()

    async def release(self) -> None:
        """The next command that needs a worker starts another, which is no restart."""
        async with self._boundary():
            if worker := self._worker:
                self._released, self._ended = True, worker
                worker.child.send_kill()
                self._lose(worker)

    async def read(self, into: Vector, part: slice = ALL) -> None:
        async with self._boundary():
            await self._compute.run(lambda: into.copy_(self._shared.local[part]), 4 * len(into))

    async def write(self, source: Vector, anchor: Vector | None = None, tokens: int = 0, part: slice = ALL) -> None:
        def copy() -> None:
            shared, measured = self._shared.anchor[part], source if anchor is None else anchor
            if measured.data_ptr() != shared.data_ptr():
                shared.copy_(measured)
            self._shared.local[part].copy_(source)

        async with self._boundary():
            self._carried, self._notify_carried = tokens, True
            await self._compute.run(copy, 8 * len(source))

    def anchor(self) -> Vector:
        """The anchor itself. Its owner may change it after a cut, and then calls `write`, which copies nothing."""
        return self._shared.anchor

    async def evaluate(self) -> float:
        return float(await self._order({"do": "evaluate"}))

    @property
    def position(self) -> int:
        return self._shared.position

    @property
    def carried(self) -> int:
        return self._carried

    @property
    def threads(self) -> int:
        return self._shared.threads

    async def save(self, path: Path) -> bool:
        """Write the optimiser's state, between two steps; False if there is no worker now. Raises `WorkerError`."""
        if self._worker is None:
            return False
        try:
            async with self._boundary():
                await self._ask({"do": "save", "path": _absolute(path)})
        except WorkerGone:
            raise WorkerError("the worker died before it had written the inner state") from None
        return True

    async def load(self, path: Path | None, position: int, threads: int = 0) -> None:
        """Load what `save` wrote (None: no state), and continue at a position of the data. Raises `WorkerError`.

        With `threads`, a worker that chooses their number itself starts with so many.
        """
        command = {"do": "load", "path": _absolute(path) if path else None, "position": position, "threads": threads}
        await self._order(command)

    async def held_out(self) -> bytes:
        """The evaluation sample, at most 256 KiB; empty where the task has none."""
        return base64.b64decode(await self._order({"do": "held_out"}))

    async def pins(self) -> ModelPins:
        return ModelPins.from_fields(await self._order({"do": "pins"}))

    async def generate(self, prompt: bytes, tokens: int, temperature: float = 0.0, seed: int = 0) -> bytes:
        """Continue the last 64 KiB of `prompt` with the outer parameters; at temperature 0 by the likeliest bytes.

        Raises `WorkerError` if the task generates no text, or the prompt is empty.
        """
        command: dict[str, Any] = {"do": "generate", "tokens": tokens, "temperature": temperature, "seed": seed}
        command["prompt"] = base64.b64encode(prompt[-_PROMPT_BYTES:]).decode()
        return base64.b64decode(await self._order(command))

    # -- turns --------------------------------------------------------------------------------------------------------

    async def _train(
        self, key: RoundKey, cut: asyncio.Event, progress: Callable[[LocalProgress], None], surplus: bool
    ) -> LocalProgress:
        begun: WorkerProcess | None = None
        while True:
            if self._worker is None:
                progress(self._without_worker)
            if not await self._alive(cut):
                return replace(self._without_worker, resting=False)
            with suppress(WorkerGone):
                async with self._boundary():
                    self._shared.attention = cut.is_set() or self._waiting > 0 or self._resting
                    begin = self._worker is not begun
                    command = {"do": "train", "round": key.round, "begin": begin, "surplus": surplus}
                    command["fragment"] = key.fragment
                    begun = self._worker
                    work = LocalProgress(
                        **await self._ask(command, on_progress=lambda values: progress(LocalProgress(**values)))
                    )
                    self._carried = work.tokens
                if rests := self._resting and not cut.is_set():
                    progress(replace(work, resting=True))
                if rests or (work.complete and not surplus):
                    await self._wait(begun, cut, rests)
                if cut.is_set():
                    return work

    async def _wait(self, worker: WorkerProcess | None, cut: asyncio.Event, rests: bool) -> None:
        """Until the cut, which comes at the round's deadline at the latest, another worker or, if it rests, work."""
        await self._notifier.until(
            lambda: cut.is_set() or self._worker is not worker or (rests and not self._resting), math.inf
        )

    async def _watch(self, cut: asyncio.Event) -> None:
        await cut.wait()
        self._shared.attention = True
        self._notifier.notify()

    async def _order(self, command: dict[str, Any]) -> Any:
        for _ in range(ATTEMPTS):
            await self._alive()
            try:
                async with self._boundary():
                    return await self._ask(command)
            except WorkerGone as gone:
                if gone.hangs:  # and would again: that takes minutes
                    raise WorkerError(gone.hangs) from None
        why = f", at last: {self.last_failure}" if self.last_failure else ""
        raise WorkerError(f"the worker died {ATTEMPTS} times during the command {command['do']!r}{why}")

    async def _ask(self, command: dict[str, Any], on_progress: OnProgress = lambda _: None) -> Any:
        """Call it only inside a boundary."""
        worker = self._worker
        if worker is None:
            raise WorkerGone
        if self._notify_carried:
            command = command | {"carried": self._carried}
        self._unanswered = worker
        try:
            answer = await worker.ask(command, self._shared, on_progress)
        except WorkerError:  # rejected: it changed nothing
            self._unanswered, self._notify_carried = None, False
            raise
        except BaseException:  # the worker died, or the caller was cancelled and does not read the answer
            worker.child.send_kill()
            self._lose(worker)
            raise
        self._unanswered, self._notify_carried = None, False
        return answer

    def _lose(self, worker: WorkerProcess) -> None:
        """The worker is dead, or will be: what it holds beside the shared vectors is lost."""
        if self._worker is worker:
            self._worker = None

    async def _gain(self, worker: WorkerProcess) -> None:
        self._worker, self._notify_carried, self.device = worker, True, worker.device
        self._notifier.notify()

    @asynccontextmanager
    async def _boundary(self) -> AsyncIterator[None]:
        """Hold the turn between two steps. A turn lasts at most as long as one command's time limit, or one copy."""
        self._waiting += 1
        self._shared.attention = True
        try:
            await self._turn.acquire()
        finally:
            self._waiting -= 1
        try:
            if self._unanswered:
                await self._reset_local(self._unanswered)
            yield
        finally:
            self._turn.release()

    async def _reset_local(self, worker: WorkerProcess) -> None:
        """Kill the worker, so that it cannot write any more, and reset the local parameters to the anchor."""
        await worker.child.kill()
        local, anchor = self._shared.local, self._shared.anchor
        await self._compute.run(lambda: local.copy_(anchor), 4 * len(anchor))
        self._unanswered, self._carried, self._notify_carried = None, 0, True
        self.resets += 1

    # -- worker processes ---------------------------------------------------------------------------------------------

    async def _alive(self, cut: asyncio.Event | None = None) -> bool:
        """Wait for a worker, at most until `cut`; whether there is one. Raises `WorkerError` if there will be none."""

        def settled() -> bool:
            return self._worker is not None or self._supervision.done() or (cut is not None and cut.is_set())

        if self._released:
            self._released = False
            self._notifier.notify()
        await self._notifier.until(settled, asyncio.get_running_loop().time() + self._mending_seconds())
        if self._supervision.cancelled():
            raise WorkerError("the trainer is closed, so there is no worker")
        if self._supervision.done():
            if cut is None or self._on_given_up is None:
                self._supervision.result()
            else:  # this peer is leaving, but the other peers still need it in its last rounds
                await cut.wait()
        return self._worker is not None

    async def _supervise(self, worker: WorkerProcess) -> None:
        """Replace the worker each time it has died, until workers die again and again (`WorkerError`)."""
        try:
            while True:
                how = await worker.child.ended()
                self._lose(worker)
                await worker.end()
                released = worker is self._ended  # even if the next command has come before its end
                if not released:
                    self.last_failure = worker.failure or how
                await self._notifier.until(lambda: not self._released, math.inf)
                try:
                    begin = self._supervisor.resume if released else self._supervisor.restart
                    worker = await begin(worker, how)
                except WorkerError as error:
                    if self._on_given_up:
                        self._on_given_up(str(error))
                    raise
                self.restarts += not released
                await self._gain(worker)
        finally:
            self._worker = None
            await worker.end()
