"""Schedules of gossip: which peers ask each other, and how fast the literature's matrices mix, in float64."""

from __future__ import annotations

import math

import pytest
import torch

from protocols.pairwise.matching import (
    closing_hops,
    closing_pairs,
    contraction,
    select_partners,
    stepped,
)
from protocols.registry import SCHEDULES
from tests.support.mixing_matrices import mixing_matrix


def names(count: int) -> list[str]:
    return [f"p{index:03}" for index in range(count)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_partners_exclude_self_and_ignore_list_order(schedule: str) -> None:
    for count in (1, 2, 3, 8, 9):
        members = names(count)
        for round_number in range(4):
            for me in members:
                asked = select_partners(schedule, members, me, round_number, "run")
                assert me not in asked and len(set(asked)) == len(asked) and set(asked) <= set(members)
                assert bool(asked) == (count > 1)
                assert asked == select_partners(schedule, members[::-1], me, round_number, "run")
                assert asked == select_partners(
                    schedule, [each for each in members if each != me], me, round_number, "run"
                )


@pytest.mark.parametrize("count", (2, 4, 9, 16, 33))
def test_random_matching_is_the_same_for_all(count: int) -> None:
    members = names(count)
    seen = set()
    for round_number in range(20):
        asked = {me: select_partners("random", members, me, round_number, "run")[0] for me in members}
        mutual = {me for me in members if asked[asked[me]] == me}
        assert len(mutual) == count - count % 2
        mixing = mixing_matrix("random", members, round_number, "run")
        for me in mutual:
            assert mixing[members.index(me), members.index(asked[me])] == 0.5
        seen.add(tuple(sorted(asked.items())))
    assert len(seen) > {2: 0, 4: 2}.get(count, 10)
    assert select_partners("random", names(16), "p003", 0, "one run") != select_partners(
        "random", names(16), "p003", 0, "another"
    )


def test_one_extra_member_changes_few_partners() -> None:
    members = names(64)
    same = total = 0
    for round_number in range(20):
        for me in members[1:]:
            total += 1
            same += select_partners("random", members, me, round_number, "x") == select_partners(
                "random", members[1:], me, round_number, "x"
            )
    assert same / total > 0.4  # the pairs before the missing member; the others ask a peer that did not name them


@pytest.mark.parametrize("count", (3, 4, 5, 16, 31))
def test_ring_contraction_matches_theory(count: int) -> None:
    expected = max(abs(1 / 3 + 2 / 3 * math.cos(2 * math.pi * k / count)) for k in range(1, count))
    assert abs(contraction(mixing_matrix("ring", names(count), 0, "")) - expected) < 1e-10
    if count == 16:
        assert abs(expected - (1 / 3 + 2 / 3 * math.cos(2 * math.pi / 16))) < 1e-12 and abs(expected - 0.9492) < 1e-4


@pytest.mark.parametrize("power", range(1, 7))
def test_static_exponential_contraction_matches_theory(power: int) -> None:
    found = contraction(mixing_matrix("exponential", names(1 << power), 0, ""))
    assert abs(found - (1 - 2 / (1 + power))) < 1e-10


@pytest.mark.parametrize("count", range(2, 34))
def test_one_peer_exponential_exact_iff_power_of_two(count: int) -> None:
    product = torch.eye(count, dtype=torch.float64)
    for round_number in range(math.ceil(math.log2(count))):
        product = mixing_matrix("one-peer-exponential", names(count), round_number, "") @ product
    off = float((product - 1 / count).abs().max())
    assert (off < 1e-10) == (count & (count - 1) == 0)


def test_unknown_schedule_gives_one_line_error() -> None:
    with pytest.raises(ValueError, match="unknown schedule 'torus': there are random, ring"):
        select_partners("torus", names(3), "p000", 0, "")


@pytest.mark.parametrize("count", (*range(1, 18), 31, 33, 64, 65, 100))
def test_closing_steps_reach_the_mean(count: int) -> None:
    """Exactly for a power of two; otherwise within what the manual says."""
    steps, most = closing_pairs(count), (count - 1).bit_length() + 1 if count > 1 else 0
    assert len(steps) == len(closing_hops(count)) == most
    power = count & (count - 1) == 0
    for partner_of in steps:
        assert all(partner_of[partner_of[index]] == index for index in range(count)), "partners name each other"
        assert sum(partner_of[index] == index for index in range(count)) <= count % 2
    given = torch.eye(count, dtype=torch.float64)
    for hop in closing_hops(count):
        given = (given + given.roll(hop, 0)) / 2
    if count > 1:
        assert contraction(stepped(steps)) < (1e-12 if power else 0.45)
        assert contraction(given) < (1e-12 if power else 0.15)


@pytest.mark.parametrize("count", (2, 4, 8, 16))
def test_later_closing_steps_repair_a_missed_first(count: int) -> None:
    first, *rest = closing_pairs(count)
    missed = tuple(index if index // 2 % 2 else partner for index, partner in enumerate(first))
    assert contraction(stepped([missed, *rest])) < 1e-12
