"""Peers in the stages of a run, as their heartbeats describe them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from protocols.pipeline.balance import PlacedMove, PlacedPeer


def drawn(rng: random.Random) -> tuple[list[float], list[PlacedPeer]]:
    """The costs of some stages, and peers in them: some rest, some may not move, some rates are not known."""
    stages, count = rng.randint(2, 6), rng.randint(4, 40)
    costs = [rng.uniform(0.5, 1.0) for _ in range(stages)]
    peers = [
        PlacedPeer(f"p{index:03}", rng.randrange(stages), rng.choice((0.0, rng.uniform(1.0, 4.0))),
                   rng.random() < 0.1, rng.random() < 0.9)
        for index in range(count)
    ]  # fmt: skip
    return costs, peers


def moved(
    peers: Sequence[PlacedPeer], moves: Sequence[PlacedMove], at: int, costs: Sequence[float]
) -> list[PlacedPeer]:
    """The peers once the movers have come, with the rates that they have in their new stages."""
    goes = {move.peer: move.target for move in moves}
    return [
        replace(each, stage=goes[each.peer], arrived=at, rate=each.rate * costs[each.stage] / costs[goes[each.peer]])
        if each.peer in goes else each for each in peers
    ]  # fmt: skip
