"""Rounds of clusters in which leads, associates and reducers die, stall or lie, from the call to the next rounds."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from protocols.allreduce.all_reduce import AllReduce
from protocols.allreduce.clustered_all_reduce import UNTOLD_SECONDS
from protocols.allreduce.clustered_messages import (
    ClusterPlan,
    member_offers,
)
from protocols.base import BadPayload, Buffer, Header, Host, PeerId, PeerSilent, Vector
from protocols.butterfly.attachment import UNCOUNTED_ROUNDS
from protocols.streams.framing import FramedStream
from protocols.wire import Chunk, Partial
from tests.sim.transport import SimTransport
from tests.support.calling_clusters import CallingClusters
from tests.support.disguises import sending
from tests.support.long import diagonal
from tests.support.simulated import simulated
from tests.support.waiting import until

ROLES, FAULTS = ("lead", "standby", "associate"), ("death", "restart", "stall", "silence")
PLACES = (0.2, 0.7)  # of the round's messages of a peer
CALM_SECONDS = 1.4
"""More than a round takes in which all peers train for a second."""


def exchange(peers: CallingClusters, name: PeerId, round: int) -> AllReduce | None:
    session = peers.rounds[name]
    return session.exchange if session.head.key.round == round else None


class Long(CallingClusters):
    """The data phase takes a quarter of a second."""

    def __init__(self) -> None:
        super().__init__(4, 8, elements=60_000, chunk=5_000)

    def declared_norm(self, vector: Vector) -> float:
        return 2.0 * float(vector.norm())


@simulated(Long)
async def test_repair_gets_to_associates_that_have_a_new_lead(peers: Long) -> None:
    """They leave the voter that stood by at once. Their work counts in the part that the lost coordinator reduced."""
    await peers.until(2)
    await until(lambda: all(exchange(peers, name, 3) for name in peers.names), 10.0)
    lost = peers.rounds["v0"].vote.tally.coordinator(0)
    vote = next(peers.rounds[name].vote for name in peers.voters if name != lost)
    moved = {name for name in peers.associates if peers.lead(name) == lost}
    peers.network.kill(lost)
    killed = peers.now
    await peers.until(3)
    assert vote.paxos.ballot > 0 and moved and lost not in {peers.lead(name) for name in moved}
    assert peers.now - killed < CALM_SECONDS
    parts = [peers.results[name][3].contributions[name] for name in sorted(moved)]
    assert all(each.chunks_counted == each.chunks for each in parts)


@pytest.mark.parametrize(("alone", "seconds"), [(True, 0.5), (False, 0.5 + UNTOLD_SECONDS)])
@simulated(lambda alone: CallingClusters(4, 2 if alone else 8))
async def test_cluster_whose_lead_died_with_the_plan_is_not_waited_for(
    peers: CallingClusters, alone: bool, seconds: float
) -> None:
    """Nobody else can tell it the plan. The others hear nothing of it, and see that its lead is gone."""
    await peers.until(2)
    await until(lambda: all(peers.rounds[name].head.key.round == 3 for name in peers.names), 10.0)
    leads, first = {peers.lead(name) for name in peers.associates}, peers.rounds["v0"].vote.tally.coordinator(0)
    lost = next(name for name in peers.voters if name != first and (name in leads) != alone)
    for name in peers.associates:
        peers.network.block(lost, name)
    await until(lambda: all(exchange(peers, name, 3) for name in peers.voters), 10.0)
    peers.network.kill(lost)
    killed = peers.now
    await until(lambda: all(len(peers.chains[name]) > 3 for name in peers.voters if name != lost), 10.0)
    assert peers.now - killed < seconds


@pytest.mark.parametrize("early", [False, True])
@simulated(lambda early: CallingClusters(4, 8))
async def test_plan_told_to_some_only_gets_to_the_others(peers: CallingClusters, early: bool) -> None:
    """The lead died before it had told all of its associates. The cluster's work counts, and nobody waits for it, also
    if a member that has the plan sees it die `early`, before those without.
    """
    await peers.until(2)
    await until(lambda: all(peers.rounds[name].head.key.round == 3 for name in peers.names), 10.0)
    first = peers.rounds["v0"].vote.tally.coordinator(0)
    followers = {voter: [name for name in peers.associates if peers.lead(name) == voter] for voter in peers.voters}
    lost = next(voter for voter in peers.voters if voter != first and len(followers[voter]) > 1)
    told, *others = followers[lost]
    post = peers.averagers[lost]._post
    send = post.send
    vars(post).update(send=lambda peer, message: None if peer in others else send(peer, message))
    await until(lambda: bool(exchange(peers, told, 3)), 10.0)
    if early:
        knows = peers.rounds[told].cluster
        assert knows.whole and knows.members
        plan, offers = knows.whole.outline, member_offers(knows.members.plan.offers)
        cluster, key = knows._cluster, knows.members.plan.key
        assert cluster
        stranger = next(name for name in peers.associates if peers.lead(name) not in (lost, None))
        await until(lambda: bool(exchange(peers, stranger, 3)), 10.0)
        theirs = peers.rounds[stranger].cluster
        assert theirs.members and theirs._cluster
        strange = ClusterPlan(key, plan, theirs._cluster, member_offers(theirs.members.plan.offers))
        for name in others:
            peers.rounds[name].take(told, ClusterPlan(key, plan, cluster, offers))
            with pytest.raises(BadPayload):  # of another cluster, whose lead is well
                peers.rounds[name].take(stranger, strange)
            assert peers.rounds[name].call.resolved is None, "its lead may yet tell it another"
        vars(knows).update(share=lambda told: None)
    peers.network.kill(lost)
    killed = peers.now
    await peers.until(3)
    assert peers.now - killed < 1.0
    assert {told, *others} <= peers.counted(3)


@simulated(CallingClusters, 8, 1, clusters=False)
async def test_peer_without_a_plan_fetches_all_parts_at_once(peers: CallingClusters) -> None:
    """So do associates of a lead that died before it told any of them the plan: the others have decided before."""
    await until(lambda: all(len(peers.chains[name]) > 0 for name in peers.voters), 10.0)
    decided = peers.now
    await peers.until(0)
    assert peers.now - decided < 0.25


@simulated(CallingClusters, 4, 8)
async def test_standby_tells_the_decision_before_a_stopped_lead_is_lost(peers: CallingClusters) -> None:
    await peers.until(2)
    lead = peers.lead("a0")
    assert lead
    await until(lambda: (held := exchange(peers, "a0", 3)) is not None and held.complete, 10.0)
    peers.network.block(lead, "a0")
    began = peers.now
    await until(lambda: len(peers.chains["a0"]) > 3, 10.0)
    assert peers.now - began < 2.0 and peers.lead("a0") == lead, "its failure detector takes longer"


@simulated(CallingClusters, 4, 8)
async def test_lead_behind_which_no_work_counts_is_left(peers: CallingClusters) -> None:
    """It is alive, and takes the work, but tells this associate nothing."""
    await peers.until(2)
    lead = peers.lead("a0")
    assert lead and "a0" in peers.counted(2)
    post = peers.averagers[lead]._post
    send = post.send
    vars(post).update(send=lambda peer, message: None if peer == "a0" else send(peer, message))
    await until(lambda: peers.lead("a0") not in (lead, None), 30.0)  # before its epoch ends
    last = len(peers.chains["a0"])
    await peers.until(last + 2)
    assert "a0" in peers.counted(last + 2)


@simulated(CallingClusters, 2, 2, clusters=False)
async def test_contribution_to_a_round_of_long_ago_is_no_lie(peers: CallingClusters) -> None:
    """Its sender may have been cut off since. One to a round of no branch that this peer knows is."""
    await peers.until(8)
    voter, key = peers.averagers["v0"], peers.rounds["v0"].head.key
    past = peers.chains["v0"].lineage_of(1)
    assert past and past not in voter._votes
    stream: Any = SimpleNamespace(peer="a0")
    with pytest.raises(PeerSilent):
        await voter._attempt(stream, replace(key, round=1, lineage=past))
    with pytest.raises(BadPayload):
        await voter._attempt(stream, replace(key, round=1, lineage=bytes(32)))


class Pair(CallingClusters):
    """The only associate aggregates its cluster's work, and sends none of it that can be used."""

    def __init__(self) -> None:
        super().__init__(2, 1)

    def host_on(self, transport: SimTransport) -> Host:
        async def send(stream: FramedStream, header: Header, payload: Buffer) -> None:
            not_a_number = b"\xff" * len(payload)
            await stream.send(header, not_a_number if isinstance(header, Partial) else payload)

        if transport.me == "a0":
            transport.disguise = sending(send)
        return super().host_on(transport)


