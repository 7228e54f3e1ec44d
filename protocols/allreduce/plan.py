"""The plan of a round: when it is called, weights, clip factors, part shares, and what makes a plan valid. Pure.

All follows from what members declared: each receiver computes the same, and no coordinator can favour a member.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median_low

from protocols.base import MAX_WEIGHT, BadPayload, LinkFault, Member, PeerFault, PeerId, RoundKey
from protocols.wire import MAX_ROSTER, MAX_SECONDS, Offer, PartDone, Plan, canonical_bytes

READY_SHARE = 2 / 3
FIRST_SHARE = 1 / 3
PATIENCE = 1.5
GRACE = 1.1
MARGIN_SECONDS = 0.25
"""A round is called when all members are ready, at GRACE times the moment at which READY_SHARE of them were, or at
PATIENCE times the moment at which FIRST_SHARE were. In a swarm of equal members, the grace lets the last one's final
offer arrive before the call. Both wait at least MARGIN_SECONDS for offers to travel."""

NORM_SLACK = 1.5
"""A contribution's norm may exceed the declared norm by this factor, since training continues from offer to cut."""

BUDGET_MULTIPLE = 4.0
BUDGET_FLOOR_SECONDS = 10.0
SCATTER_SHARE = 0.6  # share of the budget after which a contribution that is still missing is late


def call_after(complete_seconds: Sequence[float], members: int) -> float | None:
    """When to call the round, in seconds since it began, given when some of the members were complete. None: not yet.
    The time may be in the past.
    """
    done = sorted(complete_seconds)
    if len(done) == members:
        return 0.0
    first, enough = math.ceil(members * FIRST_SHARE), math.ceil(members * READY_SHARE)
    if len(done) < first:
        return None
    last = _later(done[first - 1], PATIENCE)
    return min(_later(done[enough - 1], GRACE), last) if len(done) >= enough else last


def _later(seconds: float, factor: float) -> float:
    return max(factor * seconds, seconds + MARGIN_SECONDS)


def shares(bandwidths: Sequence[float], able: Sequence[bool], growth: float = 1.0) -> tuple[float, ...]:
    """Part shares f, summing to 1, that minimise the slowest peer's time; 0 for peers that are not able to reduce.

    Peer i sends S·[1 - f_i] bytes of its own vector, S·g·(N-1)·f_i of what it reduced: in all S·[1 + h·f_i] with
    h = g·(N-1) - 1, where g (`growth`) is the bytes of a reduced vector for each byte of a contribution. So the least T
    with f_i = max(0, (T·b_i/S - 1)/h) and sum 1 is optimal (water filling).
    """
    count = len(bandwidths)
    load = _load(count, growth)
    if load <= 0:
        return tuple(float(one) / sum(able) for one in able)
    order = sorted((i for i in range(count) if able[i]), key=lambda i: -bandwidths[i])
    total, time = 0.0, math.inf
    for taken, i in enumerate(order, start=1):
        if time * bandwidths[i] <= 1.0:
            break
        total += bandwidths[i]
        time = (load + taken) / total
    raw = [max(0.0, time * b - 1.0) if one else 0.0 for b, one in zip(bandwidths, able, strict=True)]
    whole = math.fsum(raw)  # exact, where sum() differs between versions of Python
    return tuple(share / whole for share in raw)


def bandwidths(claimed: Sequence[float]) -> tuple[float, ...]:
    """Claimed bandwidths, clamped to within a factor of `CLAIM_SPREAD` of their lower median."""
    middle = median_low(claimed)
    return tuple(min(max(claim, middle / CLAIM_SPREAD), middle * CLAIM_SPREAD) for claim in claimed)


def _load(count: int, growth: float) -> float:
    """What a member that reduces everything sends in addition to its own vector, in vectors: h of `shares`."""
    return growth * (count - 1) - 1


def part_bounds(fractions: Sequence[float], elements: int, grain: int = 1) -> tuple[int, ...]:
    """Element offsets that cut `elements` by `fractions`: ascending, from 0 to `elements`, multiples of `grain`."""
    bounds, reached = [0], 0.0
    for fraction in fractions[:-1]:
        reached += fraction
        bounds.append(min(elements, max(bounds[-1], grain * round(reached * elements / grain))))
    return (*bounds, elements)


