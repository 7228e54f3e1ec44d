"""Whom gossip asks, for how long and how often; and what an asker that goes away leaves behind."""

from __future__ import annotations

import asyncio
import weakref
from itertools import pairwise
from typing import Any

import pytest

from protocols.base import Outcome
from protocols.gossip import PAUSE_SECONDS
from protocols.pairs.swap import Whole
from tests.sim.gossiping import Swarm
from tests.sim.lies import LyingStream


def slow_line(swarm: Swarm, peer: str) -> None:
    """p0 has seen that the line to this peer carries next to nothing, and to others as much as ever."""
    patience = swarm.gossips[0].pairing.patience
    for _ in range(12):
        patience.late(peer, -1e6, 0.0)
    for other in swarm.names:
        if other not in ("p0", peer):
            for _ in range(12):
                patience.took(other, 10**6, 1.0)


def play(swarm: Swarm, *lenders: int) -> None:
    """A round of p0, while these lend their states; who does not is busy."""

    async def main() -> None:
        lending = [swarm.start(index, swarm.lending(index, 90.0)) for index in lenders]
        await swarm.start(0, swarm.round(0))
        await asyncio.gather(*lending)

    swarm.run(main)


def in_order(population: Any, count: int) -> Any:
    return list(population)[:count]


def test_a_partner_that_there_is_no_time_for_does_not_end_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """p1, whom the schedule names, is busy; then p2 is drawn, whose line is too slow for what time there is, and p3."""
    swarm = Swarm(4, 2000, schedule="ring", chunk_elements=1000)
    slow_line(swarm, "p2")
    monkeypatch.setattr(swarm.gossips[0].rng, "sample", in_order)
    play(swarm, 2, 3)
    assert swarm.told[0][0].mean.outcome is Outcome.COMMITTED and swarm.told[0][0].mean.peers == ("p3",)


def test_who_stalls_costs_its_own_timeout_and_not_that_of_a_slower_peer() -> None:
    """The line to p1 is slow, and p1 is busy: an exchange with it may take a minute. p2 says yes, and then nothing."""

    class Hanging(LyingStream):
        async def send(self, header: Any, payload: Any = b"") -> None:
            swarm.network.link("p2", "p0").blocked |= len(payload) > 0
            await self._stream.send(header, payload)

    disguise = {2: lambda method, stream, pipe: Hanging(stream, pipe, "", None)}  # type: ignore[arg-type]
    swarm = Swarm(3, 2000, schedule="ring", chunk_elements=1000, disguises=disguise)
    slow_line(swarm, "p1")
    assert swarm.gossips[0].pairing.patience.timeout_seconds("p1", 16_000) > 50.0
    play(swarm, 2)
    (told,) = swarm.told[0]
    assert 2.0 < told.ended - told.asked < 5.0 and told.mean.blamed[0].peer == "p2"


def test_who_is_busy_is_not_asked_again_at_once_where_another_has_been_met(monkeypatch: pytest.MonkeyPatch) -> None:
    swarm, asked = Swarm(3, schedule="ring"), list[float]()
    asker = swarm.gossips[0]._asker
    ask = asker.ask

    async def timed(session: Any, partner: Any, until: float) -> Any:
        if partner.peer == "p1":
            asked.append(asyncio.get_running_loop().time())
        return await ask(session, partner, until)

    monkeypatch.setattr(asker, "ask", timed)
    play(swarm, 2)
    assert swarm.told[0][0].mean.peers == ("p2",) and len(asked) == 3
    assert all(later - sooner >= PAUSE_SECONDS for sooner, later in pairwise(asked))


async def until_moved(swarm: Swarm) -> None:
    while not swarm.moved(1):  # noqa: ASYNC110 - it tells nobody
        await asyncio.sleep(0.001)


def test_who_leaves_while_it_asks_what_became_of_an_exchange_tells_that_it_does_not_know() -> None:
    """p1 has moved, and all that it says is lost; p0 waits for its word, asks what became of it, and is cancelled."""
    swarm = Swarm(2)

    async def main() -> None:
        lending = swarm.start(1, swarm.lending(1, 30.0))
        asking = swarm.start(0, swarm.round(0))
        await until_moved(swarm)
        swarm.network.link("p1", "p0").blocked = True
        exchange = swarm.gossips[0].pairing.exchange
        await asyncio.sleep(3.0)
        assert exchange is swarm.gossips[0].pairing.exchange and exchange.in_doubt, "it asks"
        asking.cancel()
        await asyncio.wait([asking, lending])

    swarm.run(main)
    assert swarm.moved(1) and not swarm.moved(0) and swarm.gossips[0].half_exchanges == 1


def test_whose_state_is_free_again_keeps_nothing_of_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """p1 has moved and waits for p0's last word, for seconds in which others may ask."""

    class Breathless(LyingStream):
        async def send(self, header: Any, payload: Any = b"") -> None:
            if not isinstance(header, Whole) or swarm.gossips[0].pairing.exchange.swap.moved is None:
                await self._stream.send(header, payload)

    swarm = Swarm(2, disguises={0: lambda method, stream, pipe: Breathless(stream, pipe, "", None)})  # type: ignore[arg-type]
    kept, pairing = list[Any](), swarm.gossips[1].pairing
    begin = pairing.begin

    def remembered(*arguments: Any) -> Any:
        exchange = begin(*arguments)
        kept.append(weakref.ref(exchange.swap._theirs.part))
        return exchange

    monkeypatch.setattr(pairing, "begin", remembered)

    async def main() -> None:
        lending = swarm.start(1, swarm.lending(1, 30.0))
        await swarm.start(0, swarm.round(0))
        assert swarm.moved(0) and swarm.moved(1) and not pairing.half_exchanges, "it still waits"
        assert kept[0]() is None
        await asyncio.wait([lending])

    swarm.run(main)
