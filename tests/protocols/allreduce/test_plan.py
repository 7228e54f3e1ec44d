"""A plan: what it draws from the offers, what it resolves to, and that none passes that breaks a rule."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import pytest

from protocols import wire
from protocols.allreduce import plan as planning
from protocols.allreduce.clustered_plan import reassign_parts
from protocols.allreduce.plan import NAMED_FACTOR
from protocols.base import BadPayload, LinkFault, Member, PeerId, RoundKey
from protocols.wire import Offer, PartDone, Plan
from tests.support.variants import variants

KEY = RoundKey(bytes(range(32)), "run", bytes(32), 3)
ROSTER = tuple(Member(peer) for peer in ("anna", "bert", "cleo", "dora"))
PEERS = tuple(member.peer for member in ROSTER)
ELEMENTS = 1000


def sign(peer: PeerId, message: bytes) -> bytes:
    return hashlib.sha256(peer.encode() + message).digest()


def verify(peer: PeerId, message: bytes, signature: bytes) -> bool:
    return signature == sign(peer, message)


def offer(peer: PeerId, key: RoundKey = KEY, incarnation: int = 0, **claims: Any) -> Offer:
    """A signed offer; what is not claimed is ordinary."""
    ordinary: dict[str, Any] = {"tokens": 1000, "norm": 1.0, "step_seconds": 0.5, "complete": True, "leaving": False}
    ordinary["bandwidth"] = 1e6
    unsigned = Offer(
        **{"member": Member(peer, incarnation), "state_root": bytes(32), "signature": b"", **ordinary, **claims}
    )
    return replace(unsigned, signature=sign(peer, planning.offer_message(key, unsigned)))


def inputs(elements: int = ELEMENTS) -> planning.PlanInputs:
    return planning.PlanInputs(KEY, elements, 4.0)


def drawn(*offers: Offer, elements: int = ELEMENTS, elapsed_seconds: float = 100.0) -> Plan:
    return planning.make_plan(inputs(elements), offers or [offer(m.peer) for m in ROSTER], elapsed_seconds)


def checked(plan: Plan, elements: int = ELEMENTS, roster: Sequence[Member] = ROSTER) -> None:
    planning.check(plan, inputs(elements), roster, verify)


# -- drawing ----------------------------------------------------------------------------------------------------------


def test_plan_is_valid_and_independent_of_offer_order() -> None:
    offers = [offer(member.peer, bandwidth=1e6 * (1 + i), tokens=i) for i, member in enumerate(ROSTER)]
    plans = {drawn(*order) for order in itertools.permutations(offers)}
    assert len(plans) == 1
    (plan,) = plans
    checked(plan)
    assert [each.member for each in plan.offers] == list(ROSTER)
    assert plan.reducers == (0, 1, 2, 3) and (plan.key, plan.ballot, plan.version) == (KEY, 0, 0)
    assert plan.bounds[:2] == (0, 0), "the member without tokens reduces nothing"


def test_member_without_work_reduces_only_as_last_resort() -> None:
    assert drawn(offer("anna"), offer("bert", tokens=0)).bounds == (0, 1000, 1000)
    assert drawn(offer("anna", tokens=0), offer("bert", tokens=0)).bounds == (0, 500, 1000)


def test_bandwidth_claim_is_clamped_to_its_spread() -> None:
    """No member waits a week because another claims that its link is that slow."""
    honest = [offer("anna"), offer("bert"), offer("cleo")]
    assert planning.bandwidths([1.0, 1e6, 1e6, 1e13]) == (62_500.0, 1e6, 1e6, 16e6)
    slowest, crawling = offer("dora", bandwidth=62_500.0), offer("dora", bandwidth=1.0)
    assert drawn(*honest, crawling).budget_seconds == drawn(*honest, slowest).budget_seconds
    fast, boasting = offer("dora", bandwidth=16e6), offer("dora", bandwidth=1e13)
    assert drawn(*honest, boasting).bounds == drawn(*honest, fast).bounds


def test_times_are_derived_from_the_offers() -> None:
    offers = [offer("anna", step_seconds=2.0), offer("bert", step_seconds=9.0), offer("cleo", step_seconds=0.0)]
    assert drawn(*offers, elapsed_seconds=100.0).cut_seconds == 9.0
    assert drawn(*offers, elapsed_seconds=5.0).cut_seconds == 5.0, "no step is longer than the round so far"
    size = 4 * 3_000_000
    plan = drawn(*offers, elements=3_000_000)
    assert plan.budget_seconds == pytest.approx(4 * 2 * 2 * size / 3e6 + planning.BUDGET_FLOOR_SECONDS, rel=1e-5)
    assert drawn(offer("anna")).budget_seconds == planning.BUDGET_FLOOR_SECONDS, "alone there is nothing to send"


@pytest.mark.parametrize("bandwidth", [1.0, 1e13])
@pytest.mark.parametrize("tokens", [0, wire.MAX_TOKENS])
@pytest.mark.parametrize("norm", [0.0, 1e-320, 1e30])
def test_extreme_offer_still_gives_an_encodable_plan(bandwidth: float, tokens: int, norm: float) -> None:
    strange = offer("anna", bandwidth=bandwidth, tokens=tokens, norm=norm, step_seconds=wire.MAX_SECONDS)
    plan = drawn(strange, offer("bert"), offer("cleo"), elements=1 << 30, elapsed_seconds=1e9)
    planning.check(plan, inputs(1 << 30), ROSTER, verify)
    assert wire.decode(wire.encode(plan)) == plan


# -- terms ------------------------------------------------------------------------------------------------------------


def test_plan_resolves_to_all_derived_values() -> None:
    offers = [
        offer("anna", tokens=100, norm=1.0),
        offer("bert", tokens=100, norm=4.0),
        offer("cleo", tokens=5000, norm=16.0),
    ]
    plan = drawn(*offers, elements=999)
    resolved = planning.resolve_plan(plan)
    assert resolved.plan is plan and resolved.digest == planning.plan_digest(plan)
    assert resolved.peers == ("anna", "bert", "cleo") and resolved.robust == "mean"
    assert resolved.weights == (100.0, 100.0, 300.0) and resolved.allowances == (1.0, 1.0, 3.0)
    assert resolved.factors == (1.0, 1.0, 0.75) and resolved.capped == {"cleo": 5000}
    assert planning.resolve_plan(plan, max_weight=8.0).weights == (100.0, 100.0, 800.0)
    assert resolved.median_norm == 4.0
    assert {blame.peer: blame.why for blame in resolved.clamped} == {
        "cleo": "weight clamped from 5000 to 300 tokens",
    }
    assert [resolved.part(index) for index in range(3)] == [(0, 333), (333, 666), (666, 999)]
    assert [resolved.norm_limit(index) for index in range(3)] == [96.0, 96.0, 96.0]
    assert planning.resolve_plan(drawn()).clamped == ()


def test_only_heavily_clipped_members_are_named() -> None:
    norms = {"anna": 1.0, "bert": 1.0, "cleo": 1.9, "dora": 2.1}
    resolved = planning.resolve_plan(drawn(*(offer(peer, norm=norm) for peer, norm in norms.items())))
    assert resolved.factors == pytest.approx((1.0, 1.0, 1 / 1.9, 1 / 2.1))
    assert resolved.factors[3] < NAMED_FACTOR <= resolved.factors[2]
    assert [(blame.peer, blame.why) for blame in resolved.clamped] == [("dora", "norm 2.1 clipped by 0.476")]
    assert [resolved.norm_limit(index) for index in range(4)] == [24.0] * 4
    assert planning.resolve_plan(drawn(offer("anna", norm=100.0), offer("bert"))).norm_limit(0) == 150.0


def test_caps_on_weights_blame_no_honest_member() -> None:
    offers = [offer("anna", tokens=100), offer("bert", tokens=300), offer("cleo", tokens=1000, norm=5.0)]
    plan = drawn(*offers)
    assert planning.resolve_plan(plan).weights == (100.0, 300.0, 900.0)
    resolved = planning.resolve_plan(plan, "median")
    assert resolved.weights == (100.0, 300.0, 300.0) and resolved.allowances == (1.0, 1.0, 1.0)
    assert resolved.factors == (1.0, 1.0, 0.2) and resolved.robust == "median"
    assert planning.resolve_plan(plan).clamped == resolved.clamped == ()


# -- checking ---------------------------------------------------------------------------------------------------------


PARTS, TIMES = "parts are not those that its offers lead to", "times are not those that its offers lead to"
MEMBERS = "not distinct members of the roster, in order"
BREAKS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"offers": lambda plan: ()}, MEMBERS),
    ({"offers": lambda plan: (*plan.offers, offer("zora"))}, MEMBERS),
    ({"offers": lambda plan: (*plan.offers[:3], offer("dora", incarnation=1))}, MEMBERS),
    ({"offers": lambda plan: (plan.offers[0], *plan.offers)}, MEMBERS),
    ({"offers": lambda plan: plan.offers[::-1]}, MEMBERS),
    ({"bounds": (0,), "reducers": ()}, PARTS),
    ({"bounds": (0, 600, 500, 700, ELEMENTS)}, PARTS),
    ({"bounds": (0, 700, 800, 900, ELEMENTS)}, PARTS),
    ({"reducers": (2, 2, 2, 2)}, PARTS),
    ({"reducers": (wire.MAX_ROSTER, 1, 2, 3)}, PARTS),
    ({"cut_seconds": 0.6}, TIMES),
    ({"budget_seconds": wire.MAX_SECONDS}, TIMES),
    ({"budget_seconds": 0.0}, TIMES),
)


@pytest.mark.parametrize("changes, why", BREAKS)
def test_plan_breaking_a_rule_is_rejected(changes: dict[str, Any], why: str) -> None:
    plan = drawn()
    values = {name: value(plan) if callable(value) else value for name, value in changes.items()}
    with pytest.raises(BadPayload, match=why):
        checked(replace(plan, **values))


def test_any_changed_value_of_a_plan_is_rejected() -> None:
    """But its place among the coordinator's plans, and a part that goes to another member."""
    plan = drawn()
    for other in variants(plan):
        if replace(other, ballot=0, version=0) != plan:
            with pytest.raises(BadPayload):
                checked(other)


