"""What the web page costs a peer that trains.

    python -m benchmarks.page [--pairs 6] [--tabs 1] [--stalled 0]

One `join` peer trains the default model with its page on. Rounds take turns: in every second one, readers hold the
page's stream open: `--tabs` of them read as a browser does, `--stalled` of them never read. From its own reports come
the training rate and the lag of its event loop, from the system the processor time of its own process (without worker
and p2pd). Two more peers, one without a page, give the memory. The readers themselves need little; a browser would take
processor time that the page is not to blame for.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.joined_peer import START_SECONDS, JoinedPeer
from node.page.keys import read_link
from tests.sim.arguments import Parser

WARM_UP_ROUNDS = 2
ROUND_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Round:
    """One round's figures.

    Attributes:
        tokens_per_second: of training.
        cores: processor time of the peer's own process per second.
        lag_seconds: 99th percentile of the event loop's lag.
    """

    tokens_per_second: float
    cores: float
    lag_seconds: float


def address(peer: JoinedPeer) -> tuple[int, str]:
    """Port and token of a peer's page."""
    link = read_link(peer.directory)
    assert link is not None
    port, _, token = link.rpartition(":")[2].partition("/#")
    return int(port), token


@asynccontextmanager
async def readers(peer: JoinedPeer, tabs: int, stalled: int) -> AsyncIterator[None]:
    """Hold streams open."""
    port, token = address(peer)
    key = await session_key(port, token)
    request = f"GET /api/stream HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {key}\r\n\r\n".encode()
    async with AsyncExitStack() as stack:
        for number in range(tabs + stalled):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 12)
            stack.callback(writer.transport.abort)
            writer.write(request)
            if number < tabs:
                reading = asyncio.create_task(_read(reader))
                stack.callback(reading.cancel)
            else:
                writer.transport.pause_reading()  # type: ignore[attr-defined]
        yield


async def session_key(port: int, token: str) -> str:
    """Open a session, as the page's script does."""
    nonce, host = secrets.token_hex(16), f"127.0.0.1:{port}"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET /session HTTP/1.1\r\nHost: {host}\r\nX-Nonce: {nonce}\r\nConnection: close\r\n\r\n".encode())
    answer = json.loads((await reader.read()).partition(b"\r\n\r\n")[2])
    writer.close()
    text = "|".join(("starling page 1", "session", host, nonce, answer["salt"]))
    return hmac.new(token.encode(), text.encode(), "sha256").hexdigest()


async def _read(reader: asyncio.StreamReader) -> None:
    while await reader.read(1 << 16):
        pass


async def measure(pairs: int, tabs: int, stalled: int, directory: Path) -> tuple[list[Round], list[Round]]:
    """Rounds without and with readers, in turns."""
    loop = asyncio.get_running_loop()
    figures: tuple[list[Round], list[Round]] = ([], [])
    total = WARM_UP_ROUNDS + 2 * pairs
    async with JoinedPeer.run(directory, "--page", "--rounds", str(total + 1)) as peer:
        await peer.rounds_done(WARM_UP_ROUNDS, START_SECONDS + ROUND_SECONDS)
        for number in range(2 * pairs):
            began, before = loop.time(), peer.cpu_seconds
            async with AsyncExitStack() as stack:
                if number % 2:
                    await stack.enter_async_context(readers(peer, tabs, stalled))
                report = (await peer.rounds_done(WARM_UP_ROUNDS + number + 1, ROUND_SECONDS))[-1]
            cores = (peer.cpu_seconds - before) / (loop.time() - began)
            rate = report.tokens / report.seconds_train
            figures[number % 2].append(Round(rate, cores, report.loop_lag_p99_seconds))
    return figures


async def memory(directory: Path, *flags: str) -> int:
    """Memory of a peer's own process after its first round."""
    async with JoinedPeer.run(directory, "--rounds", "3", *flags) as peer:
        await peer.rounds_done(1, START_SECONDS + ROUND_SECONDS)
        if "--page" in flags:
            async with readers(peer, 1, 0):
                await asyncio.sleep(3)
        return peer.memory_bytes


def table(without: Sequence[Round], beside: Sequence[Round]) -> dict[str, float]:
    """Print the figures; returns those of the last line."""
    print(f"{'':28}{'no reader':>12}{'readers':>12}")
    values: dict[str, float] = {}
    for name, of in (
        ("tokens per second", lambda each: each.tokens_per_second),
        ("cores of the peer's process", lambda each: each.cores),
        ("loop lag p99, ms", lambda each: 1000 * each.lag_seconds),
    ):
        first, second = median(map(of, without)), median(map(of, beside))
        print(f"{name:28}{first:12.4g}{second:12.4g}")
        values |= {f"{name}, no reader": first, f"{name}, readers": second}
    pairs = [after.tokens_per_second / before.tokens_per_second for before, after in zip(without, beside, strict=True)]
    values["rate with readers / without, median of pairs"] = median(pairs)
    print(f"rate with readers / without: {median(pairs):.3f} ({min(pairs):.3f} to {max(pairs):.3f})")
    return values


async def run(pairs: int, tabs: int, stalled: int) -> None:
    with tempfile.TemporaryDirectory() as place:
        values = table(*await measure(pairs, tabs, stalled, Path(place) / "measured"))
        plain = await memory(Path(place) / "plain", "--no-page")
        paged = await memory(Path(place) / "paged", "--page")
    values["memory of the page, MB"] = (paged - plain) / 1e6
    print(f"memory: {plain / 1e6:.1f} MB without a page, {paged / 1e6:.1f} MB with one and a reader")
    print(json.dumps(values))


def main() -> int:
    parser = Parser(prog="python -m benchmarks.page", description="What the web page costs a peer that trains.")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--tabs", type=int, default=1)
    parser.add_argument("--stalled", type=int, default=0)
    given = parser.parse_args()
    if given.pairs < 1 or not 0 <= given.tabs + given.stalled <= 8:
        parser.error("give at least one pair, and at most eight readers: the page takes no more")
    asyncio.run(run(given.pairs, given.tabs, given.stalled))
    return 0


if __name__ == "__main__":
    sys.exit(main())
