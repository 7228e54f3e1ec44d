"""Caps in virtual time: the rate holds, small control messages never wait, rounds go first, and nobody starves."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.streams.byte_limiter import (
    BURST_SECONDS,
    CATCH_UP_EVERY,
    MAX_DEBT_SECONDS,
    MAX_SMALL_DEBT_SECONDS,
    PIECE_BYTES,
    SMALL_BYTES,
    ByteLimiter,
)
from node.streams.byte_meter import TrafficClass
from node.streams.traffic import StreamTraffic
from protocols import wire
from protocols.aio import loop_time
from protocols.base import PeerId, Stream
from tests.support.real_transports import TransportMaker, on_uvloop, soon
from tests.support.simulated import on_virtual_time

CONTROL, ROUND, CATCH_UP = TrafficClass.CONTROL, TrafficClass.ROUND, TrafficClass.CATCH_UP
SYNC, DATA = "starling/sync/1", "starling/butterfly/data/1"
rates = st.floats(65_536, 2e7)
demands = st.lists(
    st.tuples(st.sampled_from([ROUND, CATCH_UP]), st.integers(3000, PIECE_BYTES), st.integers(0, 20)),
    min_size=1,
    max_size=6,
)
"""Streams: class, size of a piece, and when it begins, in times that a whole piece takes."""


class Passed:
    """Bytes that a limiter has let pass, with the time of each."""

    def __init__(self, limiter: ByteLimiter) -> None:
        self.limiter = limiter
        self.log: list[tuple[float, TrafficClass, int, int]] = []

    async def stream(self, number: int, kind: TrafficClass, piece: int, after: float = 0.0) -> None:
        await asyncio.sleep(after)
        while True:
            await self.limiter.take(kind, piece)
            self.log.append((loop_time(), kind, number, piece))
            await asyncio.sleep(0)

    async def control(self, seconds: float, size: int) -> None:
        while True:
            before = loop_time()
            await self.limiter.take(CONTROL, size)
            assert loop_time() == before
            self.log.append((before, CONTROL, -1, size))
            await asyncio.sleep(seconds)

    async def during(self, seconds: float, *streams: asyncio.Task[None]) -> None:
        await asyncio.sleep(seconds)
        for each in streams:
            assert not each.done() or each.cancelled() or not each.exception()
            each.cancel()
        await asyncio.gather(*streams, return_exceptions=True)

    def bytes(self, kind: TrafficClass | None = None, number: int | None = None, since: float = 0.0) -> int:
        return sum(
            size
            for at, each, stream, size in self.log
            if at >= since and kind in (None, each) and number in (None, stream)
        )


@settings(max_examples=15)
@given(rates, demands, st.floats(0, 0.5))
@on_virtual_time
async def test_the_rate_holds_and_control_never_waits(
    rate: float, streams: Sequence[tuple[TrafficClass, int, int]], control_share: float
) -> None:
    passed, tick = Passed(ByteLimiter(rate)), PIECE_BYTES / rate
    size = int(control_share * SMALL_BYTES)
    tasks = [
        asyncio.create_task(passed.stream(number, kind, piece, after * tick))
        for number, (kind, piece, after) in enumerate(streams)
    ]
    tasks.append(asyncio.create_task(passed.control(tick * SMALL_BYTES / PIECE_BYTES, size)))
    first = tick * min(after for _, _, after in streams)
    await passed.during(first + 100 * tick, *tasks)
    burst = max(PIECE_BYTES, rate * BURST_SECONDS) + PIECE_BYTES + size
    small = rate * MAX_SMALL_DEBT_SECONDS if any(piece <= SMALL_BYTES for _, piece, _ in streams) else 0
    counted = passed.bytes(since=first - 1e-6)  # asyncio runs a timer up to its clock's resolution early
    assert 100 * PIECE_BYTES - burst <= counted <= 100 * PIECE_BYTES + burst + small


@settings(max_examples=40)
@given(rates, st.integers(1, 4), st.integers(1, 4))
@on_virtual_time
async def test_rounds_go_first_and_no_stream_starves(rate: float, rounds: int, joiners: int) -> None:
    passed, piece = Passed(ByteLimiter(rate)), PIECE_BYTES
    seconds = 16 * CATCH_UP_EVERY * piece / rate
    kinds = [ROUND] * rounds + [CATCH_UP] * joiners
    tasks = [asyncio.create_task(passed.stream(n, kind, piece)) for n, kind in enumerate(kinds)]
    await passed.during(seconds, *tasks)
    pieces = [passed.bytes(number=n) // piece for n in range(len(kinds))]
    for group in (pieces[:rounds], pieces[rounds:]):
        assert max(group) - min(group) <= 1  # equal streams get equal shares
    # A stream that has just had its turn waits again at once, so it may miss one turn of its class.
    assert sum(pieces[rounds:]) * CATCH_UP_EVERY >= 0.9 * sum(pieces)
    assert sum(pieces[rounds:]) <= 0.1 * sum(pieces) or rounds == 1


@settings(max_examples=20)
@given(rates, st.booleans())
@on_virtual_time
async def test_floods_of_strangers_leave_rounds_the_line(rate: float, small: bool) -> None:
    passed, tick = Passed(ByteLimiter(rate)), PIECE_BYTES / rate

    async def strangers(size: int) -> None:
        while True:
            await passed.limiter.take(CONTROL, size, by_stranger=True)
            await asyncio.sleep(0)

    sizes = [300, 3000] if small else [PIECE_BYTES] * 20
    tasks = [asyncio.create_task(strangers(size)) for size in sizes]
    tasks.append(asyncio.create_task(passed.stream(0, ROUND, PIECE_BYTES)))
    await passed.during(200 * tick, *tasks)
    assert passed.bytes(ROUND) >= 0.8 * 200 * PIECE_BYTES


@on_virtual_time
async def test_debt_of_control_messages_is_bounded() -> None:
    limiter = ByteLimiter(1e6)
    for _ in range(25_000):
        await limiter.take(CONTROL, SMALL_BYTES)  # 100 MB
    began = loop_time()
    await limiter.take(ROUND, PIECE_BYTES)
    assert loop_time() - began <= MAX_DEBT_SECONDS + 0.01


@pytest.mark.parametrize("receives", [False, True])
async def test_cancel_at_the_turn_spends_right(receives: bool) -> None:
    """Bytes that were read have passed, so they count once. Bytes that were not sent do not count."""
    now = 0.0
    limiter = ByteLimiter(65_536.0, lambda: now)
    stream = StreamTraffic(lambda sent, received: None, ROUND, limiter, limiter)
    limiter.spend(3 * PIECE_BYTES)
    waits = stream.may_receive(PIECE_BYTES, 0) if receives else stream.may_send(PIECE_BYTES)
    task = asyncio.create_task(waits)
    await asyncio.sleep(0)
    now = 10.0  # the bucket is full
    limiter.set_rate(65_536.0)  # gives the turn
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    later = [asyncio.create_task(limiter.take(ROUND, PIECE_BYTES)) for _ in range(4)]
    await asyncio.sleep(0)
    assert task.cancelled() and sum(each.done() for each in later) == (1 if receives else 2)
    for each in later:
        each.cancel()


@on_virtual_time
async def test_a_cap_changed_meanwhile_holds_at_once() -> None:
    passed = Passed(ByteLimiter(65_536.0))
    tasks = [asyncio.create_task(passed.stream(n, ROUND, PIECE_BYTES)) for n in range(3)]
    await asyncio.sleep(10)
    passed.limiter.set_rate(6.5536e6)
    changed = loop_time()
    await asyncio.sleep(10)
    fast = passed.bytes(since=changed)
    tasks[0].cancel()  # a stream that gives up leaves its place in the queue
    passed.limiter.set_rate(None)
    await asyncio.sleep(0)
    passed.limiter.set_rate(65_536.0)
    slow = loop_time()
    await passed.during(10, *tasks)
    assert 0.95 * 65.536e6 <= fast <= 1.05 * 65.536e6
    assert passed.bytes(since=slow) <= 15 * PIECE_BYTES


@pytest.mark.real
@pytest.mark.parametrize("direct", [False, True])
@on_uvloop
async def test_real_streams_keep_both_caps(make: TransportMaker, direct: bool) -> None:
    a, b = await make.pair(direct_methods={SYNC, DATA} if direct else None)
    rate, size, arrived = 2e6, 1_000_000, 0.0

    async def receive(peer: PeerId, stream: Stream) -> None:
        await stream.receive(1000)
        await stream.receive_into(memoryview(bytearray(size)))
        await stream.send(wire.Opening(1.0))

    async def send(method: str) -> None:
        nonlocal arrived
        async with a.open(b.me, method, soon()) as stream:
            await stream.send(wire.Opening(1.0), bytes(size))
            await stream.receive(1000)
            arrived = loop_time()

    for method in (SYNC, DATA):
        b.serve(method, receive)
    await send(DATA)  # both ways are open from here on
    for limiter in (a.traffic.upload, b.traffic.download):
        limiter.set_rate(rate)
        began = loop_time()
        async with asyncio.TaskGroup() as group:
            for method in (SYNC, DATA, DATA):
                group.create_task(send(method))
        seconds = arrived - began
        assert (3 * size - PIECE_BYTES - rate * BURST_SECONDS) / rate <= seconds <= 2 * 3 * size / rate
        limiter.set_rate(None)