def test_peer_counts_once_across_its_incarnations() -> None:
    offers = (offer("anna"), offer("anna", incarnation=1), offer("bert"))
    with pytest.raises(BadPayload, match="one peer several times"):
        checked(drawn(*offers), roster=tuple(each.member for each in offers))


def forged_offers() -> Iterator[Offer]:
    """Offers in bert's name that bert did not sign for this round."""
    genuine = offer("bert")
    for name in {field.name for field in fields(Offer)} - {"member"}:
        yield replace(genuine, **{name: next(variants(getattr(genuine, name)))})
    yield from (offer("bert", key=other) for other in variants(KEY))
    yield replace(offer("anna"), member=Member("bert"))


def test_offer_not_signed_for_the_round_is_rejected() -> None:
    for forged in forged_offers():
        with pytest.raises(BadPayload, match="a forged offer of bert"):
            checked(drawn(offer("anna"), forged))


def test_digest_changes_with_every_field_but_assignments() -> None:
    """All but the caller and the reducers: a part that goes to another reducer stays what it is."""
    plan = drawn()
    others = list(variants(plan))
    same = [each for each in others if replace(each, ballot=0, version=0, reducers=plan.reducers) == plan]
    different = [each for each in others if each not in same]
    assert len(different) >= 50 and len(same) > 5
    assert {planning.plan_digest(each) for each in same} == {planning.plan_digest(plan)}
    digests = {planning.plan_digest(each) for each in (plan, *different)}
    assert len(digests) == len(different) + 1
    assert planning.plan_digest(drawn()) == planning.plan_digest(plan)


