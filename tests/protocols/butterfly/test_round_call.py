"""Which members know which offers when the round is called, and that a plan cannot change an offer verified before."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from protocols.allreduce import plan as planning
from protocols.base import BadPayload, Head, LocalProgress, Member, Outcome, PeerId, Settings
from protocols.butterfly.averager import Butterfly
from protocols.butterfly.call import GROWTH
from protocols.butterfly.round import Round
from protocols.consensus.record import coordinators
from protocols.history.chain import genesis
from protocols.vectors.views import norm
from protocols.wire import Offer, Plan, Ready
from tests.sim.averaging import RUN
from tests.sim.host import SimSigner
from tests.sim.swarm import SimSwarm
from tests.support.simulated import simulated

VECTOR = torch.ones(64)
SETTINGS = Settings("fp32", (64,), 16)
WORK = LocalProgress(10, 0.0, 0.0, norm([VECTOR]), complete=False)
COMPLETE = replace(WORK, tokens=20, complete=True)
COMPLETE_AT = 1.0
CHANGES = ({"tokens": 21}, {"norm": 2.0}, {"leaving": True}, {"signature": b"?" * 32})


class Roster(SimSwarm):
    """Five peers before their first round.

    Attributes:
        order: the peers in the order in which they coordinate.
        sessions: of each peer that has entered the round.
        outcomes: of each peer that has left the round.
    """

    def __init__(self) -> None:
        super().__init__(latency_seconds=0.005)
        peers = tuple(f"p{index}" for index in range(5))
        self.head: Head = genesis(RUN, "run", tuple(Member(peer) for peer in peers), bytes(32))
        self.order = coordinators(self.head.key.lineage, self.head.roster)
        self._averagers = {peer: Butterfly(self.join(peer), SETTINGS) for peer in self.order}
        self.sessions: dict[PeerId, Round] = {}
        self.outcomes: dict[PeerId, Outcome] = {}

    async def member(
        self, peer: PeerId, offers: Sequence[LocalProgress] = (COMPLETE,), every: float = COMPLETE_AT
    ) -> None:
        """A member that makes these offers after its first one, each `every` seconds after the last."""
        async with self._averagers[peer].enter(self.head, 100.0) as session:
            self.sessions[peer] = session
            session.offer(WORK)
            for work in offers:
                await asyncio.sleep(every)
                session.offer(work)
            await session.cut.wait()
            mean = await session.average([VECTOR], WORK, [torch.empty_like(VECTOR)])
        self.outcomes[peer] = mean.outcome

    def called(self, peer: PeerId) -> bool:
        return self.sessions[peer].call.resolved is not None


@pytest.mark.parametrize("mid_call", [False, True], ids=["right after the offers", "in mid call"])
@simulated(Roster)
async def test_third_coordinator_calls_when_two_fail(roster: Roster, mid_call: bool) -> None:
    """The first two fall silent before they can call the round; or crash when all but the third have their plan."""
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


@simulated(Roster)
async def test_coordinators_lost_early_cost_only_their_work(roster: Roster) -> None:
    """Ballots pass while the others train. All their work is in the plan, and that of the slow one is up to date."""
    first, second, slow, *others = roster.order
    tasks = {peer: asyncio.create_task(roster.member(peer, every=40.0)) for peer in (first, second, *others)}
    growing = [replace(WORK, tokens=tokens) for tokens in range(20, 450, 10)]  # until the call
    tasks[slow] = asyncio.create_task(roster.member(slow, growing, every=1.0))
    await asyncio.sleep(COMPLETE_AT)
    for victim in (first, second):
        tasks.pop(victim).cancel()
        roster.network.kill(victim)
        for peer in (*others, slow):
            roster.sessions[peer].gone(victim)
    while not all(map(roster.called, tasks)):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    for peer in tasks:
        call = roster.sessions[peer].call.own
        assert call and call.plan.ballot > 2, "no ballot has passed since the first two were lost"
        tokens = {offer.member.peer: offer.tokens for offer in call.plan.offers}
        assert {peer: tokens.get(peer) for peer in others} == dict.fromkeys(others, COMPLETE.tokens)
        assert tokens[slow] * GROWTH >= growing[-1].tokens, "an old offer of the slow member"
    await asyncio.gather(*tasks.values())
    assert roster.outcomes == dict.fromkeys(tasks, Outcome.COMMITTED)


@simulated(Roster)
async def test_no_ballot_passes_while_a_long_step_ends(roster: Roster) -> None:
    """Nothing moves from the call to the cut, which is later than a ballot lasts."""
    fast = replace(COMPLETE, step_seconds=0.5)
    slow, *others = reversed(roster.order)
    tasks = [asyncio.create_task(roster.member(peer, (fast,), 20.0)) for peer in others]
    tasks.append(asyncio.create_task(roster.member(slow, (replace(COMPLETE, step_seconds=12.0),), 20.0)))
    await asyncio.gather(*tasks)
    assert set(roster.outcomes.values()) == {Outcome.COMMITTED} and roster.now > 30.0
    assert {session.vote.paxos.ballot for session in roster.sessions.values()} == {0}


@simulated(Roster)
async def test_coordinator_cut_off_from_quorum_waits(roster: Roster) -> None:
    """To it the others are gone. Since it may be the one cut off, it does not call the round for its own work."""
    first, *others = roster.order
    tasks = [asyncio.create_task(roster.member(peer, every=COMPLETE_AT if peer == first else 50.0)) for peer in others]
    tasks.append(asyncio.create_task(roster.member(first)))
    await asyncio.sleep(0.5)
    roster.cut([first], others)
    await asyncio.sleep(30.0)
    assert not {first, *others} & set(roster.network.contacts.views[first].live())
    assert not roster.called(first)
    for task in tasks:
        task.cancel()


@pytest.mark.parametrize("change", CHANGES, ids=str)
@simulated(Roster)
async def test_verified_offer_changed_in_plan_is_refused(roster: Roster, change: dict[str, Any]) -> None:
    first, _, ours, *_ = roster.order
    unsigned = Offer(Member(first), 20, WORK.norm, 0.0, True, False, 1e6, bytes(32), b"")
    signature = SimSigner(first, 1).sign(planning.offer_message(roster.head.key, unsigned))
    genuine = replace(unsigned, signature=signature)
    inputs = planning.PlanInputs(roster.head.key, len(VECTOR), 4.0)
    async with roster._averagers[ours].enter(roster.head, 100.0) as session:
        session.offer(WORK)
        session.take(first, Ready(roster.head.key, genuine))
        forged = planning.make_plan(inputs, [replace(genuine, **change)], 0.0)
        with pytest.raises(BadPayload, match="a forged offer"):
            session.take(first, forged)
        session.take(first, planning.make_plan(inputs, [genuine], 0.0))
        plan = session.call.resolved.plan if session.call.resolved else None
        assert isinstance(plan, Plan) and plan.offers == (genuine,)
