"""The plan of a clustered round: clusters instead of members, each led by a voter, and what follows from it. Pure.

A lead offers its cluster as a whole, with its members' tokens, their norms and a digest of their offers; the plan names
these clusters. All weights and the median norm follow from it. Inside a cluster, the rest follows from the offers by
the rules of `protocols.allreduce.plan`: clip factors, and which member aggregates which part. Whoever holds the offers
can check it, and what the lead claims of them: the members, and the reducers of the parts.

Voters check a plan against all clusters' offers. A member of a cluster gets an outline of it, which says what follows
from them (`protocols.allreduce.clustered_messages`). A record that names the outline's hash shows that a majority of
the voters found the same.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median_low
from typing import TypeAlias

from protocols.allreduce import plan as planning
from protocols.allreduce.clustered_messages import (
    MASK_BYTES,
    MAX_CLUSTER,
    ClusteredPlan,
    ClusterOffer,
    ClusterReady,
    OfferToLead,
    PlanOutline,
    cluster_digest,
    clustered_digest,
    coded_norm,
    leads_in,
    mask_of,
    norm_code,
    offers_digest,
)
from protocols.allreduce.plan import BUDGET_FLOOR_SECONDS, BUDGET_MULTIPLE, PlanInputs, ResolvedPlan
from protocols.base import BadPayload, Member, PeerId, RoundKey
from protocols.consensus.record import ClusterDigest, coordinator, drawn
from protocols.wire import MAX_SECONDS, Offer, Plan

SLOWEST_SHARE = 0.1
"""Share of the claims that expected times leave out. Of a thousand peers one is always sixteen times slower."""


Verify = Callable[[PeerId, bytes, bytes], bool]
"""(peer, message, signature) -> whether the signature is genuine."""


# -- a cluster and its offers -----------------------------------------------------------------------------------------


def make_cluster_offer(inputs: PlanInputs, lead: Member, offers: Sequence[Offer], complete: bool) -> ClusterOffer:
    """A lead's offer for its cluster, not yet signed. `offers`, its own among them, are in the order of members."""
    mine = next(offer for offer in offers if offer.member == lead)
    return ClusterOffer(
        lead=lead,
        tokens=tuple(offer.tokens for offer in offers),
        norms=tuple(norm_code(offer.norm) for offer in offers),
        step_seconds=quantile([offer.step_seconds for offer in offers], 1 - SLOWEST_SHARE),
        pace=quantile([offer.bandwidth for offer in offers], SLOWEST_SHARE),
        bandwidth=mine.bandwidth,
        complete=complete,
        leaving=mine.leaving,
        state_root=mine.state_root,
        offers=offers_digest(inputs.key, lead.peer, offers),
        signature=b"",
    )


def quantile(values: Sequence[float], share: float) -> float:
    """The least of the values such that at least this share of them are no larger."""
    return sorted(values)[max(0, math.ceil(share * len(values) - 1e-9) - 1)]


def check_offers(inputs: PlanInputs, cluster: ClusterOffer, offers: Sequence[Offer], verify: Verify) -> None:
    """Refuse offers that are not those of this cluster, or one that does not follow from them, with BadPayload."""
    members, lead = [offer.member for offer in offers], cluster.lead
    peers = [member.peer for member in members]
    if members != sorted(members) or len(set(peers)) < len(peers) or lead not in members:
        raise BadPayload("the offers are not of distinct members of a cluster, in order, with its lead among them")
    if any(offer.state_root != cluster.state_root for offer in offers):
        raise BadPayload("a cluster mixes offers from different states")
    due = make_cluster_offer(inputs, lead, offers, cluster.complete)
    if replace(cluster, signature=b"") != due:
        raise BadPayload(f"the cluster of {lead.peer} is not the one that its offers lead to")
    for offer in offers:
        if not verify(offer.member.peer, OfferToLead(inputs.key, lead.peer, offer).signed(), offer.signature):
            raise BadPayload(f"a cluster holds a forged offer of {offer.member.peer}")


# -- the plan ---------------------------------------------------------------------------------------------------------


