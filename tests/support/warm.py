"""Peers in milliseconds: a process that has loaded PyTorch and the node forks them (`node.runtime.fork_server`).

    python -P -m tests.support.warm DESCRIPTOR PADDING      # DESCRIPTOR: one end of a socket, inherited

A forked peer is what `python -P -m MODULE …` with that environment would be, but for the modules that it has from the
start. Its command line and the mark in its environment can be seen from outside, as those of any process: both are
written over those of the server, which has room for them.

Workers that a test starts itself, without a peer, are forked in the same way (`forked_workers`).
"""

from __future__ import annotations

import asyncio
import asyncio.subprocess
import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, cast

from benchmarks.averaging import Swarm
from node.runtime import fork_server
from node.runtime.fork_server import ForkServer
from tests.support.paths import REPOSITORY

MARK = "STARLING_TEST_PEER"
"""A variable by which the processes of a peer are found. Its values are as long as those of `uuid4().hex`."""
_NO_MARK = "-" * 32
_PADDING = "." * 8000
_START_SECONDS = 60.0
_PR_SET_CHILD_SUBREAPER = 36


class ForkedProcess:
    def __init__(self, server: WarmServer, pid: int) -> None:
        self._server, self.pid = server, pid

    @property
    def returncode(self) -> int | None:
        return self._server.codes.get(self.pid)

    def poll(self) -> int | None:
        self._server.listen(0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class WarmProcess(ForkedProcess):
    """A forked process, with what tests use of `subprocess.Popen`."""

    def wait(self, timeout: float) -> int:
        until = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if (left := until - time.monotonic()) <= 0:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            self._server.listen(left)
        return code


class WarmServer:
    """The tests' side of the process that forks."""

    def __init__(self, modules: Sequence[str]) -> None:
        """Start it. Its processes have loaded these modules, too; if there are any, it is itself forked."""
        self.codes: dict[int, int] = {}
        self._started: list[int] = []
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            if modules:
                self._pid = server().fork({"modules": [*modules]}, os.environ, [theirs.fileno()])
            else:
                self._pid = self._execute(theirs)
        atexit.register(self.close)

    def _execute(self, link: socket.socket) -> int:
        command = [sys.executable, "-P", "-m", "tests.support.warm", str(link.fileno()), _PADDING]
        environment = {**os.environ, MARK: _NO_MARK, "PYTHONPATH": str(REPOSITORY)}
        process = subprocess.Popen(
            command, env=environment, pass_fds=[link.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
        )
        atexit.register(process.wait, 10)  # after the link is closed
        return process.pid

    def close(self) -> None:
        self._link.close()

    def start(
        self, module: str, arguments: Sequence[str], environment: Mapping[str, str], streams: Mapping[int, int]
    ) -> WarmProcess:
        """Fork a process."""
        request = {"module": module, "arguments": [*arguments], "numbers": [*streams]}
        return WarmProcess(self, self.fork(request, environment, [*streams.values()]))

    def fork(self, request: dict[str, Any], environment: Mapping[str, str], descriptors: Sequence[int]) -> int:
        request = request | {"environment": {**environment}, "directory": os.getcwd()}
        socket.send_fds(self._link, [json.dumps(request).encode()], descriptors)
        until = time.monotonic() + _START_SECONDS
        while not self._started:
            assert time.monotonic() < until, "the process that forks peers does not answer"
            self.listen(until - time.monotonic())
        return self._started.pop()

    def children_seconds(self) -> float:
        try:
            descriptor = os.open(f"/proc/{self._pid}/stat", os.O_RDONLY)  # not by what a test may have replaced
        except OSError:
            return 0.0
        fields = os.read(descriptor, 4096).rpartition(b")")[2].split()
        os.close(descriptor)
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")

    def listen(self, seconds: float) -> None:
        """Take in what the server says, for at most this many seconds, and until it has said something."""
        while select.select([self._link], [], [], seconds)[0]:
            message = json.loads(self._link.recv(1 << 16) or "null")
            assert message, "the process that forks peers has ended"
            if "pid" in message:
                self.codes.pop(message["pid"], None)
                self._started.append(message["pid"])
            else:
                self.codes[message["ended"]] = message["code"]
            seconds = 0.0


class PipedProcess(ForkedProcess):
    """One with pipes for its input and output, and what a benchmark's swarm uses of asyncio's `Process`."""

    stdin: asyncio.StreamWriter
    stdout: asyncio.StreamReader

    async def pipe(self, stdin: int, stdout: int) -> None:
        loop, self.stdout = asyncio.get_running_loop(), asyncio.StreamReader()
        output = os.fdopen(stdout, "rb", 0)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(self.stdout), output)
        transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, os.fdopen(stdin, "wb", 0))
        self.stdin = asyncio.StreamWriter(transport, protocol, None, loop)

    async def wait(self) -> int:
        while (code := self.poll()) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        return code


