"""Rounds of clusters with their vote, in virtual time: voters decide one mean of all, and associates hold its bits."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import pytest

from protocols.allreduce import clustered_plan as clustered
from protocols.allreduce.clustered_messages import (
    ClusterPlan,
    ClusterVersion,
    PackedPlan,
    packed,
    unpacked,
)
from protocols.base import Buffer, Header, PeerId
from protocols.butterfly.cluster_call import ClusteredStart
from protocols.consensus.messages import MeanDecided
from protocols.consensus.record import Kind
from protocols.streams.framing import FramedStream
from protocols.wire import AdmissionRequest, Partial
from tests.sim.contact import LIVENESS_SECONDS
from tests.support.clustered_swarm import KEY
from tests.support.disguises import sending
from tests.support.long import diagonal, long
from tests.support.simulated import simulated
from tests.support.voting_clusters import CALL_SECONDS, VotingClusters
from tests.support.waiting import until


@pytest.mark.parametrize("sizes", [(3, 3, 3), (1, 4, 2), (1, 1, 1), *long(((12,) * 12,))])
@simulated(lambda sizes: VotingClusters(*sizes))
async def test_calm_round_decides_the_work_of_all(swarm: VotingClusters) -> None:
    await swarm.average()
    record = swarm.decided(swarm.names)
    assert record.averaged and record.roster == swarm.head.roster and not record.complaints
    assert set(swarm.counts(record).values()) == {swarm.chunks_in(record)}
    assert max(swarm.ended.values()) < CALL_SECONDS + 1.5


VICTIMS: dict[str, Callable[[VotingClusters], PeerId]] = {
    "coordinator": lambda swarm: swarm.order[0],
    "other lead": lambda swarm: swarm.order[1],
    "aggregator": lambda swarm: swarm.clusters[1][1],
    "aggregator of the coordinator": lambda swarm: swarm.clusters[swarm.voters.index(swarm.order[0])][2],
}


def strike(swarm: VotingClusters, faults: Mapping[tuple[PeerId, int], str]) -> None:
    """Let each fault strike a peer at its message of this number."""

    def watch(mover: PeerId, message: int, way: str, other: PeerId) -> None:
        fault, others = faults.get((mover, message)), [name for name in swarm.names if name != mover]
        if fault == "kill":
            swarm.network.kill(mover)
        elif fault == "silence":
            swarm.cut([mover], others)
        elif fault == "one-way":
            for name in others:
                swarm.network.block(mover, name)

    swarm.network.watch = watch


@diagonal("role, fault, first", list(VICTIMS), ["kill", "silence", "one-way"], range(1, 22, 6))
def test_fault_at_any_message_leaves_the_others_one_mean(role: str, fault: str, first: int) -> None:
    """Each of them holds the decided bits, and they wait for an aggregator that dies no longer than for one that works.

    A silent peer is missed after 5 s; one time of a ballot passes if a lead dies before it tells its cluster the plan.
    """
    limit = 6.5 if fault != "kill" else CALL_SECONDS + 1.5 if role.startswith("aggregator") else 3.5
    for number in range(first, 150, 21):
        swarm = VotingClusters(3, 3, 3)
        victim = VICTIMS[role](swarm)
        strike(swarm, {(victim, number): fault})
        swarm.play(swarm.average)
        others = [name for name in swarm.names if name != victim]
        record = swarm.decided(others)
        ended = max(swarm.ended[name] for name in others)
        assert record.averaged and ended < limit, f"message {number}: {ended:.1f} s"


@pytest.mark.parametrize("seed", [*range(4), *long(*range(4, 60))])
def test_several_faults_leave_the_others_one_mean(seed: int) -> None:
    """Of any peers, as long as a majority of the voters is well. A cluster without lead and standby is told nothing."""
    draw = random.Random(seed)
    voters = draw.randint(3, 6)
    swarm = VotingClusters(*(draw.randint(1, 5) for _ in range(voters)))
    associates = [name for name in swarm.names if name not in swarm.voters]
    victims = draw.sample(swarm.voters, draw.randint(0, (voters - 1) // 2))
    victims += draw.sample(associates, min(len(associates), draw.randint(0, 3)))
    strike(swarm, {(name, draw.randint(1, 120)): draw.choice(["kill", "silence", "one-way"]) for name in victims})
    swarm.play(swarm.average)
    leads = {name: name.split(".")[0] for name in swarm.names}
    told = [name for name, lead in leads.items() if not {lead, swarm.standby[lead]} <= {*victims}]
    well = [name for name in told if name not in victims]
    assert swarm.decided(well).averaged and max(swarm.ended[name] for name in well) < 15.0


@pytest.mark.parametrize("seed", [28, *long(*range(28))])
def test_stalls_and_deaths_leave_one_mean_and_report(seed: int) -> None:
    """Parts come late, again from another reducer, or by their digests from a peer that has them."""
    draw = random.Random(seed)
    swarm = VotingClusters(*(draw.randint(1, 4) for _ in range(draw.randint(5, 8))), elements=2000)
    victims = draw.sample(swarm.names, draw.randint(0, 2))

    async def stall(link: list[PeerId], seconds: float) -> None:
        swarm.cut(link[:1], link[1:])
        await asyncio.sleep(seconds)
        swarm.heal(link[:1], link[1:])

    async def strike() -> None:
        await asyncio.sleep(2 * CALL_SECONDS)
        async with asyncio.TaskGroup() as group:
            for number in range(60):
                await asyncio.sleep(0.1 * draw.random())
                group.create_task(stall(draw.sample(swarm.names, 2), draw.uniform(0.1, 3.0)))
                if victims and number in (2, 6):
                    swarm.network.kill(victims.pop())

    swarm.play(lambda: swarm.average(strike()))
    told = [name for name, session in swarm.rounds.items() if session.vote.decided and swarm.alive(name)]
    assert len(told) > len(swarm.names) / 2 and swarm.decided(told).averaged


@simulated(VotingClusters, 3, 3, 3)
async def test_lead_stays_when_all_of_its_associates_are_lost(swarm: VotingClusters) -> None:
    """The mean holds nothing of its cluster, and one part alone something of the other: no lead's link is to blame."""
    gone = [*swarm.clusters[1][1:], swarm.clusters[2][1]]

    async def lose() -> None:
        await asyncio.sleep(2 * CALL_SECONDS + 0.02)
        for name in gone:
            swarm.network.kill(name)

    await swarm.average(lose())
    well = [name for name in swarm.names if name not in gone]
    record = swarm.decided(well)
    counts = swarm.counts(record)
    assert counts["v1"] == 0 < counts["v2"] < counts["v0"] == swarm.chunks_in(record)
    told = {swarm.results[name].contributors for name in well}
    assert told == {sum(map(bool, counts.values()))} and record.contributors == 9, "who is in it, not who was called"
    assert record.roster == swarm.head.roster and not record.complaints


