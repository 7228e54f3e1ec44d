"""A model of who works in which stage of a pipeline while peers come and go: the rule of `protocols.pipeline.balance`.

    python -m benchmarks.placement churn [--seeds 0:20]
    python -m benchmarks.placement calm [--seeds 0:10000]
    python -m benchmarks.placement large [--seeds 0:3]

churn   32 peers in 4 stages for three hours, rates 1 to 4, mean lives of one and of two hours; another peer comes for
        each that goes. The least capacity of a stage, as a share of that of the best split of the same peers (the
        oracle), which moves them at no cost. `random` makes as many moves as `every 60 s`, at the same times
calm    nobody comes or goes for 100 rounds: 4 to 40 peers in 2 to 6 uneven stages, from any start. Whether a move left
        a stage with fewer than two replicas, and the round of the last move
large   512 peers in 16 stages, some of them unequal, for 14 rounds. `whole`: each peer sees all others. `part`: it sees
        those of its own stage, 8 of each other stage, and what these say of theirs. The least capacity of a stage at
        the end, as a share of the mean one, and the moves

Nothing is trained here. A peer that moves computes nothing for as long as it is away; one that comes computes at once.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from protocols.pipeline.balance import KEPT_REPLICAS, PlacedMove, PlacedPeer, Placements, joins, plan_moves, unseen
from tests.sim.arguments import Parser, seeds
from tests.support.placements import drawn, moved

STAGES, PEERS, HOURS = 4, 32, 3
TICK_SECONDS = 10.0
LIVES_SECONDS, AWAY_SECONDS = (3600.0, 7200.0), (30.0, 120.0)
CALM_ROUNDS, QUIET_ROUNDS = 100, 70
LARGE_STAGES, LARGE_ROUNDS, SEEN = 16, 14, 8
LARGE_SIZES = ([32] * 16, [62, *[30] * 15], [100, *[27] * 14, 34], [4, *[34] * 14, 32])
POLICIES = {"never": 0.0, "every 300 s": 300.0, "every 60 s": 60.0, "random": 60.0}


@dataclass(slots=True)
class ModelPeer:
    placed: PlacedPeer
    dies_at: float
    ready_at: float = 0.0


def oracle(rates: Sequence[float]) -> float:
    """The least capacity of a split that is nearly the best: the fastest peers first, then swaps and moves."""
    split: list[list[float]] = [[] for _ in range(STAGES)]
    for rate in sorted(rates, reverse=True):
        min(split, key=sum).append(rate)
    while _improve(split):
        pass
    return min(map(sum, split))


def _improve(split: list[list[float]]) -> bool:
    low = min(split, key=sum)
    for other in split:
        if other is low:
            continue
        for given in other:
            for back in (0.0, *low):
                least = min(sum(low), sum(other)) + 1e-9
                if min(sum(low) + given - back, sum(other) - given + back) > least:
                    other.remove(given)
                    low.append(given)
                    if back:
                        low.remove(back)
                        other.append(back)
                    return True
    return False


class ChurnModel:
    """Plays one policy on the comings and goings of a seed, which are the same for all policies."""

    def __init__(self, policy: str, seed: int, life_seconds: float, away_seconds: float, weakest_first: bool) -> None:
        self._policy, self._life, self._away, self._weakest = policy, life_seconds, away_seconds, weakest_first
        self._comings, self._rng = random.Random(f"comings/{seed}"), random.Random(f"{policy}/{seed}")
        self._round = 0
        self._peers = [self._new(0.0, index, index % STAGES) for index in range(PEERS)]
        self._count, self._best = PEERS, oracle([each.placed.rate for each in self._peers])
        self.moves: Counter[float] = Counter()
        self.emptied = 0

    def _new(self, now: float, index: int, stage: int) -> ModelPeer:
        rate, life = self._comings.uniform(1.0, 4.0), self._comings.expovariate(1 / self._life)
        return ModelPeer(PlacedPeer(f"p{index:06}", stage, rate), now + life)

    def view(self) -> Placements:
        return Placements(bytes(32), self._round, (1.0,) * STAGES, [each.placed for each in self._peers])

    def play(self, times: Counter[float] | None = None) -> float:
        """The mean share of the oracle's least capacity. `times`: how many moves are made when, for `random`."""
        every, shares, now = POLICIES[self._policy], [], 0.0
        while now < HOURS * 3600.0:
            now += TICK_SECONDS
            self._churn(now)
            if every and now % every == 0.0:
                self._round += 1
                self._rebalance(now, times)
            working = [each.placed for each in self._peers if each.ready_at <= now]
            capacity = [sum(each.rate for each in working if each.stage == stage) for stage in range(STAGES)]
            shares.append(min(capacity) / self._best)
        return fmean(shares)

    def _churn(self, now: float) -> None:
        gone = [each for each in self._peers if each.dies_at <= now]
        if not gone:
            return
        self._peers = [each for each in self._peers if each.dies_at > now]
        for _ in gone:
            drawn = self._comings.randrange(STAGES)
            self._peers.append(self._new(now, self._count, joins(self.view()) if self._weakest else drawn))
            self._count += 1
        self._best = oracle([each.placed.rate for each in self._peers])

    def _rebalance(self, now: float, times: Counter[float] | None) -> None:
        moves = plan_moves(self.view()).moves if times is None else self._random(times[now])
        for move in moves:
            self.emptied += self.view().replicas()[move.stage] <= KEPT_REPLICAS
            mover = next(each for each in self._peers if each.placed.peer == move.peer)
            mover.placed = replace(mover.placed, stage=move.target, arrived=self._round)
            mover.ready_at = now + self._away
            self.moves[now] += 1

    def _random(self, count: int) -> Iterator[PlacedMove]:
        for _ in range(count):
            replicas = self.view().replicas()
            free = [each.placed for each in self._peers if replicas[each.placed.stage] > KEPT_REPLICAS]
            if free:
                peer = self._rng.choice(free)
                others = [stage for stage in range(STAGES) if stage != peer.stage]
                yield PlacedMove(peer.peer, peer.stage, self._rng.choice(others))