@simulated(Pair)
async def test_lead_parts_from_an_associate_that_wastes_its_work(peers: Pair) -> None:
    """The others hear how it lies; the lead sees that nothing of its own counts."""
    await until(lambda: peers.lead("a0") is not None, 10.0)
    first = len(peers.chains["v0"]) + 1
    last = first + 2 * UNCOUNTED_ROUNDS + 2  # both voters may lead it once
    await peers.until(last)
    assert peers.counted(first) != {"v0", "v1"} == peers.counted(last)


class LateLead(CallingClusters):
    """All are honest. The data of v1 comes too late for its cluster's aggregators."""

    def host_on(self, transport: SimTransport) -> Host:
        async def send(stream: FramedStream, header: Header, payload: Buffer) -> None:
            await asyncio.sleep(0.7 if isinstance(header, Chunk) else 0.0)
            await stream.send(header, payload)

        if transport.me == "v1":
            transport.disguise = sending(send)
        return super().host_on(transport)


@simulated(LateLead, 4, 20)
async def test_late_lead_keeps_associates_whose_work_counts(peers: LateLead) -> None:
    await peers.until(2)
    mine = {name for name in peers.associates if peers.lead(name) == "v1"}
    last = 3 + UNCOUNTED_ROUNDS
    await peers.until(last)
    assert len(mine) >= 4, "else an aggregator waits for the lead: three quarters of three are three"
    assert all("v1" not in peers.counted(round) >= mine for round in range(3, last + 1))
    assert {name for name in peers.associates if peers.lead(name) == "v1"} == mine


