"""The script's side of its connection to the peer: lines of JSON, and the descriptors of the shared memory."""

from __future__ import annotations

import json
import os
import select
import socket
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import Any

from node.runtime.json_file import read_json
from node.runtime.program import typed

CONNECT_SECONDS = 2.0
MAX_LINE_BYTES = 1 << 20
FILE = "own-loop.json"  # as in `node.training.script`


class LinkLost(Exception):
    """The connection to the peer has ended, or there is no peer."""


class Link:
    """`descriptors` are those that came with the first message: of the counters with the local parameters, and of the
    anchor. Both are closed with the link.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket, self._buffer = sock, b""
        self.descriptors: list[int] = []
        _open.add(self)

    @classmethod
    def connect(cls, state_dir: Path) -> Link:
        """Connect to the peer of a state directory. Raises LinkLost."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            place = read_json(state_dir / FILE)
            sock.settimeout(CONNECT_SECONDS)
            sock.connect(place["socket"])
        except (OSError, ValueError, TypeError, KeyError) as error:
            sock.close()
            begin = f"start one by `{typed('join --own-loop --state-dir')} {quote(str(state_dir))}`"
            raise LinkLost(f"no peer with --own-loop runs in {state_dir}: {begin}") from error
        return cls(sock)

    def receive(self, seconds: float) -> dict[str, Any] | None:
        """The next message; None if there is none within this time. Raises LinkLost."""
        try:
            while b"\n" not in self._buffer:
                waiting = select.poll()  # select() takes no descriptors from 1024 on
                waiting.register(self._socket, select.POLLIN)
                if not waiting.poll(1000 * max(0.0, seconds)):
                    return None
                data, descriptors, _, _ = socket.recv_fds(self._socket, 1 << 16, 2)
                for each in descriptors:
                    os.set_inheritable(each, False)
                self.descriptors += descriptors
                if not data or len(self._buffer) > MAX_LINE_BYTES:
                    raise LinkLost
                self._buffer += data
            line, _, self._buffer = self._buffer.partition(b"\n")
            message: dict[str, Any] = json.loads(line)
        except (OSError, ValueError) as error:
            raise LinkLost from error
        return message

    def send(self, kind: str, value: Any) -> None:
        try:
            self._socket.sendall(json.dumps({kind: value}).encode() + b"\n")
        except OSError as error:
            raise LinkLost from error

    def close(self) -> None:
        _open.discard(self)
        self._socket.close()
        for each in self.descriptors:
            with suppress(OSError):
                os.close(each)
        self.descriptors = []


_open: set[Link] = set()


def _close_in_child() -> None:
    """A forked data loader must not keep the connection open when the script is gone."""
    for link in tuple(_open):
        link.close()


os.register_at_fork(after_in_child=_close_in_child)