# -- parts given to others, links that failed -------------------------------------------------------------------------


def test_lost_part_is_reassigned_and_others_stay() -> None:
    plan = drawn()
    second = reassign_parts(plan, {2: 0}, ballot=0)
    assert (second.ballot, second.version, second.reducers) == (0, 1, (0, 1, 0, 3))
    taken_over = reassign_parts(second, {}, ballot=5)
    assert (taken_over.ballot, taken_over.version, taken_over.reducers) == (5, 0, (0, 1, 0, 3))
    for each in (second, taken_over):
        assert isinstance(each, Plan)
        checked(each)
        assert planning.resolve_plan(each).digest == planning.resolve_plan(plan).digest
    with pytest.raises(BadPayload, match="parts"):
        checked(replace(plan, version=1, reducers=(0, 1, 4, 3)))
    with pytest.raises(BadPayload, match="parts"):
        checked(replace(plan, reducers=(1, 0, 2, 3)))


def done(part: int, reducer: int, *masks: int) -> PartDone:
    runs = tuple(wire.ChunkSpan(1, mask) for mask in masks)
    return PartDone(part, reducer, wire.PartDigest(bytes([part]) * 32, runs), b"")


def test_broken_link_is_reported_as_fault_and_spared() -> None:
    """bert's work is in all parts but cleo's: neither reduces for a while, and both still bring what they have."""
    parts = [done(0, 0, 0b1111), done(1, 1, 0b1111), done(2, 2, 0b1101, 0b1101), done(3, 3, 0b1111)]
    (complaint,) = planning.complaints(KEY.round, PEERS, parts, ())
    until = KEY.round + 1 + planning.COMPLAINT_ROUNDS
    assert complaint == LinkFault("bert", "cleo", until)
    assert planning.complaints(KEY.round, PEERS, parts, [complaint]) == (complaint,), (
        "an old complaint is not made younger"
    )
    spared = planning.PlanInputs(replace(KEY, round=until - 1), ELEMENTS, 4.0, (complaint,))
    offers = [offer(member.peer) for member in ROSTER]
    assert planning.make_plan(spared, offers, 100.0).bounds == (0, 500, 500, 500, 1000)
    over = planning.PlanInputs(replace(KEY, round=until), ELEMENTS, 4.0, (complaint,))
    assert planning.make_plan(over, offers, 100.0).bounds == drawn().bounds
    whole = [done(part, part, 0b1111) for part in range(4)]
    for now, kept in ((until - 1, (complaint,)), (until, ())):
        assert planning.complaints(now, PEERS, whole, [complaint]) == kept, "it is known until the link was tried again"


def test_absent_or_late_contributor_is_no_link_fault() -> None:
    nowhere = [done(part, part, 0b1011) for part in range(4)]
    torn = [done(0, 0, 0b1111, 0b1101), *(done(part, part, 0b1111) for part in (1, 2, 3))]
    assert planning.complaints(KEY.round, PEERS, nowhere, ()) == planning.complaints(KEY.round, PEERS, torn, ()) == ()


def test_reducer_cannot_report_faults_with_all_members() -> None:
    liar = [done(0, 0, 0b0001), *(done(part, part, 0b1111) for part in (1, 2, 3))]
    assert len(planning.complaints(KEY.round, PEERS, liar, ())) == 1


def test_link_faults_of_all_members_are_ignored() -> None:
    complaints = (LinkFault("anna", "bert", 99), LinkFault("cleo", "dora", 99))
    inputs = planning.PlanInputs(KEY, ELEMENTS, 4.0, complaints)
    assert planning.make_plan(inputs, [offer(member.peer) for member in ROSTER], 100.0).bounds == drawn().bounds
