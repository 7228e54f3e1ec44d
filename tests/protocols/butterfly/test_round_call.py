"""Which members know an offer of complete work, and that a plan cannot change an offer that was verified before."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch

from protocols.allreduce import plan as planning
from protocols.base import BadPayload, Head, LocalProgress, Member, Outcome, PeerId, Settings
from protocols.butterfly.averager import Butterfly
from protocols.butterfly.session import ButterflySession
from protocols.consensus.record import coordinators
from protocols.history.chain import genesis
from protocols.vectors import norm
from protocols.wire import Offer, Ready
from tests.sim import loop as simloop
from tests.sim.butterfly_harness import RUN
from tests.sim.host import SimSigner, sim_host
from tests.sim.network import SimNetwork
from tests.sim.trace import Trace
from tests.support.simulated import on_virtual_clock

VECTOR = torch.ones(64)
SETTINGS = Settings("fp32", (64,), 16)
WORK = LocalProgress(10, 0.0, 0.0, norm([VECTOR]), complete=False)
COMPLETE_AT = 1.0


class Roster:
    """Five peers before their first round. All complete their work at the same time.

    Attributes:
        order: the peers in the order in which they coordinate.
        sessions: of each peer that has entered the round.
        outcomes: of each peer that has left the round.
    """

    def __init__(self) -> None:
        self.network = SimNetwork(Trace(), latency_seconds=0.005)
        peers = tuple(f"p{index}" for index in range(5))
        self.head: Head = genesis(RUN, "run", tuple(Member(peer) for peer in peers), bytes(32))
        self.order = coordinators(self.head.key.lineage, self.head.roster)
        hosts = [sim_host(self.network, self.network.join(peer), 1, {}) for peer in self.order]
        self._averagers = {host.me: Butterfly(host, SETTINGS) for host in hosts}
        self.sessions: dict[PeerId, ButterflySession] = {}
        self.outcomes: dict[PeerId, Outcome] = {}

    async def member(self, peer: PeerId) -> None:
        async with self._averagers[peer].enter(self.head, 100.0) as session:
            self.sessions[peer] = session
            session.offer(WORK)
            await asyncio.sleep(COMPLETE_AT)
            session.offer(replace(WORK, tokens=20, complete=True))
            await session.cut.wait()
            mean = await session.average([VECTOR], WORK, [torch.empty_like(VECTOR)])
        self.outcomes[peer] = mean.outcome

    def called(self, peer: PeerId) -> bool:
        return self.sessions[peer].call.resolved is not None


@pytest.mark.parametrize("mid_call", [False, True], ids=["right after the offers", "in mid call"])
def test_third_coordinator_calls_when_two_fail(mid_call: bool) -> None:
    """The first two fall silent before they can call the round; or crash when all but the third have their plan."""

    async def main() -> None:
        roster = Roster()
        first, second, third, *others = roster.order
        tasks = {peer: asyncio.create_task(roster.member(peer)) for peer in roster.order}
        await asyncio.sleep(COMPLETE_AT + 0.001)  # all offers are under way
        if mid_call:
            roster.network.block(first, third)
        while mid_call and not all(map(roster.called, others)):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert not roster.called(third)
        for victim in (first, second):
            tasks.pop(victim).cancel()
            if mid_call:
                roster.network.kill(victim)
                roster.sessions[third].gone(victim)
            for peer in roster.order:
                roster.network.block(victim, peer)
        await asyncio.gather(*tasks.values())
        assert roster.outcomes == dict.fromkeys(tasks, Outcome.COMMITTED)
        calls = [roster.sessions[peer].call.resolved for peer in tasks]
        assert {call.plan.ballot for call in calls if call} == {2}, "not the third coordinator's plan"

    simloop.run(main())


@pytest.mark.parametrize("change", [{"tokens": 21}, {"norm": 2.0}, {"signature": b"?" * 32}], ids=str)
@on_virtual_clock
async def test_verified_offer_changed_in_plan_is_refused(change: dict[str, object]) -> None:
    roster = Roster()
    first, _, ours, *_ = roster.order
    unsigned = Offer(Member(first), 20, WORK.norm, 0.0, True, False, 1e6, bytes(32), b"")
    signature = SimSigner(first, 1).sign(planning.offer_message(roster.head.key, unsigned))
    genuine = replace(unsigned, signature=signature)
    inputs = planning.PlanInputs(roster.head.key, len(VECTOR), 4.0)
    async with roster._averagers[ours].enter(roster.head, 100.0) as session:
        session.offer(WORK)
        session.take(first, Ready(roster.head.key, genuine))
        forged = planning.make_plan(inputs, [replace(genuine, **change)], 0.0)  # type: ignore[arg-type]
        with pytest.raises(BadPayload, match="a forged offer"):
            session.take(first, forged)
        session.take(first, planning.make_plan(inputs, [genuine], 0.0))
        assert session.call.resolved and session.call.resolved.plan.offers == (genuine,)
