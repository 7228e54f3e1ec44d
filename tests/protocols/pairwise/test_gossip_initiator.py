"""Whom gossip asks, for how long and how often; and what an asker that goes away leaves behind."""

from __future__ import annotations

import asyncio
import weakref
from itertools import pairwise
from typing import Any

import pytest

from protocols.base import Outcome
from protocols.pairwise.gossip import BUSY_PAUSE_SECONDS, Gossip
from protocols.pairwise.peer_timeouts import PeerTimeouts
from protocols.pairwise.push_sum import PushSum
from protocols.pairwise.state_swap import StateReceived
from tests.sim.byzantine.contributors import ByzantineContributorStream
from tests.sim.gossip_harness import ROUND_SECONDS, GossipHarness, head


def slow_line(swarm: GossipHarness, peer: str) -> None:
    """p0 has seen that the line to this peer carries next to nothing, and to others as much as ever."""
    patience = swarm.gossips[0].exchanges.patience
    for _ in range(12):
        patience.late(peer, -1e6, 0.0)
    for other in swarm.names:
        if other not in ("p0", peer):
            for _ in range(12):
                patience.took(other, 10**6, 0.0, 1.0)


def play(swarm: GossipHarness, *lenders: int) -> None:
    """A round of p0, while these lend their states; who does not is busy."""

    async def main() -> None:
        lending = [swarm.start(index, swarm.lending(index, 90.0)) for index in lenders]
        await swarm.start(0, swarm.round(0))
        await asyncio.gather(*lending)

    swarm.run(main)


def in_order(population: Any, count: int) -> Any:
    return list(population)[:count]


def test_peer_without_enough_time_does_not_end_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """p1, whom the schedule names, is busy; then p2 is drawn, whose line is too slow for what time there is, and p3."""
    swarm = GossipHarness(4, 2000, schedule="ring", chunk_elements=1000)
    slow_line(swarm, "p2")
    monkeypatch.setattr(swarm.gossips[0].rng, "sample", in_order)
    play(swarm, 2, 3)
    assert swarm.told[0][0].mean.outcome is Outcome.COMMITTED and swarm.told[0][0].mean.peers == ("p3",)


def test_stalled_peer_costs_only_its_own_timeout() -> None:
    """The line to p1 is slow, and p1 is busy: an exchange with it may take a minute. p2 says yes, and then nothing."""

    class Hanging(ByzantineContributorStream):
        async def send(self, header: Any, payload: Any = b"") -> None:
            swarm.network.link("p2", "p0").blocked |= len(payload) > 0
            await self._stream.send(header, payload)

    disguise = {2: lambda method, stream, pipe: Hanging(stream, pipe, "", None)}  # type: ignore[arg-type]
    swarm = GossipHarness(3, 2000, schedule="ring", chunk_elements=1000, disguises=disguise)
    slow_line(swarm, "p1")
    assert swarm.gossips[0].exchanges.patience.timeout_seconds("p1", 16_000) > 50.0
    play(swarm, 2)
    (told,) = swarm.told[0]
    assert 2.0 < told.ended - told.asked < 5.0 and told.mean.blamed[0].peer == "p2"


def test_busy_peer_is_asked_again_only_after_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    swarm, asked = GossipHarness(3, schedule="ring"), list[float]()
    initiator = swarm.gossips[0]._initiator
    ask = initiator.ask

    async def timed(session: Any, partner: Any, until: float) -> Any:
        if partner.peer == "p1":
            asked.append(asyncio.get_running_loop().time())
        return await ask(session, partner, until)

    monkeypatch.setattr(initiator, "ask", timed)
    play(swarm, 2)
    assert swarm.told[0][0].mean.peers == ("p2",) and len(asked) == 3
    assert all(later - sooner >= BUSY_PAUSE_SECONDS for sooner, later in pairwise(asked))


async def until_moved(swarm: GossipHarness) -> None:
    while not swarm.moved(1):  # noqa: ASYNC110 - it tells nobody
        await asyncio.sleep(0.001)


def test_cancelled_outcome_query_counts_a_half_exchange() -> None:
    """p1 has moved, and all that it says is lost; p0 waits for its word, asks what became of it, and is cancelled."""
    swarm = GossipHarness(2)

    async def main() -> None:
        lending = swarm.start(1, swarm.lending(1, 30.0))
        asking = swarm.start(0, swarm.round(0))
        await until_moved(swarm)
        swarm.network.link("p1", "p0").blocked = True
        exchange = swarm.gossips[0].exchanges.exchange
        await asyncio.sleep(3.0)
        assert exchange is swarm.gossips[0].exchanges.exchange and exchange.in_doubt, "it asks"
        asking.cancel()
        await asyncio.wait([asking, lending])

    swarm.run(main)
    assert swarm.moved(1) and not swarm.moved(0) and swarm.gossips[0].half_exchanges == 1