@simulated(CallingClusters, 4, 8)
async def test_lead_is_found_although_a_voter_never_answers(peers: CallingClusters) -> None:
    """Rounds end before it counts as silent."""
    await peers.until(2)
    lead = peers.lead("a0")
    assert lead
    peers.network.block(lead, "a0")
    await peers.until(8)
    last = len(peers.chains["a0"])
    await peers.until(last + 2)
    assert "a0" in peers.counted(last + 2)


# -- faults -----------------------------------------------------------------------------------------------------------

ROUND, LAST = 3, 11
"""The messages of the one are struck; in the other all is well again."""
SECONDS = {"restart": 1.0, "stall": 4.0, "silence": 7.0}
"""How long a fault lasts: a stall is shorter than the failure detector takes."""


class Struck(CallingClusters):
    """A fault strikes a peer at its message with this number."""

    def __init__(self, victim: PeerId = "", number: int = 0, fault: str = "") -> None:
        super().__init__(3, 6)
        self._victim, self._number, self._fault = victim, number, fault
        self.network.watch = self._watch

    def _watch(self, peer: PeerId, number: int, way: str, other: PeerId) -> None:
        if (peer, number) == (self._victim, self._number):
            self.network.watch = None
            self._strike(asyncio.get_running_loop())

    def _strike(self, loop: asyncio.AbstractEventLoop) -> None:
        others = [name for name in self.names if name != self._victim]
        if self._fault in ("death", "restart"):
            self.network.kill(self._victim)
        else:
            self.cut([self._victim], others)
            loop.call_later(SECONDS[self._fault], self.heal, [self._victim], others)
        if self._fault == "restart":
            loop.call_later(SECONDS["restart"], self.start, self._victim)


@functools.cache
def calm() -> tuple[dict[str, PeerId], dict[PeerId, range]]:
    """The peers of each role in the round, and the numbers of its messages."""
    peers, roles, starts, ends = Struck(), dict[str, PeerId](), dict[PeerId, int](), dict[PeerId, int]()

    async def main() -> None:
        await peers.until(ROUND - 1)
        starts.update({name: peers.network.nodes[name].messages for name in peers.names})
        search = peers.averagers["a0"]._attachment
        assert search and search.search.lead and search.search.standby
        roles.update(associate="a0", lead=search.search.lead.peer, standby=search.search.standby.peer)
        await peers.until(ROUND)
        ends.update({name: peers.network.nodes[name].messages for name in peers.names})

    peers.play(main)
    return roles, {name: range(starts[name] + 1, ends[name] + 1) for name in peers.names}


@diagonal("role, fault, place", ROLES, FAULTS, PLACES)
def test_fault_in_a_round_is_over_some_rounds_later(role: str, fault: str, place: float) -> None:
    """All follow one branch, and the work of all that are alive counts again."""
    roles, messages = calm()
    victim = roles[role]
    peers = Struck(victim, messages[victim][int(place * len(messages[victim]))], fault)

    async def main() -> None:
        await peers.until(LAST)
        assert peers.network.watch is None, "not struck"
        alive = {name for name in peers.names if peers.alive(name)}
        assert peers.counted(LAST) == alive, [sorted(peers.counted(round)) for round in range(ROUND, LAST + 1)]

    peers.play(main)
