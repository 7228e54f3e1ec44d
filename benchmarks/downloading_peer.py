"""One peer of `benchmarks.downloading` in a process of its own: rank 0 is the joiner, the others are donors.

    write {}            a donor writes the state to a file: random numbers, and beside it the index of their chunks
    hold {}             a donor serves the state in that file, as a peer serves a checkpoint
    wire {sizes}        the joiner receives this many bytes from each of these donors over one stream, and does nothing
                        with them: (rank, bytes) of each
    listen {}           a donor waits for a plain TCP connection, and sends as many bytes as a state over it
    plain {host, port}  the joiner receives them
    download {ranks}    the joiner downloads the state from these donors into a file
    work {}             the joiner verifies and writes the state once more from its memory, with no other peer
    check {}            the joiner compares the file with the donors' and deletes it

All donors of a machine serve one file: it is in the cache of its disk once, not once for each of them.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import uvloop

from benchmarks.averaging_peer import MOVE, RUN, Lag, Peer, main
from benchmarks.averaging_setup import Setup
from node.storage.buffers import outer_buffer
from protocols import wire
from protocols.aio import loop_time
from protocols.base import CHUNK_BYTES, Host, PeerId, Settings, Stream
from protocols.blobs.parts import PartCache
from protocols.blobs.serving import WantChunk
from protocols.history.chain import Chain
from protocols.sync.chain_sync import ChainSync
from protocols.sync.context import SyncContext
from protocols.sync.snapshot import Snapshot, SnapshotBuffer, SnapshotIndex, Snapshots, buffer_bytes
from protocols.sync.snapshot_download import SnapshotDownload
from protocols.vectors.views import chunk_count, chunk_range

PLAIN_SECONDS = 600.0


class DownloadingPeer(Peer):
    """This process."""

    _host: Host
    _peers: list[PeerId]

    async def connect(self, peers: list[tuple[PeerId, str]]) -> dict[str, Any]:
        self._peers = [peer for peer, _ in peers]
        return await super().connect(peers)

    def prepare(self, host: Host) -> None:
        self._host = host

    # -- a donor's commands -------------------------------------------------------------------------------------------

    async def write(self) -> dict[str, Any]:
        index = await asyncio.to_thread(write_state, self.setup)
        self._index_path.write_bytes(index.pack())
        return {}

    async def hold(self) -> dict[str, Any]:
        index = self._index()
        chain = Chain(RUN, "benchmark", tuple(self._host.members.live()), index.state_root(0))
        snapshots = Snapshots()
        buffer = _buffer(self.setup, self._state_path, there=True)
        snapshots.put(Snapshot(chain.head.key.lineage, 0, index, buffer))
        self._sync = ChainSync(
            self._host,
            _settings(self.setup),
            chain=chain,
            snapshots=snapshots,
            part_cache=PartCache(self._host),
            hints=lambda: (),
        )
        return {}

    async def _on_move(self, peer: PeerId, stream: Stream) -> None:
        """Send what `wire` asks for: that many bytes, in chunks."""
        left = wire.expect(await stream.receive(64), WantChunk).index
        data = memoryview(bytearray(CHUNK_BYTES))
        while left > 0:
            piece = data[: min(CHUNK_BYTES, left)]
            await stream.send(wire.Chunk(0, len(piece)), piece)
            left -= len(piece)

    async def listen(self) -> dict[str, Any]:
        host = self.setup.listen.split("/")[2]
        listener = socket.create_server((host, 0))
        self._sending = asyncio.create_task(asyncio.to_thread(_send_plain, listener, self._state_bytes))
        return {"host": host, "port": listener.getsockname()[1]}

    # -- the joiner's commands ----------------------------------------------------------------------------------------

    async def wire(self, sizes: Sequence[tuple[int, int]]) -> dict[str, Any]:
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for rank, size in sizes:
                group.create_task(self._move(self._peers[rank], size))
        return {"seconds": time.monotonic() - began}

    async def _move(self, peer: PeerId, size: int) -> None:
        buffer = memoryview(bytearray(CHUNK_BYTES))
        async with self.transport.open(peer, MOVE, loop_time() + self.setup.deadline_seconds) as stream:
            await stream.send(WantChunk(size))
            while size > 0:
                coming = wire.expect(await stream.receive(64), wire.Chunk).size
                await stream.receive_into(buffer[:coming])
                size -= coming

    async def plain(self, host: str, port: int) -> dict[str, Any]:
        began = time.monotonic()
        await asyncio.to_thread(_receive_plain, host, port, self._state_bytes)
        return {"seconds": time.monotonic() - began}

    async def download(self, ranks: Sequence[int]) -> dict[str, Any]:
        index = self._index()
        chain = Chain(RUN, "benchmark", tuple(self._host.members.live()), index.state_root(0))
        head = replace(chain.head, state_root=index.state_root(0))
        snapshots = Snapshots(make_buffer=lambda lineage, number, size: _buffer(self.setup, self._downloaded_path))
        context = SyncContext(self._host, _settings(self.setup), snapshots, lambda: (), chain)
        download, lag = SnapshotDownload(context, head), Lag()
        donors = [self._peers[rank] for rank in ranks]
        async with lag.watched():
            began = time.monotonic()
            await download.fetch(lambda: donors, loop_time() + self.setup.deadline_seconds)
            seconds = time.monotonic() - began
        brought = [download.brought.get(donor, 0) / self._state_bytes for donor in donors]
        blamed = {fault.peer: fault.why for fault in context.accounting.take()[0]}
        extra = download.bytes_received - self._state_bytes
        return {"seconds": seconds, "brought": brought, "extra": extra, "blamed": blamed, **lag.report()}

    async def work(self) -> dict[str, Any]:
        path, index, began = self._downloaded_path, self._index(), time.monotonic()
        await self._compute.run(partial(_verify_and_write, self.setup, path, index), self._state_bytes)
        seconds = time.monotonic() - began
        path.unlink()  # the next download would find it
        return {"seconds": seconds}

    async def check(self) -> dict[str, Any]:
        same = await asyncio.to_thread(_same, self._downloaded_path, self._state_path)
        self._downloaded_path.unlink()
        return {"same": same}

    @property
    def _state_bytes(self) -> int:
        return buffer_bytes(self.setup.elements)

    @property
    def _state_path(self) -> Path:
        return Path(self.setup.directory) / "state"

    @property
    def _downloaded_path(self) -> Path:
        return Path(self.setup.directory) / "downloaded"

    @property
    def _index_path(self) -> Path:
        return Path(self.setup.directory) / "index"

    def _index(self) -> SnapshotIndex:
        return SnapshotIndex.unpack(self.setup.elements, self._index_path.read_bytes())


def write_state(setup: Setup) -> SnapshotIndex:
    """Write a state of random numbers to the donors' file, and return its index."""
    generator = torch.Generator().manual_seed(setup.seed)
    buffer = _buffer(setup, Path(setup.directory) / "state")
    digests, offset = [], 0
    for _half in range(2):
        for chunk in range(chunk_count(setup.elements)):
            low, high = chunk_range(0, setup.elements, chunk)
            data = torch.randn(high - low, generator=generator).numpy().data.cast("B")
            buffer.write(offset, data)
            digests.append(hashlib.sha256(data).digest())
            offset += len(data)
    return SnapshotIndex(setup.elements, tuple(digests))