def make_clustered_plan(
    inputs: PlanInputs, clusters: Sequence[ClusterOffer], elapsed_seconds: float, ballot: int = 0
) -> ClusteredPlan:
    """The plan that calls a round of these clusters, as `plan.make_plan` does for members."""
    unable = set().union(*planning.broken(inputs.complaints, inputs.key.round))
    ordered = tuple(sorted(clusters, key=lambda cluster: cluster.lead))
    able = [any(cluster.tokens) and cluster.lead.peer not in unable for cluster in ordered]
    uplinks = planning.bandwidths([cluster.bandwidth for cluster in ordered])
    growth = inputs.growth(sum(cluster.size for cluster in ordered))
    fractions = planning.shares(uplinks, able if any(able) else [True] * len(ordered), growth)
    total = int(inputs.elements * inputs.bytes_per_element)
    voters = planning.expected_seconds(fractions, uplinks, total, growth)
    seconds = max(voters, _cluster_seconds(ordered, total, growth))
    steps = quantile([cluster.step_seconds for cluster in ordered], 1 - SLOWEST_SHARE)
    return ClusteredPlan(
        key=inputs.key,
        ballot=ballot,
        version=0,
        clusters=ordered,
        bounds=planning.part_bounds(fractions, inputs.elements, inputs.grain),
        reducers=tuple(range(len(ordered))),
        cut_seconds=min(elapsed_seconds, steps),
        budget_seconds=min(MAX_SECONDS, BUDGET_MULTIPLE * seconds + BUDGET_FLOOR_SECONDS),
    )


def _cluster_seconds(clusters: Sequence[ClusterOffer], total_bytes: int, growth: float) -> float:
    """Time in which all but the slowest tenth of the clusters send what a cluster sends: each member its vector, and
    as an aggregator the partials of its parts and the means of these to the others.
    """
    paces = planning.bandwidths([cluster.pace for cluster in clusters])
    each = [
        total_bytes * (1 + growth * (1 + 1 / max(1, cluster.size - 1))) / pace if cluster.size > 1 else 0.0
        for cluster, pace in zip(clusters, paces, strict=True)
    ]
    return quantile(each, 1 - SLOWEST_SHARE)


def outline_of(plan: ClusteredPlan, roster: Sequence[Member]) -> PlanOutline:
    """The outline of a valid plan."""
    return PlanOutline(
        ballot=plan.ballot,
        version=plan.version,
        leads=mask_of(plan, roster),
        clusters=tuple(cluster_digest(plan.key, cluster) for cluster in plan.clusters),
        bounds=plan.bounds,
        reducers=plan.reducers,
        cut_seconds=plan.cut_seconds,
        budget_seconds=plan.budget_seconds,
        median_tokens=median_tokens([cluster.tokens for cluster in plan.clusters]),
        median_norm=norm_code(median_norm(plan.clusters)),
        signature=plan.signature,
    )


def check_signature(outline: PlanOutline, key: RoundKey, roster: Sequence[Member], verify: Verify) -> None:
    """Refuse a plan that the coordinator of its ballot has not signed, with BadPayload, whoever passes it on."""
    if not verify(coordinator(key.lineage, roster, outline.ballot), outline.signed(key), outline.signature):
        raise BadPayload("a plan that the coordinator of its ballot has not signed")


def check_clustered_plan(plan: ClusteredPlan, inputs: PlanInputs, roster: Sequence[Member], verify: Verify) -> None:
    """Refuse a plan that breaks a rule or does not follow from its clusters, with BadPayload, as `plan.check` does."""
    leads = [cluster.lead for cluster in plan.clusters]
    peers = [lead.peer for lead in leads]
    if not leads or leads != sorted(leads) or len(set(peers)) < len(peers) or not set(leads) <= set(roster):
        raise BadPayload("the plan's leads are not distinct members of the roster, in order")
    if plan.key != inputs.key or len({cluster.state_root for cluster in plan.clusters}) > 1:
        raise BadPayload("the plan is of another round, or mixes clusters from different states")
    if not all(cluster.well_formed for cluster in plan.clusters):
        raise BadPayload("the plan holds a cluster without members, or without their norms")
    for cluster in plan.clusters:
        if not verify(cluster.lead.peer, ClusterReady(plan.key, cluster).signed(), cluster.signature):
            raise BadPayload(f"the plan holds a forged cluster of {cluster.lead.peer}")
    due = make_clustered_plan(inputs, plan.clusters, plan.cut_seconds)
    first = plan.ballot == plan.version == 0
    known = plan.reducers == due.reducers if first else all(index < len(leads) for index in plan.reducers)
    if plan.bounds != due.bounds or len(plan.reducers) != len(due.reducers) or not known:
        raise BadPayload("the plan's parts are not those that its clusters lead to")
    if (plan.cut_seconds, plan.budget_seconds) != (due.cut_seconds, due.budget_seconds):
        raise BadPayload("the plan's times are not those that its clusters lead to")


