"""Failpoints: named points of a round at which the harness can kill a real peer, rather than at some time.

The harness (`tests/faults/tracing.py`) listens on a Unix socket, whose path is in `STARLING_TRACE`. At every failpoint
the peer (`tests/faults/peer.py`) writes a line, `ROUND POINT`, and blocks the whole process until the harness answers
with one byte. The points are:

    send NAME, receive NAME   before a frame of averaging is sent; after the header of one was received
    sync: …, parts: …         the same for frames of state sync and of the part cache, some of which share names
    train, trained            before and after a round's steps
    read, write, evaluate     before the trainer does it
    report, reported          before and after a line of `rounds.jsonl` is written

In a run with stages, those of the trainer (train, trained, read, write, evaluate) are not reported.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

from node.reporting.report import RoundReport
from node.storage.journal import Journal
from node.training.remote import RemoteTrainer
from protocols.base import (
    ALL,
    Buffer,
    Deadline,
    Handler,
    Header,
    LocalProgress,
    PeerId,
    RoundKey,
    Stream,
    Transport,
    Vector,
)
from protocols.blobs.serving import BLOBS
from protocols.sync.requests import SYNC

log = logging.getLogger(__name__)

ANSWER_SECONDS = 10.0
VOTED = (
    "train", "send Ready", "send Plan", "receive Plan", "trained",
    "send Contribute", "send Chunk", "receive Chunk", "send Reduced", "send PartDone", "receive Reduced",
    "send Propose", "send Accept", "receive Propose", "receive Accept",
    "write", "evaluate", "report", "reported",
)  # fmt: skip
"""Points that every committed round of several peers passes, roughly in the order of their first passing.

Only the coordinator sends Plan and Propose, and only the others receive them."""
POINTS: Mapping[str, tuple[str, ...]] = {
    "butterfly": VOTED,
    "gossip": (
        "train", "receive ExchangeRequest", "send ExchangeReply", "trained", "send ExchangeRequest",
        "receive ExchangeReply", "send Chunk", "receive Chunk", "send StateReceived", "receive StateReceived",
        "read", "write", "evaluate", "report", "reported",
    ),
    "moshpit": (
        "train", "send PositionAnnouncement", "receive PositionAnnouncement", "trained", "read", "send Plan",
        "receive Plan", "send Contribute", "send Chunk", "receive Chunk", "send Reduced", "send PartDone",
        "receive Reduced",
        "write", "evaluate", "report", "reported",
    ),
}  # fmt: skip
"""Protocol -> the points that every peer passes in its rounds, roughly in their order."""

ONE_ROLE_ONLY = ("send Plan", "receive Plan", "send Propose", "receive Propose")
"""Points that only a caller or only the other members pass: the first peer that reaches one is killed."""


class FailpointClient:
    """The connection to the harness, opened at the first failpoint. Without one it logs that, and does nothing."""

    def __init__(self, path: str, answer_seconds: float = ANSWER_SECONDS) -> None:
        self.round = -1
        self._path = path
        self._socket: socket.socket | None = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(answer_seconds)
        self._connected = False

    def point(self, name: str, header: Header | None = None) -> None:
        """Report a failpoint, and block the whole process until the harness has answered.

        A header's type is added to the name, and its round is used. After an error, no further failpoints are reported.
        """
        key = getattr(header, "key", None)
        number = key.round if isinstance(key, RoundKey) else self.round
        line = f"{number} {name} {type(header).__name__}\n" if header else f"{number} {name}\n"
        try:
            if self._socket and not self._ask(self._socket, line.encode()):
                self._give_up("it is gone")
        except OSError as error:
            self._give_up(str(error))

    def _ask(self, line: socket.socket, message: bytes) -> bytes:
        if not self._connected:
            line.connect(self._path)
            self._connected = True
        line.sendall(message)
        return line.recv(1)

    def _give_up(self, why: str) -> None:
        log.warning("no answer from the harness at %s (%s): failpoints are not reported any more", self._path, why)
        self.close()

    def close(self) -> None:
        if self._socket:
            self._socket.close()
        self._socket = None


class FailpointStream:
    def __init__(self, trace: FailpointClient, inner: Stream, where: str) -> None:
        self._trace, self._inner, self._where = trace, inner, where

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def send(self, header: Header, payload: Buffer = b"") -> None:
        self._trace.point(f"{self._where}send", header)
        await self._inner.send(header, payload)

    async def receive(self, limit: int) -> Header:
        header: Header = await self._inner.receive(limit)
        self._trace.point(f"{self._where}receive", header)
        return header


class WrappedTransport:
    """A transport of which each stream is wrapped, whether this peer opens it or serves it."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner

    def wrapped(self, method: str, stream: Stream) -> Stream:
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def serve(self, method: str, handler: Handler) -> None:
        self._inner.serve(method, lambda peer, stream: handler(peer, self.wrapped(method, stream)))

    @asynccontextmanager
    async def open(self, peer: PeerId, method: str, deadline: Deadline) -> AsyncIterator[Stream]:
        async with self._inner.open(peer, method, deadline) as stream:
            yield self.wrapped(method, stream)


class FailpointTransport(WrappedTransport):
    def __init__(self, trace: FailpointClient, inner: Transport) -> None:
        super().__init__(inner)
        self._trace = trace

    def wrapped(self, method: str, stream: Stream) -> Stream:
        where = {SYNC: "sync: ", BLOBS: "blobs: "}.get(method, "")
        return cast(Stream, FailpointStream(self._trace, stream, where))


class FailpointTrainer(RemoteTrainer):
    def __init__(self, trace: FailpointClient, *given: Any) -> None:
        super().__init__(*given)
        self._trace = trace

    async def train(
        self, key: RoundKey, cut: asyncio.Event, progress: Callable[[LocalProgress], None], surplus: bool = True
    ) -> LocalProgress:
        self._trace.round = key.round
        self._trace.point("train")
        work = await super().train(key, cut, progress, surplus)
        self._trace.point("trained")
        return work

    async def read(self, into: Vector, part: slice = ALL) -> None:
        self._trace.point("read")
        await super().read(into, part)

    async def write(self, source: Vector, anchor: Vector | None = None, tokens: int = 0, part: slice = ALL) -> None:
        self._trace.point("write")
        await super().write(source, anchor, tokens, part)

    async def evaluate(self) -> float:
        self._trace.point("evaluate")
        return await super().evaluate()


class FailpointJournal(Journal):
    def __init__(self, trace: FailpointClient, path: Path) -> None:
        super().__init__(path)
        self._trace = trace

    def write(self, report: RoundReport) -> None:
        self._trace.point("report")
        super().write(report)
        self._trace.point("reported")