@simulated(VotingClusters, 3, 3, 3, 3, 3)
async def test_lead_whose_aggregators_stall_is_not_evicted(swarm: VotingClusters) -> None:
    """Five clusters do not wait for it, and the coordinator hears nothing of this lead: but it reduced its part."""
    number = next(g for g, lead in enumerate(swarm.voters) if lead == swarm.order[1])

    async def send(stream: FramedStream, header: Header, payload: Buffer) -> None:
        if isinstance(header, Partial):
            await asyncio.sleep(60.0)
        await stream.send(header, payload)

    swarm.disguises |= dict.fromkeys(swarm.clusters[number][1:], sending(send))
    await swarm.average()
    record = swarm.decided(swarm.names)
    assert swarm.counts(record)[swarm.order[1]] == 0
    assert record.roster == swarm.head.roster and not record.complaints


@simulated(VotingClusters, 1, 3, 3)
async def test_lone_lead_that_brings_nothing_is_evicted(swarm: VotingClusters) -> None:
    swarm.order = tuple(sorted(swarm.order, key="v0".__eq__))
    others = [name for name in swarm.names if name != "v0"]

    async def lose() -> None:
        await asyncio.sleep(2 * CALL_SECONDS - 0.01)
        swarm.cut(["v0"], others)

    await swarm.average(lose())
    record = swarm.decided(others)
    assert "v0" not in {member.peer for member in record.roster}


@pytest.mark.parametrize("late", [False, True])
@simulated(lambda late: VotingClusters(3, 3, 3))
async def test_repair_gets_to_the_cluster_of_a_lost_lead(swarm: VotingClusters, late: bool) -> None:
    """From the voter that stands by it, before anything is decided; also before a plan that comes `late`."""
    lost, *associates = swarm.clusters[1]
    versions = dict[PeerId, int]()
    if late:
        swarm.network.link(lost, associates[-1]).latency_seconds = 0.3

    async def lose() -> None:
        await asyncio.sleep(2 * CALL_SECONDS + 0.05)
        swarm.network.kill(lost)
        while not any(name in swarm.ended for name in associates):
            for name in associates:
                plan = swarm.rounds[name].call.resolved
                versions[name] = plan.plan.version if plan else 0
            await asyncio.sleep(0.001)

    await swarm.average(lose())
    record = swarm.decided([name for name in swarm.names if name != lost])
    assert min(versions.values()) > 0 and len(versions) == 2
    assert min(swarm.counts(record)[name] for name in associates) == swarm.chunks_in(record)


