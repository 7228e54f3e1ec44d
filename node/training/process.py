"""The peer's side of one worker process: commands, answers and timeouts."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from node.runtime.cgroup import bounded_spin
from node.runtime.child_process import ChildProcess
from node.runtime.notes import relay
from node.tasks.spec import WorkerSpec
from node.training import liveness
from node.training.failure import FaultDump
from node.training.liveness import Watchdog, usage
from node.training.shared import Shared
from node.training.worker import MAX_LINE_BYTES
from protocols.base import Layout

LOOK_SECONDS = 2.5
"""Time between two looks whether a worker that does not answer still works."""
_DUMP_SECONDS = 0.5
"""Time that a worker that hangs has to write where it stands."""
OOM_SCORE = 1000
"""When memory runs out, the kernel kills the worker first, because the peer can replace it."""

OnProgress = Callable[[dict[str, Any]], None]


class WorkerError(Exception):
    """The worker cannot be started, rejects a command, or dies each time. The message is one line."""

    def __init__(self, why: str, is_killed: bool = False) -> None:
        super().__init__(why)
        self.is_killed = is_killed  # by SIGKILL, during its start


class WorkerGone(Exception):
    """This worker has died, or hangs and was killed. `WorkerProcess.failure` says why, if that is known."""

    def __init__(self, hangs: str = "") -> None:
        super().__init__(hangs)
        self.hangs = hangs  # why, in one line; empty if it died or was stopped


class WorkerProcess:
    def __init__(
        self, child: ChildProcess, dump: FaultDump, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.child, self._dump, self._said = child, dump, ""
        self.command = ""  # the latest one, by name
        self.finished = set[str]()  # names of those carried out; `train` from its first step on
        self.layout, self.timeout_seconds = Layout(()), liveness.TIMEOUT_SECONDS
        self.device = ""  # in words
        self._reader, self._writer = reader, writer

    @classmethod
    async def start(cls, spec: WorkerSpec, memory: int) -> WorkerProcess:
        """Start a worker over the vectors' descriptor, and wait until it is ready. Raises WorkerError, OSError."""
        ours, theirs = socket.socketpair()
        # `-P`: never import from the current directory.
        command = [
            sys.executable,
            "-P",
            "-m",
            _program(spec),
            *map(str, (memory, theirs.fileno())),
        ]
        with theirs:
            reader, writer = await asyncio.open_unix_connection(sock=ours, limit=MAX_LINE_BYTES)
            try:
                slots = (spec.stage.slots,) if spec.stage else ()
                descriptors = (memory, theirs.fileno(), *slots)
                environment = bounded_spin(os.environ)
                dump = FaultDump()
                arguments = (command, partial(_log_line, dump), environment, descriptors, OOM_SCORE, True)
                child = await ChildProcess.start("worker", *arguments)
            except BaseException:
                writer.close()
                raise
        worker = cls(child, dump, reader, writer)
        try:
            await worker._introduce(spec)
        except BaseException:
            await worker.end()
            raise
        return worker

    async def _introduce(self, spec: WorkerSpec) -> None:
        # A start on a busy machine takes long, whatever is right for steps.
        self.timeout_seconds = spec.start_seconds(liveness.TIMEOUT_SECONDS)
        self._writer.write(spec.to_json().encode() + b"\n")
        try:
            answer = (await self._answer(lambda: 0))["done"]
        except WorkerGone:
            self.child.send_kill()  # in case it closed its socket and still runs
            how = await self.child.ended()
            if self.failure:
                raise WorkerError(self.failure) from None
            raise WorkerError(f"the worker did not start: {how}", self.child.is_killed) from None
        fragments = answer["layout"]
        self.layout = Layout(tuple(tuple((name, tuple(shape)) for name, shape in each) for each in fragments))
        self.timeout_seconds = spec.timeout_seconds or answer["timeout_seconds"] or liveness.TIMEOUT_SECONDS
        self.device = str(answer["device"])

    @property
    def failure(self) -> str:
        """Why the worker cannot continue, in one line; empty if that is not known."""
        if not self._said and self._dump.crash:
            return f"the worker crashed in {self._activity}: {self._dump.crash}{self._where}"
        return self._said

    @property
    def _activity(self) -> str:
        return self.command or "its start"

    @property
    def _where(self) -> str:
        return f", in {self._dump.place}" if self._dump.place else ""

    async def ask(self, command: dict[str, Any], memory: Shared, on_progress: OnProgress) -> Any:
        """The answer to a command; progress before it goes to `on_progress`. Raises WorkerError, WorkerGone."""
        self.command = command["do"]
        self._writer.write(json.dumps(command).encode() + b"\n")
        while True:
            answer = await self._answer(lambda: memory.heartbeats)
            if "done" in answer:
                if self.command != "train":
                    self.finished.add(self.command)
                return answer["done"]
            if answer["progress"]["tokens"] > answer["progress"]["carried"]:
                self.finished.add("train")
            on_progress(answer["progress"])

    async def _answer(self, steps: Callable[[], int]) -> dict[str, Any]:
        """The next message, for which the worker may take as long as it works; `steps()` changes with each step."""
        loop = asyncio.get_running_loop()
        watchdog = Watchdog(self._activity, self.timeout_seconds, loop.time())
        while True:
            try:
                async with asyncio.timeout(min(LOOK_SECONDS, self.timeout_seconds)):
                    return await self._next()
            except TimeoutError:
                seen = usage(self.child.pid)
                if why := watchdog.look(loop.time(), steps(), seen):
                    if seen and seen.stopped:  # where the others stand explains nothing
                        self._said = why
                        raise WorkerGone from None
                    self.child.ask_where()
                    await asyncio.sleep(_DUMP_SECONDS)
                    self._said = f"{why}{self._where}"
                    raise WorkerGone(self._said) from None

    async def _next(self) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = json.loads(await self._reader.readline())
        except (ValueError, OSError):  # end of the stream, or an incomplete line
            raise WorkerGone from None
        if "refused" in answer:
            raise WorkerError(answer["refused"])
        if "failed" in answer:
            self._said = f"the worker failed in {self._activity}: {answer['failed']}"
            raise WorkerGone
        return answer

    async def end(self) -> None:
        self._writer.close()
        await self.child.kill()


def _program(spec: WorkerSpec) -> str:
    if spec.devices:
        return "node.ranks.worker"
    return "node.training.stage_worker" if spec.stage else "node.training.worker"


def _log_line(dump: FaultDump, line: str | None) -> None:
    if line:
        dump.take(line)
        relay("worker", line)
