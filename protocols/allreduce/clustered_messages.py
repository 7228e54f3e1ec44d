"""What peers of a clustered round send each other about its plan. Pure.

Voters get the plan packed, members of clusters an outline of it, and with it the offers of their own cluster
(decision 0090). The hash of a plan is that of its outline. The coordinator signs the outline of each version.
"""

# ruff: noqa: RUF009 - a field's bound is its default

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar, cast

from protocols.base import BadPayload, Header, Member, PeerId, RoundKey
from protocols.consensus.record import ClusterDigest
from protocols.wire import (
    MAX_NORM,
    MAX_ROSTER,
    MAX_SECONDS,
    MAX_TOKENS,
    Offer,
    Partial,
    blob,
    canonical_bytes,
    digest,
    flag,
    list_of,
    one,
    peer_id,
    real,
    register,
    short_uints,
    text,
    uint,
)

T = TypeVar("T")

MAX_CLUSTER = 32  # the lead included: one bit of a member mask for each
MASK_BYTES = 4  # of a member mask
MAX_NORM_CODE = (1 << 16) - 1
_NORM_BIAS = 128  # of the exponent in a norm's code


@dataclass(frozen=True, slots=True)
class OfferToLead(Header):
    """A peer's offer to the lead of its cluster. Its signature covers the lead: no other cluster can use the offer."""

    key: RoundKey = one(RoundKey)
    lead: PeerId = peer_id()
    offer: Offer = one(Offer)

    def signed(self) -> bytes:
        return b"starling cluster member" + canonical_bytes(replace(self, offer=replace(self.offer, signature=b"")))


@dataclass(frozen=True, slots=True)
class ClusterOffer:
    """What a cluster contributes to a round. All but `complete` follows from its members' offers."""

    lead: Member = one(Member)
    tokens: tuple[int, ...] = list_of(uint(MAX_TOKENS), MAX_CLUSTER)  # of each member, in their order
    norms: tuple[int, ...] = short_uints(MAX_CLUSTER)  # the same, as `norm_code`
    step_seconds: float = real(0, MAX_SECONDS)  # all but the slowest tenth take at most so long for a step
    pace: float = real(1, 1e13)  # bytes/s that all but the slowest tenth of the members send
    bandwidth: float = real(1, 1e13)  # of the lead, which reduces for all clusters
    complete: bool = flag()
    leaving: bool = flag()  # the lead, after this round
    state_root: bytes = digest()
    offers: bytes = digest()  # `offers_digest`
    signature: bytes = blob(128)

    @property
    def size(self) -> int:
        return len(self.tokens)

    @property
    def well_formed(self) -> bool:
        """Whether it has members, and as many norms."""
        return 0 < len(self.tokens) == len(self.norms)


@dataclass(frozen=True, slots=True)
class ClusterReady(Header):
    """A lead's offer for its cluster, to the coordinators."""

    key: RoundKey = one(RoundKey)
    offer: ClusterOffer = one(ClusterOffer)

    def signed(self) -> bytes:
        return b"starling cluster offer" + canonical_bytes(replace(self, offer=replace(self.offer, signature=b"")))


@dataclass(frozen=True, slots=True)
class ClusteredPlan:
    """The coordinator's plan of a round of clusters, as `wire.Plan` is one of members."""

    key: RoundKey
    ballot: int
    version: int
    clusters: tuple[ClusterOffer, ...]  # in the order that bit masks and sums use
    bounds: tuple[int, ...]
    reducers: tuple[int, ...]  # part -> index of the cluster whose lead reduces
    cut_seconds: float
    budget_seconds: float
    signature: bytes = b""  # of its outline


@dataclass(frozen=True, slots=True)
class PlannedCluster:
    """A `ClusterOffer` in a plan, which has its lead and its state."""

    tokens: tuple[int, ...] = list_of(uint(MAX_TOKENS), MAX_CLUSTER)
    norms: tuple[int, ...] = short_uints(MAX_CLUSTER)
    step_seconds: float = real(0, MAX_SECONDS)
    pace: float = real(1, 1e13)
    bandwidth: float = real(1, 1e13)
    complete: bool = flag()
    leaving: bool = flag()
    offers: bytes = digest()
    signature: bytes = blob(128)


