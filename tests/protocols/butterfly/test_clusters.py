"""Which voter an associate attaches to: places for all, in an order that neither side chooses."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.butterfly import clusters
from protocols.butterfly.clusters import CLUSTER_ROOM, EPOCH_ROUNDS, FIRST_CHOICES, LITTLE_ROOM

VOTERS = tuple(f"voter{index}" for index in range(32))


def attached(peers: int, draw: random.Random) -> dict[str, int]:
    """The fill of each voter, after these peers have attached one after the other; "" counts those without a lead."""
    fills, seed = dict.fromkeys((*VOTERS, ""), 0), draw.randbytes(32)
    for peer in range(peers):
        order, refused = clusters.lead_order(seed, f"peer{peer}", VOTERS), set[str]()
        while asked := clusters.next_leads(order, refused):
            willing = {voter: fills[voter] for voter in asked if clusters.takes(voter, order, fills[voter])}
            if willing:
                fills[clusters.emptiest(willing, order)] += 1
                break
            refused.update(asked)
        else:
            fills[""] += 1
    return fills


@pytest.mark.parametrize("peers, most_left", [(100, 0), (900, 0), (960, 6)])
def test_nearly_full_swarm_places_all_peers(peers: int, most_left: int) -> None:
    for seed in range(4):
        fills = attached(peers, random.Random(seed))
        assert fills.pop("") <= most_left and max(fills.values()) <= CLUSTER_ROOM
        assert peers < 900 or min(fills.values()) >= CLUSTER_ROOM - 2 * LITTLE_ROOM


def test_two_first_voters_are_asked_at_once_then_one_after_the_other() -> None:
    order = clusters.lead_order(bytes(32), "p", VOTERS[:4])
    assert clusters.next_leads(order, ()) == order[:2]
    assert clusters.next_leads(order, order[:1]) == order[1:2]
    assert clusters.next_leads(order, order[:2]) == order[2:3]
    assert clusters.next_leads(order, order[:3]) == order[3:]
    assert clusters.next_leads(order, order) == ()
    assert clusters.emptiest({order[0]: 3, order[1]: 2}, order) == order[1]
    assert clusters.emptiest({order[0]: 2, order[1]: 2}, order) == order[0]


def test_voter_keeps_its_last_places_for_those_that_rank_it_first() -> None:
    order = clusters.lead_order(bytes(32), "p", VOTERS)
    first, last = order[FIRST_CHOICES - 1], order[-1]
    assert clusters.takes(first, order, CLUSTER_ROOM - 1) and not clusters.takes(first, order, CLUSTER_ROOM)
    room = CLUSTER_ROOM - LITTLE_ROOM
    assert clusters.takes(last, order, room - 1) and not clusters.takes(last, order, room)
    assert clusters.takes(first, order, 0, resting=clusters.MAX_RESTING - 1)
    assert not clusters.takes(first, order, 0, resting=clusters.MAX_RESTING)


@given(peer=st.text(max_size=8), round=st.integers(0, 1000))
def test_an_epoch_lasts_as_long_for_each_peer(peer: str, round: int) -> None:
    start = clusters.epoch_start(peer, round)
    assert 0 <= round - start < EPOCH_ROUNDS and clusters.epoch_start(peer, start) == start
    assert start == 0 or clusters.epoch_start(peer, start + EPOCH_ROUNDS) == start + EPOCH_ROUNDS


def test_epochs_of_peers_begin_in_different_rounds() -> None:
    moves = [sum(clusters.epoch_start(f"p{i}", round) == round for i in range(640)) for round in range(200, 264)]
    assert sum(moves) == 640 and max(moves) < 25


def test_seed_is_younger_than_the_acquaintance() -> None:
    """An id can be made to fit a seed that is known already."""
    start = clusters.epoch_start("p", 500)
    assert clusters.seed_round("p", 500, known_since=start - 1) == start
    assert clusters.seed_round("p", start + 5, known_since=start + 2) == start + 3
    assert clusters.seed_round("p", start + 5, known_since=start + 5) is None


def test_order_depends_on_seed_and_peer_only() -> None:
    orders = {clusters.lead_order(bytes([seed]) * 32, peer, VOTERS) for seed in range(8) for peer in "abcdefgh"}
    assert len(orders) == 64
    assert clusters.lead_order(bytes(32), "a", VOTERS) == clusters.lead_order(bytes(32), "a", VOTERS[::-1])
    assert len({order[0] for order in orders}) > 16, "some voters come first far too often"
