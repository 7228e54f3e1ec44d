"""One worker process as its peer sees it: commands, answers, and how long to wait for them."""

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
from node.tasks.spec import WorkerSpec
from node.training.priority import ready_seconds
from node.training.shared import Shared
from node.training.worker import MAX_LINE_BYTES
from protocols.base import Layout

log = logging.getLogger(__name__)

START_SECONDS = 120.0
"""Reading the data takes its time on a slow disk."""
FIRST_STEP_SECONDS = 60.0
OOM_SCORE = 1000
"""Where memory runs out the kernel is to take the worker, which is replaced: whatever it holds, from its start on."""
PATIENCE_SECONDS = 5.0
PATIENCE_STEPS = 20
STARVED, STARVED_TIMES = 0.25, 20
"""A worker that was ready for so much of its time, but had no core, does not hang: it has so many times as long."""

SPIN = {"GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "1"}
"""How long a thread that waits for others keeps its core before it sleeps: of libgomp in turns, of LLVM's and Intel's
libomp in milliseconds. Left to themselves they spin thirty times, or two hundred times, as long: once another program
takes a core, each operation waits for a thread that cannot run. With fewer turns the quiet machine pays: RESULTS.md."""
_WAITING = (*SPIN, "OMP_WAIT_POLICY", "KMP_LIBRARY")

Hear = Callable[[dict[str, Any]], None]


class WorkerError(Exception):
    """The worker cannot be started, refuses, or dies each time; one line for a person.

    Attributes:
        is_killed: it was killed (SIGKILL) before it had come up.
    """

    def __init__(self, why: str, is_killed: bool = False) -> None:
        super().__init__(why)
        self.is_killed = is_killed


class WorkerGone(Exception):
    """This worker is dead, or as good as dead."""


class WorkerProcess:
    """One worker process, from its start to its end.

    Attributes:
        useful: it has carried out a command, or taken a step.
    """

    def __init__(self, child: ChildProcess, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.child = child
        self.useful = False
        self.layout = Layout(())
        self._reader, self._writer = reader, writer

    @classmethod
    async def start(cls, spec: WorkerSpec, memory: int) -> WorkerProcess:
        """
        Raises:
            WorkerError: it refused, and said why, or did not come up.
            OSError: no process can be had.
        """
        ours, theirs = socket.socketpair()
        # `-P` and the path: what lies in the current directory is not ours to import.
        command = [
            sys.executable,
            "-P",
            "-m",
            "node.training.worker",
            *map(str, (os.getpid(), memory, theirs.fileno())),
        ]
        path = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
        with theirs:
            reader, writer = await asyncio.open_unix_connection(sock=ours, limit=MAX_LINE_BYTES)
            try:
                descriptors = (memory, theirs.fileno())
                environment = {"PYTHONPATH": path, **bounded_spin(os.environ)}
                child = await ChildProcess.start("worker", command, _log_line, environment, descriptors, OOM_SCORE)
            except BaseException:
                writer.close()
                raise
        life = cls(child, reader, writer)
        try:
            await life._introduce(spec)
        except BaseException:
            await life.end()
            raise
        return life

    async def _introduce(self, spec: WorkerSpec) -> None:
        self._writer.write(spec.to_json().encode() + b"\n")
        try:
            async with asyncio.timeout(START_SECONDS):
                fragments = (await self._next())["done"]
        except TimeoutError:
            raise WorkerError(
                f"the worker did not start within {START_SECONDS:g} s: {self.child.output_tail}"
            ) from None
        except WorkerGone:
            self.child.send_kill()  # in case it has closed its socket and lives on
            how = await self.child.ended()
            raise WorkerError(f"the worker did not start: {how}", self.child.is_killed) from None
        self.layout = Layout(tuple(tuple((name, tuple(shape)) for name, shape in each) for each in fragments))

    async def ask(self, command: dict[str, Any], memory: Shared, extra_seconds: float, hear: Hear) -> Any:
        """The answer to a command; progress is heard meanwhile.

        Raises:
            WorkerError: it refused.
            WorkerGone: it died, or took no step for too long.
        """
        self._writer.write(json.dumps(command).encode() + b"\n")
        starved = 0
        while True:
            steps, ready = memory.steps, ready_seconds(self.child.pid)
            patience_seconds = _patience_seconds(memory) + extra_seconds
            try:
                async with asyncio.timeout(patience_seconds):
                    answer = await self._next()
            except TimeoutError:
                if memory.steps != steps:
                    starved = 0
                    continue
                if ready_seconds(self.child.pid) - ready > STARVED * patience_seconds and starved < STARVED_TIMES:
                    starved += 1
                    continue
                log.warning("worker %d does not move and is killed", self.child.pid)
                raise WorkerGone from None
            if "done" in answer:
                self.useful = True
                return answer["done"]
            self.useful |= answer["progress"]["tokens"] > 0
            hear(answer["progress"])

    async def _next(self) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = json.loads(await self._reader.readline())
        except (ValueError, OSError):  # an end in the middle of a line, or at its beginning
            raise WorkerGone from None
        if "refused" in answer:
            raise WorkerError(answer["refused"])
        return answer

    async def end(self) -> None:
        """End it at once."""
        self._writer.close()
        await self.child.kill()


def bounded_spin(environment: Mapping[str, str]) -> dict[str, str]:
    """What bounds the spinning of a worker's threads; nothing where the user has said how they are to wait."""
    return {} if any(environment.get(name) for name in _WAITING) else SPIN


def _log_line(line: str | None) -> None:
    if line:
        log.warning("worker: %s", line)


def _patience_seconds(memory: Shared) -> float:
    longest = memory.longest_step_seconds
    return max(PATIENCE_SECONDS, PATIENCE_STEPS * longest) if longest else FIRST_STEP_SECONDS