@dataclass(frozen=True, slots=True)
class PackedPlan(Header):
    """A `ClusteredPlan` on its way to a voter, which knows the roster. All clusters begin from one state."""

    key: RoundKey = one(RoundKey)
    ballot: int = uint(1 << 20)
    version: int = uint(1 << 20)
    leads: int = uint((1 << MAX_ROSTER) - 1)  # a bit for each member of the roster, in order
    state_root: bytes = digest()
    clusters: tuple[PlannedCluster, ...] = list_of(one(PlannedCluster), MAX_ROSTER)
    bounds: tuple[int, ...] = list_of(uint(1 << 48), MAX_ROSTER + 1)
    reducers: tuple[int, ...] = list_of(uint(MAX_ROSTER), MAX_ROSTER)
    cut_seconds: float = real(0, MAX_SECONDS)
    budget_seconds: float = real(0, MAX_SECONDS)
    signature: bytes = blob(128)


@dataclass(frozen=True, slots=True)
class MemberOffer:
    """A member's offer beside that of its cluster, which has its tokens and its state."""

    member: Member = one(Member)
    norm: float = real(0, MAX_NORM)
    step_seconds: float = real(0, MAX_SECONDS)
    complete: bool = flag()
    leaving: bool = flag()
    bandwidth: float = real(1, 1e13)
    signature: bytes = blob(128)


@dataclass(frozen=True, slots=True)
class PlanOutline:
    """What members of clusters need of a `ClusteredPlan`, and all that its hash covers."""

    ballot: int = uint(1 << 20)
    version: int = uint(1 << 20)
    leads: int = uint((1 << MAX_ROSTER) - 1)  # a bit for each member of the roster, in order
    clusters: tuple[ClusterDigest, ...] = list_of(one(ClusterDigest), MAX_ROSTER)
    bounds: tuple[int, ...] = list_of(uint(1 << 48), MAX_ROSTER + 1)
    reducers: tuple[int, ...] = list_of(uint(MAX_ROSTER), MAX_ROSTER)
    cut_seconds: float = real(0, MAX_SECONDS)
    budget_seconds: float = real(0, MAX_SECONDS)
    median_tokens: int = uint(MAX_TOKENS)  # as `median_tokens`
    median_norm: int = uint(MAX_NORM_CODE)  # the `norm_code` of `median_norm`
    signature: bytes = blob(128)  # of the ballot's coordinator

    def signed(self, key: RoundKey) -> bytes:
        body = canonical_bytes(key) + canonical_bytes(replace(self, signature=b""))
        return b"starling outline of a plan" + body


@dataclass(frozen=True, slots=True)
class ClusterPlan(Header):
    """A lead passes the plan on to its cluster, with the offers of that one. If it is lost, a member does."""

    key: RoundKey = one(RoundKey)
    plan: PlanOutline = one(PlanOutline)
    cluster: ClusterOffer = one(ClusterOffer)
    offers: tuple[MemberOffer, ...] = list_of(one(MemberOffer), MAX_CLUSTER)

    @property
    def lead(self) -> PeerId:
        return self.cluster.lead.peer


@dataclass(frozen=True, slots=True)
class ClusterVersion(Header):
    """A lead, or a voter in its place, tells the cluster of a later version of the plan with this digest."""

    key: RoundKey = one(RoundKey)
    plan: bytes = digest()
    ballot: int = uint(1 << 20)
    version: int = uint(1 << 20)
    reducers: tuple[int, ...] = list_of(uint(MAX_ROSTER), MAX_ROSTER)
    signature: bytes = blob(128)  # of the outline of this version


@dataclass(frozen=True, slots=True)
class ContributePartial(Header):
    """Opens a data stream from a cluster to the reducer of `part`, which sends reduced chunks back. Partials follow,
    unless the sender `relays` only: its cluster's aggregator is lost.
    """

    key: RoundKey = one(RoundKey)
    plan: bytes = digest()
    part: int = uint(MAX_ROSTER)
    codec: str = text(16)
    cluster: int = uint(MAX_ROSTER)
    offers: tuple[MemberOffer, ...] = list_of(one(MemberOffer), MAX_CLUSTER)
    relays: bool = flag()


