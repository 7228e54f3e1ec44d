"""A process that has loaded PyTorch and forks programs on request: they start in milliseconds, and share its memory.

A peer forks it (`ForkServer.begin`) before it has a thread or an event loop, so that no lock is held across the fork.
`swarm`, which needs no PyTorch itself, starts one for its peers (`ChildProcess.fork_server`):

    python -P -m node.runtime.fork_server SOCKET      # an inherited descriptor

It keeps no more than one socket to its parent, and ends with it. Linux only: elsewhere, and where no server runs,
programs are executed. One message each way is one packet of JSON. A request brings the file descriptors of the
program's output, and of those that it inherits, under the numbers that it expects:

    command: [python, -P, -m, MODULE, ARGUMENT …], environment, numbers, oom_score, reaped     -> pid
                                                             later, when that process has ended: ended: pid, code

A program is the function `main(arguments)` of a module, which returns an exit code.

A worker uses its GPU although it is forked, because what forks it never asks for one: already
`torch.cuda.is_available()` initialises CUDA's driver, which does not survive a fork.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import gc
import importlib.util
import json
import logging
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeAlias

from node.runtime import reaper
from node.runtime.program import ROOT

log = logging.getLogger(__name__)

START_SECONDS = 120.0  # a server that is a program of its own loads PyTorch first, which takes long on a busy machine
_MAX_BYTES = 1 << 16
_MAX_DESCRIPTORS = 16


class ForkedProcess:
    """A process that the server has forked. It has what `ChildProcess` uses of asyncio's own."""

    def __init__(self, pid: int) -> None:
        self.pid, self.stdout = pid, asyncio.StreamReader()
        self.returncode: int | None = None
        self._ended = asyncio.Event()

    def end(self, code: int) -> None:
        self.returncode = code
        self._ended.set()

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode


class ForkServer:
    """The peer's side of its fork server. `here` is this process's; None if it has none, or if it has died."""

    here: ClassVar[ForkServer | None] = None

    def __init__(self, link: socket.socket) -> None:
        link.setblocking(False)
        self._link = link
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running: dict[int, ForkedProcess] = {}
        self._starting: asyncio.Future[ForkedProcess] | None = None
        self._lock = asyncio.Lock()

    @classmethod
    def begin(cls) -> None:
        """Fork the server. Call it while this process has one thread, and after it has imported what programs need."""
        if sys.platform != "linux" or threading.active_count() > 1:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        gc.freeze()  # a collection would write to the memory of each object, and so unshare it
        parent = os.getpid()
        if not os.fork():
            with _boundary():
                _begin_server(theirs, parent)
                serve(theirs, run_program)
        theirs.close()
        cls.here = cls(ours)

    def close(self) -> None:
        """Let the server end. Of what it has forked, this process learns nothing more."""
        if self._loop:
            self._loop.remove_reader(self._link.fileno())
        self._link.close()
        ForkServer.here = None

    async def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        pass_fds: Sequence[int],
        oom_score: int,
        reaped: bool,
    ) -> ForkedProcess:
        """Fork a program as `ChildProcess.start` says. OSError: the server has died, or does not answer."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._link.fileno(), self._take)
        values = {"command": command, "environment": environment, "oom_score": oom_score, "reaped": reaped}
        async with self._lock:
            reading, writing = os.pipe()
            with os.fdopen(reading, "rb", buffering=0) as output:
                with os.fdopen(writing, "wb", buffering=0):
                    request = json.dumps(values | {"numbers": [1, 2, *pass_fds]}).encode()
                    self._starting = self._loop.create_future()
                    socket.send_fds(self._link, [request], [writing, writing, *pass_fds])
                    async with asyncio.timeout(START_SECONDS):
                        process = await self._starting
                protocol = asyncio.StreamReaderProtocol(process.stdout)
                await self._loop.connect_read_pipe(lambda: protocol, os.fdopen(os.dup(output.fileno()), "rb", 0))
        return process

    def _take(self) -> None:
        """The end of what the server says is that of all that it has forked."""
        try:
            data = self._link.recv(_MAX_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            return self._lose()
        message = json.loads(data)
        if "ended" in message:
            if process := self._running.pop(message["ended"], None):
                process.end(message["code"])
            return
        process = self._running[message["pid"]] = ForkedProcess(message["pid"])
        if self._starting and not self._starting.done():
            self._starting.set_result(process)

    def _lose(self) -> None:
        assert self._loop
        self._loop.remove_reader(self._link.fileno())
        ForkServer.here = None
        log.warning("the fork server has died, and with it all that it has forked")
        for process in self._running.values():
            process.end(-signal.SIGKILL)
        if self._starting and not self._starting.done():
            self._starting.set_exception(ChildProcessError("the fork server has died"))


# -- in the server ----------------------------------------------------------------------------------------------------


Run: TypeAlias = Callable[[dict[str, Any], list[int]], NoReturn]


@contextmanager
def _boundary() -> Iterator[None]:
    try:
        yield
    except BaseException:  # noqa: BLE001 - the outermost frame, as the interpreter's
        traceback.print_exc()
    finally:
        os._exit(1)


def _begin_server(link: socket.socket, parent: int) -> None:
    """Keep nothing of the peer: a lock would be held, and a connection open, beyond its end."""
    os.setsid()
    reaper.die_with_parent()
    if os.getppid() != parent:
        os._exit(1)
    become_program("node.runtime.fork_server", ())
    os.closerange(3, link.fileno())
    os.closerange(link.fileno() + 1, os.sysconf("SC_OPEN_MAX"))


def serve(link: socket.socket, run: Run) -> NoReturn:
    wake, woken = socket.socketpair()
    for each in (wake, woken):
        each.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    poll = select.poll()
    for each in (link, wake):
        poll.register(each, select.POLLIN)
    while True:
        ready = {number for number, _ in poll.poll()}
        if wake.fileno() in ready:
            with suppress(BlockingIOError):
                wake.recv(4096)
            _tell_ended(link)
        if link.fileno() in ready:
            data, descriptors = _next_request(link)
            if not data:
                os._exit(0)
            if not (pid := os.fork()):
                with _boundary():
                    signal.set_wakeup_fd(-1)
                    for each in (link, wake, woken):
                        each.close()
                    run(json.loads(data), descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            _tell(link, {"pid": pid})


def _next_request(link: socket.socket) -> tuple[bytes, list[int]]:
    """Nothing if the peer has ended."""
    try:
        data, descriptors, _, _ = socket.recv_fds(link, _MAX_BYTES, _MAX_DESCRIPTORS)
    except ConnectionResetError:  # it ended before it read all that it was told
        return b"", []
    return data, descriptors


def _tell(link: socket.socket, message: dict[str, int]) -> None:
    with suppress(OSError):  # the peer has gone: the next read says so
        link.send(json.dumps(message).encode())


def _tell_ended(link: socket.socket) -> None:
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            _tell(link, {"ended": found[0], "code": os.waitstatus_to_exitcode(found[1])})


def run_program(request: dict[str, Any], descriptors: list[int]) -> NoReturn:
    place_descriptors(descriptors, request["numbers"])
    os.environ.update(request["environment"])
    parent, oom_score = os.getppid(), str(request["oom_score"])
    module, arguments = request["command"][3], request["command"][4:]
    if request["reaped"]:
        become_program("node.runtime.reaper", ())
    reaper.begin(parent, oom_score, request["reaped"], lambda: run_module(module, arguments))


def place_descriptors(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Give received file descriptors the numbers that a program expects. Standard input is empty if none is for it."""
    above = max((*numbers, *descriptors)) + 1
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD, above) for each in descriptors]
    for each, number in zip(moved, numbers, strict=True):
        os.dup2(each, number, inheritable=True)
    for each in {*moved, *descriptors} - {*numbers}:
        os.close(each)
    if 0 not in numbers:
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)


