"""The byte meter: rates over the last seconds, bounded tables, and every byte of real streams on both sides."""

from __future__ import annotations

import asyncio

import pytest

from node.streams.byte_meter import ByteMeter, Direction, TrafficClass
from protocols import wire
from protocols.base import PeerId, Stream
from tests.support.real_transports import TransportMaker, on_uvloop, soon

SYNC = "starling/sync/1"
UP, DOWN = Direction.UPLOAD, Direction.DOWNLOAD


def test_rates_cover_the_last_seconds() -> None:
    now = [100.0]
    meter = ByteMeter(lambda: now[0])
    stream = meter.stream("a", SYNC)
    assert set(meter.rates().values()) == {0.0}
    for _ in range(200):
        stream(1000, 0)
        now[0] += 0.1
    assert meter.rates()[UP, TrafficClass.CATCH_UP] == pytest.approx(10_000, rel=0.03)
    assert meter.rates()[DOWN, TrafficClass.CATCH_UP] == 0
    now[0] += 60
    assert set(meter.rates().values()) == {0.0}
    stream(5000, 0)  # the pause counts, or a single message after it would look like a flood
    now[0] += 0.1
    assert meter.rates()[UP, TrafficClass.CATCH_UP] == pytest.approx(1000)
    assert meter.totals()[UP, TrafficClass.CATCH_UP] == 205_000


def test_the_table_of_peers_is_bounded() -> None:
    meter = ByteMeter(lambda: 0.0)
    for number in range(1000):
        meter.stream(f"peer {number}", SYNC)(0, 1)
        meter.stream("partner", SYNC)(0, 1)
    assert len(meter.peers()) <= 256
    assert meter.peers()["partner"].received == 1000
    assert meter.total(DOWN) == 2000


@pytest.mark.real
@pytest.mark.parametrize("direct", [False, True])
@on_uvloop
async def test_both_sides_count_the_same_bytes(make: TransportMaker, direct: bool) -> None:
    a, b = await make.pair(direct_methods={SYNC} if direct else None)
    size = 3_000_000

    async def receive(peer: PeerId, stream: Stream) -> None:
        await stream.receive(1000)
        await stream.receive_into(memoryview(bytearray(size)))

    b.serve(SYNC, receive)
    async with a.open(b.me, SYNC, soon()) as stream:
        await stream.send(wire.Opening(1.0), bytes(size))
    for _ in range(1000):  # the stream's end is still under way
        if a.traffic.meter.total(DOWN) == b.traffic.meter.total(UP) > 0 and b.traffic.meter.total(
            DOWN
        ) == a.traffic.meter.total(UP):
            break
        await asyncio.sleep(0.01)
    sent = a.traffic.meter.totals()[UP, TrafficClass.CATCH_UP]
    assert a.traffic.meter.total(UP) == b.traffic.meter.total(DOWN) and a.traffic.meter.total(
        DOWN
    ) == b.traffic.meter.total(UP)
    assert size < sent < 1.001 * size
    assert a.traffic.meter.totals()[UP, TrafficClass.ROUND] == 0
    assert a.traffic.meter.peers()[b.me].sent == a.traffic.meter.total(UP)
