"""What the swarm's table on the page costs a peer: bytes and processor time, with many peers.

    python -m benchmarks.swarm_page [--peers 32] [--seconds 60]

One process has a peer's transport (with its p2pd), its poller of the others' status and its page; it takes no part in
rounds. The other peers are real transports with a p2pd each, in a second process. They answer as a peer in a session
does. The same time passes without a reader, then with one that holds the page's stream open as a browser does.
Bytes of the stream are those that the reader gets; bytes between peers are those of the loopback (/proc/net/dev), with
the headers of TCP and IP and what libp2p adds, less those of the page's connection and of the time without a reader. So
nothing else may use the loopback: run it in a network namespace of its own.

    unshare -rn sh -c 'ip link set lo up && python -m benchmarks.swarm_page'

The last line is a JSON object. The exit code is 1 if the bytes or the processor time miss their aims.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import psutil
import uvloop

from benchmarks.page import session_key
from node.config.peer_sources import load_peer
from node.joining.bootstrap import BootstrapServer, RunInfo, ask_summary
from node.network.libp2p import LibP2PTransport
from node.page.keys import read_link
from node.page.server import PageServer
from node.reporting.event_feed import EventFeed
from node.reporting.status import PeerStatus, Status, public
from node.runtime import identity
from node.runtime.clock import WallClock
from node.session.processes import PageContent
from node.session.status_tracker import StatusTracker
from node.session.swarm_poller import SwarmPoller
from node.session.traffic_limits import TrafficLimits
from protocols.base import Member
from tests.sim.arguments import Parser, at_least
from tests.sim.host import SimCompute
from tests.support.scripted_page import Sink
from tests.support.status_examples import STATUS

BYTES_AIM, CORES_AIM = 8000.0, 0.01
SETTLE_SECONDS, START_SECONDS = 20.0, 120.0


def crowd(peers: Sequence[str]) -> tuple[PeerStatus, ...]:
    address = "/ip4/203.0.113.7/tcp/41233"
    return tuple(
        PeerStatus(each, f"laptop-{number}", True, True, 60, address, route="direct")
        for number, each in enumerate(peers)
    )


class KnownSwarm(StatusTracker):
    """The status of a peer in a session, with these other peers."""

    others: tuple[PeerStatus, ...] = ()

    def status(self) -> Status:
        self.state = "training"
        address = f"/ip4/203.0.113.7/tcp/41233/p2p/{self.peer}"
        return replace(
            super().status(), peers=self.others, run="starling", run_id="cd" * 32, tokens_per_second=48_211.0,
            addresses=(address,) * 3, lineage="ab" * 32, round=60, rounds=200, loss=1.4567890123, protocol="butterfly",
            held_out_loss=1.3456789012, tokens=14_200_000, bytes_sent=1_450_000_000, bytes_received=1_500_000_000,
            eta_seconds=8400.123456789, checkpoint_age_seconds=190.123456789, device="cpu",
        )  # fmt: skip


async def measured(directory: Path) -> None:
    """The measured process. Its peers are the addresses on stdin, one a line; it says on stdout that it is ready."""
    addresses = [line.strip() for line in sys.stdin]
    config, clock, view = load_peer({}, {}, None), WallClock(), EventFeed(Sink(), WallClock().wall)
    key = identity.create(directory / "identity.key")
    limits = TrafficLimits(config, clock.wall, directory, SimCompute())
    tracker = KnownSwarm("ada", Member(key.peer_id), limits, clock)
    async with tracker.lag, LibP2PTransport(key) as transport:
        deadline = asyncio.get_running_loop().time() + START_SECONDS
        peers = [await transport.connect(each, deadline) for each in addresses]
        tracker.transport, tracker.others = transport, crowd(peers)
        poller = SwarmPoller(tracker.status, view.say)
        polling = asyncio.create_task(poller.run(partial(ask_summary, transport), lambda: peers))
        content = PageContent(config, tracker, transport, view, _no_command, poller)
        async with PageServer(content, view.say, state_dir=directory):
            print("ready", transport.daemon_pid, flush=True)
            await asyncio.sleep(1e6)
        polling.cancel()


async def _no_command(request: object) -> dict[str, object]:
    return {"error": "no commands here"}


@asynccontextmanager
async def others(number: int, directory: Path) -> AsyncIterator[list[str]]:
    """Real transports that answer for their status; the addresses."""
    async with AsyncExitStack() as stack:
        keys = [identity.create(directory / f"key-{each}") for each in range(number)]
        addresses = []
        for each in keys:
            transport = await stack.enter_async_context(LibP2PTransport(each))
            mine = replace(
                STATUS, state="training", reason="", waiting_for=(), peer=each.peer_id, version="0.2.0+g1f3c2ab",
                device="NVIDIA GeForce RTX 4090", peers=crowd([other.peer_id for other in keys if other is not each]),
            )  # fmt: skip
            BootstrapServer(transport, RunInfo(b"", b""), partial(lambda status: asdict(public(status)), mine))
            addresses.append(transport.addresses[0])
        yield addresses


@asynccontextmanager
async def measured_process(directory: Path, addresses: Sequence[str]) -> AsyncIterator[list[psutil.Process]]:
    """The measured peer's own process and its p2pd."""
    command = (sys.executable, "-m", "benchmarks.swarm_page", "--measured", str(directory))
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert process.stdin and process.stdout
    try:
        process.stdin.write("".join(f"{each}\n" for each in addresses).encode())
        process.stdin.close()
        async with asyncio.timeout(START_SECONDS):
            ready, _, daemon = (await process.stdout.readline()).decode().partition(" ")
        assert ready == "ready", "the measured process did not start"
        yield [psutil.Process(process.pid), psutil.Process(int(daemon))]
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