register(220, (OfferToLead, ClusterReady, PackedPlan, ClusterPlan, ContributePartial, Partial))
register(228, (ClusterVersion,))


# -- digests ----------------------------------------------------------------------------------------------------------


def offers_digest(key: RoundKey, lead: PeerId, offers: Sequence[Offer]) -> bytes:
    """The digest by which a cluster's offer names those of its members, with their signatures."""
    signed = (canonical_bytes(OfferToLead(key, lead, offer)) for offer in offers)
    return hashlib.sha256(b"starling cluster" + b"".join(signed)).digest()


def cluster_digest(key: RoundKey, cluster: ClusterOffer) -> ClusterDigest:
    """How records and outlines name a cluster's offer, and with it those of its members."""
    return ClusterDigest(hashlib.sha256(ClusterReady(key, cluster).signed()).digest(), cluster.size)


def clustered_digest(key: RoundKey, outline: PlanOutline) -> bytes:
    """Digest of what is averaged and in which parts, as `plan.plan_digest`."""
    body = canonical_bytes(key) + canonical_bytes(replace(outline, ballot=0, version=0, reducers=(), signature=b""))
    return hashlib.sha256(b"starling clustered plan" + body).digest()


# -- shorter forms ----------------------------------------------------------------------------------------------------


def member_offers(offers: Sequence[Offer]) -> tuple[MemberOffer, ...]:
    return tuple(_as(MemberOffer, each) for each in offers)


def whole_offers(cluster: ClusterOffer, offers: Sequence[MemberOffer]) -> tuple[Offer, ...]:
    """The offers of a cluster's members, not checked. Raises BadPayload if they are not as many as its offer says."""
    if len(offers) != cluster.size:
        raise BadPayload("other offers than those of the cluster's members")
    pairs = zip(offers, cluster.tokens, strict=True)
    return tuple(_as(Offer, each, tokens=tokens, state_root=cluster.state_root) for each, tokens in pairs)


def packed(plan: ClusteredPlan, roster: Sequence[Member]) -> PackedPlan:
    """Pack a plan for voters. Its leads are members, in order, and begin from one state."""
    clusters, state_root = tuple(_as(PlannedCluster, each) for each in plan.clusters), plan.clusters[0].state_root
    return _as(PackedPlan, plan, leads=mask_of(plan, roster), state_root=state_root, clusters=clusters)


def unpacked(message: PackedPlan, roster: Sequence[Member]) -> ClusteredPlan:
    """The plan that was `packed`, not checked. Raises BadPayload if it has not one cluster for each lead."""
    leads = leads_in(message.leads, roster)
    if len(leads) != len(message.clusters) or message.leads >> len(roster):
        raise BadPayload("the plan's leads are not members of the roster, each with a cluster")
    pairs = zip(leads, message.clusters, strict=True)
    clusters = tuple(_as(ClusterOffer, each, lead=lead, state_root=message.state_root) for lead, each in pairs)
    return _as(ClusteredPlan, message, clusters=clusters)


def leads_in(mask: int, roster: Sequence[Member]) -> tuple[Member, ...]:
    return tuple(member for bit, member in enumerate(sorted(roster)) if mask >> bit & 1)


def mask_of(plan: ClusteredPlan, roster: Sequence[Member]) -> int:
    leads = {cluster.lead for cluster in plan.clusters}
    return sum(1 << bit for bit, member in enumerate(sorted(roster)) if member in leads)


def _as(kind: type[T], source: object, **others: Any) -> T:
    """A value of this kind with these fields, and those of its other fields that `source` has."""
    names = (each.name for each in fields(cast(Any, kind)) if each.name not in others)
    return kind(**{name: getattr(source, name) for name in names}, **others)


def norm_code(norm: float) -> int:
    """A norm in 16 bits, rounded up to one of 256 in each octave: 0 for none, else its exponent and its fraction.

    Integers, and no logarithm, so that all machines get the same one.
    """
    fraction, exponent = math.frexp(norm)
    code = ((exponent + _NORM_BIAS) << 8) + math.ceil(fraction * 512) - 256
    return max(1, min(code, MAX_NORM_CODE)) if norm > 0 else 0


def coded_norm(code: int) -> float:
    return math.ldexp(256 + (code & 255), (code >> 8) - _NORM_BIAS - 9) if code else 0.0
