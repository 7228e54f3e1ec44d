"""Which peers gossip asks, for how long and how often, and what an interrupted exchange leaves behind."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from protocols.base import Buffer, Header, Outcome
from protocols.pairwise.gossip import BUSY_PAUSE_SECONDS
from protocols.pairwise.state_swap import StateReceived
from protocols.streams.framing import FramedStream
from tests.sim.averaging import head
from tests.support.disguises import sending
from tests.support.pairwise import PairwiseSwarm
from tests.support.simulated import simulated


def with_slow_link(swarm: PairwiseSwarm, peer: str) -> None:
    """Let p0 have seen that its link to this peer carries next to nothing, and to the others as much as ever."""
    timeouts = swarm.gossips[0].timeouts
    for _ in range(12):
        timeouts.late(peer, -1e6, 0.0)
    for other in swarm.names:
        if other not in ("p0", peer):
            for _ in range(12):
                timeouts.took(other, 10**6, 0.0, 1.0)


def test_peer_without_enough_time_does_not_end_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """The schedule names p1, which is busy. Of the others, the link to p2 is too slow for the time left."""
    swarm = PairwiseSwarm(4, 2000, schedule="ring", chunk_elements=1000)
    with_slow_link(swarm, "p2")
    monkeypatch.setattr(swarm.gossips[0].rng, "sample", lambda population, count: list(population)[:count])
    swarm.run_round(0, 2, 3)
    assert swarm.results[0][0].mean.outcome is Outcome.COMMITTED and swarm.results[0][0].mean.peers == ("p3",)


def test_stalled_peer_costs_only_its_own_timeout() -> None:
    """p1 is busy, and its slow link would allow an exchange of a minute. p2 accepts, and then sends nothing."""

    async def stall(stream: FramedStream, header: Header, payload: Buffer) -> None:
        swarm.network.link("p2", "p0").blocked |= len(payload) > 0
        await stream.send(header, payload)

    swarm = PairwiseSwarm(3, 2000, schedule="ring", chunk_elements=1000, disguises={2: sending(stall)})
    with_slow_link(swarm, "p1")
    assert swarm.gossips[0].timeouts.timeout_seconds("p1", 16_000) > 50.0
    swarm.run_round(0, 2)
    (result,) = swarm.results[0]
    assert 2.0 < result.ended - result.asked < 5.0 and result.mean.blamed[0].peer == "p2"


def test_busy_peer_is_asked_again_only_after_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    swarm, times = PairwiseSwarm(3, schedule="ring"), list[float]()
    exchanges = swarm.gossips[0]
    ask = exchanges.ask

    async def timed(session: Any, partner: Any, until: float) -> Any:
        if partner.peer == "p1":
            times.append(asyncio.get_running_loop().time())
        return await ask(session, partner, until)

    monkeypatch.setattr(exchanges, "ask", timed)
    swarm.run_round(0, 2)
    assert swarm.results[0][0].mean.peers == ("p2",) and len(times) == 3
    assert all(later - sooner >= BUSY_PAUSE_SECONDS for sooner, later in pairwise(times))


@simulated(PairwiseSwarm, 2)
async def test_cancelled_outcome_query_counts_a_half_exchange(swarm: PairwiseSwarm) -> None:
    """p1 has moved, and all that it sends is lost. p0 asks for the outcome, and is cancelled."""
    async with swarm.beside_lenders(1, seconds=30.0):
        asking = swarm.start(0, swarm.round(0))
        while not swarm.moved(1):  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.001)
        swarm.network.link("p1", "p0").blocked = True
        exchange = swarm.gossips[0].exchange
        await asyncio.sleep(3.0)
        assert exchange is swarm.gossips[0].exchange and exchange.in_doubt, "it asks"
        asking.cancel()
        await asyncio.wait([asking])
    await swarm.settle()
    assert swarm.moved(1) and not swarm.moved(0) and swarm.gossips[0].half_exchanges == 1


def unconfirmed() -> PairwiseSwarm:
    """Two peers. p0 sends everything but the last message of an exchange."""

    async def withhold_last(stream: FramedStream, header: Header, payload: Buffer) -> None:
        if not isinstance(header, StateReceived) or swarm.gossips[0].exchange.swap.moved is None:
            await stream.send(header, payload)

    swarm = PairwiseSwarm(2, disguises={0: sending(withhold_last)})
    return swarm


@simulated(unconfirmed)
async def test_half_exchange_is_reported_in_the_next_round(swarm: PairwiseSwarm) -> None:
    """p1 has moved. It gives up waiting for p0's last message when its round is over."""

    async with swarm.beside_lenders(1, seconds=1.5):
        await swarm.start(0, swarm.round(0))
    assert swarm.moved(1) and not swarm.gossips[1].half_exchanges
    await asyncio.sleep(10.0)
    for _ in range(2):
        await swarm.start(1, swarm.lending(1, 1.0))
    await swarm.settle()
    assert [result.half_exchanges for result in swarm.results[1]] == [0, 1, 0] and swarm.results[1][1].mass_drift > 0


@simulated(unconfirmed)
async def test_partner_state_is_freed_before_the_confirmation(
    swarm: PairwiseSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """p1 has moved and waits some seconds for p0's last message. Other peers may ask it meanwhile."""
    received = list[Callable[[], Any]]()
    exchanges = swarm.gossips[1]
    begin = exchanges.begin

    def remembered(*arguments: Any) -> Any:
        exchange = begin(*arguments)
        received.append(weakref.ref(exchange.swap._theirs.part))
        return exchange

    monkeypatch.setattr(exchanges, "begin", remembered)

    async with swarm.beside_lenders(1, seconds=30.0):
        await swarm.start(0, swarm.round(0))
        assert swarm.moved(0) and swarm.moved(1) and not exchanges.half_exchanges, "it still waits"
        assert received[0]() is None
    await swarm.settle()


@simulated(PairwiseSwarm, 2)
async def test_peer_without_time_for_an_exchange_is_busy(swarm: PairwiseSwarm) -> None:
    """p0 asks p1 after the end of p1's round, while p1 still trains: p1 declines, and no peer is blamed."""

    async def late() -> None:
        async with swarm.gossips[1].enter(head(0), asyncio.get_running_loop().time() + 0.5) as session:
            session.share(swarm.states[1])
            await asyncio.sleep(20.0)

    lender = swarm.start(1, late())
    await asyncio.gather(swarm.start(0, swarm.round(0)), lender)
    await swarm.settle()
    assert not swarm.results[0][0].mean.blamed and not any(gossip.accounting.take()[0] for gossip in swarm.gossips)
