"""The proxy between peers: what it does to bytes, to whose, and that all else arrives as it was sent."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.faults import proxy
from tests.faults.proxy import Faults, Wire

ENDS = ("10.77.0.2", "10.77.0.3")
DATA = random.Random(1).randbytes(1_000_000)


def test_bits_flip_at_the_requested_rate() -> None:
    wire = Wire(random.Random(0), Faults(ENDS[:1], flip_every_bytes=10_000))
    changed = wire.corrupted(ENDS, DATA)
    flipped = [(one ^ other).bit_count() for one, other in zip(changed, DATA, strict=True) if one != other]
    assert 60 < len(flipped) < 150 and set(flipped) == {1}
    assert wire.corrupted(("10.77.0.4", "10.77.0.5"), DATA) == DATA
    assert wire.take_counts() == {"delayed_bytes": 0, "flipped_bits": len(flipped)}
    assert wire.take_counts()["flipped_bits"] == 0


@pytest.mark.real
async def test_delayed_bytes_arrive_whole_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways, with the end of each; the jitter is ten times the latency, so that pieces would overtake others."""
    loop = asyncio.get_running_loop()

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.read())
        writer.write_eof()
        await writer.drain()
        writer.close()

    wire = Wire(random.Random(0), Faults((), latency_seconds=0.01, jitter_seconds=0.1))
    async with (
        asyncio.timeout(20),
        await asyncio.start_server(echo, "127.0.0.1", 0) as target,
        await asyncio.start_server(wire.carry, "127.0.0.1", 0) as between,
    ):
        where = target.sockets[0].getsockname()
        monkeypatch.setattr(proxy, "original", lambda link: where)
        reader, writer = await asyncio.open_connection(*between.sockets[0].getsockname())
        began = loop.time()
        writer.write(DATA)
        writer.write_eof()
        assert await reader.read() == DATA
        assert loop.time() - began >= 2 * 0.01
        writer.close()
        await writer.wait_closed()
    assert wire.take_counts()["delayed_bytes"] == 2 * len(DATA)