def open_streams() -> None:
    """Open Python's standard streams anew: the parent's may be for a terminal, and hold what it has not written yet."""
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False, errors="backslashreplace")


def become_program(module: str, arguments: Sequence[str]) -> None:
    """Have this forked process look like one of its own: its command line, signal handlers, logging and random numbers.

    Those of Python's `random` differ in each fork anyway. PyTorch's begin as in each new process: none was drawn yet.
    """
    set_command_line("python", "-P", "-m", module, *arguments)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    root = logging.getLogger()
    root.handlers.clear()
    root.setLevel(logging.WARNING)
    reseed_numpy()


def reseed_numpy() -> None:
    """Else numpy's global random numbers are the same in each fork."""
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def run_module(module: str, arguments: Sequence[str]) -> NoReturn:
    with _boundary():
        become_program(module, arguments)
        open_streams()
        gc.enable()
        if not sys.flags.safe_path:  # as with -P: never import from the current directory
            del sys.path[0]
        sys.path[:] = [str(ROOT), *(each for each in sys.path if each != str(ROOT))]
        is_package = importlib.util.find_spec(module).submodule_search_locations is not None  # type: ignore[union-attr]
        program = importlib.import_module(f"{module}.__main__" if is_package else module)
        sys.modules["__main__"], sys.argv = program, [str(program.__file__), *arguments]
        try:
            code = program.main([*arguments])
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        sys.stdout.flush()
        os._exit(code)


def set_command_line(*words: str) -> None:
    """Set what `ps` shows for this process, as far as there is room for it."""
    with suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()
        begin, end, limit = int(fields[45]), int(fields[46]), int(fields[48])
        text = "\0".join(words).encode()
        if len(text) >= end - begin:
            # It continues where the environment is, which `getenv` must not read there any more. The kernel then shows
            # what there is up to the first zero.
            os.environ.update({**os.environ})
            text, end = text.replace(b"\0", b" "), limit
        ctypes.memset(begin, 0, end - begin)
        ctypes.memmove(begin, text, min(len(text), end - begin - 1))


def _main(descriptor: int) -> NoReturn:
    import uvloop  # noqa: F401

    gc.freeze()
    with socket.socket(fileno=descriptor) as link:
        serve(link, run_program)


if __name__ == "__main__":
    _main(int(sys.argv[1]))
