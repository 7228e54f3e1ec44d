"""One peer of `benchmarks.averaging` in a process of its own. It reads commands as JSON lines and ends with its input.

    connect {peers}     connects to the other peers; (id, address) of all, by rank
    make {round}        draws this rank's vector for the round
    move {}             sends as many bytes as a round, over one plain stream to the next peer: the lower bound
    average {round}     one round of butterfly, at the head of this peer's chain. Prints "cut" before the data phase
                        and, with {mark}, "mark" when that share of the mean has arrived
    digest              SHA-256 of the result, and this process's memory; rank 0 writes the result to a file

Times are seconds of CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import resource
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import torch
import uvloop

from benchmarks.averaging_setup import Setup, say
from node.network.libp2p import LibP2PTransport
from node.runtime import identity
from node.runtime.clock import WallClock
from node.runtime.compute import ThreadCompute
from protocols import wire
from protocols.aio import run_with_helper
from protocols.base import (
    CHUNK_BYTES,
    Averager,
    Deadline,
    Host,
    LocalProgress,
    Member,
    Outcome,
    PeerId,
    Settings,
    StaticMembers,
    Stream,
    Transport,
)
from protocols.consensus.messages import Certificate
from protocols.history.chain import Chain
from protocols.registry import load_averager
from protocols.streams.framing import BULK_METHODS
from protocols.vectors.views import norm

RUN = hashlib.sha256(b"benchmarks.averaging").digest()
ROOT = bytes(32)  # no peer keeps an outer state
TRAINED_SECONDS = 60.0
"""How long before its round each peer says to have begun: by that the members judge how long to wait for a late one."""
PROBE_ELEMENTS = 1 << 12
LAG_STEP_SECONDS = 0.005
MOVE = "starling/benchmark/move/1"


class NoDirectory:
    """`protocols.base.Directory` without entries: all peers know each other."""

    async def announce(self, scope: str, value: bytes, ttl_seconds: float, deadline: Deadline) -> None: ...

    async def find(self, scope: str, limit: int, deadline: Deadline) -> Sequence[tuple[PeerId, bytes]]:
        return ()


class Lag:
    """Measures how late the event loop runs its timers, and the processor time of its thread in between."""

    def __init__(self) -> None:
        self.late: list[float] = []
        self.busy: list[float] = []

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            task.cancel()

    async def _watch(self) -> None:
        while True:
            began, cpu = time.monotonic(), time.thread_time()
            await asyncio.sleep(LAG_STEP_SECONDS)
            self.late.append(max(0.0, time.monotonic() - began - LAG_STEP_SECONDS))
            self.busy.append(time.thread_time() - cpu)

    def report(self) -> dict[str, float]:
        late = sorted(self.late) or [0.0]
        return {
            "lag_max": late[-1],
            "lag_p99": late[math.ceil(0.99 * len(late)) - 1],
            "busy_max": max(self.busy, default=0.0),
        }


class Peer:
    """This process."""

    def __init__(
        self, setup: Setup, transport: LibP2PTransport, compute: ThreadCompute, key: identity.Identity
    ) -> None:
        self.setup, self.transport, self._compute, self._key = setup, transport, compute, key
        self._next: PeerId = ""
        self._mine, self._into = torch.zeros(setup.elements), torch.zeros(setup.elements)
        self._norm = 0.0
        transport.serve(MOVE, self._on_move)

    async def obey(self, commands: asyncio.Queue[dict[str, Any]]) -> None:
        while True:
            command = await commands.get()
            name = command.pop("do")
            say(event=name, **await getattr(self, name)(**command))

    async def connect(self, peers: list[tuple[PeerId, str]]) -> dict[str, Any]:
        deadline = asyncio.get_running_loop().time() + self.setup.deadline_seconds
        for peer, address in peers:
            if peer != self.transport.me:
                await self.transport.connect(address, deadline)
        roster = tuple(sorted(Member(peer) for peer, _ in peers))
        self._chain = Chain(RUN, "benchmark", roster, ROOT)
        self._next = peers[(self.setup.rank + 1) % len(peers)][0]
        self.prepare(self.host(self.transport, roster))
        return {}

    def host(self, transport: Transport, roster: Sequence[Member]) -> Host:
        return Host(
            transport=transport,
            directory=NoDirectory(),
            members=StaticMembers(roster),
            compute=self._compute,
            clock=WallClock(),
            signer=self._key,
            seed=self.setup.seed,
        )

    def prepare(self, host: Host) -> None:
        """Create the averager."""
        setup = self.setup
        settings = Settings(
            setup.codec,
            (setup.elements,),
            bandwidth=setup.bandwidth,
            keep_rounds=setup.keep_rounds,
        )
        self._averager: Averager = load_averager("butterfly")(host, settings)

    async def make(self, round: int) -> dict[str, Any]:
        def draw() -> None:
            for low, piece in self.setup.pieces(self.setup.rank, round):
                self._mine[low : low + len(piece)] = piece
            self._norm = norm([self._mine])
            self._into.fill_(math.nan)

        await self._compute.run(draw, 4 * self.setup.elements)
        return {}

    async def move(self) -> dict[str, Any]:
        began = time.monotonic()
        data = memoryview(bytearray(CHUNK_BYTES))
        deadline = asyncio.get_running_loop().time() + self.setup.deadline_seconds
        async with self.transport.open(self._next, MOVE, deadline) as stream:
            for index, low in enumerate(range(0, self.setup.moved_bytes, CHUNK_BYTES)):
                piece = data[: min(CHUNK_BYTES, self.setup.moved_bytes - low)]
                await stream.send(wire.Chunk(index, len(piece)), piece)
            await stream.receive(64)  # it has arrived
            return {"began": began, "ended": time.monotonic(), "sent": stream.bytes_sent}

    async def _on_move(self, peer: PeerId, stream: Stream) -> None:
        buffer, left = memoryview(bytearray(CHUNK_BYTES)), self.setup.moved_bytes
        while left > 0:
            size = wire.expect(await stream.receive(64), wire.Chunk).size
            await stream.receive_into(buffer[:size])
            left -= size
        await stream.send(wire.Chunk(0, 0))

    async def average(self, round: int, mark: float | None = None) -> dict[str, Any]:
        work = LocalProgress(
            tokens=self.setup.tokens(self.setup.rank), loss=0.0, seconds=1.0, norm=self._norm, complete=True
        )
        now = asyncio.get_running_loop().time()
        lag = Lag()
        entered = self._averager.enter(self._chain.head, now + self.setup.deadline_seconds, now - TRAINED_SECONDS)
        async with entered as session:
            offered = time.monotonic()
            session.offer(work)
            await session.cut.wait()
            say(event="cut")
            async with lag.watched(), self._marking(mark):
                began = time.monotonic()
                mean = await session.average([self._mine], work, [self._into])
                ended = time.monotonic()
        if mean.outcome in (Outcome.COMMITTED, Outcome.SKIPPED):
            assert isinstance(mean.certificate, Certificate)
            self._chain.extend(mean.certificate)
            self._chain.settle(ROOT)
        return {
            "outcome": str(mean.outcome),
            "lineage": self._chain.head.key.lineage.hex(),
            "roster": [member.peer for member in self._chain.head.roster],
            "offered": offered,
            "began": began,
            "ended": ended,
            "sent": mean.bytes_sent,
            "received": mean.bytes_received,
            "blamed": {blame.peer: blame.why for blame in mean.blamed},
            "contributions": {peer: (each.chunks_counted, each.chunks) for peer, each in mean.contributions.items()},
            **lag.report(),
        }

    @asynccontextmanager
    async def _marking(self, share: float | None) -> AsyncIterator[None]:
        """Print "mark" when that share of the mean has arrived; `make` filled its memory with NaN."""

        async def watch() -> None:
            while float(torch.isnan(self._into[::PROBE_ELEMENTS]).float().mean()) > 1 - (share or 1.0):  # noqa: ASYNC110
                await asyncio.sleep(LAG_STEP_SECONDS)
            say(event="mark")

        task = asyncio.create_task(watch()) if share is not None else None
        try:
            yield
        finally:
            if task:
                task.cancel()

    async def digest(self) -> dict[str, Any]:
        content = self._into.numpy().data.cast("B")
        digest = await self._compute.run(lambda: hashlib.sha256(content).hexdigest(), len(content))
        if self.setup.rank == 0:
            await self._compute.run(lambda: self.setup.result.write_bytes(content), len(content))
        process = psutil.Process()
        return {
            "digest": digest,
            "rss": process.memory_info().rss,
            "rss_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024),
            "tasks": len(asyncio.all_tasks()),
            "descriptors": process.num_fds(),
        }


async def listen(commands: asyncio.Queue[dict[str, Any]]) -> None:
    """Read commands until the parent process closes the input, or ends."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        commands.put_nowait(json.loads(line))


def network(setup: Setup, key: identity.Identity) -> LibP2PTransport:
    """The transport for `setup.path`, `setup.listen` and `setup.relays`."""
    return LibP2PTransport(
        key,
        listen=(setup.listen,),
        nat=setup.relays is not None,
        relays=tuple(setup.relays or ()),
        direct_methods=BULK_METHODS | {MOVE} if setup.path == "direct" else None,
        runtime_directory=Path(setup.directory),
    )


async def main(setup: Setup, kind: type[Peer] = Peer) -> None:
    torch.set_num_threads(1)
    key = identity.load_or_create(Path(setup.directory) / f"identity{setup.rank}")
    async with ThreadCompute() as compute, network(setup, key) as transport:
        peer = kind(setup, transport, compute, key)
        say(event="up", peer=transport.me, address=transport.addresses[0], pid=os.getpid(), daemon=transport.daemon_pid)
        commands: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        await run_with_helper(listen(commands), peer.obey(commands))


if __name__ == "__main__":
    with suppress(BrokenPipeError):  # the parent process is gone
        uvloop.run(main(Setup(**json.loads(sys.argv[1]))))