class WarmSwarm(Swarm):
    """The benchmark's peers, forked."""

    async def _start(self, rank: int) -> asyncio.subprocess.Process:
        with self._log(rank).open("wb") as log:
            (reading, stdin), (stdout, writing) = os.pipe(), os.pipe()
            streams = {0: reading, 1: writing, 2: log.fileno()}
            arguments = [json.dumps(asdict(self.setup_of(rank)))]
            environment = {**self._environment, "PYTHONPATH": str(REPOSITORY)}
            pid = server().start(self._module, arguments, environment, streams).pid
            os.close(reading)
            os.close(writing)
        process = PipedProcess(server(), pid)
        await process.pipe(stdin, stdout)
        return cast("asyncio.subprocess.Process", process)


@cache
def server(*modules: str) -> WarmServer:
    """The server of this process whose processes have loaded these modules, too. It starts when it is first needed."""
    _servers.append(made := WarmServer(modules))
    return made


_servers: list[WarmServer] = []


def run(
    module: str, *arguments: str, environment: Mapping[str, str] = os.environ, seconds: float = 40.0
) -> subprocess.CompletedProcess[str]:
    """What `subprocess.run` gives of a module."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = server().start(module, arguments, environment, {1: out.fileno(), 2: err.fileno()})
        try:
            code = process.wait(seconds)
        finally:
            process.kill()
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess((module, *arguments), code, out.read(), err.read())


class WarmForkServer(ForkServer):
    def __init__(self, link: socket.socket, pid: int) -> None:
        super().__init__(link)
        self.pid = pid


@asynccontextmanager
async def forked_workers(*modules: str) -> AsyncIterator[ForkServer]:
    """Have the workers of this process forked, as a peer has: PyTorch and these modules take seconds to load."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    before = ForkServer.here
    with ours:
        with theirs:
            pid = server(*modules).fork({}, os.environ, [theirs.fileno()])
        here = ForkServer.here = WarmForkServer(ours, pid)
        try:
            yield here
        finally:
            ForkServer.here = before
            asyncio.get_running_loop().remove_reader(ours.fileno())


def children_seconds() -> float:
    """Processor seconds of all processes that the servers have forked and that have ended, and of theirs."""
    return sum(each.children_seconds() for each in _servers)


# -- in the server ----------------------------------------------------------------------------------------------------


def _run(request: dict[str, Any], descriptors: list[int]) -> NoReturn:
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # that of the new environment
    os.chdir(request["directory"])
    os.setsid()
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    if "module" in request:
        _become_peer(request, descriptors)
    if "modules" in request:
        for each in request["modules"]:
            importlib.import_module(each)
        _serve(descriptors[0])
    fork_server.become_program("node.runtime.fork_server", ())
    with socket.socket(fileno=descriptors[0]) as link:
        fork_server.serve(link, fork_server.run_program)


def _become_peer(request: dict[str, Any], descriptors: list[int]) -> NoReturn:
    fork_server.place_descriptors(descriptors, request["numbers"])
    fork_server.open_streams()
    module, arguments = request["module"], request["arguments"]
    fork_server.become_program(module, arguments)
    _write_mark(request["environment"].get(MARK, _NO_MARK))
    sys.argv = [module, *arguments]
    code: object = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        code = error.code
    sys.stdout.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def _write_mark(mark: str) -> None:
    """Have /proc/PID/environ show the mark, as that of an executed process would."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[47]), int(fields[48])
    place = ctypes.string_at(begin, end - begin).index(f"{MARK}={_NO_MARK}".encode()) + len(MARK) + 1
    assert len(mark) == len(_NO_MARK)
    ctypes.memmove(begin + place, mark.encode(), len(mark))


def _main(descriptor: int) -> NoReturn:
    import torch._dynamo  # noqa: F401 - the first optimiser of each worker would load it, for a second
    import uvloop  # noqa: F401

    import node.cli.app
    import node.session.peer
    import node.training.stage_worker
    import node.ui.terminal  # noqa: F401
    import protocols.butterfly.averager  # noqa: F401 - most peers load it, by its name

    _serve(descriptor)


def _serve(descriptor: int) -> NoReturn:
    gc.collect()
    gc.freeze()  # a collection in what is forked would visit each object that is loaded, and so copy its memory
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # to wait for the processes of peers that have ended
    with socket.socket(fileno=descriptor) as link:
        fork_server.serve(link, _run)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        _main(int(sys.argv[1]))