def churn(numbers: Sequence[int]) -> None:
    print("| mean life | a mover away | joiners placed | " + " | ".join(POLICIES) + " | moves an hour | too few left |")
    print("|---" * (5 + len(POLICIES)) + "|")
    for life in LIVES_SECONDS:
        for away in AWAY_SECONDS:
            for weakest_first in (True, False):
                shares: dict[str, list[float]] = {policy: [] for policy in POLICIES}
                moves, emptied = 0, 0
                for seed in numbers:
                    times: Counter[float] = Counter()
                    for policy, found in shares.items():
                        model = ChurnModel(policy, seed, life, away, weakest_first)
                        found.append(model.play(times if policy == "random" else None))
                        times = model.moves
                        if policy == "every 60 s":
                            moves, emptied = moves + times.total(), emptied + model.emptied
                how = "weakest stage" if weakest_first else "at random"
                means = " | ".join(f"{fmean(found):.3f}" for found in shares.values())
                an_hour = moves / HOURS / len(numbers)
                print(f"| {life / 3600:g} h | {away:g} s | {how} | {means} | {an_hour:.1f} | {emptied} |", flush=True)


def calm(numbers: Sequence[int]) -> int:
    """Print what is found; the exit code is 1 if a stage was left with too few, or peers did not settle."""
    emptied, restless, lasts = 0, 0, []
    for seed in numbers:
        costs, peers = drawn(random.Random(seed))
        last = 0
        for at in range(1, CALM_ROUNDS + 1):
            view = Placements(bytes(32), at, costs, peers)
            moves, replicas = plan_moves(view).moves, view.replicas()
            emptied += any(replicas[move.stage] <= KEPT_REPLICAS for move in moves)
            peers, last = moved(peers, moves, at, costs), at if moves else last
        restless += last > CALM_ROUNDS - QUIET_ROUNDS
        lasts.append(last)
    print(f"{len(lasts)} starts: {emptied} rounds in which too few were left in a stage; {restless} with a move in the "
          f"last {QUIET_ROUNDS} of {CALM_ROUNDS} rounds; the last move in round {max(lasts)} at most")  # fmt: skip
    return int(emptied + restless > 0)


def part(peers: Sequence[PlacedPeer], stage: int, at: int, rng: random.Random) -> Placements:
    """What a peer of a stage sees in a run of many."""
    whole = Placements(bytes(32), at, (1.0,) * LARGE_STAGES, peers)
    seen: list[PlacedPeer] = []
    for other in range(LARGE_STAGES):
        team = [each for each in peers if each.stage == other]
        seen += team if other == stage else rng.sample(team, min(SEEN, len(team)))
        seen += unseen(other, seen, [whole.team(other)]) if other != stage else []
    return replace(whole, peers=seen)


def large(numbers: Sequence[int]) -> None:
    """Print where both kinds of views lead to."""
    print("| peers of each stage | seed | at first | whole: the end | moves | part: the end | moves | in a round |")
    print("|---" * 8 + "|")
    for sizes, seed in itertools.product(LARGE_SIZES, numbers):
        rng = random.Random(f"large/{seed}")
        first = [PlacedPeer(f"p{stage}/{number}", stage, rng.choice((1.0, 2.0, 3.0, 4.0)))
                 for stage, size in enumerate(sizes) for number in range(size)]  # fmt: skip
        cells, counts = [f"{_least(first):.2f}"], [0]
        for sees_all in (True, False):
            peers, counts = first, []
            for at in range(1, LARGE_ROUNDS + 1):
                moves = _moves(peers, at, None if sees_all else rng)
                peers = moved(peers, moves, at, (1.0,) * LARGE_STAGES)
                counts.append(len(moves))
            cells += [f"{_least(peers):.2f}", str(sum(counts))]
        print(f"| {sizes[0]}, {sizes[1]}, …, {sizes[-1]} | {seed} | {' | '.join(cells)} | {max(counts)} |", flush=True)


def _moves(peers: Sequence[PlacedPeer], at: int, rng: random.Random | None) -> list[PlacedMove]:
    """All moves of a round; with a source of random numbers by views of parts, in which each stage finds its own."""
    if rng is None:
        return list(plan_moves(Placements(bytes(32), at, (1.0,) * LARGE_STAGES, peers)).moves)
    ids = {each.peer for each in peers}
    views = [part(peers, stage, at, rng) for stage in range(LARGE_STAGES)]
    moves = [move for stage, view in enumerate(views) for move in plan_moves(view).moves if move.stage == stage]
    return [move for move in moves if move.peer in ids]


def _least(peers: Sequence[PlacedPeer]) -> float:
    capacities = [sum(each.rate for each in peers if each.stage == stage) for stage in range(LARGE_STAGES)]
    return min(capacities) / fmean(capacities)


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m benchmarks.placement", description="Who works in which stage of a pipeline.")
    experiments: dict[str, Callable[[Sequence[int]], int | None]] = {
        "churn": churn,
        "calm": calm,
        "large": large,
    }
    parser.add_argument("experiment", choices=tuple(experiments))
    parser.add_argument("--seeds", type=seeds, default=range(20))
    options = parser.parse_args(arguments)
    return experiments[options.experiment](options.seeds) or 0


if __name__ == "__main__":
    raise SystemExit(main())
