"""What a butterfly does about reducers, strangers and claims that are not what they should be."""

from __future__ import annotations

import asyncio
import struct
from contextlib import suppress
from dataclasses import replace

import pytest

from protocols.allreduce.all_reduce import DATA, MIN_BANDWIDTH, next_claim
from protocols.allreduce.parts import chunk_digest
from protocols.allreduce.reducer import Reducer
from protocols.base import Host, Member, Outcome, PeerError, RoundKey, Settings
from protocols.butterfly.averager import CONTROL, Butterfly
from protocols.history.chain import genesis
from protocols.static_members import StaticMembers
from protocols.wire import Offer, Ready
from tests.protocols.butterfly.test_butterfly import vectors
from tests.sim import loop as simloop
from tests.sim.butterfly_harness import RUN, ButterflyHarness
from tests.sim.host import sim_host
from tests.sim.network import SimNetwork, Trace


def test_reducer_with_undecodable_part_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the coordinator, nor anybody else; its part goes to another, and the round is committed."""
    close = Reducer._close

    def poisoned(self: Reducer, index: int) -> object:
        result = close(self, index)
        if self.task.me == "p02":
            data = self.held.chunk(index)
            data[0:4] = struct.pack("<f", float("nan"))
            self._digests[-1] = chunk_digest(result[0], data)
        return result

    monkeypatch.setattr(Reducer, "_close", poisoned)
    averaged = ButterflyHarness(vectors(4, 40_000, seed=5), [1000] * 4, [1e7] * 4).average()
    assert {mean.outcome for mean in averaged.means} == {Outcome.COMMITTED}
    assert {blame.peer for mean in averaged.means for blame in mean.blamed} == {"p02"}
    assert len({result.numpy().tobytes() for result in averaged.results}) == 1


async def says_nothing(host: Host, method: str) -> None:
    with suppress(PeerError):
        async with host.transport.open("p0", method, asyncio.get_running_loop().time() + 1e5) as stream:
            await stream.receive(64)


async def offers(host: Host, key: RoundKey) -> None:
    offer = Offer(Member(host.me), 1, 1.0, 1.0, True, False, 1e6, bytes(32), b"")
    with suppress(PeerError):
        async with host.transport.open("p0", CONTROL, asyncio.get_running_loop().time() + 1e5) as stream:
            await stream.send(Ready(key, offer))
            await stream.receive(64)


@pytest.mark.parametrize("ahead", (0, 1, 10**6))
def test_non_member_stream_is_closed_within_seconds(ahead: int) -> None:
    """Whatever round it speaks of, and when it says nothing: it is sent away in seconds, though it asks for a day."""
    network = SimNetwork(Trace())
    roster = (Member("p0"), Member("p1"))
    head = genesis(RUN, "run", roster, bytes(32))

    async def main() -> int:
        host = replace(sim_host(network, network.join("p0"), 1, {}), members=StaticMembers(roster))
        stranger = sim_host(network, network.join("zoe"), 1, {})
        loop = asyncio.get_running_loop()
        async with Butterfly(host, Settings("fp32", (10,))).enter(head, loop.time() + 3600):
            tasks = [loop.create_task(says_nothing(stranger, DATA)) for _ in range(20)]
            tasks += [loop.create_task(offers(stranger, replace(head.key, round=ahead))) for _ in range(20)]
            await asyncio.sleep(0.5)
            held = len(network.nodes["p0"].ends)
            await asyncio.wait(tasks, timeout=30)
            assert not network.nodes["p0"].ends
        return held

    assert simloop.run(main()) >= 20
    assert not network.bugs


def test_bandwidth_claim_follows_observed_results() -> None:
    """Budgets follow claims: halved after a data phase that did not end in time, and slowly more again."""
    claim = 8e6
    for in_time, due in ((False, 4e6), (False, 2e6), (True, 2.1e6), *((True, None),) * 27, (True, 8e6)):
        claim = next_claim(claim, 8e6, in_time)
        assert due is None or claim == due
    for _ in range(100):
        claim = next_claim(claim, 8e6, False)
    assert claim == MIN_BANDWIDTH