@simulated(VotingClusters, 3, 3, 3)
async def test_last_voter_forks_with_the_mean_that_it_accepted(swarm: VotingClusters) -> None:
    """The record of the fork names the clusters: without them no peer could read the parts."""
    last, *lost = swarm.order

    def watch(mover: PeerId, message: int, way: str, other: PeerId) -> None:
        session = swarm.rounds.get(last)
        if session and session.vote.paxos.accepted and not session.over():
            for name in lost:
                if swarm.alive(name):
                    swarm.network.kill(name)

    swarm.network.watch = watch
    await swarm.average()
    record = swarm.decided([last])  # its associates learn of a fork as others do that are not in its roster
    assert record.kind == Kind.FORK and record.averaged and len(record.clusters) == 3


@pytest.mark.parametrize("version", [0, 1])
@simulated(lambda version: VotingClusters(3, 3, 3))
async def test_false_version_of_a_plan_is_the_fault_of_its_sender(swarm: VotingClusters, version: int) -> None:
    """Not of the lead, whose plan comes later."""
    liar = swarm.standby["v1"]
    swarm.network.link("v1", "v1.1").latency_seconds = 0.5

    async def mislead() -> None:
        await until(lambda: liar in swarm.rounds and swarm.rounds[liar].call.resolved)
        plan = swarm.rounds[liar].call.resolved
        assert plan and swarm.rounds["v1.1"].call.resolved is None
        swarm.rounds[liar].post.send("v1.1", ClusterVersion(KEY, plan.digest, 0, version, (0, 0, 0), b""))

    await swarm.average(mislead())
    assert swarm.decided(swarm.names).averaged
    assert {fault.peer for fault in swarm.results["v1.1"].blamed} == {liar}


@pytest.mark.parametrize("plan", ["in time", "late at a voter", "late at an associate"])
@simulated(lambda plan: VotingClusters(3, 3, 3))
async def test_associate_need_only_see_its_lead(swarm: VotingClusters, plan: str) -> None:
    """In a large run it watches few others. A peer serves one that it does not see by its plan, and waits for that: a
    lead sends half a megabyte of plans.
    """

    def near(peer: PeerId) -> Collection[PeerId]:
        own = next(each for each in swarm.clusters if peer in each)
        return [*own, *swarm.voters] if peer in swarm.voters else [peer, own[0]]

    swarm.network.contacts.near = near
    if plan != "in time":
        late = (swarm.order[0], swarm.order[1]) if plan.endswith("voter") else ("v0", "v0.1")
        swarm.network.link(*late).latency_seconds = 0.5
    await swarm.average()
    # without the certificate of its own lead it would not know the outcome
    record = swarm.decided(swarm.names)
    assert set(swarm.counts(record).values()) == {swarm.chunks_in(record)}


@pytest.mark.parametrize("mover", ["v0.1", "v0.3"])
@simulated(lambda mover: VotingClusters(4, 4, 3))
async def test_member_of_two_clusters_counts_in_one(swarm: VotingClusters, mover: str) -> None:
    """It has moved, and both leads have its offer. The second cluster loses only the part that it should aggregate."""
    swarm.moved[mover] = 1
    await swarm.average()
    record = swarm.decided(swarm.names)
    counts, second = swarm.counts(record), swarm.inner[1]
    lost = sum(len(part.members) for at, part in enumerate(swarm.parts_of(record, "v0")) if second.reducer(at) == mover)
    assert lost > 0 and max(swarm.ended.values()) < CALL_SECONDS + 1.5
    for name, count in counts.items():
        assert count == swarm.chunks_in(record) - (lost if name in swarm.clusters[1] else 0), name
    named = [fault for result in swarm.results.values() for fault in result.blamed]
    assert {fault.peer for fault in named} == {mover} and not any("refused" in fault.why for fault in named)


# -- liars ------------------------------------------------------------------------------------------------------------


