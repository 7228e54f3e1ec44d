"""How much memory p2pd holds after many streams, and after many peers that came and left.

    python -m benchmarks.daemon [--streams 4000] [--peers 100]

Two peers run on the loopback. The first one's p2pd is watched while it opens streams to the other, accepts streams and
moves data. Then joiners connect, open a stream and end, every second one by SIGKILL. After each tenth a line shows:

    kept       live heap after Go's last collection, MB. A leak always shows here.
    resident   mean and maximum over that tenth, MB: with garbage, stacks, and 31 MB of p2pd itself.
    cpu        seconds of processor time so far.

The last line is JSON. `GOGC=100` in front of the command shows Go's default.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import uvloop

from node.network.libp2p import LibP2PTransport
from node.runtime import identity
from protocols import wire
from protocols.base import PeerId, Transport
from tests.conformance.other_process import echo
from tests.sim.arguments import Parser, at_least

_MIB = 1 << 20
_TENTHS, _TOGETHER, _PATIENT_SECONDS, _LOOK_SECONDS = 10, 8, 300.0, 0.1
_MOVED_MEGABYTES = 80
_COLLECTED = re.compile(r"gc (?P<number>\d+) @.*->(?P<kept>\d+) MB, ")


class _Heard(logging.Handler):
    """Go's log of its collections (GODEBUG=gctrace=1), read from p2pd's output line by line."""

    kept_megabytes = collections = 0

    def emit(self, record: logging.LogRecord) -> None:
        if found := _COLLECTED.search(record.getMessage()):
            self.collections, self.kept_megabytes = int(found["number"]), int(found["kept"])


class _Watch:
    """The memory of one process between two printed lines."""

    def __init__(self, pid: int, heard: _Heard) -> None:
        self._process, self._heard, self._seen = psutil.Process(pid), heard, list[float]()
        self.rows: list[dict[str, Any]] = []

    async def look(self) -> None:
        while True:
            self._seen.append(self._process.memory_info().rss / _MIB)
            await asyncio.sleep(_LOOK_SECONDS)

    def line(self, after: str) -> None:
        self._seen.append(self._process.memory_info().rss / _MIB)
        row = {"after": after, "kept": self._heard.kept_megabytes, "collections": self._heard.collections}
        row |= {"resident": round(sum(self._seen) / len(self._seen), 1), "most": round(max(self._seen), 1)}
        row |= {"cpu": round(sum(self._process.cpu_times()[:2]), 2), "descriptors": self._process.num_fds()}
        self._seen.clear()
        self.rows.append(row)
        print("  ".join(f"{name} {value}" for name, value in row.items()), file=sys.stderr, flush=True)


def _soon() -> float:
    return asyncio.get_running_loop().time() + _PATIENT_SECONDS


async def _ask(transport: Transport, peer: PeerId, size: int = 4) -> None:
    data = bytearray(size)
    async with transport.open(peer, "echo", _soon()) as stream:
        await stream.send(wire.Chunk(1, size), data)
        await stream.receive(64)
        await stream.receive_into(memoryview(data))


@asynccontextmanager
async def _peer(home: Path, name: str) -> AsyncIterator[LibP2PTransport]:
    async with LibP2PTransport(identity.create(home / name), runtime_directory=home) as transport:
        transport.serve("echo", echo)
        yield transport


async def _newcomer(home: Path, number: int, there: LibP2PTransport) -> None:
    async with _peer(home, f"newcomer-{number}") as transport:
        await transport.connect(there.addresses[0], _soon())
        await _ask(transport, there.me)
        if number % 2 and (pid := transport.daemon_pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


async def _tenths(watch: _Watch, what: str, many: int, together: int, one: Callable[[int], Awaitable[None]]) -> None:
    done = 0
    for tenth in range(1, _TENTHS + 1):
        while done < many * tenth // _TENTHS:
            batch = range(done, min(done + together, many * tenth // _TENTHS))
            await asyncio.gather(*map(one, batch))
            done = batch.stop
        watch.line(f"{done} {what}")


async def _measure(home: Path, streams: int, peers: int) -> list[dict[str, Any]]:
    heard, words = _Heard(), logging.getLogger("node.network.daemon")
    words.addHandler(heard)
    words.setLevel(logging.DEBUG)
    words.propagate = False
    async with _peer(home, "b") as other:
        os.environ["GODEBUG"] = "gctrace=1"  # of the next p2pd that is started
        async with _peer(home, "a") as watched:
            del os.environ["GODEBUG"]
            assert watched.daemon_pid is not None
            await other.connect(watched.addresses[0], _soon())
            watch = _Watch(watched.daemon_pid, heard)
            looking = asyncio.create_task(watch.look())
            watch.line("its start")
            await _tenths(watch, "streams out", streams // 2, _TOGETHER, lambda _: _ask(watched, other.me))
            await _tenths(watch, "streams in", streams // 2, _TOGETHER, lambda _: _ask(other, watched.me))
            for _ in range(_MOVED_MEGABYTES // 8):
                await asyncio.gather(_ask(watched, other.me, 2 * _MIB), _ask(other, watched.me, 2 * _MIB))
            watch.line(f"{_MOVED_MEGABYTES} MB moved")
            await _tenths(watch, "peers", peers, 2, lambda number: _newcomer(home, number, watched))
            looking.cancel()
            assert not watched.restarts, "its p2pd was ended because it did not answer: this machine is too busy"
    return watch.rows


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m benchmarks.daemon", description=__doc__)
    parser.add_argument("--streams", type=lambda text: at_least(2 * _TENTHS, text), default=4000, metavar="N")
    parser.add_argument("--peers", type=lambda text: at_least(_TENTHS, text), default=100, metavar="N")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.ERROR)
    with (
        tempfile.TemporaryDirectory(prefix="st") as home,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        rows = runner.run(_measure(Path(home), options.streams, options.peers))
    print(json.dumps({"gogc": os.environ.get("GOGC", "as started"), "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