def _buffer(setup: Setup, path: Path, there: bool = False) -> SnapshotBuffer:
    return outer_buffer(path, (setup.elements,), 0, bytes(32), there)


def _settings(setup: Setup) -> Settings:
    return Settings(setup.codec, (setup.elements,), bandwidth=setup.bandwidth)


def _verify_and_write(setup: Setup, path: Path, index: SnapshotIndex) -> None:
    """What a joiner does with each chunk, from one buffer in memory."""
    snapshot = Snapshot(bytes(32), 0, index, _buffer(setup, path))
    data = memoryview(bytearray(CHUNK_BYTES))
    for chunk in range(len(index.digests)):
        piece = data[: index.size(chunk)]
        hashlib.sha256(piece).digest()
        snapshot.put(chunk, piece)


def _same(one: Path, other: Path) -> bool:
    with one.open("rb") as left, other.open("rb") as right:
        return hashlib.file_digest(left, "sha256").digest() == hashlib.file_digest(right, "sha256").digest()


def _send_plain(listener: socket.socket, size: int) -> None:
    data = memoryview(bytearray(CHUNK_BYTES))
    listener.settimeout(PLAIN_SECONDS)
    with listener, listener.accept()[0] as connection:
        connection.settimeout(PLAIN_SECONDS)
        while size > 0:
            connection.sendall(data[: min(len(data), size)])
            size -= min(len(data), size)


def _receive_plain(host: str, port: int, size: int) -> None:
    data = memoryview(bytearray(CHUNK_BYTES))
    with socket.create_connection((host, port), PLAIN_SECONDS) as connection:
        while size > 0:
            count = connection.recv_into(data)
            if not count:
                raise EOFError("the donor closed the connection")
            size -= count


if __name__ == "__main__":
    with suppress(BrokenPipeError):  # the parent process is gone
        uvloop.run(main(Setup(**json.loads(sys.argv[1])), DownloadingPeer))