Said: TypeAlias = ClusterPlan | PackedPlan | MeanDecided
LEADS: dict[str, Callable[[ClusterPlan, bool], ClusterPlan | None]] = {
    "no plan": lambda said, first: None,
    "a plan for some": lambda said, first: None if first else said,
    "forged offers": lambda said, first: replace(said, offers=(replace(said.offers[0], norm=1.0), *said.offers[1:])),
    "other offers of its cluster": lambda said, first: replace(said, cluster=replace(said.cluster, complete=False)),
    "another plan": lambda said, first: replace(said, plan=replace(said.plan, median_tokens=1)),
    "another plan for some": lambda said, first: replace(said, plan=replace(said.plan, median_tokens=int(first))),
}


def lie(swarm: VotingClusters, liar: PeerId, kind: type[Said], change: Callable[[Any, PeerId], Said | None]) -> None:
    """Let a peer change, or keep to itself, what it sends of a kind."""

    async def send(stream: FramedStream, header: Header, payload: Buffer) -> None:
        said: Header | None = change(header, stream.peer) if isinstance(header, kind) else header
        if said:
            await stream.send(said, payload)

    swarm.disguises[liar] = sending(send)


@pytest.mark.parametrize("what", LEADS)
@simulated(lambda what: VotingClusters(3, 3, 3))
async def test_lying_lead_costs_its_cluster_at_most(swarm: VotingClusters, what: str) -> None:
    liar = swarm.order[1]
    cluster = swarm.clusters[swarm.voters.index(liar)]
    lie(swarm, liar, ClusterPlan, lambda said, to: LEADS[what](said, to == cluster[1]))
    await swarm.average()
    record = swarm.decided([name for name in swarm.names if name != liar])
    counts = swarm.counts(record)
    assert {count for name, count in counts.items() if name not in cluster} == {swarm.chunks_in(record)}
    assert record.roster == swarm.head.roster and max(swarm.ended.values()) < 6.0


@simulated(VotingClusters, 3, 4, 3)
async def test_lying_mate_passes_no_other_plan_on(swarm: VotingClusters) -> None:
    """The lead is lost before it has told all of its cluster. Another member passes the plan on, too."""
    lost, lacking, liar, _ = swarm.clusters[1]

    def change(said: ClusterPlan, to: PeerId) -> ClusterPlan:
        return replace(said, plan=replace(said.plan, median_tokens=1))

    lie(swarm, lost, ClusterPlan, lambda said, to: None if to == lacking else said)
    lie(swarm, liar, ClusterPlan, change)
    swarm.network.link(swarm.clusters[1][3], lacking).latency_seconds = 0.2  # the lie comes first

    async def lose() -> None:
        await until(lambda: all(name in swarm.rounds and swarm.rounds[name].exchange for name in swarm.clusters[1][2:]))
        swarm.network.kill(lost)

    await swarm.average(lose())
    record = swarm.decided([name for name in swarm.names if name != lost])
    assert min(swarm.counts(record)[name] for name in swarm.clusters[1][1:]) == swarm.chunks_in(record)
    assert {fault.peer for fault in swarm.results[lacking].blamed if "refused" in fault.why} == {liar}


TOLD: dict[str, Callable[[MeanDecided], MeanDecided]] = {
    "the truth": lambda said: said,
    "another record": lambda said: replace(said, digest=bytes(32)),
    "forged votes": lambda said: replace(said, signatures=said.signatures[::-1]),
    "too few signatures": lambda said: replace(said, signatures=said.signatures[1:]),
    "votes of no members": lambda said: replace(said, voters=said.voters << 3),
}


@pytest.mark.parametrize("what", TOLD)
@simulated(lambda what: VotingClusters(3, 3, 3))
async def test_cluster_takes_the_record_of_a_mean_only_with_its_votes(swarm: VotingClusters, what: str) -> None:
    """Each member makes the record itself, and asks for it only if its lead's digest is not that of the mean here."""
    liar, asked = swarm.order[1], set[tuple[PeerId, PeerId]]()
    cluster = swarm.clusters[swarm.voters.index(liar)][1:]

    async def ask(stream: FramedStream, header: Header, payload: Buffer) -> None:
        if isinstance(header, AdmissionRequest) and swarm.now > CALL_SECONDS:
            asked.add((header.member.peer, stream.peer))
        await stream.send(header, payload)

    lie(swarm, liar, MeanDecided, lambda said, to: TOLD[what](said))
    swarm.disguises |= dict.fromkeys(cluster, sending(ask))
    is_forged = what not in ("the truth", "another record")
    if not is_forged:  # else the voter that stands by sends the certificate
        vars(swarm).update(_pass_certificate_on=lambda session, voter: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ClusteredStart, "is_told", lambda self: True)  # they have leads
        await swarm.average()
    swarm.decided(swarm.names)
    assert asked == {(name, liar) for name in cluster if what == "another record"}
    assert {fault.peer for name in cluster for fault in swarm.results[name].blamed} == ({liar} if is_forged else set())