def expected_seconds(
    fractions: Sequence[float], bandwidths: Sequence[float], total_bytes: int, growth: float = 1.0
) -> float:
    """Time of the data phase at the slowest uplink, with vectors of `total_bytes`; `growth` as in `shares`."""
    count = len(fractions)
    if count == 1:
        return 0.0
    load = _load(count, growth)
    return max(total_bytes * (1 + load * f) / b for f, b in zip(fractions, bandwidths, strict=True))


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """What a plan follows from, besides the offers. It is the same at every member of a round."""

    key: RoundKey
    elements: int
    bytes_per_element: float  # of an encoded contribution
    complaints: tuple[LinkFault, ...] = ()  # broken links: the members at both ends reduce nothing
    robust: str = "mean"
    max_weight: float = MAX_WEIGHT
    grain: int = 1  # parts begin at multiples of this number of elements
    growth: Callable[[int], float] = lambda members: 1.0  # members -> bytes of a mean for each of a contribution


def broken(complaints: Iterable[LinkFault], round: int) -> list[set[PeerId]]:
    """The two ends of each link that is known to be broken in this round."""
    return [{each.first, each.second} for each in complaints if each.until > round]


def make_plan(inputs: PlanInputs, offers: Sequence[Offer], elapsed_seconds: float, ballot: int = 0) -> Plan:
    """The plan that calls a round with these offers, `elapsed_seconds` after it began.

    All train on as long as the slowest member's step takes: none is cut in the middle of a step. A claimed step length
    counts up to the time that the round has lasted, since a longer step contributes nothing.
    """
    unable = set().union(*broken(inputs.complaints, inputs.key.round))
    members = tuple(sorted(offers, key=lambda offer: offer.member))
    # A member without work may be in the middle of its first step, so it reduces nothing: no other has to wait for it.
    able = [offer.tokens > 0 and offer.member.peer not in unable for offer in members]
    uplinks = bandwidths([offer.bandwidth for offer in members])
    growth = inputs.growth(len(members)) if members else 1.0
    fractions = shares(uplinks, able if any(able) else [True] * len(members), growth)
    seconds = expected_seconds(fractions, uplinks, int(inputs.elements * inputs.bytes_per_element), growth)
    return Plan(
        key=inputs.key,
        ballot=ballot,
        version=0,
        offers=members,
        bounds=part_bounds(fractions, inputs.elements, inputs.grain),
        reducers=tuple(range(len(members))),
        cut_seconds=min(elapsed_seconds, max(offer.step_seconds for offer in members)),
        budget_seconds=min(MAX_SECONDS, BUDGET_MULTIPLE * seconds + BUDGET_FLOOR_SECONDS),
    )


def offer_message(key: RoundKey, offer: Offer) -> bytes:
    return b"starling offer" + canonical_bytes(key) + canonical_bytes(replace(offer, signature=b""))


@dataclass(frozen=True, slots=True)
class ResolvedPlan:
    """A valid plan with all that follows from it."""

    plan: Plan
    digest: bytes
    peers: tuple[PeerId, ...]  # in the order of mask bits and of summation
    weights: tuple[float, ...]  # at most `Settings.max_weight` median ones; 0: contributes nothing
    factors: tuple[float, ...]  # each contribution is multiplied by its one before it is weighted, in (0, 1]
    clamped: tuple[PeerFault, ...]  # members that claim an implausible weight, or whose norm will be clipped by much
    allowances: tuple[float, ...]  # median norms that each member's norm may reach
    median_norm: float
    robust: str = "mean"

    @property
    def phase_seconds(self) -> float:
        """Expected length of the data phase."""
        return phase_seconds(self.plan.budget_seconds)

    @property
    def uplinks(self) -> tuple[float, ...]:
        """The bandwidths that `peers` claim, bytes/s."""
        return tuple(offer.bandwidth for offer in self.plan.offers)

    @property
    def expected_norms(self) -> tuple[float, ...]:
        """The norm of each contribution by its offer and after its factor, in median norms; 0 if it is not declared."""
        pairs, median = zip(self.plan.offers, self.factors, strict=True), self.median_norm
        return tuple(offer.norm * factor / median if median else 0.0 for offer, factor in pairs)

    @property
    def capped(self) -> dict[PeerId, int]:
        """Members that weigh less than the tokens they trained, and these tokens."""
        pairs = zip(self.plan.offers, self.weights, strict=True)
        return {offer.member.peer: offer.tokens for offer, weight in pairs if weight < offer.tokens}

    def part(self, index: int) -> tuple[int, int]:
        return self.plan.bounds[index], self.plan.bounds[index + 1]

    def reducer(self, part: int) -> PeerId:
        return self.peers[self.plan.reducers[part]]

    def norm_limit(self, member: int) -> float:
        """Largest norm that a contribution of the member with this index may have: work grows by a step or more after
        an offer.

        At least `CLAIM_SPREAD` median norms: a member that declares little and sends more is clipped by the measured
        norm (`protocols.vectors.robust.RobustAggregator`).
        """
        return max(self.plan.offers[member].norm, CLAIM_SPREAD * self.median_norm) * NORM_SLACK


