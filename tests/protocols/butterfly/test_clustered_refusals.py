"""What a peer refuses in a clustered round: plans from the wrong peers, and proposals that no honest voter makes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from protocols.allreduce import clustered_plan as clustered
from protocols.allreduce.clustered_messages import (
    ClusterPlan,
    ClusterReady,
    ClusterVersion,
    cluster_digest,
    member_offers,
    packed,
)
from protocols.base import BadPayload, Member, PeerId
from protocols.consensus import record as records
from protocols.consensus.messages import Propose
from protocols.wire import Contribute
from tests.sim.host import SimSigner
from tests.support.clustered_swarm import KEY
from tests.support.simulated import simulated
from tests.support.voting_clusters import CALL_SECONDS, VotingClusters

WRONG_OUTLINES: dict[str, dict[str, Any]] = {
    "no leads": {"leads": 0},
    "leads beyond the roster": {"leads": 0b1111},
    "fewer leads than clusters": {"leads": 0b011},
    "parts beyond the vector": {"bounds": (0, 100, 200, 301)},
    "parts out of order": {"bounds": (0, 200, 100, 300)},
    "fewer parts than leads": {"bounds": (0, 100, 300)},
    "fewer reducers than parts": {"reducers": (0, 1)},
    "no time": {"budget_seconds": 1.0},
}


@simulated(VotingClusters, 3, 3, 3)
async def test_plans_from_the_wrong_peers_are_refused(swarm: VotingClusters) -> None:
    refused = dict[str, str]()

    def attempt(receiver: PeerId, sender: PeerId, message: ClusterPlan | ClusterVersion, what: str) -> None:
        try:
            swarm.rounds[receiver].take(sender, message)
        except BadPayload as error:
            refused[what] = str(error)

    async def try_all() -> None:
        await asyncio.sleep(2 * CALL_SECONDS)
        called = swarm.versions[0]
        plan = swarm.rounds["v1.1"].call.resolved
        assert isinstance(plan, clustered.ResolvedClusters)
        offers = member_offers(swarm.offers[1])
        honest = ClusterPlan(KEY, plan.outline, swarm.offered[1], offers)
        signature = swarm.signed(replace(plan.outline, version=9, reducers=(7, 0, 0))).signature
        later = ClusterVersion(KEY, plan.digest, 0, 9, (7, 0, 0), signature)
        swapped = swarm.signed(replace(plan.outline, version=1, reducers=(7, 0, 0)))
        attempt("v2", "v1", honest, "plan to a voter")
        attempt("v2", "v1", later, "version to a voter")
        attempt("v1.1", "v2", replace(honest, cluster=swarm.offered[2]), "plan of another cluster")
        attempt("v1.1", "v1.2", replace(honest, plan=swapped), "plan of a mate, which is only ignored")
        before = (offers[0], replace(offers[1], member=Member("v1.1", 5)), offers[2])
        attempt("v1.1", "v1", replace(honest, offers=before), "plan for another incarnation, which is only ignored")
        attempt("v1.1", "v1.2", later, "version of a mate")
        attempt("v1.1", "v2", replace(later, reducers=(0, 0, 0)), "version that the coordinator has not signed")
        attempt("v1.1", "v0", later, "version with unknown reducers")
        assert swarm.rounds["v1.1"].call.resolved is plan
        attempt("v1.1", "v1", replace(honest, plan=swapped), "plan with unknown reducers")
        forged = (*swarm.offers[1][:2], replace(swarm.offers[1][2], norm=2 * swarm.offers[1][2].norm))
        fresh = clustered.make_cluster_offer(swarm.inputs(), called.offered[1].lead, forged, True)
        fresh = replace(fresh, signature=SimSigner("v1", swarm.seed).sign(ClusterReady(KEY, fresh).signed()))
        named = cluster_digest(KEY, fresh)
        other = swarm.signed(replace(plan.outline, ballot=3, clusters=(plan.clusters[0], named, plan.clusters[2])))
        attempt("v1.1", "v1", ClusterPlan(KEY, other, fresh, member_offers(forged)), "forged offers")
        attempt("v1.1", "v1", ClusterPlan(KEY, other, fresh, offers[:2]), "fewer offers")
        pair = clustered.make_cluster_offer(swarm.inputs(), called.offered[1].lead, swarm.offers[1][:2], True)
        named = cluster_digest(KEY, pair)
        paired = swarm.signed(replace(plan.outline, ballot=3, clusters=(plan.clusters[0], named, plan.clusters[2])))
        attempt("v1.1", "v1", ClusterPlan(KEY, paired, pair, offers[:2]), "cluster that its lead has not signed")
        attempt("v1.1", "v1", ClusterPlan(KEY, other, swarm.offered[1], offers), "another cluster than the plan's")
        for what, change in WRONG_OUTLINES.items():
            wrong = swarm.signed(replace(plan.outline, ballot=3, **change))
            attempt("v1.1", "v1", replace(honest, plan=wrong), what)
        empty = replace(plan.clusters[0], size=0)
        wrong = swarm.signed(replace(plan.outline, ballot=3, clusters=(empty, *plan.clusters[1:])))
        attempt("v1.1", "v1", replace(honest, plan=wrong), "an empty cluster")
        cut = replace(plan.outline, cut_seconds=9.0)
        attempt("v1.1", "v1", replace(honest, plan=cut), "a second plan that the coordinator has not signed")
        attempt("v1.1", "v1", replace(honest, plan=swarm.signed(cut)), "a second plan, for which that one is named")

    await swarm.average(try_all())
    assert len(refused) == 13 + len(WRONG_OUTLINES), refused
    named = {fault.peer: fault.why for fault in swarm.results["v1.1"].blamed}
    assert named == {swarm.order[0]: "signed two plans of one version"}
    record = swarm.decided(swarm.names)
    assert set(swarm.counts(record).values()) == {swarm.chunks_in(record)}


@simulated(VotingClusters, 3, 3, 3)
async def test_proposal_of_other_clusters_is_refused(swarm: VotingClusters) -> None:
    first, second, _ = swarm.order
    refused = list[str]()

    async def try_all() -> None:
        await asyncio.sleep(CALL_SECONDS)
        while not (accepted := swarm.rounds[second].vote.paxos.accepted):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        honest, vote = accepted.record, swarm.rounds[second].vote
        one, *rest = honest.clusters
        for clusters, peers in (
            ((), honest.peers),
            ((replace(one, digest=bytes(32)), *rest), honest.peers),
            ((replace(one, size=2), *rest), honest.peers),
            ((replace(one, size=0), *rest), honest.peers),
            (honest.clusters[:2], honest.peers),
            (honest.clusters, honest.peers[::-1]),
            (honest.clusters, ("v0", "v1", "v0.1")),
        ):
            lying = records.encode(replace(honest, clusters=clusters, peers=peers))
            with pytest.raises(BadPayload, match="a proposal") as error:
                vote.receive(first, Propose(KEY, swarm.rounds[first].me, 0, lying))
            refused.append(str(error.value))

    await swarm.average(try_all())
    swarm.decided(swarm.names)
    assert len(refused) == 7


@simulated(VotingClusters, 2, 2, 2)
async def test_run_without_clusters_takes_no_plan_of_them(swarm: VotingClusters) -> None:
    swarm.settings = replace(swarm.settings, clusters=False)
    refused = list[str]()

    async def try_all() -> None:
        first, second, _ = swarm.order
        offers = member_offers(swarm.offers[1])
        told = ClusterPlan(KEY, swarm.versions[0].outline, swarm.offered[1], offers)
        await asyncio.sleep(0.1)
        for receiver, sender, message in (
            (second, first, packed(swarm.plan, swarm.head.roster)),
            ("v1.1", "v1", told),
        ):
            with pytest.raises(BadPayload, match="which this run has not") as error:
                swarm.rounds[receiver].take(sender, message)
            refused.append(str(error.value))
        for session in swarm.rounds.values():
            session.supersede()

    await swarm.average(try_all())
    assert len(refused) == 2
    opening = Contribute(KEY, swarm.versions[0].digest, 0, "fp32")
    assert not swarm.rounds["v1"].cluster.acquaintances(opening)