@simulated(VotingClusters, 3, 3, 3)
async def test_lead_that_leaves_sends_its_cluster_the_whole_certificate(
    swarm: VotingClusters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may not be there when a member that lacks the mean asks for the record."""
    monkeypatch.setattr(ClusteredStart, "is_told", lambda self: True)  # they have leads
    told = set[PeerId]()

    def note(said: MeanDecided, to: PeerId) -> MeanDecided:
        told.add(to)
        return said

    for voter in swarm.voters:
        lie(swarm, voter, MeanDecided, note)

    async def leave() -> None:
        await until(lambda: "v1" in swarm.rounds)
        swarm.rounds["v1"].vote.leaving.add("v1")

    await swarm.average(leave())
    swarm.decided(swarm.names)
    assert told == {"v0.1", "v0.2", "v2.1", "v2.2"}


@pytest.mark.parametrize("what", ["not to all", "another plan for some", "another plan for the others"])
@simulated(lambda what: VotingClusters(3, 3, 3))
async def test_lying_coordinator_leaves_one_mean(swarm: VotingClusters, what: str) -> None:
    """It leaves a voter without the plan, or a cluster out of the plan that it sends."""
    liar, second, third = swarm.order

    def change(said: PackedPlan, to: PeerId) -> PackedPlan | None:
        if what == "not to all":
            return None if to == third else said
        plan = unpacked(said, swarm.head.roster)
        clusters = [each for each in plan.clusters if each.lead.peer != second]
        other = clustered.make_clustered_plan(swarm.inputs(), clusters, CALL_SECONDS, plan.ballot)
        signature = swarm.signed(clustered.outline_of(other, swarm.head.roster)).signature
        message = replace(packed(other, swarm.head.roster), signature=signature)
        return message if to == third or what.endswith("others") else said

    lie(swarm, liar, PackedPlan, change)
    await swarm.average()
    record = swarm.decided([name for name in swarm.names if name != liar])
    assert record.averaged and max(swarm.ended.values()) < 12.0


@pytest.mark.parametrize(("pause_seconds", "repairs"), [(30.0, 1), (0.9, 0)])
def test_reducer_that_does_not_answer_is_replaced(pause_seconds: float, repairs: int) -> None:
    """Sooner than the failure detector loses it. One that only pauses keeps its part, and nothing that it and its
    cluster brought is lost.
    """
    swarm = VotingClusters(3, 3, 3, elements=200_000)
    swarm.settings = replace(swarm.settings, chunk_elements=5_000)
    stopped, coordinator = swarm.order[1], swarm.order[0]
    others = [name for name in swarm.names if name != stopped]

    def version() -> int:
        resolved = swarm.rounds[coordinator].call.resolved
        return resolved.plan.version if resolved else 0

    async def stop() -> None:
        await until(lambda: coordinator in swarm.rounds and swarm.rounds[coordinator].exchange)
        await until(lambda: (exchange := swarm.rounds[coordinator].exchange) and exchange.parts)
        swarm.cut([stopped], others)
        if repairs:
            assert await until(version) < LIVENESS_SECONDS - 2.0
        await asyncio.sleep(pause_seconds)
        for other in others:
            swarm.network.heal(stopped, other)
            swarm.network.heal(other, stopped)

    async def play() -> None:
        await swarm.average(stop())
        assert swarm.decided(others).averaged and version() == repairs
        counts = (swarm.results[coordinator].clusters or {}).values()
        assert repairs or all(each.chunks_counted == each.chunks for each in counts)

    swarm.play(play)


def test_cluster_that_lacks_a_part_of_the_decided_mean_soon_asks_others() -> None:
    """The part's reducer is cut off from it, and failure detectors take longer. The others decide meanwhile."""
    swarm = VotingClusters(3, 3, 3)
    _, reducer, voter = swarm.order
    cluster = next(each for each in swarm.clusters if voter in each)

    async def cut() -> None:
        def has_reduced() -> bool:
            exchange = swarm.rounds[reducer].exchange if reducer in swarm.rounds else None
            return exchange is not None and bool(exchange.parts)

        await until(has_reduced, 10.0)
        for name in cluster:
            swarm.network.block(reducer, name)

    async def play() -> None:
        await swarm.average(cut())
        assert swarm.decided(swarm.names).averaged
        others = max(seconds for name, seconds in swarm.ended.items() if name not in cluster)
        assert max(swarm.ended.values()) < others + 1.0

    swarm.play(play)