@dataclass(frozen=True, slots=True)
class ResolvedClusters:
    """A valid clustered plan with all that follows from it. Names as in `ResolvedPlan`, with leads as the peers.

    What only voters know, as they alone reduce and coordinate, is empty elsewhere.
    """

    plan: ClusteredPlan | PlanOutline  # an outline at other peers than voters
    outline: PlanOutline
    digest: bytes
    inputs: PlanInputs
    peers: tuple[PeerId, ...]  # the leads, in the order of mask bits and of summation
    # at voters:
    offered: tuple[ClusterOffer, ...] = ()
    member_weights: tuple[tuple[float, ...], ...] = ()  # of each cluster, as in `ResolvedPlan`
    weights: tuple[float, ...] = ()  # of each cluster with all of its members
    allowances: tuple[float, ...] = ()  # as in `ResolvedPlan`, of the means of clusters
    weight_limit: float = math.inf  # of a cluster in a chunk: that of the median one under a rule, none otherwise

    @property
    def clusters(self) -> tuple[ClusterDigest, ...]:
        """As the record names them."""
        return self.outline.clusters

    @property
    def median(self) -> int:
        """`median_tokens` of all members."""
        return self.outline.median_tokens

    @property
    def median_norm(self) -> float:
        """`median_norm` of all members."""
        return coded_norm(self.outline.median_norm)

    @property
    def robust(self) -> str:
        return self.inputs.robust

    @property
    def phase_seconds(self) -> float:
        return planning.phase_seconds(self.plan.budget_seconds)

    @property
    def uplinks(self) -> tuple[float, ...]:
        return tuple(cluster.bandwidth for cluster in self.offered)

    @property
    def lone(self) -> tuple[PeerId, ...]:
        """Leads without associates: they send their work to the reducers themselves."""
        return tuple(lead for lead, cluster in zip(self.peers, self.clusters, strict=True) if cluster.size == 1)

    @property
    def members(self) -> int:
        return sum(cluster.size for cluster in self.clusters)

    def part(self, index: int) -> tuple[int, int]:
        return self.plan.bounds[index], self.plan.bounds[index + 1]

    def reducer(self, part: int) -> PeerId:
        return self.peers[self.plan.reducers[part]]

    def weight(self, cluster: int, mask: int) -> float:
        """The weight of a cluster in a chunk that holds these of its members."""
        held = (weight for bit, weight in enumerate(self.member_weights[cluster]) if mask >> bit & 1)
        return min(self.weight_limit, math.fsum(held))

    def check_chunk(self, mask: int, members: bytes, before: bytes) -> None:
        """Refuse masks of a reduced chunk (`wire.Reduced`) that do not fit the plan, or hold a member that the chunk
        `before` it left out (empty: there is none), with BadPayload.
        """
        counts = member_masks(members)
        if len(counts) != len(self.peers) or mask >> len(counts):
            raise BadPayload("a reduced chunk of other clusters than the plan's")
        allowed = member_masks(before) if before else [(1 << each.size) - 1 for each in self.clusters]
        for cluster, (held, may) in enumerate(zip(counts, allowed, strict=True)):
            if held & ~may or (held > 0) != bool(mask >> cluster & 1):
                raise BadPayload(f"a reduced chunk holds members of cluster {cluster} that are excluded or unknown")


RoundPlan: TypeAlias = ResolvedPlan | ResolvedClusters


