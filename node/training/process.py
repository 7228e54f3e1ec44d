"""The peer's side of one worker process: commands, answers and timeouts."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from node.runtime.child_process import ChildProcess
from node.runtime.notes import relay
from node.tasks.spec import WorkerSpec
from node.training.priority import ready_seconds
from node.training.shared import Shared
from node.training.worker import MAX_LINE_BYTES
from protocols.base import Layout

log = logging.getLogger(__name__)

START_SECONDS = 120.0
"""Long enough to read the data from a slow disk."""
FIRST_STEP_SECONDS = 60.0
OOM_SCORE = 1000
"""When memory runs out, the kernel kills the worker first, because the peer can replace it. Set from its start on,
however much memory it uses."""
PATIENCE_SECONDS = 5.0
PATIENCE_STEPS = 20
STARVED, STARVED_TIMES = 0.25, 20
"""A worker that was ready to run for more than this share of the time, but had no core, does not hang. Its time limit
is extended up to `STARVED_TIMES` times."""

SPIN = {"GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "1"}
"""How long a waiting thread keeps its core before it sleeps: in turns for libgomp, in milliseconds for LLVM's and
Intel's libomp. Their defaults are 30 and 200 times as long. With those, as soon as another program takes a core, each
operation waits for a thread that cannot run. Fewer turns slow down an idle machine: see RESULTS.md."""
_WAITING = (*SPIN, "OMP_WAIT_POLICY", "KMP_LIBRARY")

OnProgress = Callable[[dict[str, Any]], None]


class WorkerError(Exception):
    """The worker cannot be started, rejects a command, or dies each time. The message is one line.

    Attributes:
        is_killed: the worker was killed (SIGKILL) during its start.
    """

    def __init__(self, why: str, is_killed: bool = False) -> None:
        super().__init__(why)
        self.is_killed = is_killed


class WorkerGone(Exception):
    """This worker has died, or hangs and was killed."""


class WorkerProcess:
    """One worker process, from its start to its end.

    Attributes:
        useful: the worker has carried out a command or taken a step.
    """

    def __init__(self, child: ChildProcess, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.child = child
        self.useful = False
        self.layout = Layout(())
        self._patience = 1
        self._reader, self._writer = reader, writer

    @classmethod
    async def start(cls, spec: WorkerSpec, memory: int) -> WorkerProcess:
        """Start a worker and wait until it is ready.

        Args:
            memory: file descriptor of the shared vectors (`node.training.shared`).

        Raises:
            WorkerError: the worker rejected the spec, or did not start.
            OSError: the process cannot be created.
        """
        ours, theirs = socket.socketpair()
        # `-P` and the path: never import from the current directory.
        command = [
            sys.executable,
            "-P",
            "-m",
            "node.training.stage_worker" if spec.stage else "node.training.worker",
            *map(str, (os.getpid(), memory, theirs.fileno())),
        ]
        path = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
        with theirs:
            reader, writer = await asyncio.open_unix_connection(sock=ours, limit=MAX_LINE_BYTES)
            try:
                slots = (spec.stage.slots,) if spec.stage else ()
                descriptors = (memory, theirs.fileno(), *slots)
                environment = {"PYTHONPATH": path, **bounded_spin(os.environ)}
                child = await ChildProcess.start("worker", command, _log_line, environment, descriptors, OOM_SCORE)
            except BaseException:
                writer.close()
                raise
        worker = cls(child, reader, writer)
        try:
            await worker._introduce(spec)
        except BaseException:
            await worker.end()
            raise
        return worker

    async def _introduce(self, spec: WorkerSpec) -> None:
        self._patience, start_seconds = spec.patience, START_SECONDS * spec.patience
        self._writer.write(spec.to_json().encode() + b"\n")
        try:
            async with asyncio.timeout(start_seconds):
                fragments = (await self._next())["done"]
        except TimeoutError:
            raise WorkerError(
                f"the worker did not start within {start_seconds:g} s: {self.child.output_tail}"
            ) from None
        except WorkerGone:
            self.child.send_kill()  # in case it closed its socket and still runs
            how = await self.child.ended()
            raise WorkerError(f"the worker did not start: {how}", self.child.is_killed) from None
        self.layout = Layout(tuple(tuple((name, tuple(shape)) for name, shape in each) for each in fragments))

    async def ask(self, command: dict[str, Any], memory: Shared, extra_seconds: float, on_progress: OnProgress) -> Any:
        """Send a command and return its answer. Progress messages before it go to `on_progress`.

        Args:
            extra_seconds: added to the time that the worker may take without finishing a step.

        Raises:
            WorkerError: the worker rejected the command.
            WorkerGone: the worker died, or finished no step for too long.
        """
        self._writer.write(json.dumps(command).encode() + b"\n")
        starved = 0
        while True:
            heartbeats, ready = memory.heartbeats, ready_seconds(self.child.pid)
            patience_seconds = _patience_seconds(memory, self._patience) + extra_seconds
            try:
                async with asyncio.timeout(patience_seconds):
                    answer = await self._next()
            except TimeoutError:
                if memory.heartbeats != heartbeats:
                    starved = 0
                    continue
                if ready_seconds(self.child.pid) - ready > STARVED * patience_seconds and starved < STARVED_TIMES:
                    starved += 1
                    continue
                log.warning("worker %d makes no progress and is killed", self.child.pid)
                raise WorkerGone from None
            if "done" in answer:
                self.useful = True
                return answer["done"]
            self.useful |= answer["progress"]["tokens"] > 0
            on_progress(answer["progress"])

    async def _next(self) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = json.loads(await self._reader.readline())
        except (ValueError, OSError):  # end of the stream, or an incomplete line
            raise WorkerGone from None
        if "refused" in answer:
            raise WorkerError(answer["refused"])
        return answer

    async def end(self) -> None:
        """Kill the process at once and wait for its end."""
        self._writer.close()
        await self.child.kill()


def bounded_spin(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that limit how long a worker's threads spin; empty if the user has set one of these variables."""
    return {} if any(environment.get(name) for name in _WAITING) else SPIN


def _log_line(line: str | None) -> None:
    if line:
        relay("worker", line)


def _patience_seconds(memory: Shared, patience: int) -> float:
    longest = memory.longest_step_seconds
    return max(PATIENCE_SECONDS, PATIENCE_STEPS * longest) if longest else FIRST_STEP_SECONDS * patience