class Reader:
    """Reads the page's stream as a browser does, and counts its bytes."""

    received = 0

    @asynccontextmanager
    async def reading(self, directory: Path) -> AsyncIterator[None]:
        link = read_link(directory)
        assert link
        port, _, token = link.rpartition(":")[2].partition("/#")
        key = await session_key(int(port), token)
        reader, writer = await asyncio.open_connection("127.0.0.1", int(port))
        writer.write(
            f"GET /api/stream HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {key}\r\n\r\n".encode()
        )

        async def read() -> None:
            while piece := await reader.read(1 << 16):
                self.received += len(piece)

        task = asyncio.create_task(read())
        try:
            yield
        finally:
            task.cancel()
            writer.transport.abort()


def loopback_bytes() -> int:
    line = next(each for each in Path("/proc/net/dev").read_text().splitlines() if each.strip().startswith("lo:"))
    return int(line.split()[1])


def busy_seconds(processes: Sequence[psutil.Process]) -> list[float]:
    times = [each.cpu_times() for each in processes]
    return [each.user + each.system for each in times]


async def figures(seconds: float, processes: Sequence[psutil.Process], reader: Reader) -> dict[str, float]:
    """Of this time, per second."""
    before, bytes_before, page_before = busy_seconds(processes), loopback_bytes(), reader.received
    await asyncio.sleep(seconds)
    used = [after - first for after, first in zip(busy_seconds(processes), before, strict=True)]
    return {
        "page_bytes": (reader.received - page_before) / seconds,
        "loopback_bytes": (loopback_bytes() - bytes_before) / seconds,
        "own_cores": used[0] / seconds,
        "p2pd_cores": used[1] / seconds,
    }


async def run(peers: int, seconds: float) -> bool:
    reader = Reader()
    with tempfile.TemporaryDirectory(prefix="st") as place:
        directory = Path(place) / "measured"
        directory.mkdir()
        async with others(peers - 1, Path(place)) as addresses, measured_process(directory, addresses) as processes:
            await asyncio.sleep(SETTLE_SECONDS)
            idle = await figures(seconds, processes, reader)
            async with reader.reading(directory):
                await asyncio.sleep(SETTLE_SECONDS)
                open_ = await figures(seconds, processes, reader)
    more = {name: open_[name] - idle[name] for name in idle}
    between = more["loopback_bytes"] - more["page_bytes"]
    cores = more["own_cores"] + more["p2pd_cores"]
    print(f"{peers} peers, {seconds:.0f} s each, without a reader and with one; more with one, per second:")
    print(f"  page's stream {more['page_bytes']:8.0f} bytes")
    print(f"  between peers {between:8.0f} bytes, with all headers of both connections")
    print(f"  both          {more['loopback_bytes']:8.0f} bytes (aim: under {BYTES_AIM:.0f})")
    print(f"  own process   {100 * more['own_cores']:8.2f} % of a core, p2pd {100 * more['p2pd_cores']:.2f} %")
    print(f"  both          {100 * cores:8.2f} % of a core (aim: under {100 * CORES_AIM:.0f})")
    print(json.dumps({"peers": peers, "seconds": seconds, "idle": idle, "open": open_}))
    return more["loopback_bytes"] < BYTES_AIM and cores < CORES_AIM


def main() -> int:
    parser = Parser(prog="python -m benchmarks.swarm_page", description="What the swarm's table costs a peer.")
    parser.add_argument("--peers", type=partial(at_least, 2), default=32)
    parser.add_argument("--seconds", type=partial(at_least, 10), default=60)
    parser.add_argument("--measured", type=Path, help="for its own use")
    given = parser.parse_args()
    if given.measured:
        uvloop.run(measured(given.measured))
        return 0
    return 0 if uvloop.run(run(given.peers, float(given.seconds))) else 1


if __name__ == "__main__":
    sys.exit(main())
