"""Idle connections: the latest is reused, few are kept, and none that was closed, spent or spoken on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from node.direct import records
from node.direct.connection import DirectConnection
from node.direct.idle import MAX_IDLE, MAX_IDLE_PER_PEER, IdleConnections
from tests.support.direct_connections import connected


class Idle(IdleConnections):
    """With the connections put, and the other ends of all."""

    def __init__(self) -> None:
        super().__init__(asyncio.create_task)
        self.ends: list[DirectConnection] = []

    def add(self, peer: str) -> tuple[DirectConnection, DirectConnection]:
        mine, theirs = connected()
        self.ends += (mine, theirs)
        self.put(peer, mine)
        return mine, theirs


@pytest.fixture
async def idle() -> AsyncIterator[Idle]:
    made = Idle()
    yield made
    for end in made.ends:
        end.abort()
    await asyncio.sleep(0)


async def test_latest_quiet_connection_is_taken_once(idle: Idle) -> None:
    (first, _), (_, closed), (_, spoken_on) = (idle.add("peer") for _ in range(3))
    closed.abort()
    await spoken_on.write(b"before it was asked")
    assert idle.take("other") is None and idle.take("peer") is first and idle.take("peer") is None
    await asyncio.sleep(0)
    assert not first.closed and len(idle) == 0


async def test_few_are_kept_for_a_peer_and_in_all(idle: Idle) -> None:
    first, *more = [idle.add("peer")[0] for _ in range(MAX_IDLE_PER_PEER + 1)]
    assert [each.closed for each in more] == [False] * (MAX_IDLE_PER_PEER - 1) + [True]
    for index in range(MAX_IDLE - MAX_IDLE_PER_PEER + 1):
        idle.add(f"peer {index}")
    assert len(idle) == MAX_IDLE and first.closed and not more[0].closed


async def test_spent_key_and_closed_connection_are_not_kept(idle: Idle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_RENEWED_AFTER", 1)
    mine, theirs = connected()
    idle.ends += (mine, theirs)
    await mine.write(b"one record")
    idle.put("peer", mine)
    assert mine.closed and len(idle) == 0
    _, other = idle.add("peer")
    other.abort()
    async with asyncio.timeout(20):
        while len(idle):
            await asyncio.sleep(0.01)
