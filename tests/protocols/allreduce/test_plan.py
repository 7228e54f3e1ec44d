"""Who brings what: the moment of a call, weights, clips, the best shares there are; and no plan that breaks a rule."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from protocols import wire
from protocols.allreduce import clipping
from protocols.allreduce import plan as planning
from protocols.base import BadPayload, LinkFault, Member, PeerId, RoundKey
from protocols.wire import Offer, PartDone, Plan

KEY = RoundKey(bytes(range(32)), "run", bytes(32), 3)
ROSTER = tuple(Member(peer) for peer in ("anna", "bert", "cleo", "dora"))
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


def variants(value: Any) -> Iterator[Any]:
    """Values that differ from this one in a single leaf."""
    if is_dataclass(value):
        for field in fields(value):
            for other in variants(getattr(value, field.name)):
                yield replace(value, **{field.name: other})  # type: ignore[type-var]
    elif isinstance(value, tuple):
        if value:
            yield value[:-1]
        for index, item in enumerate(value):
            yield from ((*value[:index], other, *value[index + 1 :]) for other in variants(item))
    elif isinstance(value, bytes):
        yield bytes([value[0] ^ 1, *value[1:]]) if value else b"x"
    elif isinstance(value, str):
        yield value + "x"
    else:
        yield (not value) if isinstance(value, bool) else value + 1


# -- the call ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "complete, members, expected",
    [
        ([], 1, None),
        ([7.0], 1, 0.0),
        ([], 2, None),
        ([10.0], 2, 15.0),
        ([10.0, 400.0], 2, 0.0),
        ([10.0], 3, 15.0),
        ([10.0, 12.0], 3, 13.2),
        ([10.0, 14.0], 3, 15.0),  # the grace would end at 15.4
        ([10.0], 4, None),
        ([10.0, 12.0], 4, 18.0),
        ([10.0, 12.0, 14.0], 4, 15.4),
        ([10.0, 12.0, 17.0], 4, 18.0),
        ([10.0, 12.0, 14.0, 14.0], 4, 0.0),
        ([10.0, 12.0], 5, 18.0),
        ([10.0, 12.0, 13.0], 5, 18.0),
        ([10.0, 12.0, 13.0, 14.0], 5, 15.4),
        ([10.0], 6, None),
        ([10.0, 20.0], 6, 30.0),
        ([10.0, 20.0, 21.0], 6, 30.0),
        ([10.0, 20.0, 21.0, 22.0], 6, 24.2),
        ([22.0, 10.0, 21.0, 20.0], 6, 24.2),
        ([10.0, 20.0, 21.0, 22.0, 23.0], 6, 24.2),
        ([float(n) for n in range(10, 0, -1)], 32, None),
        ([float(n) for n in range(11, 0, -1)], 32, 16.5),
        ([0.0], 2, 0.25),  # short rounds leave offers a quarter of a second to travel
        ([0.1], 2, 0.35),
        ([2.0, 2.1], 3, 2.35),
        ([1.0, 2.0], 3, 1.5),
    ],
)
def test_call_time_follows_complete_members(complete: list[float], members: int, expected: float | None) -> None:
    after = planning.call_after(complete, members)
    assert (after is None) == (expected is None)
    assert after == (None if expected is None else pytest.approx(expected))


@given(seconds=st.lists(st.floats(0, 1e4), min_size=1, max_size=32), data=st.data())
def test_more_completions_never_postpone_the_call(seconds: list[float], data: st.DataObject) -> None:
    in_time = sorted(seconds)
    before = float("inf")
    for known in range(len(seconds) + 1):
        after = planning.call_after(data.draw(st.permutations(in_time[:known])), len(seconds))
        assert after == planning.call_after(in_time[:known], len(seconds))
        assert after is not None or 3 * known < len(seconds)
        before, latest = before if after is None else after, before
        assert before <= latest
    assert before == 0.0


# -- weights and clips ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tokens, expected",
    [
        ([], ()),
        ([0, 0], (0.0, 0.0)),
        ([5], (5.0,)),
        ([0, 7], (0.0, 7.0)),
        ([100, 200, 300], (100.0, 200.0, 300.0)),
        ([100, 100, 1601], (100.0, 100.0, 1600.0)),
        ([100, 100, 1600], (100.0, 100.0, 1600.0)),
        ([1000, 10**9], (1000.0, 16_000.0)),  # of two, the smaller is the measure
        ([0, 0, 0, 100, 100, 5000], (0.0, 0.0, 0.0, 100.0, 100.0, 1600.0)),  # those that bring nothing move no median
        ([1, 3, 100, 1000], (1.0, 3.0, 48.0, 48.0)),
        ([wire.MAX_TOKENS, 1, 1], (16.0, 1.0, 1.0)),
        ([wire.MAX_TOKENS], (float(wire.MAX_TOKENS),)),
    ],
)
def test_weights_are_tokens_capped_by_median_multiple(tokens: list[int], expected: tuple[float, ...]) -> None:
    assert clipping.weights(tokens) == expected


@given(tokens=st.lists(st.integers(0, 10**6), min_size=1, max_size=32))
def test_unit_multiple_caps_weights_at_the_median(tokens: list[int]) -> None:
    brought = sorted(count for count in tokens if count)
    if not brought:
        return
    assert max(clipping.weights(tokens, 1.0)) == brought[(len(brought) - 1) // 2]
    assert all(low <= high for low, high in zip(clipping.weights(tokens, 1.0), tokens, strict=True))
    assert set(clipping.allowances(clipping.weights(tokens, 1.0))) == {1.0}


@pytest.mark.parametrize(
    "norms, weights, factors",
    [
        ([], [], ()),
        ([0.0, 0.0], [0.0, 0.0], (1.0, 1.0)),
        ([2.0], [1.0], (1.0,)),
        ([1.0, 2.0, 3.0], [1.0] * 3, (1.0, 1.0, 2 / 3)),
        ([1.0, 2.0, 4.0, 8.0], [1.0] * 4, (1.0, 1.0, 0.5, 0.25)),  # of two in the middle, the smaller is the measure
        ([1.0, 2.0**90], [1.0, 1.0], (1.0, 2.0**-90)),
        ([0.0, 0.0, 1.0, 1.0, 64.0], [0.0, 0.0, 1.0, 1.0, 1.0], (1.0, 1.0, 1.0, 1.0, 1 / 64)),
        ([1e-320, 1.0, 1.0], [1.0] * 3, (1.0, 1.0, 1.0)),
        ([1.0, 1.0, 5.0], [100.0, 100.0, 1000.0], (1.0, 1.0, 1.0)),  # ten times the steps: up to ten times the norm
        ([1.0, 1.0, 20.0], [100.0, 100.0, 1000.0], (1.0, 1.0, 0.5)),
        ([1.0, 5.0], [100.0, 1000.0], (1.0, 1.0)),
        ([4.0, 1.0, 1.0], [1.0, 100.0, 100.0], (0.25, 1.0, 1.0)),  # fewer steps are no reason for a smaller one
    ],
)
def test_norms_are_clipped_to_median_and_token_allowance(
    norms: list[float], weights: list[float], factors: tuple[float, ...]
) -> None:
    assert clipping.clip_factors(norms, clipping.allowances(weights)) == factors


@given(
    norms=st.lists(st.floats(0.0, 1e30), min_size=1, max_size=16),
    lies=st.lists(st.floats(0.0, 1e30), max_size=15),
    data=st.data(),
)
def test_lying_minority_cannot_exceed_largest_honest_norm(
    norms: list[float], lies: list[float], data: st.DataObject
) -> None:
    lies = lies[: max(0, len(norms) - 1)]
    claims = data.draw(st.permutations([*norms, *lies]))
    factors = clipping.clip_factors(claims, [1.0] * len(claims))
    assume(sum(norm > 0 for norm in norms) > len(lies))
    assert all(norm * factor <= max(norms) * (1 + 1e-12) for norm, factor in zip(claims, factors, strict=True))


# -- shares -----------------------------------------------------------------------------------------------------------


def seconds_of(
    fractions: Sequence[float], bandwidths: Sequence[float], able: Sequence[bool], growth: float = 1.0
) -> float:
    """Time, per byte of the vector, of the slowest member that reduces anything."""
    count = len(fractions)
    return max(
        (1 - f + growth * (count - 1) * f) / b
        for f, b, one in zip(fractions, bandwidths, able, strict=True)
        if one and f > 0
    )


def least_seconds(bandwidths: list[float], able: list[bool], growth: float = 1.0) -> float:
    """The least T at which the able members can reduce everything, by bisection."""
    usable = [b for b, one in zip(bandwidths, able, strict=True) if one]
    room = growth * (len(bandwidths) - 1) - 1
    low, high = 0.0, (1 + room) / max(usable)
    for _ in range(200):
        middle = (low + high) / 2
        enough = sum(max(0.0, middle * b - 1) for b in usable) >= room
        low, high = (low, middle) if enough else (middle, high)
    return high


@st.composite
def uplinks(draw: st.DrawFn, fewest: int = 1) -> tuple[list[float], list[bool]]:
    count = draw(st.integers(fewest, 32))
    speed = st.sampled_from([1.0, 1e6, 1e7, 1e13]) | st.floats(5, 8).map(lambda exponent: 10**exponent)
    able = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    able[draw(st.integers(0, count - 1))] = True
    return draw(st.lists(speed, min_size=count, max_size=count)), able


@given(links=uplinks())
def test_shares_sum_to_one(links: tuple[list[float], list[bool]]) -> None:
    bandwidths, able = links
    fractions = planning.shares(bandwidths, able)
    assert len(fractions) == len(bandwidths)
    assert sum(fractions) == pytest.approx(1, abs=1e-12)
    assert all(0 <= f <= 1 for f in fractions)
    assert all(f == 0 for f, one in zip(fractions, able, strict=True) if not one)


@given(links=uplinks(fewest=3))
def test_shares_minimise_the_time(links: tuple[list[float], list[bool]]) -> None:
    bandwidths, able = links
    fractions = planning.shares(bandwidths, able)
    least = least_seconds(bandwidths, able)
    assert seconds_of(fractions, bandwidths, able) == pytest.approx(least, rel=1e-9)
    for f, b, one in zip(fractions, bandwidths, able, strict=True):
        assert not one or f > 0 or 1 / b >= least * (1 - 1e-9)  # idle only if handing in alone takes it as long


@given(links=uplinks(fewest=2), growth=st.floats(1.01, 40))
def test_shares_minimise_the_time_with_growing_means(links: tuple[list[float], list[bool]], growth: float) -> None:
    bandwidths, able = links
    fractions = planning.shares(bandwidths, able, growth)
    least = least_seconds(bandwidths, able, growth)
    assert seconds_of(fractions, bandwidths, able, growth) == pytest.approx(least, rel=1e-9)
    slowest = max(least, *(1 / b for b in bandwidths))
    assert planning.expected_seconds(fractions, bandwidths, 1, growth) == pytest.approx(slowest, rel=1e-9)


@given(links=uplinks(), elements=st.integers(0, 10**7), grain=st.sampled_from([1, 64, 4096]))
def test_parts_start_at_multiples_of_the_grain(
    links: tuple[list[float], list[bool]], elements: int, grain: int
) -> None:
    bounds = planning.part_bounds(planning.shares(*links), elements, grain)
    assert (bounds[0], bounds[-1]) == (0, elements) and list(bounds) == sorted(bounds)
    assert all(bound % grain == 0 for bound in bounds if bound < elements)


@given(scale=st.sampled_from([1e3, 1e7, 1e12]), ratios=st.lists(st.floats(1, 2), min_size=3, max_size=32))
def test_similar_links_share_by_the_formula(scale: float, ratios: list[float]) -> None:
    """2(N-1)·S/Σb, for every member."""
    bandwidths, count = [scale * ratio for ratio in ratios], len(ratios)
    assume(min(bandwidths) >= sum(bandwidths) / (2 * (count - 1)))
    fractions = planning.shares(bandwidths, [True] * count)
    expected = 2 * (count - 1) * 4_000_000 / sum(bandwidths)
    assert planning.expected_seconds(fractions, bandwidths, 4_000_000) == pytest.approx(expected, rel=1e-9)
    times = [4_000_000 * (1 + (count - 2) * f) / b for f, b in zip(fractions, bandwidths, strict=True)]
    assert times == pytest.approx([expected] * count, rel=1e-9)


@pytest.mark.parametrize("bandwidths", [(1.0, 1.0, 1.0), (4.0, 3.0, 2.0), (10.0, 1.0, 1.0), (9.0, 8.0, 1.0)])
@pytest.mark.parametrize("able", [(True, True, True), (True, True, False), (False, True, True)])
def test_no_other_share_division_is_faster(bandwidths: tuple[float, ...], able: tuple[bool, ...]) -> None:
    fractions = planning.shares(bandwidths, able)
    best = seconds_of(fractions, bandwidths, able)
    steps = 48
    for first, second in itertools.product(range(steps + 1), repeat=2):
        other = (first / steps, second / steps, 1 - (first + second) / steps)
        if other[2] >= 0 and all(one or not f for f, one in zip(other, able, strict=True)):
            assert seconds_of(other, bandwidths, able) >= best * (1 - 1e-12)


@pytest.mark.parametrize(
    "bandwidths, able, expected",
    [
        ([5.0], [True], (1.0,)),
        ([1.0, 1e9], [True, True], (0.5, 0.5)),  # with two, everybody sends S whatever the shares
        ([1.0, 1e9], [True, False], (1.0, 0.0)),
        ([1e9, 1.0, 1.0, 1.0], [True] * 4, (1.0, 0.0, 0.0, 0.0)),
        ([1e9, 1.0, 1.0, 1.0], [False, True, True, True], (0.0, 1 / 3, 1 / 3, 1 / 3)),
        ([1e6, 1e6, 1e5, 1e6], [True] * 4, (1 / 3, 1 / 3, 0.0, 1 / 3)),
        ([1.0, 30.0, 20.0], [True] * 3, (0.0, 0.8, 0.2)),
    ],
)
def test_shares_match_hand_calculation(bandwidths: list[float], able: list[bool], expected: tuple[float, ...]) -> None:
    assert planning.shares(bandwidths, able) == pytest.approx(expected)


@given(links=uplinks(), elements=st.integers(0, 40) | st.integers(0, 10**9))
def test_parts_tile_the_vector(links: tuple[list[float], list[bool]], elements: int) -> None:
    """Odd sizes, fewer elements than members; whoever has no share has no element."""
    fractions = planning.shares(*links)
    bounds = planning.part_bounds(fractions, elements)
    assert len(bounds) == len(fractions) + 1 and (bounds[0], bounds[-1]) == (0, elements)
    for f, (low, high) in zip(fractions, itertools.pairwise(bounds), strict=True):
        assert abs(high - low - f * elements) <= 1.001
        assert low <= high and (f > 0 or low == high)


@pytest.mark.parametrize(
    "fractions, elements, expected",
    [
        ((1.0,), 7, (0, 7)),
        ((0.25, 0.25, 0.5), 7, (0, 2, 4, 7)),
        ((0.25,) * 4, 2, (0, 0, 1, 2, 2)),
        ((0.5, 0.0, 0.5), 9, (0, 4, 4, 9)),
        ((0.1,) * 10, 10, tuple(range(11))),
    ],
)
def test_part_bounds_match_hand_calculation(
    fractions: tuple[float, ...], elements: int, expected: tuple[int, ...]
) -> None:
    assert planning.part_bounds(fractions, elements) == expected


def test_slowest_uplink_determines_the_expected_time() -> None:
    assert planning.expected_seconds((1.0,), (5.0,), 1000) == 0.0
    assert planning.expected_seconds((0.5, 0.5), (10.0, 20.0), 1000) == 100.0
    assert planning.expected_seconds((0.5, 0.5, 0.0), (10.0, 30.0, 40.0), 1000) == 150.0


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
    """Nobody waits a week because one member says that its link is that slow."""
    honest = [offer("anna"), offer("bert"), offer("cleo")]
    assert planning.bandwidths([1.0, 1e6, 1e6, 1e13]) == (62_500.0, 1e6, 1e6, 16e6)
    slowest, crawling = offer("dora", bandwidth=62_500.0), offer("dora", bandwidth=1.0)
    assert drawn(*honest, crawling).budget_seconds == drawn(*honest, slowest).budget_seconds
    fast, boasting = offer("dora", bandwidth=16e6), offer("dora", bandwidth=1e13)
    assert drawn(*honest, boasting).bounds == drawn(*honest, fast).bounds


def test_times_are_derived_from_the_offers() -> None:
    offers = [offer("anna", step_seconds=2.0), offer("bert", step_seconds=9.0), offer("cleo", step_seconds=0.0)]
    assert drawn(*offers, elapsed_seconds=100.0).cut_seconds == 9.0
    assert drawn(*offers, elapsed_seconds=5.0).cut_seconds == 5.0, "nobody's step is longer than the round so far"
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
    assert resolved.weights == (100.0, 100.0, 1600.0) and resolved.allowances == (1.0, 1.0, 16.0)
    assert resolved.factors == (1.0, 1.0, 1.0) and resolved.median_norm == 4.0
    assert {blame.peer: blame.why for blame in resolved.clamped} == {
        "cleo": "weight clamped from 5000 to 1600 tokens",
    }
    assert [resolved.part(index) for index in range(3)] == [(0, 333), (333, 666), (666, 999)]
    assert [resolved.norm_limit(index) for index in range(3)] == [96.0, 96.0, 96.0]
    assert planning.resolve_plan(drawn()).clamped == ()


def test_only_heavily_clipped_members_are_named() -> None:
    norms = {"anna": 1.0, "bert": 1.0, "cleo": 1.9, "dora": 2.1}
    resolved = planning.resolve_plan(drawn(*(offer(peer, norm=norm) for peer, norm in norms.items())))
    assert resolved.factors == pytest.approx((1.0, 1.0, 1 / 1.9, 1 / 2.1))
    assert [(blame.peer, blame.why) for blame in resolved.clamped] == [("dora", "norm 2.1 clipped by 0.476")]
    assert [resolved.norm_limit(index) for index in range(4)] == [24.0] * 4
    assert planning.resolve_plan(drawn(offer("anna", norm=100.0), offer("bert"))).norm_limit(0) == 150.0


def test_robust_rule_caps_weights_without_blame() -> None:
    offers = [offer("anna", tokens=100), offer("bert", tokens=300), offer("cleo", tokens=1000, norm=5.0)]
    plan = drawn(*offers)
    assert planning.resolve_plan(plan).weights == (100.0, 300.0, 1000.0)
    resolved = planning.resolve_plan(plan, "median")
    assert resolved.weights == (100.0, 300.0, 300.0) and resolved.allowances == (1.0, 1.0, 1.0)
    assert resolved.factors == (1.0, 1.0, 0.2) and resolved.robust == "median"
    assert planning.resolve_plan(plan).clamped == resolved.clamped == ()


# -- checking ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("elements", [1, 3, 1000])
def test_drawn_plan_is_valid(count: int, elements: int) -> None:
    checked(drawn(*(offer(member.peer) for member in ROSTER[:count]), elements=elements), elements)


Break = Callable[[Plan], Plan]

NOT_MEMBERS: dict[str, Break] = {
    "nobody": lambda plan: replace(plan, offers=()),
    "a stranger": lambda plan: replace(plan, offers=(*plan.offers, offer("zora"))),
    "another life of a member": lambda plan: replace(plan, offers=(*plan.offers[:3], offer("dora", incarnation=1))),
    "a double": lambda plan: replace(plan, offers=(plan.offers[0], *plan.offers)),
    "two offers of one": lambda plan: replace(plan, offers=(*plan.offers, offer("dora", tokens=2))),
    "out of order": lambda plan: replace(plan, offers=plan.offers[::-1]),
}
OTHER_PARTS: dict[str, Break] = {
    "no bounds": lambda plan: replace(plan, bounds=()),
    "no parts": lambda plan: replace(plan, bounds=(0,), reducers=()),
    "a part too few": lambda plan: replace(plan, reducers=plan.reducers[:-1]),
    "a part too many": lambda plan: replace(plan, reducers=(*plan.reducers, 0)),
    "not from the start": lambda plan: replace(plan, bounds=(1, *plan.bounds[1:])),
    "not to the end": lambda plan: replace(plan, bounds=(*plan.bounds[:-1], ELEMENTS - 1)),
    "beyond the end": lambda plan: replace(plan, bounds=(*plan.bounds[:-1], ELEMENTS + 1)),
    "overlapping": lambda plan: replace(plan, bounds=(0, 600, 500, 700, ELEMENTS)),
    "over the end and back": lambda plan: replace(plan, bounds=(0, ELEMENTS + 1, ELEMENTS + 1, 9999, ELEMENTS)),
    "more for a friend": lambda plan: replace(plan, bounds=(0, 700, 800, 900, ELEMENTS)),
    "all to the same member": lambda plan: replace(plan, reducers=(2, 2, 2, 2)),
    "one too high": lambda plan: replace(plan, reducers=(0, 1, 2, 4)),
    "the highest on the wire": lambda plan: replace(plan, reducers=(wire.MAX_ROSTER, 1, 2, 3)),
}
OTHER_TIMES: dict[str, Break] = {
    "a longer cut than any step": lambda plan: replace(plan, cut_seconds=0.6),
    "a week to wait": lambda plan: replace(plan, budget_seconds=wire.MAX_SECONDS),
    "no time at all": lambda plan: replace(plan, budget_seconds=0.0),
}


@pytest.mark.parametrize(
    "broken, why",
    [
        pytest.param(broken, why, id=name)
        for cases, why in (
            (NOT_MEMBERS, "not distinct members of the roster, in order"),
            (OTHER_PARTS, "parts are not those that its offers lead to"),
            (OTHER_TIMES, "times are not those that its offers lead to"),
        )
        for name, broken in cases.items()
    ],
)
def test_plan_breaking_a_rule_is_rejected(broken: Break, why: str) -> None:
    plan = drawn()
    checked(plan)
    with pytest.raises(BadPayload, match=why):
        checked(broken(plan))


def test_peer_counts_once_across_its_incarnations() -> None:
    lives = (offer("anna"), offer("anna", incarnation=1), offer("bert"))
    with pytest.raises(BadPayload, match="one peer several times"):
        checked(drawn(*lives), roster=tuple(each.member for each in lives))


@pytest.mark.parametrize("index", range(len(ROSTER)))
@pytest.mark.parametrize("name", [field.name for field in fields(Offer) if field.name != "member"])
def test_altered_offer_is_rejected_as_forged(index: int, name: str) -> None:
    plan = drawn()
    genuine = plan.offers[index]
    forged = replace(genuine, **{name: next(variants(getattr(genuine, name)))})
    with pytest.raises(BadPayload, match=f"a forged offer of {genuine.member.peer}"):
        checked(replace(plan, offers=(*plan.offers[:index], forged, *plan.offers[index + 1 :])))


@pytest.mark.parametrize("other", list(variants(KEY)), ids=[field.name for field in fields(KEY)])
def test_offer_for_another_round_is_rejected_as_forged(other: RoundKey) -> None:
    with pytest.raises(BadPayload, match="a forged offer of anna"):
        checked(replace(drawn(), key=other))
    with pytest.raises(BadPayload, match="a forged offer of bert"):
        checked(drawn(offer("anna"), offer("bert", key=other)))


def test_signature_of_another_member_is_rejected() -> None:
    genuine = offer("anna")
    with pytest.raises(BadPayload, match="a forged offer of bert"):
        checked(drawn(replace(genuine, member=Member("bert"))))


def test_digest_changes_with_every_field_but_assignments() -> None:
    """But for who calls and who reduces: a part that goes to another stays what it is."""
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
    second = planning.reassign_parts(plan, {2: 0}, ballot=0)
    assert (second.ballot, second.version, second.reducers) == (0, 1, (0, 1, 0, 3))
    taken_over = planning.reassign_parts(second, {}, ballot=5)
    assert (taken_over.ballot, taken_over.version, taken_over.reducers) == (5, 0, (0, 1, 0, 3))
    for each in (second, taken_over):
        checked(each)
        assert planning.resolve_plan(each).digest == planning.resolve_plan(plan).digest
    with pytest.raises(BadPayload, match="parts"):
        checked(replace(second, reducers=(0, 1, 4, 3)))
    with pytest.raises(BadPayload, match="parts"):
        checked(replace(plan, reducers=(1, 0, 2, 3)))


def done(part: int, reducer: int, *masks: int) -> PartDone:
    runs = tuple(wire.ChunkSpan(1, mask) for mask in masks)
    return PartDone(part, reducer, wire.PartDigest(bytes([part]) * 32, runs), b"")


def test_broken_link_is_reported_as_fault_and_spared() -> None:
    """bert's work is in all parts but cleo's: neither reduces for a while, and both still bring what they have."""
    resolved = planning.resolve_plan(drawn())
    parts = [done(0, 0, 0b1111), done(1, 1, 0b1111), done(2, 2, 0b1101, 0b1101), done(3, 3, 0b1111)]
    (complaint,) = planning.complaints(resolved, parts, ())
    until = KEY.round + 1 + planning.COMPLAINT_ROUNDS
    assert complaint == LinkFault("bert", "cleo", until)
    assert planning.complaints(resolved, parts, [complaint]) == (complaint,), "an old complaint is not made younger"
    spared = planning.PlanInputs(replace(KEY, round=until - 1), ELEMENTS, 4.0, (complaint,))
    offers = [offer(member.peer) for member in ROSTER]
    assert planning.make_plan(spared, offers, 100.0).bounds == (0, 500, 500, 500, 1000)
    over = planning.PlanInputs(replace(KEY, round=until), ELEMENTS, 4.0, (complaint,))
    assert planning.make_plan(over, offers, 100.0).bounds == drawn().bounds


def test_absent_or_late_contributor_is_no_link_fault() -> None:
    resolved = planning.resolve_plan(drawn())
    nowhere = [done(part, part, 0b1011) for part in range(4)]
    torn = [done(0, 0, 0b1111, 0b1101), *(done(part, part, 0b1111) for part in (1, 2, 3))]
    assert planning.complaints(resolved, nowhere, ()) == planning.complaints(resolved, torn, ()) == ()


def test_reducer_cannot_report_faults_with_all_members() -> None:
    resolved = planning.resolve_plan(drawn())
    liar = [done(0, 0, 0b0001), *(done(part, part, 0b1111) for part in (1, 2, 3))]
    assert len(planning.complaints(resolved, liar, ())) == 1


def test_link_faults_of_all_members_are_ignored() -> None:
    complaints = (LinkFault("anna", "bert", 99), LinkFault("cleo", "dora", 99))
    inputs = planning.PlanInputs(KEY, ELEMENTS, 4.0, complaints)
    assert planning.make_plan(inputs, [offer(member.peer) for member in ROSTER], 100.0).bounds == drawn().bounds