def phase_seconds(budget_seconds: float) -> float:
    """Expected length of the data phase that has this budget."""
    return (budget_seconds - BUDGET_FLOOR_SECONDS) / BUDGET_MULTIPLE


def plan_digest(plan: Plan) -> bytes:
    """Digest of what is averaged and in which parts. It leaves out the reducers, since a part may go to another one."""
    return hashlib.sha256(b"starling plan" + canonical_bytes(replace(plan, ballot=0, version=0, reducers=()))).digest()


def resolve_plan(
    plan: Plan,
    robust: str = "mean",
    max_weight: float = MAX_WEIGHT,
    median: float | None = None,
    norm_median: float | None = None,
) -> ResolvedPlan:
    """Derive all that follows from a plan: weights, clip factors, clamped members. `median` and `norm_median`: see
    `weights` and `clip_factors`.

    No member counts for more than `max_weight` median members. With any rule but the mean none counts for more than
    one: a run that expects wrong vectors must expect wrong claims, too. A member is blamed only for a claim that no
    honest one makes.
    """
    offers = plan.offers
    tokens, norms = [offer.tokens for offer in offers], [offer.norm for offer in offers]
    plausible = weights(tokens, median=median)
    counted = weights(tokens, max_weight if robust == "mean" else 1.0, median)
    middle = median_norm(norms) if norm_median is None else norm_median
    clamped = []
    honest_factors = clip_factors(norms, allowances(plausible, median), middle)
    for offer, weight, counts, factor in zip(offers, plausible, counted, honest_factors, strict=True):
        if weight < offer.tokens:
            clamped.append(PeerFault(offer.member.peer, f"weight clamped from {offer.tokens} to {counts:g} tokens"))
        if factor < NAMED_FACTOR:
            clamped.append(PeerFault(offer.member.peer, f"norm {offer.norm:.3g} clipped by {factor:.3g}"))
    allowed = allowances(counted, median)
    factors = clip_factors(norms, allowed, middle)
    peers = tuple(offer.member.peer for offer in offers)
    digest = plan_digest(plan)
    return ResolvedPlan(plan, digest, peers, counted, factors, tuple(clamped), allowed, middle, robust)


def check(
    plan: Plan, inputs: PlanInputs, roster: Sequence[Member], verify: Callable[[PeerId, bytes, bytes], bool]
) -> None:
    """Refuse a plan that breaks a rule or does not follow from its offers, with BadPayload. A coordinator may choose
    only the reducers, and those only after the round's first plan. `verify` maps (peer, message, signature) to
    whether it is genuine.
    """
    members = [offer.member for offer in plan.offers]
    if not members or members != sorted(set(members)) or not set(members) <= set(roster):
        raise BadPayload("the plan's members are not distinct members of the roster, in order")
    for one, other in itertools.pairwise(members):
        if one.peer == other.peer:
            raise BadPayload(f"the plan counts one peer several times: {one.peer} is in it twice")
    for offer in plan.offers:
        if not verify(offer.member.peer, offer_message(plan.key, offer), offer.signature):
            raise BadPayload(f"the plan holds a forged offer of {offer.member.peer}")
    if len({offer.state_root for offer in plan.offers}) > 1:
        raise BadPayload("the plan mixes offers from different states")
    due = make_plan(inputs, plan.offers, plan.cut_seconds)
    first = plan.ballot == plan.version == 0
    known = plan.reducers == due.reducers if first else all(index < len(members) for index in plan.reducers)
    if plan.bounds != due.bounds or len(plan.reducers) != len(due.reducers) or not known:
        raise BadPayload("the plan's parts are not those that its offers lead to")
    if (plan.cut_seconds, plan.budget_seconds) != (due.cut_seconds, due.budget_seconds):
        raise BadPayload("the plan's times are not those that its offers lead to")


