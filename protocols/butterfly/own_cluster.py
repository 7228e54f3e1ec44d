"""A peer's own cluster in one attempt at a round of clusters: the plan inside it, and how the round's plan gets to it.

The coordinator sends a plan of clusters to the voters. Each lead passes its outline on to the members of its cluster
with their offers, so that they can check what follows from these, and later versions without them. So that a repair
gets to a cluster whose lead is lost, its members name another voter, which tells them of later versions, too. If the
lead is lost before it has told all of them the plan, those that have it pass it on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from operator import or_

from protocols.allreduce import clustered_plan
from protocols.allreduce.clustered_messages import (
    ClusterOffer,
    ClusterPlan,
    ClusterReady,
    ClusterVersion,
    ContributePartial,
    PlanOutline,
    cluster_digest,
    clustered_digest,
    leads_in,
    member_offers,
    whole_offers,
)
from protocols.allreduce.clustered_plan import ResolvedClusters, Verify
from protocols.allreduce.parts import ReducedPart
from protocols.allreduce.plan import PlanInputs, ResolvedPlan
from protocols.base import AveragingResult, BadPayload, Contribution, Member, PeerId
from protocols.consensus.record import ClusterDigest, Record
from protocols.streams.endpoint import ControlChannel
from protocols.wire import Contribute, Offer

MAX_KEPT = 32
"""Clusters' offers that are kept: a lead makes some until its cluster is in a plan."""
MAX_SHARED = 6
"""Members to which a member passes the plan of a lost lead on: those that follow it in the cluster, and do the same."""


