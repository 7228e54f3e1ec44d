"""Which peers move to another stage, so that the weakest one is less weak. Pure: equal views give equal plans.

A plan moves one peer after another to the weakest stage, each time the one whose move leaves the best capacities. It is
judged by its end: a single move may gain nothing where two stages are equally weak. Then at most one peer leaves a
stage, and one comes to it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median, median_low

from protocols.base import PeerId

LEAST_GAIN = 0.10  # of the least capacity, by which the plan's end has to raise it
KEPT_GAIN = 0.05  # the same once a peer has announced its move
MOVER_RESTS_ROUNDS = 10
TARGET_RESTS_ROUNDS = 2
KEPT_REPLICAS = 2
PLANNED_MOVES = 8
LEAST_RATE = 1e-9  # a lower one says nothing
GRAIN = 1 << 20
"""Capacities are sums of whole parts of a usual peer's rate: exact, in whatever order they are added."""
PEERS_A_MOVE = 16  # at most one move in a round for each so many peers; one in a smaller run


@dataclass(frozen=True, slots=True)
class PlacedPeer:
    """A live peer, as its heartbeats describe it."""

    peer: PeerId
    stage: int
    rate: float = 0.0  # microbatches/s in its stage; 0: not known
    pinned: bool = False
    works: bool = True
    moving: int | None = None  # the stage to which it is about to move; its own: it is on its way. It counts there
    holds: int = 0  # bit k: it has a backup of stage k
    arrived: int = 0  # training rounds of the run when it moved to its stage; 0: it has not moved

    @property
    def place(self) -> int:
        return self.stage if self.moving is None else self.moving

    def has_come(self, now: int, rounds: int) -> bool:
        """Whether it has moved to its stage in the last `rounds`. A round that is still to come is not believed."""
        return 0 < self.arrived <= now + 1 and now < self.arrived + rounds


@dataclass(frozen=True, slots=True)
class PlacedMove:
    peer: PeerId
    stage: int
    target: int


@dataclass(frozen=True, slots=True)
class MovePlan:
    """`moves` are for now; `before` and `after` are the least capacity now and at the plan's end."""

    moves: tuple[PlacedMove, ...]
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class Placements:
    """One peer's view of a run in stages. `costs`: of a microbatch in each stage, in any unit."""

    run: bytes
    round: int  # training rounds of the run
    costs: Sequence[float]
    peers: Sequence[PlacedPeer]
    usual: float = field(init=False)  # the median of what peers compute in a second, in the unit of `costs`
    _speeds: dict[PeerId, float] = field(init=False)

    def __post_init__(self) -> None:
        known = {each.peer: each.rate * self.costs[each.stage] for each in self.peers if each.rate >= LEAST_RATE}
        object.__setattr__(self, "peers", tuple(sorted(self.peers, key=lambda each: each.peer)))
        object.__setattr__(self, "usual", median(known.values()) if known else 1.0)
        # An unknown one is as the median of all, wherever it is. With its stage's, a move would change what it seems
        # to be worth, and peers might move for ever.
        object.__setattr__(self, "_speeds", {each.peer: known.get(each.peer, self.usual) for each in self.peers})

    def rate(self, peer: PlacedPeer, stage: int) -> int:
        """Of a peer in any stage, in grains."""
        return round(self._speeds[peer.peer] / self.costs[stage] / self.usual * GRAIN)

    def grains(self) -> list[int]:
        """Capacity of each stage. Those that are about to move count where they go."""
        found = [0] * len(self.costs)
        for each in self.peers:
            if each.works:
                found[each.place] += self.rate(each, each.place)
        return found

    def capacities(self) -> list[float]:
        """Microbatches/s of each stage."""
        return [each * self.usual / GRAIN for each in self.grains()]

    def replicas(self) -> list[int]:
        """How many peers work in each stage. One that is about to move still is in its own, and not yet in the other
        one."""
        found = [0] * len(self.costs)
        for each in self.peers:
            found[each.stage] += each.works and each.moving != each.stage
        return found

    def team(self, stage: int) -> tuple[int, float]:
        """How many peers work in a stage, and their microbatches/s; 0 if no peer's rate is known.

        Those that are about to move count where they go.
        """
        team = [each for each in self.peers if each.works and each.place == stage]
        if not any(each.rate >= LEAST_RATE for each in self.peers):
            return len(team), 0.0
        return len(team), sum(self.rate(each, stage) for each in team) * self.usual / GRAIN

    def _order(self, *what: object) -> bytes:
        return hashlib.sha256(b"starling move" + self.run + repr(what).encode()).digest()

    def tie(self, peer: PeerId) -> bytes:
        """Chooses among equal peers, each round anew."""
        return self._order(peer, self.round)

    def turn(self, peer: PlacedPeer) -> bytes:
        """Of two intents the lower one goes on. It does not depend on the round, in which two views may differ."""
        return self._order(peer.peer, peer.moving)


def unseen(stage: int, seen: Sequence[PlacedPeer], teams: Sequence[tuple[int, float]]) -> list[PlacedPeer]:
    """The peers of a stage that are not seen one by one, all of the mean rate.

    `teams` is what peers of the stage say: how many work in it, and their microbatches/s. The median counts.
    """
    if not teams:
        return []
    count, rate = median_low(count for count, _ in teams), median_low(rate for _, rate in teams)
    missing = count - sum(each.works and each.place == stage for each in seen)
    return [PlacedPeer(f"{stage}/{number}", stage, rate / count) for number in range(missing)]


