"""The rule that moves peers between stages: it settles near the best split, and leaves no stage too small."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protocols.pipeline.balance import (
    MOVER_RESTS_ROUNDS,
    TARGET_RESTS_ROUNDS,
    PlacedPeer,
    Placements,
    joins,
    may_go_on,
    plan_moves,
)
from tests.support.long import long
from tests.support.placements import drawn, moved

RUN = bytes(32)
ROUND = 50


def placed(counts: Sequence[int], rates: Iterable[float]) -> list[PlacedPeer]:
    rate = iter(rates)
    stages = [stage for stage, count in enumerate(counts) for _ in range(count)]
    return [PlacedPeer(f"p{index:03}", stage, next(rate)) for index, stage in enumerate(stages)]


def view(peers: Iterable[PlacedPeer], stages: int, at: int = ROUND, costs: Sequence[float] = ()) -> Placements:
    return Placements(RUN, at, costs or (1.0,) * stages, tuple(peers))


def best_split(rates: Sequence[float], stages: int) -> float:
    """The largest least capacity of all splits, in stages of one cost."""
    splits = torch.tensor(list(product(range(stages), repeat=len(rates))))
    capacities = torch.stack([((splits == stage) * torch.tensor(rates)).sum(1) for stage in range(stages)])
    return float(capacities.min(0).values.max())


def weakest(peers: Iterable[PlacedPeer], stages: int, costs: Sequence[float] = ()) -> float:
    return min(view(peers, stages, costs=costs).capacities())


def settle(peers: list[PlacedPeer], stages: int, rounds: int, costs: Sequence[float]) -> tuple[list[PlacedPeer], int]:
    """Play rounds in which each move succeeds. Returns the peers at the end, and the last round with a move."""
    last = 0
    for at in range(1, rounds + 1):
        moves = plan_moves(view(peers, stages, at, costs)).moves
        donors, targets = [move.stage for move in moves], [move.target for move in moves]
        assert len({*donors, *targets}) == 2 * len(moves) <= 2 * max(1, len(peers) // 16)
        before = view(peers, stages).replicas()
        peers, last = moved(peers, moves, at, costs), at if moves else last
        after = view(peers, stages).replicas()
        assert all(now >= 2 for was, now in zip(before, after, strict=True) if now < was), "too few are left"
    return peers, last


@pytest.mark.parametrize("numbers", [range(30), *long(range(30, 300))])
def test_crowded_stage_spreads_until_the_split_is_nearly_the_best(numbers: range) -> None:
    for seed in numbers:
        rates = random.Random(seed).choices((1.0, 2.0, 3.0, 4.0), k=8)
        peers, _ = settle(placed((6, 1, 1), rates), 3, 10, (1.0,) * 3)
        assert weakest(peers, 3) >= 0.7999 * best_split(rates, 3), seed


@pytest.mark.parametrize("numbers", [range(20), *long(range(20, 500))])
def test_no_stage_is_emptied_and_moves_end(numbers: range) -> None:
    """Of any start, with peers whose users have chosen, that rest, or whose rates are not known, and uneven stages."""
    for seed in numbers:
        costs, peers = drawn(random.Random(seed))
        stages = len(costs)
        before = weakest(peers, stages, costs)
        peers, last = settle(peers, stages, 100, costs)
        assert last <= 30, (seed, last)
        assert weakest(peers, stages, costs) >= before * 0.999, seed


@given(st.randoms(use_true_random=False), st.integers(2, 5), st.integers(0, 24))
def test_every_peer_computes_the_same_plan_of_the_same_view(rng: random.Random, stages: int, count: int) -> None:
    """In whatever order it has met the others, and whatever they claim within the bounds of a heartbeat."""
    said = (0.0, 5e-324, 1e-12, 0.1, 0.2, 0.3, 1.0, 1e9)
    peers = [
        PlacedPeer(
            f"p{index}", rng.randrange(stages), rng.choice(said), rng.random() < 0.2, rng.random() < 0.8,
            rng.choice((None, None, None, rng.randrange(stages))), rng.getrandbits(stages), rng.choice((0, 49, 1 << 40))
        )
        for index in range(count)
    ]  # fmt: skip
    plan, stage = plan_moves(view(peers, stages)), joins(view(peers, stages))
    rng.shuffle(peers)
    assert plan_moves(view(peers, stages)) == plan and joins(view(peers, stages)) == stage
    by_name = {each.peer: each for each in peers}
    for move in plan.moves:
        mover = by_name[move.peer]
        assert mover.works and not mover.pinned and mover.moving is None and mover.stage == move.stage != move.target
        assert plan.after > 1.1 * plan.before


CROWDED = placed((6, 1, 1), [1.0] * 8)


def test_single_move_that_gains_nothing_is_made_if_the_plan_gains() -> None:
    plan = plan_moves(view(CROWDED, 3))
    assert [(move.stage, move.target) for move in plan.moves] == [(0, 1)] and (plan.before, plan.after) == (1.0, 2.0)
    assert not plan_moves(view(placed((3, 2, 2), [1.0] * 7), 3)).moves, "the plan's end is as weak"
    assert not plan_moves(view(placed((2, 1), [9.0, 9.0, 1.0]), 2)).moves, "the last two stay"
    assert not plan_moves(view(placed((4, 0), [1.0] * 4), 2)).moves, "nobody there has the state"
    assert not plan_moves(view([], 2)).moves


def test_pinned_resting_and_recently_moved_peers_stay() -> None:
    mover = plan_moves(view(CROWDED, 3)).moves[0].peer
    for change in ({"pinned": True}, {"works": False}, {"arrived": ROUND + 1 - MOVER_RESTS_ROUNDS}):
        peers = [replace(each, **change) if each.peer == mover else each for each in CROWDED]
        found = plan_moves(view(peers, 3)).moves
        assert found and found[0].peer != mover, change
    peers = [replace(each, arrived=ROUND + 1 - TARGET_RESTS_ROUNDS) if each.stage == 1 else each for each in CROWDED]
    assert not plan_moves(view(peers, 3)).moves, "a stage that has just got a peer gets no other"
    assert plan_moves(view(peers, 3, ROUND + 1)).moves
    peers = [replace(each, arrived=1 << 40) for each in CROWDED]
    assert plan_moves(view(peers, 3)).moves, "a move in a round to come is not believed: a liar could hold up all"


def test_peer_with_a_backup_of_the_target_moves_first() -> None:
    for index in range(6):
        peers = [replace(each, holds=0b10) if each is CROWDED[index] else each for each in CROWDED]
        assert plan_moves(view(peers, 3)).moves[0].peer == CROWDED[index].peer


def test_of_two_intents_one_goes_on_whatever_round_their_peers_are_in() -> None:
    for first, second, targets in ((0, 1, (1, 1)), (0, 1, (1, 2)), (2, 5, (2, 1))):
        goes = dict(zip((first, second), targets, strict=True))
        peers = [replace(each, moving=goes.get(index)) for index, each in enumerate(CROWDED)]
        going = [peers[index].peer for index in goes if may_go_on(view(peers, 3, ROUND + index), peers[index].peer)]
        assert len(going) == 1
        assert not plan_moves(view(peers, 3)).moves, "one in a round, of eight"
    assert not may_go_on(view(CROWDED, 3), CROWDED[0].peer), "it has announced nothing"


def test_mover_on_its_way_has_capacity_but_is_not_yet_a_replica() -> None:
    peers = placed((2, 3), [0.1, 0.1, 1.0, 1.0, 1.0])
    peers[3] = replace(peers[3], moving=0)
    assert may_go_on(view(peers, 2), peers[3].peer)
    peers[2] = replace(peers[2], moving=1)
    assert view(peers, 2).replicas() == [2, 2] and view(peers, 2).capacities()[1] == pytest.approx(2.0)
    assert not may_go_on(view(peers, 2), peers[3].peer), "one would stay"


def test_announced_move_is_given_up_once_it_gains_too_little() -> None:
    peers = [replace(CROWDED[0], moving=1), *CROWDED[1:]]
    assert may_go_on(view(peers, 3), peers[0].peer)
    joined = [*peers, *(PlacedPeer(f"q{index}", 1, 1.0) for index in range(5))]
    assert not may_go_on(view(joined, 3), peers[0].peer), "others have joined its target"
    gone = [each for index, each in enumerate(peers) if index not in (1, 2, 3, 4)]
    assert not may_go_on(view(gone, 3), peers[0].peer), "two are left where it is"


def test_joiner_goes_where_the_least_capacity_gains_most() -> None:
    peers = placed((2, 2, 2), [2.0, 2.0, 1.0, 1.0, 2.0, 2.0])
    assert joins(view(peers, 3)) == 1
    assert joins(view([replace(peers[0], moving=1), *peers[1:]], 3)) == 0, "who is about to move counts where it goes"
    resting = [replace(each, works=False) if each.stage == 2 else each for each in peers]
    assert joins(view(resting, 3)) == 2, "who rests computes nothing"
    assert joins(view(placed((2, 1), [1.0, 1.0, 2.0]), 2)) == 1, "of equal ones, that with fewer peers"
    assert joins(view([], 3)) == 0 and joins(view(placed((1, 0), [1.0]), 2)) == 1
    uneven = view(placed((2, 1), [1.0, 1.0, 1.5]), 2, costs=(1.0, 0.5))
    assert joins(uneven) == 1 and joins(replace(uneven, costs=(1.0, 1.0)), 4.0) == 1