COMPLAINT_ROUNDS = 32
"""For how many rounds a failed link is avoided. Then it is tried again, at the cost of one repair."""


def complaints(
    now: int,
    peers: Sequence[PeerId],
    parts: Sequence[PartDone],
    before: Sequence[LinkFault],
    senders: Collection[PeerId] | None = None,
) -> tuple[LinkFault, ...]:
    """The links to avoid after round `now`, or to try again next: between a part's reducer and a member of which that
    part alone holds nothing. Bit i of a mask stands for `peers[i]`; `senders`: those that send their work themselves,
    by default all.

    Each reducer can accuse only one member in a round, so that a liar cannot keep all others from reducing.
    """
    standing = {(each.first, each.second): each for each in before if each.until > now}
    present = [functools.reduce(operator.or_, (run.mask for run in part.result.runs), 0) for part in parts]
    somewhere = functools.reduce(operator.or_, present, 0)
    for part, masks in zip(parts, present, strict=True):
        absent = [peer for bit, peer in enumerate(peers) if somewhere >> bit & 1 and not masks >> bit & 1]
        absent = [peer for peer in absent if senders is None or peer in senders]
        if part.result.runs and absent:
            first, second = sorted((peers[part.reducer], absent[0]))
            standing.setdefault((first, second), LinkFault(first, second, now + 1 + COMPLAINT_ROUNDS))
    return tuple(sorted(standing.values()))[:MAX_ROSTER]


# -- what a slow member costs its group: the others are taken to send at one rate, as their claims come too late -------

_BUDGET_SHARE = 0.5


def least_claim(vector_bytes: int, others: float) -> tuple[float, float]:
    """The least bandwidth with which a member is sure to be in time, bytes/s, and half of the budget in seconds.

    The plan takes a slower member for one at the clamp, the `CLAIM_SPREAD`th part of the bandwidth of the `others`.
    """
    budget_seconds = BUDGET_MULTIPLE * vector_bytes * CLAIM_SPREAD / others + BUDGET_FLOOR_SECONDS
    return vector_bytes / (_BUDGET_SHARE * budget_seconds), _BUDGET_SHARE * budget_seconds


def cost_seconds(claim: float, others: float, vector_bytes: int, members: int) -> float:
    """By how much a member of this bandwidth lengthens the data phase, compared with one like the others."""
    if members < 2:
        return 0.0

    def seconds(mine: float) -> float:
        uplinks = [mine] + [others] * (members - 1)
        return expected_seconds(shares(uplinks, [True] * members), uplinks, vector_bytes)

    return max(0.0, seconds(min(claim, others)) - seconds(others))


CLAIM_SPREAD = 16.0
"""Claims of tokens are plausible up to this multiple of the lower median, bandwidths within this factor of it: honest
peers differ tenfold. Of two claims the smaller one is the measure."""
NAMED_FACTOR = 0.5
"""A member whose norm is clipped by a smaller factor is blamed. Half of all honest members are a little above the
median."""


def weights(tokens: Sequence[int], spread: float = CLAIM_SPREAD, median: float | None = None) -> tuple[float, ...]:
    """Token weights, none above `spread` times the `median`: by default the lower one of those that are positive."""
    if median is None:
        median = median_low([count for count in tokens if count > 0] or [0])
    return tuple(float(min(count, spread * median)) for count in tokens)


def allowances(weights: Sequence[float], median: float | None = None) -> tuple[float, ...]:
    """How many median norms each member's norm may reach: its weight in median weights, at least 1."""
    middle = median or median_low([weight for weight in weights if weight > 0] or [1.0])
    return tuple(max(1.0, weight / middle) for weight in weights)


def median_norm(norms: Sequence[float]) -> float:
    """The lower median of the positive norms; 0 if there is none."""
    positive = [norm for norm in norms if norm > 0]
    return median_low(positive) if positive else 0.0


def clip_factors(norms: Sequence[float], allowances: Sequence[float], median: float | None = None) -> tuple[float, ...]:
    """Factors in (0, 1] that reduce each norm to at most the `median` norm, by default theirs, times its allowance."""
    middle = median_norm(norms) if median is None else median
    return tuple(
        min(1.0, allowance * middle / norm) if norm > 0 and middle > 0 else 1.0
        for norm, allowance in zip(norms, allowances, strict=True)
    )