class _Planner:
    """The moves of one plan, each of which changes what the next one finds."""

    def __init__(self, view: Placements) -> None:
        self._view = view
        self.capacities = view.grains()
        self._rates = {each.peer: [view.rate(each, stage) for stage in range(len(view.costs))] for each in view.peers}
        gone = [each for each in view.peers if each.moving not in (None, each.stage) and each.works]
        self._left = [count - sum(each.stage == stage for each in gone) for stage, count in enumerate(view.replicas())]
        self._alive = {each.stage for each in view.peers}
        self._free = [each for each in view.peers if self._may_move(each)]
        self._resting = {each.stage for each in view.peers if each.has_come(view.round, TARGET_RESTS_ROUNDS)}

    def _may_move(self, peer: PlacedPeer) -> bool:
        rests = peer.has_come(self._view.round, MOVER_RESTS_ROUNDS)
        return peer.works and not peer.pinned and peer.moving is None and not rests

    def next(self) -> PlacedMove | None:
        target = min(range(len(self.capacities)), key=lambda stage: (self.capacities[stage], stage))
        if target in self._resting or target not in self._alive:
            return None
        donors = [each for each in self._free if each.stage != target and self._left[each.stage] > KEPT_REPLICAS]
        found = [(sorted(self._after(each, target)), each) for each in donors]
        best = max((ranked for ranked, _ in found), default=[])
        if best <= sorted(self.capacities):
            return None
        equal = [each for ranked, each in found if ranked == best]
        mover = min(equal, key=lambda each: (not each.holds >> target & 1, self._view.tie(each.peer)))
        self.move(mover, target)
        return PlacedMove(mover.peer, mover.stage, target)

    def end(self) -> tuple[PlacedMove, ...]:
        """Plan until nothing gains."""
        moves: list[PlacedMove] = []
        while len(moves) < PLANNED_MOVES and (move := self.next()):
            moves.append(move)
        return tuple(moves)

    def _after(self, peer: PlacedPeer, target: int) -> list[int]:
        changed = self.capacities.copy()
        changed[peer.stage] -= self._rates[peer.peer][peer.stage]
        changed[target] += self._rates[peer.peer][target]
        return changed

    def gains(self, peer: PlacedPeer, target: int) -> bool:
        return sorted(self._after(peer, target)) > sorted(self.capacities)

    def move(self, peer: PlacedPeer, target: int) -> None:
        self.capacities = self._after(peer, target)
        self._left[peer.stage] -= 1
        self._free = [each for each in self._free if each.peer != peer.peer]


def plan_moves(view: Placements) -> MovePlan:
    """The moves that begin now: the first ones of the plan from each stage and to each, if its end gains enough."""
    planner = _Planner(view)
    before = min(planner.capacities)
    planned = planner.end()
    after, unit = min(planner.capacities), view.usual / GRAIN
    if after <= before * (1.0 + LEAST_GAIN):
        return MovePlan((), before * unit, after * unit)
    under_way = [each for each in view.peers if each.moving is not None]
    touched = {each.stage for each in under_way} | {each.place for each in under_way}
    moves: list[PlacedMove] = []
    for move in planned:
        if not {move.stage, move.target} & touched:
            moves.append(move)
        touched |= {move.stage, move.target}
    limit = max(1, len(view.peers) // PEERS_A_MOVE) - len(under_way)
    return MovePlan(tuple(moves[: max(0, limit)]), before * unit, after * unit)


def may_go_on(view: Placements, me: PeerId) -> bool:
    """Whether a peer that has announced its move still makes it: no other intent from its stage, or to its target, goes
    before; its stage keeps enough; and its move, with those that the plan adds to it, still gains.
    """
    mine = next((each for each in view.peers if each.peer == me and each.moving is not None), None)
    if mine is None or mine.moving is None or view.replicas()[mine.stage] <= KEPT_REPLICAS:
        return False
    rivals = [
        each for each in view.peers
        if each.peer != me and each.moving is not None and (each.stage == mine.stage or each.moving == mine.moving)
    ]  # fmt: skip
    if any(view.turn(each) < view.turn(mine) for each in rivals):
        return False
    planner = _Planner(
        replace(view, peers=[replace(each, moving=None) if each in (mine, *rivals) else each for each in view.peers])
    )
    before = min(planner.capacities)
    if not planner.gains(mine, mine.moving):
        return False
    planner.move(mine, mine.moving)
    planner.end()
    return min(planner.capacities) > before * (1.0 + KEPT_GAIN)


def joins(view: Placements, rate: float = 0.0) -> int:
    """The stage that gains most by one more peer: the least capacity rises most, then the next one.

    An unknown `rate` is the median of all. Ties go to the stage with fewer peers, then to the lower one.
    """
    grains, replicas = view.grains(), view.replicas()

    def worth(stage: int) -> tuple[list[int], int, int]:
        changed = grains.copy()
        changed[stage] += round((rate or view.usual / view.costs[stage]) / view.usual * GRAIN)
        return sorted(changed), -replicas[stage], -stage

    return max(range(len(view.costs)), key=worth)
