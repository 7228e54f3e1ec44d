"""A peer's control socket, at which processes of the same user ask for its status, or ask it to finish or to pause.

It is a Unix socket in a directory that only this user can enter; `<state-dir>/control.json` holds its path. A request
is one line of JSON, and so is the answer. If a killed peer left its file behind, nothing answers at the socket.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

from node.network.daemon import DaemonError
from node.network.sockets import socket_directory
from node.reporting.status import Status, to_json
from node.runtime.directories import user_directory
from node.runtime.json_file import read_json, replace_private
from node.runtime.locks import hold
from node.runtime.program import typed

log = logging.getLogger(__name__)

FILE = "control.json"
MAX_REQUEST_BYTES = 1 << 10
MAX_ANSWER_BYTES = 1 << 22
MAX_CLIENTS = 4
MAX_HOMES = 1000
SERVE_SECONDS = 5.0

Command: TypeAlias = Callable[[Mapping[str, Any]], Awaitable[Mapping[str, object]]]
"""Carries out a request, and returns the answer; see `node.session.processes.carry_out`."""


class ControlUnavailable(Exception):
    """No peer answers at the control socket. The message says what, why and what to do."""


class ControlServer:
    """The control socket of a running peer. An async context manager.

    If the socket cannot be opened, that is logged, and the peer continues without one.
    """

    def __init__(self, state_dir: Path, status: Callable[[], Status], command: Command) -> None:
        self._file = state_dir / FILE
        self._status, self._command = status, command
        self._clients: set[asyncio.Task[None]] = set()
        self._exit = ExitStack()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> ControlServer:
        try:
            self._file.unlink(missing_ok=True)
            path = self._exit.enter_context(socket_directory()) / "control"
            self._server = await asyncio.start_unix_server(self._accept, path, limit=MAX_REQUEST_BYTES)
            replace_private(self._file, json.dumps({"pid": os.getpid(), "socket": str(path)}) + "\n")
        except (OSError, DaemonError) as error:
            log.warning("`status` and `finish` cannot reach this peer: %s", error)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server:
            await asyncio.sleep(0)  # asyncio loses a connection that is half accepted when its server closes
            self._server.close()
        clients = tuple(self._clients)
        for client in clients:
            client.cancel()
        if clients:
            await asyncio.wait(clients, timeout=1)
        with suppress(OSError):
            self._file.unlink(missing_ok=True)
        self._exit.close()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._clients) >= MAX_CLIENTS:
            writer.transport.abort()
            return
        client = asyncio.create_task(self._serve(reader, writer), name="control")
        self._clients.add(client)
        client.add_done_callback(self._clients.discard)
        client.add_done_callback(lambda _: writer.transport.abort())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, ValueError):  # gone, too slow, or a request that is too long
            async with asyncio.timeout(SERVE_SECONDS):
                writer.write((await self._answer(await reader.readline())).encode() + b"\n")
                await writer.drain()
                writer.close()
                await writer.wait_closed()

    async def _answer(self, line: bytes) -> str:
        try:
            request = json.loads(line)
        except (ValueError, RecursionError):
            request = None
        if not isinstance(request, dict):
            request = {}
        return to_json(self._status() if request.get("do") == "status" else await self._command(request))


async def ask(state_dir: Path, what: str, deadline: float, **values: object) -> dict[str, Any]:
    """Send a request, "status" or one of `node.ui.control` with its `values`, to the peer of a state directory.

    `deadline` is in the loop's time. Raises ControlUnavailable if no peer answers.
    """
    place = _read(state_dir / FILE)
    try:
        async with asyncio.timeout_at(deadline):
            reader, writer = await asyncio.open_unix_connection(place["socket"], limit=MAX_ANSWER_BYTES)
            try:
                writer.write(json.dumps({"do": what, **values}).encode() + b"\n")
                answer = json.loads(await reader.readline())
            finally:
                writer.transport.abort()
    except TimeoutError:
        raise ControlUnavailable(
            f"the peer in {state_dir} (process {place.get('pid')}) does not answer: is it stopped?"
        ) from None
    except (OSError, KeyError, ValueError, RecursionError):
        raise ControlUnavailable(f"no peer runs in {state_dir}: start one with `{typed('join')}`") from None
    if not isinstance(answer, dict) or "error" in answer:
        raise ControlUnavailable(f"the peer in {state_dir} runs another version: restart it")
    return answer


async def running(home: Path, deadline: float) -> tuple[Path, ...]:
    """State directories under `home` of peers that run and whose control socket is open."""
    found = []
    for file in _files(home):
        with suppress(OSError, KeyError):
            async with asyncio.timeout_at(deadline):
                _, writer = await asyncio.open_unix_connection(_read(file)["socket"])
            writer.transport.abort()
            found.append(file.parent)
    return tuple(found)


def _files(home: Path) -> list[Path]:
    return sorted(home.glob(f"peer-*/{FILE}"))[:MAX_HOMES]


def home() -> Path:
    """Parent of the default state directories: `$XDG_STATE_HOME/starling`, or `~/.local/state/starling`."""
    variable = "XDG_STATE_HOME"
    try:
        return user_directory(variable, ".local/state") / "starling"
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}: set {variable}") from None


@contextmanager
def claimed(state_dir: Path | None) -> Iterator[Path]:
    """Create a state directory if needed, and lock it for this process; None: the first free `peer-N` of `home()`.

    That of a killed peer is free at once. Raises OSError, and BlockingIOError if another process holds it.
    """
    candidates = [state_dir] if state_dir else [home() / f"peer-{number}" for number in range(1, MAX_HOMES + 1)]
    if not state_dir:
        home().mkdir(mode=0o700, parents=True, exist_ok=True)  # as a parent it would get the default mode
    for directory in candidates:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (held := hold(directory)) is not None:
            try:
                yield directory
            finally:
                os.close(held)
            return
    raise BlockingIOError(f"another running peer holds {candidates[-1]}")


def _read(file: Path) -> dict[str, Any]:
    """The content of a control file; empty if it cannot be read."""
    with suppress(OSError, ValueError):
        place = read_json(file)
        if isinstance(place, dict) and isinstance(place.get("socket"), str):
            return place
    return {}
