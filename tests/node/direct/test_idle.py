"""Idle connections: the latest is reused, few are kept, and none that was closed, spent or spoken on."""

from __future__ import annotations

import asyncio

import pytest

from node.direct import records
from node.direct.connection import DirectConnection
from node.direct.plane import MAX_IDLE, MAX_IDLE_PER_PEER, IdleConnections
from tests.support.direct_connections import connected


def add(idle: IdleConnections, peer: str) -> tuple[DirectConnection, DirectConnection]:
    """Put a connection. Returns both of its ends."""
    ends = connected()
    idle.put(peer, ends[0])
    return ends


async def test_latest_quiet_connection_is_taken_once() -> None:
    idle = IdleConnections(asyncio.create_task)
    (first, far), (_, closed), (_, spoken_on) = (add(idle, "peer") for _ in range(3))
    closed.abort()
    await spoken_on.write(b"before it was asked")
    assert idle.take("other") is None and idle.take("peer") is first and idle.take("peer") is None
    await asyncio.sleep(0)
    assert not first.closed and len(idle) == 0
    for end in (first, far, spoken_on):
        end.abort()


async def test_few_are_kept_and_none_with_a_spent_key(monkeypatch: pytest.MonkeyPatch) -> None:
    idle = IdleConnections(asyncio.create_task)
    ends = [add(idle, "peer") for _ in range(MAX_IDLE_PER_PEER + 1)]
    assert [mine.closed for mine, _ in ends] == [False] * MAX_IDLE_PER_PEER + [True]
    ends += [add(idle, f"peer {index}") for index in range(MAX_IDLE - MAX_IDLE_PER_PEER + 1)]
    assert len(idle) == MAX_IDLE and ends[0][0].closed and not ends[1][0].closed
    monkeypatch.setattr(records, "_RENEWED_AFTER", 0)
    ends.append(add(idle, "another"))
    assert ends[-1][0].closed and len(idle) == MAX_IDLE
    for each in (end for pair in ends for end in pair):
        each.abort()
    await asyncio.sleep(0)
    assert len(idle) == 0
