"""p2pd: the go-libp2p daemon that the hivemind wheel ships, as one child process of ours.

Facts of that daemon which this file relies on (read in its source, and tried):

  - it prints "Peer ID:" when its control socket listens;
  - it closes when the last persistent connection to it has ended, or if none was made within `-idleTimeout`;
  - SIGTERM closes it in good order; SIGINT does too, hence a session of its own: Ctrl-C must not reach it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

log = logging.getLogger(__name__)

_START_SECONDS = 20.0
_STOP_SECONDS = 3.0
_KEPT_LINES = 5
_MAX_SOCKET_DIRECTORY = 76  # Linux allows a socket's path 107 bytes, macOS 103; hivemind's file names take 26

# Becomes p2pd after asking the kernel to kill it with its parent. A program of its own, because code between fork and
# exec (preexec_fn) is unsafe once threads exist. The parent may have died before the request: hence the second look.
_SHIM = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""


class DaemonError(Exception):
    """p2pd cannot be found or did not start; the message holds its last words."""


def binary() -> Path:
    """Where the hivemind wheel keeps p2pd; does not import hivemind.

    Raises:
        DaemonError: hivemind is not installed, or without p2pd.
    """
    spec = find_spec("hivemind")
    path = Path(spec.origin).parent / "hivemind_cli" / "p2pd" if spec and spec.origin else None
    if path is None or not os.access(path, os.X_OK):
        raise DaemonError("p2pd is not installed: pip install hivemind==1.1.12 brings it")
    return path


def arguments(
    control: Path, identity: Path, listen: Sequence[str], announce: Sequence[str] = (), nat: bool = False
) -> list[str]:
    """p2pd's command line. Bare, without bootstrap peers: given unreachable ones it would exit."""
    traversal = int(nat)
    flags = {
        "listen": f"/unix{control}",
        "id": identity,
        "hostAddrs": ",".join(listen),
        # Peers that met through a third find each other's addresses in libp2p's own table.
        "dhtServer": 1,
        "connManager": 1,
        "natPortMap": traversal,
        "autonat": traversal,
        "relay": traversal,
        "relayService": traversal,
        "idleTimeout": "30s",
    }
    if announce:
        flags["announceAddrs"] = ",".join(announce)
    return [f"-{name}={value}" for name, value in flags.items()]


def socket_directory(parent: Path | None) -> Path:
    """A new directory that only this user can enter.

    Raises:
        DaemonError: its path is too long for a socket's.
    """
    directory = Path(tempfile.mkdtemp(prefix="starling-", dir=parent))
    if len(bytes(directory)) > _MAX_SOCKET_DIRECTORY:
        directory.rmdir()
        raise DaemonError(
            f"{directory} is too long a path for sockets (over {_MAX_SOCKET_DIRECTORY} bytes): "
            "set TMPDIR, or the runtime directory, to a shorter one"
        )
    return directory


_IP_PORT = re.compile(r"/(?P<family>ip[46])/(?P<host>[^/]+)/(?P<kind>tcp|udp)/(?P<port>\d+)(?P<rest>.*)")


def with_ports(listen: Sequence[str], found: Sequence[str]) -> tuple[str, ...]:
    """`listen` with each port 0 replaced by the one that p2pd took, as seen in the addresses found. Pure."""
    seen = [match for address in found if (match := _IP_PORT.fullmatch(address))]

    def fixed(address: str) -> str:
        match = _IP_PORT.fullmatch(address)
        if match is None or match["port"] != "0":
            return address
        # Of an unspecified address p2pd shows the interfaces'; a router's mapping never is on the loopback.
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(match["host"], match["host"])
        wanted = (match["family"], host, match["kind"], match["rest"])
        ports = [s["port"] for s in seen if (s["family"], s["host"], s["kind"], s["rest"]) == wanted]
        if not ports:
            return address
        return f"/{match['family']}/{match['host']}/{match['kind']}/{ports[0]}{match['rest']}"

    return tuple(fixed(address) for address in listen)


class Daemon:
    """One running p2pd. `Daemon.start` makes it; it dies with this process, however that ends.

    Start it from the main thread: the kernel's die-with-parent follows the thread that started it.
    """

    def __init__(self, process: Process) -> None:
        self._process = process
        self._last_lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reading = asyncio.create_task(self._read_output(), name="p2pd output")

    @property
    def pid(self) -> int:
        return self._process.pid

    @classmethod
    async def start(cls, command_arguments: Sequence[str]) -> Daemon:
        """Run p2pd until its control socket listens, within 20 seconds.

        Raises:
            DaemonError: it ended or said nothing.
        """
        shim = (sys.executable, "-I", "-S", "-c", _SHIM, str(os.getpid()), str(binary()))
        process = await asyncio.create_subprocess_exec(
            *shim,
            *command_arguments,
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=STDOUT,
            start_new_session=True,
            env=os.environ | {"GOLOG_LOG_LEVEL": "error"},
        )
        daemon = cls(process)
        try:
            async with asyncio.timeout(_START_SECONDS):
                await daemon._ready
        except TimeoutError:
            await daemon.kill()
            raise DaemonError(f"p2pd said nothing for {_START_SECONDS:g} s: {daemon.last_words}") from None
        except BaseException:
            await daemon.kill()
            raise
        return daemon

    @property
    def last_words(self) -> str:
        return " | ".join(self._last_lines) or "(no output)"

    async def ended(self) -> str:
        """Wait until the process has ended, however long; returns how, in one line."""
        code = await self._process.wait()
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        return f"{how}; last output: {self.last_words}"

    async def stop(self) -> None:
        """End it in good order, within 3 seconds, by force after that."""
        with suppress(ProcessLookupError):
            self._process.terminate()
        try:
            async with asyncio.timeout(_STOP_SECONDS):
                await self._process.wait()
        except TimeoutError:
            log.warning("p2pd %d did not stop within %g s and is killed", self.pid, _STOP_SECONDS)
        finally:
            await self.kill()

    async def kill(self) -> None:
        """End it at once."""
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        await self._reading

    async def _read_output(self) -> None:
        output = self._process.stdout
        assert output is not None
        while True:
            try:
                line = await output.readline()
            except ValueError:  # longer than the reader's buffer, which has dropped it
                continue
            if not line:
                break
            text = line.decode(errors="replace").rstrip()
            self._last_lines.append(text[:300])
            log.debug("p2pd %d: %s", self.pid, text)
            if text.startswith("Peer ID:") and not self._ready.done():
                self._ready.set_result(None)
        if not self._ready.done():
            self._ready.set_exception(DaemonError(f"p2pd did not start: {self.last_words}"))