def reassign_parts(
    plan: Plan | ClusteredPlan | PlanOutline, reducers: Mapping[int, int], ballot: int
) -> Plan | ClusteredPlan:
    """The next version of a plan, in which some parts (part -> index of a member or cluster) get other reducers."""
    assert not isinstance(plan, PlanOutline), "only voters coordinate"
    version = plan.version + 1 if ballot == plan.ballot else 0
    given = tuple(reducers.get(part, index) for part, index in enumerate(plan.reducers))
    return replace(plan, ballot=ballot, version=version, reducers=given)


def member_masks(members: bytes) -> list[int]:
    """The member mask of each cluster, from `wire.Reduced.members`."""
    at = range(0, len(members), MASK_BYTES)
    return [int.from_bytes(members[place : place + MASK_BYTES], "little") for place in at]


def median_tokens(clusters: Sequence[Sequence[int]]) -> int:
    """The tokens of the median member, from those of each cluster's members; 0 if none trained.

    It is the smaller of two lower medians over the members that trained. In one each of them counts once, as in a flat
    round. In the other each cluster counts once, and its members share that: so a lead that makes up associates, or
    claims what they do not offer, counts once, too.
    """
    working = [trained for tokens in clusters if (trained := [count for count in tokens if count])]
    return min(_shared_median(working), median_low(itertools.chain(*working))) if working else 0


def median_norm(clusters: Sequence[ClusterOffer]) -> float:
    """The declared norm of the median member that trained; 0 if none declares one.

    Each cluster counts once, and its members share that. Members do not count otherwise, as they do for the tokens: of
    norms, a false median does harm on either side. A small one scales down the work of all.
    """
    declared = [
        [code for code, count in zip(cluster.norms, cluster.tokens, strict=True) if code and count]
        for cluster in clusters
    ]
    working = [codes for codes in declared if codes]
    return coded_norm(_shared_median(working)) if working else 0.0