def breathless() -> GossipHarness:
    """Two, of whom p0 says everything but its last word."""

    class Breathless(ByzantineContributorStream):
        async def send(self, header: Any, payload: Any = b"") -> None:
            if not isinstance(header, StateReceived) or swarm.gossips[0].exchanges.exchange.swap.moved is None:
                await self._stream.send(header, payload)

    swarm = GossipHarness(2, disguises={0: lambda method, stream, pipe: Breathless(stream, pipe, "", None)})  # type: ignore[arg-type]
    return swarm


def test_half_exchange_is_reported_in_the_next_round() -> None:
    """p1 has moved, and gives up waiting for p0's last word when its round is over."""
    swarm = breathless()

    async def main() -> None:
        lending = swarm.start(1, swarm.lending(1, 1.5))
        await swarm.start(0, swarm.round(0))
        await asyncio.wait([lending])
        assert swarm.moved(1) and not swarm.gossips[1].exchanges.half_exchanges
        await asyncio.sleep(10.0)
        await swarm.start(1, swarm.lending(1, 1.0))
        await swarm.start(1, swarm.lending(1, 1.0))

    swarm.run(main)
    assert [told.half_exchanges for told in swarm.told[1]] == [0, 1, 0] and swarm.told[1][1].mass_drift > 0


def test_partner_state_is_freed_before_the_confirmation(monkeypatch: pytest.MonkeyPatch) -> None:
    """p1 has moved and waits for p0's last word, for seconds in which others may ask."""
    swarm = breathless()
    kept, exchanges = list[Any](), swarm.gossips[1].exchanges
    begin = exchanges.begin

    def remembered(*arguments: Any) -> Any:
        exchange = begin(*arguments)
        kept.append(weakref.ref(exchange.swap._theirs.part))
        return exchange

    monkeypatch.setattr(exchanges, "begin", remembered)

    async def main() -> None:
        lending = swarm.start(1, swarm.lending(1, 30.0))
        await swarm.start(0, swarm.round(0))
        assert swarm.moved(0) and swarm.moved(1) and not exchanges.half_exchanges, "it still waits"
        assert kept[0]() is None
        await asyncio.wait([lending])

    swarm.run(main)


def test_peer_without_time_for_an_exchange_is_busy() -> None:
    """p1 is asked when its round is over, while it still trains: it says no, and nobody is named."""
    swarm = GossipHarness(2)

    async def late() -> None:
        loop = asyncio.get_running_loop()
        async with swarm.gossips[1].enter(head(0), loop.time() + 0.5) as session:
            session.share(swarm.state[1])
            await asyncio.sleep(20.0)

    async def main() -> None:
        lending = swarm.start(1, late())
        await asyncio.gather(swarm.start(0, swarm.round(0)), lending)

    swarm.run(main)
    assert not swarm.told[0][0].mean.blamed and not any(gossip.accounting.take()[0] for gossip in swarm.gossips)


@pytest.mark.parametrize("protocol", (Gossip, PushSum))
def test_peers_meet_again_after_a_long_silence(protocol: Any) -> None:
    """However often each has waited for the other in vain: that says nothing of how long a share or a state takes."""
    swarm = GossipHarness(2, 25_000, chunk_elements=5_000, protocol=protocol)

    async def life(index: int) -> None:
        for number in range(30):
            await swarm.round(index, number, train_seconds=10.0)

    async def main() -> None:
        lives = [swarm.start(index, life(index)) for index in range(2)]
        for one, other in (("p0", "p1"), ("p1", "p0")):
            swarm.network.link(one, other).blocked = True  # and nobody is told
        await asyncio.sleep(200.0)
        assert not swarm.messages(0) and not swarm.messages(1)
        for one, other in (("p0", "p1"), ("p1", "p0")):
            swarm.network.heal(one, other)
        await asyncio.wait(lives)

    swarm.run(main)
    assert len(swarm.messages(0)) > 2 and len(swarm.messages(1)) > 2
    for gossip, other in zip(swarm.gossips, ("p1", "p0"), strict=True):
        assert patience_of(gossip).timeout_seconds(other, 200_000) < 5.0


@pytest.mark.parametrize("protocol", (Gossip, PushSum))
def test_peer_estimated_too_slow_is_still_tried(protocol: Any) -> None:
    """Two whose line carried next to nothing for some hours: nobody else would tell them that it is mended."""
    swarm = GossipHarness(2, 25_000, chunk_elements=5_000, protocol=protocol)
    for gossip, other in zip(swarm.gossips, ("p1", "p0"), strict=True):
        for _ in range(20):
            patience_of(gossip).late(other, -1e6, 0.0)
        assert patience_of(gossip).expected_seconds(other, 200_000) > ROUND_SECONDS
    swarm.rounds(3, stagger_seconds=0.5)
    assert swarm.messages(0) and swarm.messages(1)


def patience_of(averager: Any) -> PeerTimeouts:
    found: PeerTimeouts = averager.exchanges.patience if isinstance(averager, Gossip) else averager.weighted.patience
    return found
