"""A child process that dies with this process. Ctrl-C does not reach it, and its output goes to a callback.

One that runs a user's code runs under a reaper (`node.runtime.reaper`), so that whatever it has started dies with it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress

from node.runtime import reaper
from node.runtime.fork_server import START_SECONDS, ForkedProcess, ForkServer
from node.runtime.program import child_environment

log = logging.getLogger(__name__)

_STOP_SECONDS = 3.0
_LAST_WORDS_SECONDS = 1.0
_KEPT_LINES = 5
_LINE_CHARACTERS = 300
_ROOM = "." * 4000
"""For the command lines of forked processes, which take the place of the server's (`fork_server.set_command_line`)."""


class ChildProcess:
    """One running program, with the program's `pid`. `ChildProcess.start` creates it.

    Start it from the main thread, because the kernel kills the program when the thread that started it ends. This
    exists only on Linux; elsewhere the program itself has to detect that its parent is gone.
    """

    def __init__(
        self, name: str, process: Process | ForkedProcess, on_line: Callable[[str | None], None], reaped: bool
    ) -> None:
        self.name, self.pid = name, process.pid
        self._process = process
        self._reaped = reaped
        self._started = asyncio.Event()
        self._on_line = on_line
        self._last_lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._reading = asyncio.create_task(self._read_output(), name=f"{name} output")

    @property
    def code(self) -> int | None:
        """Minus the number of the signal that killed it; None while it runs."""
        return self._process.returncode

    @property
    def is_killed(self) -> bool:
        """Whether SIGKILL has ended it, sent by this process, by a user, or by the kernel when memory ran out."""
        return self.code == -signal.SIGKILL

    @classmethod
    async def start(
        cls,
        name: str,
        command: Sequence[str],
        on_line: Callable[[str | None], None],
        environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        oom_score: int = 0,
        reaped: bool = False,
    ) -> ChildProcess:
        """Start a program.

        `command` begins with the full path; `python -P -m MODULE …` finds this project's modules, and is forked if
        there is a `ForkServer`. `on_line` gets each line of output, cut at 300 characters, and None at its end.
        `oom_score` is Linux's `oom_score_adj`, up to 1000. `reaped`: whatever the program starts is killed when it
        ends, or when this process does.
        """
        is_python = [*command[1:3]] == ["-P", "-m"]
        environment = {**(child_environment() if is_python else {}), **(environment or {})}
        process: Process | ForkedProcess | None = None
        if is_python:
            process = await _forked(command, environment, pass_fds, oom_score, reaped)
        if process is None:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", reaper.__file__, str(os.getpid()), str(oom_score)),
                *(("reaped",) if reaped else ()),
                stdin=DEVNULL,
                stdout=PIPE,
                stderr=STDOUT,
                start_new_session=True,
                pass_fds=pass_fds,
                env={**os.environ, **environment, reaper.PROGRAM: json.dumps(command)},
            )
        child = cls(name, process, on_line, reaped)
        try:
            if reaped:
                async with asyncio.timeout(START_SECONDS):
                    await child._started.wait()  # it has started the program, or has ended
        except BaseException:
            child.send_kill()
            raise
        return child

    @classmethod
    @asynccontextmanager
    async def fork_server(cls, environment: Mapping[str, str]) -> AsyncIterator[None]:
        """On Linux, a fork server for the programs that this process starts inside this context. It has ended then."""
        if sys.platform != "linux":
            yield
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = (sys.executable, "-P", "-m", "node.runtime.fork_server", str(theirs.fileno()), _ROOM)
            process = await cls.start("fork server", command, lambda line: None, environment, (theirs.fileno(),))
        server = ForkServer.here = ForkServer(ours)
        try:
            yield
        finally:
            server.close()
            await process.kill()

    @property
    def output_tail(self) -> str:
        return " | ".join(self._last_lines) or "(no output)"

    async def ended(self) -> str:
        """Returns in one line how it ended."""
        code = await self._process.wait()
        # Wait for the rest of its output, but not for ever: a child of its own may still hold the pipe open.
        await asyncio.wait([self._reading], timeout=_LAST_WORDS_SECONDS)
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        return f"{how}; last output: {self.output_tail}"

    async def stop(self) -> None:
        self.ask()
        try:
            async with asyncio.timeout(_STOP_SECONDS):
                await self._process.wait()
        except TimeoutError:
            log.warning("%s %d did not stop within %g s and is killed", self.name, self.pid, _STOP_SECONDS)
        finally:
            await self.kill()

    def ask(self) -> None:
        self._signal(signal.SIGTERM)

    def send_kill(self) -> None:
        if self._reaped:  # the reaper kills the program, then all that it has started
            self._signal(signal.SIGCONT)
        self._signal(signal.SIGTERM if self._reaped else signal.SIGKILL)

    def ask_where(self) -> None:
        """Ask a program that knows this signal (SIGUSR1) to write where it stands. Any other dies of it."""
        if self.code is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGUSR1)

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal. asyncio's own methods poll for the exit code first; a task that waits for it then gets 255."""
        if self.code is None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    async def kill(self) -> None:
        self.send_kill()
        await self.ended()
        self._reading.cancel()
        await asyncio.wait([self._reading])

    async def _read_output(self) -> None:
        output = self._process.stdout
        assert output is not None
        if self._reaped:
            first = await output.readline()
            self.pid = int(first) if first.strip().isdigit() else self.pid
            self._started.set()
        while True:
            try:
                line = await output.readline()
            except ValueError:  # a line longer than the reader's buffer, which has discarded it
                continue
            if not line:
                break
            text = line.decode(errors="replace").rstrip()[:_LINE_CHARACTERS]
            self._last_lines.append(text)
            self._on_line(text)
        self._on_line(None)


async def _forked(
    command: Sequence[str], environment: Mapping[str, str], pass_fds: Sequence[int], oom_score: int, reaped: bool
) -> ForkedProcess | None:
    server = ForkServer.here
    if server is None:
        return None
    try:
        return await server.start(command, environment, pass_fds, oom_score, reaped)
    except OSError as error:
        log.warning("the fork server fails (%s): programs start without it", error)
        ForkServer.here = None
        return None