def _shared_median(groups: Sequence[Sequence[int]]) -> int:
    """The lower median of all values, where each group counts once, and its values share that. No group is empty."""
    whole = math.lcm(*map(len, groups))
    values = sorted((value, whole // len(group)) for group in groups for value in group)
    reached = itertools.accumulate(share for _, share in values)
    return next(value for (value, _), sum_ in zip(values, reached, strict=True) if 2 * sum_ >= whole * len(groups))


def resolve_clusters(plan: ClusteredPlan, inputs: PlanInputs, roster: Sequence[Member]) -> ResolvedClusters:
    """Derive what follows from a valid plan. A member counts for at most `PlanInputs.max_weight` times the median
    member of all clusters. By a robust rule no cluster counts for more than the median one: a lead with made-up
    associates would else have half of the weight, and with it the whole result.
    """
    outline, spread = outline_of(plan, roster), inputs.max_weight if inputs.robust == "mean" else 1.0
    median = outline.median_tokens
    weights = tuple(planning.weights(cluster.tokens, spread, median) for cluster in plan.clusters)
    whole = tuple(map(math.fsum, weights))
    return ResolvedClusters(
        plan=plan,
        outline=outline,
        digest=clustered_digest(plan.key, outline),
        inputs=inputs,
        peers=tuple(cluster.lead.peer for cluster in plan.clusters),
        offered=plan.clusters,
        member_weights=weights,
        weights=whole,
        allowances=tuple(_allowance(each, median) for each in weights),
        weight_limit=math.inf if inputs.robust == "mean" else median_low([*filter(None, whole)] or [0.0]),
    )


def resolve_outline(outline: PlanOutline, inputs: PlanInputs, roster: Sequence[Member]) -> ResolvedClusters:
    """Derive what follows from the outline of a plan. Raises BadPayload if no plan of this round has it."""
    peers, bounds = tuple(member.peer for member in leads_in(outline.leads, roster)), outline.bounds
    if not peers or outline.leads >> len(roster) or len(peers) != len(outline.clusters):
        raise BadPayload("the plan's leads are not members of the roster, each with a cluster")
    if not all(0 < cluster.size <= MAX_CLUSTER for cluster in outline.clusters):
        raise BadPayload("the plan holds an empty cluster, or one that is too large")
    cuts = [bound for bound in bounds if bound < inputs.elements]
    tiles = len(bounds) == len(peers) + 1 and (bounds[0], bounds[-1]) == (0, inputs.elements)
    if not tiles or list(bounds) != sorted(bounds) or any(cut % inputs.grain for cut in cuts):
        raise BadPayload("the plan's parts are not those of the vector")
    if len(outline.reducers) != len(peers) or any(index >= len(peers) for index in outline.reducers):
        raise BadPayload("the plan's parts are reduced by others than its leads")
    if outline.budget_seconds < BUDGET_FLOOR_SECONDS:
        raise BadPayload("the plan's times are too short")
    return ResolvedClusters(outline, outline, clustered_digest(inputs.key, outline), inputs, peers)


def _allowance(weights: Sequence[float], median: int) -> float:
    """How many median norms the mean of a cluster may reach: the mean of what its members' norms may."""
    whole = math.fsum(weights)
    return math.fsum(weight * max(1.0, weight / median) for weight in weights) / whole if whole else 1.0


# -- inside a cluster -------------------------------------------------------------------------------------------------


def resolve_cluster(clusters: ResolvedClusters, index: int, offers: Sequence[Offer]) -> ResolvedPlan:
    """The plan of a data phase inside a cluster, from its checked offers: aggregators reduce its parts."""
    outer, inputs = clusters.plan, clusters.inputs
    sizes = [high - low for low, high in zip(outer.bounds, outer.bounds[1:], strict=False)]
    plan = Plan(
        key=inputs.key,
        ballot=outer.ballot,
        version=outer.version,
        offers=tuple(offers),
        bounds=outer.bounds,
        reducers=aggregators(offers, clusters.peers[index], sizes),
        cut_seconds=outer.cut_seconds,
        budget_seconds=outer.budget_seconds,
    )
    resolved = planning.resolve_plan(plan, inputs.robust, inputs.max_weight, clusters.median, clusters.median_norm)
    return replace(resolved, digest=clusters.digest)


def aggregators(offers: Sequence[Offer], lead: PeerId, sizes: Sequence[int]) -> tuple[int, ...]:
    """Which member of a cluster aggregates which part (part -> index of an offer): parts, largest first, each to the
    member with the least load for its bandwidth. The lead, which reduces for all, gets none if another one has work.
    """
    first = next(index for index, offer in enumerate(offers) if offer.member.peer == lead)
    able = [index for index, offer in enumerate(offers) if offer.tokens > 0 and index != first] or [first]
    uplinks, loads = planning.bandwidths([offer.bandwidth for offer in offers]), dict.fromkeys(able, 0)
    given = [first] * len(sizes)
    for part in sorted(range(len(sizes)), key=lambda part: (-sizes[part], part)):
        given[part] = min(able, key=lambda index: ((loads[index] + sizes[part]) / uplinks[index], index))
        loads[given[part]] += sizes[part]
    return tuple(given)


def relays(cluster: ResolvedPlan, lead: PeerId, part: int) -> tuple[PeerId, ...]:
    """The peers that a cluster's members ask for the mean of a part, one after the other.

    First its aggregator, then the other members in an order that the plan's digest draws. The lead, which reduces for
    all, is the last one.
    """
    aggregator = cluster.reducer(part)
    others = [peer for peer in cluster.peers if peer not in (aggregator, lead)]
    order = (aggregator, *drawn(cluster.digest + part.to_bytes(4, "little"), others), lead)
    return tuple(dict.fromkeys(order))


# -- patience ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pace:
    """When a chunk is closed without the slowest ones: once `SHARE` of those expected have delivered it, after `factor`
    times the time that this took since the cut, and `margin_seconds`.
    """

    factor: float
    margin_seconds: float

    SHARE = 0.75

    def enough(self, expected: int) -> int:
        return math.ceil(self.SHARE * expected)

    def until(self, took_seconds: float) -> float:
        """Seconds after the cut."""
        return self.factor * took_seconds + self.margin_seconds


MEMBER_PACE = Pace(1.5, 0.5)  # of an aggregator with the members of its cluster
CLUSTER_PACE = Pace(2.25, 1.25)
"""Of a reducer with the clusters. It must be the more patient one: else a slow member costs its cluster the chunk."""
