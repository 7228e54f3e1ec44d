"""How long rounds wait for peers that still fetch what they begin from: neither for ever nor again and again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from protocols.aio import loop_time
from protocols.butterfly.lagging import PAUSE_SECONDS, WAIT_SECONDS, LaggingPeers
from tests.support.long import long
from tests.support.simulated import on_virtual_time

RUN_SECONDS = 40_000.0
ROUND_SECONDS = 0.5


class Blobs:
    """A server that a peer asks for blobs now and then, without ever having enough."""

    idle_seconds, name = 0.0, b"mean"

    def last_served(self, peer: str) -> tuple[bytes, float]:
        return self.name, self.idle_seconds if peer == "slow" else float("inf")


async def waited(lagging: LaggingPeers, limit_seconds: float = 3600.0, names: tuple[bytes, ...] | None = None) -> float:
    """Play one round: how long it waits for the slow peer."""
    began = loop_time()
    lagging.begin(began + limit_seconds, names)
    while "slow" in lagging.among(["slow", "other"]):  # noqa: ASYNC110 - it sets no event
        await asyncio.sleep(1.0)
    return loop_time() - began


@on_virtual_time
async def test_round_waits_for_limited_time() -> None:
    blobs: Any = Blobs()
    lagging = LaggingPeers(blobs, 10**7)
    assert await waited(lagging) == WAIT_SECONDS
    assert await waited(lagging, 40.0) == 20.0, "the round would run into its deadline"
    assert await waited(lagging, names=(b"mean",)) == WAIT_SECONDS
    assert await waited(lagging, names=(b"another",)) == 0.0
    blobs.idle_seconds = PAUSE_SECONDS
    assert await waited(lagging) == 0.0, "it has stalled"


@pytest.mark.parametrize("elements", (10**7, *long(1000)))
@on_virtual_time
async def test_endless_fetching_slows_run_little(elements: int) -> None:
    blobs: Any = Blobs()
    lagging, waiting_seconds = LaggingPeers(blobs, elements), 0.0
    first = [await waited(lagging) for _ in range(30)]
    assert sum(first) >= WAIT_SECONDS, "an honest joiner has the time of a state"
    while loop_time() < RUN_SECONDS:
        waiting_seconds += await waited(lagging)
        await asyncio.sleep(ROUND_SECONDS)
    assert waiting_seconds <= 0.12 * RUN_SECONDS
