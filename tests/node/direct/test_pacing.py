"""The pacing rate of a connection on a simulated line, and what it is where nothing waits."""

from __future__ import annotations

import asyncio
import math
import socket

import pytest

from node.direct.pacing import _SO_MAX_PACING_RATE, LEAST_BYTES, LOOK_SECONDS, next_rate
from node.streams.traffic import Traffic
from tests.support.direct_connections import SimpleServer
from tests.support.waiting import until


def steered(line: float, connections: int, base_seconds: float) -> tuple[float, float]:
    """Mean share of a line, bytes/s, and mean wait in its endless queue, of connections that always have data."""
    rates, queue, shares, waits = [math.inf] * connections, 0.0, [], []
    for step in range(600):
        waited = queue / line
        round_trip = base_seconds + waited
        wanted = [min(rate, 2 * line) for rate in rates]
        carried = min(line, queue / LOOK_SECONDS + sum(wanted))
        queue = max(0.0, queue + (sum(wanted) - carried) * LOOK_SECONDS)
        rates = [
            next_rate(rate, carried * mine / sum(wanted), round_trip, waited)
            for rate, mine in zip(rates, wanted, strict=True)
        ]
        if step > 100:
            shares.append(carried / line)
            waits.append(queue / line)
    return sum(shares) / len(shares), sum(waits) / len(waits)


@pytest.mark.parametrize("line, connections", [(1.25e6, 1), (1.25e6, 6), (12.5e6, 6), (125e6, 14)])
@pytest.mark.parametrize("base_seconds", [0.001, 0.05, 0.2])
def test_full_line_is_used_and_its_queue_stays_short(line: float, connections: int, base_seconds: float) -> None:
    share, wait_seconds = steered(line, connections, base_seconds)
    assert share > 0.85
    assert wait_seconds < 0.12 + connections * LEAST_BYTES / line


def test_connection_progresses_beside_others_that_fill_the_queue() -> None:
    rate = 1e6
    for _ in range(100):
        rate = next_rate(rate, rate, 1.05, 1.0)
    assert rate == pytest.approx(LEAST_BYTES / 1.05)


def test_without_waiting_a_connection_is_not_paced() -> None:
    assert next_rate(math.inf, 1e9, 0.09, 0.03) == math.inf


@pytest.mark.real
@pytest.mark.parametrize("is_read", [True, False])
async def test_data_waits_for_a_slow_line_and_not_for_a_reader_that_stalls(is_read: bool) -> None:
    """The line's rate is a limit of the kernel here. A reader that takes nothing has no room for more."""
    line, server, looks = 2e6, SimpleServer(), list[tuple[float, bool]]()
    sender, reader = await server.pair()
    sender.traffic = Traffic().stream("reader", "")
    sender.traffic.delivered = lambda now, connection, rate, is_waiting: looks.append((rate, is_waiting))
    if is_read:
        sender._socket.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, int(line))
    tasks = [asyncio.create_task(sender.write(bytes(32 << 20)))]
    tasks += [asyncio.create_task(reader.discard(32 << 20))] if is_read else []
    await until(lambda: len(looks) >= 8, 5)
    rates, waits = zip(*looks[3:], strict=True)
    assert {*waits} == {is_read}
    assert not is_read or sum(rates) / len(rates) == pytest.approx(line, rel=0.3)
    sender.abort()
    server.close()
    await asyncio.gather(*tasks, return_exceptions=True)