class OwnCluster:
    def __init__(
        self, me: Member, inputs: PlanInputs, roster: Sequence[Member], post: ControlChannel, verify: Verify
    ) -> None:
        self.whole: ResolvedClusters | None = None  # the latest plan of clusters
        self.index = 0  # of this peer's cluster in it
        self.members: ResolvedPlan | None = None  # the plan inside this cluster; None if this peer is in none
        self.second: ResolvedPlan | None = None  # the same of another cluster that counts on this peer, which moved
        self._second = 0  # its index
        self.standby: Callable[[], Collection[PeerId]] = tuple  # a member may ask these, besides the lead
        self.followers: Callable[[], Collection[PeerId]] = tuple  # this voter tells them of later versions, too
        self._me, self._inputs, self._roster, self._post, self._verify = me, inputs, roster, post, verify
        self._offers: dict[ClusterDigest, tuple[ClusterOffer, tuple[Offer, ...]]] = {}
        self._cluster: ClusterOffer | None = None  # this peer's, in the latest plan
        self._passed_on = b""
        self._repair: ClusterVersion | None = None
        self._told: set[PeerId] = set()  # of followers, about the repair
        self._versions: dict[PeerId, ClusterVersion] = {}  # a voter's latest, not yet looked at
        self._shared: set[PeerId] = set()  # mates to which this peer has passed the plan on

    def keep(self, cluster: ClusterOffer, offers: Sequence[Offer]) -> None:
        """Keep the checked offers of a cluster's members. This peer's own one is among them."""
        self._offers[cluster_digest(self._inputs.key, cluster)] = cluster, tuple(offers)
        while len(self._offers) > MAX_KEPT:
            del self._offers[next(iter(self._offers))]

    def enter(self, whole: ResolvedClusters) -> None:
        """Find this peer's cluster in the latest plan. A peer of two clusters stays in the first that it learned of."""
        before, self.whole = self.whole, whole
        if before and before.digest == whole.digest and self.members:
            return
        known = next((digest for digest in self._offers if digest in whole.clusters), None)
        self.members = None
        if known is not None:
            self.index = whole.clusters.index(known)
            self._cluster, offers = self._offers[known]
            self.members = clustered_plan.resolve_cluster(whole, self.index, offers)

    @property
    def lead(self) -> PeerId:
        return self.whole.peers[self.index] if self.whole and self.members else ""

    @property
    def lead_is_replaced(self) -> bool:
        """Whether another voter reduces the lead's part by now."""
        reducers = self.whole.plan.reducers if self.whole and self.members else ()
        return bool(reducers) and reducers[self.index] != self.index

    @property
    def peers(self) -> tuple[PeerId, ...]:
        return self.members.peers if self.members else ()

    def mates(self, plan: bytes) -> Sequence[PeerId]:
        """The other members of this peer's cluster in the plan with this digest."""
        here = self.peers if self.whole and self.whole.digest == plan else ()
        return [peer for peer in here if peer != self._me.peer]

    # -- at a lead ----------------------------------------------------------------------------------------------------

    def pass_on(self, whole: ResolvedClusters) -> None:
        """Send the members of the cluster a plan, or a later version of it. Followers know the first one already."""
        key, plan, digest = self._inputs.key, whole.plan, whole.digest
        version = ClusterVersion(key, digest, plan.ballot, plan.version, plan.reducers, plan.signature)
        first, self._passed_on = self._passed_on != digest, digest
        mates = self.mates(digest)
        if first:
            self._tell_plan(mates)
        for peer in () if first else mates:
            self._post.send(peer, version)
        if (plan.ballot, plan.version) != (0, 0):
            self._repair, self._told = version, {*self.peers}
            self.tell_followers()

    def _tell_plan(self, mates: Sequence[PeerId]) -> None:
        if self.whole and self.members and self._cluster:
            offers = member_offers(self.members.plan.offers)
            told = ClusterPlan(self._inputs.key, self.whole.outline, self._cluster, offers)
            for peer in mates:
                self._post.send(peer, told)

    def tell_followers(self) -> None:
        """Tell followers of the latest repair, each once. A member follows another voter once it has lost its lead."""
        if self._repair:
            for peer in sorted({*self.followers()} - self._told):
                self._told.add(peer)
                self._post.send(peer, self._repair)

    # -- at its members -----------------------------------------------------------------------------------------------

    def take(self, peer: PeerId, message: ClusterPlan) -> PlanOutline | None:
        """Take the offers of this peer's cluster from a member of it. Returns the plan; the rest of it is not checked.

        None if an earlier incarnation of this peer is in the cluster. Raises BadPayload if the offers are not those of
        the cluster.
        """
        plan, cluster, key = message.plan, message.cluster, self._inputs.key
        leads, members = leads_in(plan.leads, self._roster), [each.member for each in message.offers]
        if self._me not in members and any(member.peer == self._me.peer for member in members):
            return None
        led = dict(zip(leads, plan.clusters, strict=False)).get(cluster.lead)
        if led is None or self._me not in members or all(member.peer != peer for member in members):
            raise BadPayload("a plan for a cluster that is not in it, or in which its sender or this peer is not")
        if led != cluster_digest(key, cluster):
            raise BadPayload("a plan that holds another offer of the cluster")
        if led in self._offers:
            return plan
        if not self._verify(message.lead, ClusterReady(key, cluster).signed(), cluster.signature):
            raise BadPayload(f"a forged offer of the cluster of {message.lead}")
        offers = whole_offers(cluster, message.offers)
        clustered_plan.check_offers(self._inputs, cluster, offers, self._verify)
        if self.whole and self.members and self.whole.digest == clustered_digest(key, plan):
            self._second = plan.clusters.index(led)
            self.second = clustered_plan.resolve_cluster(self.whole, self._second, offers)
        else:
            self.keep(cluster, offers)
        return plan

    def share(self, told: Collection[PeerId]) -> None:
        """Pass the plan on to members that may lack it, because the lead is lost: the next that were not `told`."""
        at = self.peers.index(self._me.peer) if self.members else 0
        following = (*self.peers[at:], *self.peers[:at])
        lacking = [peer for peer in following if peer not in {self._me.peer, self.lead, *told, *self._shared}]
        lacking = lacking[: MAX_SHARED - len(self._shared)]
        self._shared |= {*lacking}
        self._tell_plan(lacking)

    def hear(self, peer: PeerId, version: ClusterVersion) -> None:
        """Note a version of the plan from a voter. The plan itself may yet come."""
        before = self._versions.get(peer)
        if not (before and before.plan == version.plan and _order(version) < _order(before)):
            self._versions[peer] = version

    def later(self) -> Iterator[tuple[PeerId, PlanOutline]]:
        """The versions of the plan that were heard of, from the first to the last, each once, and who sent them. Those
        of plans that this peer does not have wait.
        """
        whole = self.whole if self.members else None
        for peer, version in sorted(self._versions.items(), key=lambda each: _order(each[1])):
            if whole and whole.digest == version.plan:
                del self._versions[peer]
                yield (
                    peer,
                    replace(
                        whole.outline,
                        ballot=version.ballot,
                        version=version.version,
                        reducers=version.reducers,
                        signature=version.signature,
                    ),
                )

    # -- in the data phase, and after it ------------------------------------------------------------------------------

    def acquaintances(self, opening: Contribute | ContributePartial) -> Collection[PeerId]:
        """The peers that may open a data stream so, although this peer may not see them: those of its cluster and, with
        their offers, those of others. The offers are checked before they are served.
        """
        if self.whole is None or self.whole.digest != opening.plan:
            return ()
        return self.peers if isinstance(opening, Contribute) else [offer.member.peer for offer in opening.offers]

    def refusals(self, codec: str) -> Iterator[tuple[PeerId, Contribute | ContributePartial]]:
        """How this peer opens data streams only to close them: to the aggregators of its second cluster, and to the
        reducers of the parts that it should aggregate there.
        """
        whole, second = self.whole, self.second
        for part in range(len(second.plan.reducers)) if whole and second else ():
            assert whole and second
            low, high = second.part(part)
            if low == high:
                continue
            if second.reducer(part) != self._me.peer:
                yield second.reducer(part), Contribute(second.plan.key, second.digest, part, codec)
            else:
                yield (
                    whole.reducer(part),
                    ContributePartial(
                        second.plan.key,
                        second.digest,
                        part,
                        codec,
                        self._second,
                        member_offers(second.plan.offers),
                        False,
                    ),
                )

    def counted(self, result: AveragingResult, record: Record, parts: Sequence[ReducedPart]) -> AveragingResult:
        """The result of a mean of clusters: how much it holds of each member of this cluster, and of the others."""
        masks_of = (clustered_plan.member_masks(members) for part in parts for members in part.members)
        chunks = [masks for masks in masks_of if len(masks) == len(record.clusters)]
        held = [functools.reduce(or_, masks, 0) for masks in zip(*chunks, strict=True)]  # of each cluster
        result = replace(result, contributors=sum(mask.bit_count() for mask in held))
        whole, members = self.whole, self.members
        others = {
            lead: Contribution(sum(masks[index].bit_count() for masks in chunks), len(chunks) * cluster.size)
            for index, (lead, cluster) in enumerate(zip(record.peers, record.clusters, strict=True))
        }
        if whole is None or members is None or whole.digest != record.plan:
            return replace(result, clusters=others)
        others.pop(self.lead, None)
        own = [masks[self.index] for masks in chunks]
        return replace(
            result,
            contributions={
                peer: Contribution(sum(mask >> bit & 1 for mask in own), len(chunks))
                for bit, peer in enumerate(members.peers)
            },
            clusters=others,
            weights=dict(zip(members.peers, members.weights, strict=True)),
            blamed=members.clamped,
            capped=members.capped,
        )


def _order(version: ClusterVersion) -> tuple[int, int]:
    return version.ballot, version.version
