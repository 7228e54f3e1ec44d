"""What peers learn with each protocol at equal tokens, and what failures in every round cost them.

    python -m benchmarks.protocols --json FILE [--resume] [--seeds 5] [--preset w64] [--peers 8] [--failures 0 .1 .3]
                                   [--inner-steps H] [--rate TIMES] [--show]

one-worker      one worker takes the tokens of all peers, one step after the other: plain AdamW, without failures
alone           one peer that meets no other: as many steps as each of the others, so only its share of the tokens. The
                advantage of the other arms over it is the value of averaging
data-parallel   the gradient is averaged in every step and one AdamW step follows, which takes H times the messages of
                the others (`protocols.baselines.registry` says why that method is implemented here)
butterfly       DiLoCo: in each round one mean of the pseudo-gradients, and one outer step of all
moshpit         each peer takes its own outer step; states are averaged in small groups along both axes of a grid: eight
                peers on 3 x 3 cells, one of which is empty
gossip          the same in pairs, drawn each round among the peers that are up: an unanswered peer asks another
noloco          the same pairs, which pull each other by NoLoCo's rule instead of averaging states; gamma is 1 - the
                square of the outer momentum, the best against drift by training (`node.outer.noloco`)
push-sum        states and weights: each peer pushes half of both 1, 2, 4, … places on, in turn

Training is real, on real text; the pure schedules of `protocols` average in memory. There are no votes, no waits for a
majority, and no rounds before a peer is admitted again: other benchmarks measure the effects of peers and networks.

In each round each peer is down with the same probability, the same peers for all protocols (drawn again if none would
be up). A peer that is down trains, but meets no other peer:

- with butterfly its work is lost, and it goes on with the others' anchor;
- with moshpit, gossip, noloco and push-sum it goes on from its own state, and nothing is lost;
- with data-parallel it takes part in no step of the round. The others do not stop for it; with a barrier they would.

Losses are held out, in nats per byte: of the one model, or the mean over all peers' models, down ones included.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Literal

import torch

from benchmarks.book import Book, History, paired, perform_all, shares, spread
from benchmarks.laboratory.reference import LabMember, Run, alone, in_memory
from benchmarks.mixers import Mixer, moshpit_seats, pairs, push_sum
from node.outer.noloco import NoLoCo
from node.outer.sgd import OuterSGD
from node.tasks.gpt import GptTask, preset
from node.tasks.text import load
from node.training.task_learner import TaskLearner
from node.training.trainer import LocalTraining
from protocols.moshpit.grid import shape_for
from tests.sim.arguments import Parser, at_least, at_least_one

ARMS = ("one-worker", "alone", "data-parallel", "butterfly", "moshpit", "gossip", "noloco", "push-sum")
NOBODY_FAILS = ("one-worker", "alone")
GROUP_MOST = 4
"""For Moshpit. By default eight peers are one group, which is butterfly without a vote."""
EVALUATE_EVERY = 4
"""Rounds."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One training run, determined by its fields alone."""

    protocol: str
    peers: int
    rounds: int
    inner_steps: int
    preset: str
    seed: int
    failure: float
    rate: float = 1.0
    outer: tuple[float, float] | None = None
    optimizer: Literal["muon"] | None = None

    def name(self) -> str:
        sizes = f"peers={self.peers} rounds={self.rounds} H={self.inner_steps}"
        rate = f" rate={self.rate:g}" if self.rate != 1.0 else ""
        return f"{self.preset} {self.protocol} {sizes} failure={self.failure:g} {self.seed}{rate}"

    def run(self) -> Run:
        """The same run for `benchmarks.learning`, whose peers share an anchor."""
        sizes = (self.peers, self.rounds, self.inner_steps, self.preset, self.seed)
        return Run(*sizes, outer=self.outer, rate=self.rate, optimizer=self.optimizer)


def up(arm: Arm, number: int) -> list[bool]:
    """Which peers are up in a round: the same for all protocols."""
    draw = random.Random(f"{arm.seed}/down/{arm.failure}/{number}")
    while True:
        found = [draw.random() >= arm.failure for _ in range(arm.peers)]
        if any(found):
            return found


class _Streams:
    """A task whose batches come from the streams of the peers that are up, in turn."""

    def __init__(self, task: GptTask, seed: int, peers: int) -> None:
        self.module, self.loss, self.evaluate = task.module, task.loss, task.evaluate
        self._task, self._seed = task, seed
        self._positions = [0] * peers
        self._due: list[int] = []
        self.up: list[int] = []

    def batch(self, seed: int, position: int) -> tuple[torch.Tensor, ...]:
        self._due = self._due or list(self.up)
        peer = self._due.pop(0)
        self._positions[peer] += 1
        return self._task.batch(1000 * self._seed + peer, self._positions[peer] - 1)


class Pooled(TaskLearner):
    """One AdamW step by the mean gradient over a batch of each peer that is up: synchronous data parallel training."""

    def __init__(self, arm: Arm) -> None:
        self._one = arm.run().recipe
        self._streams = _Streams(GptTask(preset(arm.preset), load(), arm.seed), arm.seed, arm.peers)
        super().__init__(self._streams, self._one, seed=arm.seed)

    def among(self, peers: Sequence[int]) -> None:
        """Let these peers take part from now on."""
        self._streams.up = list(peers)
        self._recipe = replace(self._one, batches=self._one.batches * len(peers))


def data_parallel(arm: Arm, evaluation_rounds: int = EVALUATE_EVERY) -> History:
    learner, history = Pooled(arm), History()
    for number in range(arm.rounds):
        learner.among([peer for peer, here in enumerate(up(arm, number)) if here])
        for step in range(arm.inner_steps):
            learner.step(number, step)
        if _evaluated(arm, number, evaluation_rounds):
            history.append(((number + 1) * arm.inner_steps, learner.evaluate()))
    return history


def butterfly(arm: Arm) -> History:
    return in_memory(arm.run(), [[float(here) for here in up(arm, number)] for number in range(arm.rounds)])


def loose(arm: Arm, mixer: Mixer, passes: int, evaluation_rounds: int = EVALUATE_EVERY) -> History:
    """Train peers that take their own outer steps and average states, or, with noloco, pull each other.

    Args:
        mixer: averages states; with noloco what the peers bring to its step.
        passes: how often each round applies the mixer.
    """
    shifts = [LocalTraining(LabMember(arm.run(), index), arm.inner_steps) for index in range(arm.peers)]
    starts = torch.stack([local_training.learner.vectors[0] for local_training in shifts])
    travelling, history = _travelling(arm, starts), History()
    for number in range(arm.rounds):
        for peer, local_training in enumerate(shifts):
            local_training.begin(number)
            for _ in range(arm.inner_steps):
                local_training.step()
            travelling.bring(peer, local_training.learner.vectors[0])
        here, mixed = torch.tensor(up(arm, number)), travelling.brought.double()
        for step in range(passes):
            mixed = mixer(number * passes + step, here, mixed)
        for peer, (local_training, row) in enumerate(zip(shifts, mixed.float(), strict=True)):
            local_training.write(travelling.take(peer, row))
        if _evaluated(arm, number, evaluation_rounds):
            history.append(
                ((number + 1) * arm.inner_steps, fmean(local_training.evaluate() for local_training in shifts))
            )
    return history


class _States:
    """Sends states after the outer step, as `node.outer.mixing.StateMixing` does.

    Attributes:
        brought: what each peer sends, one row per peer.
    """

    def __init__(self, starts: torch.Tensor, outer: OuterSGD) -> None:
        self.brought = torch.cat([starts, torch.zeros_like(starts)], dim=1)
        self._outer, self._size = outer, starts.shape[1]

    def bring(self, peer: int, local: torch.Tensor) -> None:
        phi, velocity = self.brought[peer].split(self._size)
        self._outer.step(phi, velocity, phi - local)

    def take(self, peer: int, mixed: torch.Tensor) -> torch.Tensor:
        self.brought[peer] = mixed
        return mixed[: self._size]


class _Pulls:
    """As `node.outer.mixing.PullMixing`, with all peers meeting at the end of a round."""

    def __init__(self, starts: torch.Tensor, rule: NoLoCo) -> None:
        self.brought, self._phis, self._velocities = torch.zeros_like(starts), starts, torch.zeros_like(starts)
        self._rule = rule

    def bring(self, peer: int, local: torch.Tensor) -> None:
        self._rule.offer(self._phis[peer], self._phis[peer] - local, self.brought[peer])

    def take(self, peer: int, mixed: torch.Tensor) -> torch.Tensor:
        self._rule.step(self._phis[peer], self._velocities[peer], mixed)
        return self._phis[peer]


def _travelling(arm: Arm, starts: torch.Tensor) -> _States | _Pulls:
    recipe = preset(arm.preset).recipe
    rate, momentum = arm.outer or (recipe.outer_learning_rate, recipe.outer_momentum)
    if arm.protocol == "noloco":
        return _Pulls(starts, NoLoCo(momentum, rate, pull=1 - momentum**2))
    return _States(starts, OuterSGD(rate, momentum))


def _evaluated(arm: Arm, number: int, rounds: int = EVALUATE_EVERY) -> bool:
    return (number + 1) % rounds == 0 or number + 1 == arm.rounds


def train(arm: Arm, evaluation_rounds: int = EVALUATE_EVERY) -> History:
    """Train a run. The peers without a common state are evaluated every `evaluation_rounds`, and data parallel is."""
    rng = random.Random(f"{arm.seed}/mixing")
    if arm.protocol in NOBODY_FAILS:
        workers = arm.peers if arm.protocol == "one-worker" else 1
        return alone(replace(arm.run(), peers=0, rounds=arm.rounds * workers))
    if arm.protocol == "data-parallel":
        return data_parallel(arm, evaluation_rounds)
    if arm.protocol == "butterfly":
        return butterfly(arm)
    passes = len(shape_for(arm.peers, GROUP_MOST)) if arm.protocol == "moshpit" else 1
    makers = {"moshpit": moshpit_seats(GROUP_MOST), "gossip": pairs, "noloco": pairs, "push-sum": push_sum}
    return loose(arm, makers[arm.protocol](arm.peers, rng), passes, evaluation_rounds)


def perform(arm: Arm) -> tuple[History, float]:
    """Train a run on one thread. Returns its history and the seconds that it took."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    return train(arm), time.perf_counter() - began


def wanted(options: argparse.Namespace) -> Iterator[Arm]:
    """The runs seed by seed, those without failures first. Arms that never fail come several times."""
    recipe = preset(options.preset).recipe
    rounds, steps = options.rounds or recipe.rounds, options.inner_steps or recipe.inner_steps
    for seed in range(options.seeds):
        for failure in options.failures:
            for protocol in options.only or ARMS:
                risk = failure if protocol not in NOBODY_FAILS else 0.0
                yield Arm(protocol, options.peers, rounds, steps, options.preset, seed, risk, options.rate)


def print_all(arms: Sequence[Arm], book: Book) -> None:
    """Print the finished seeds. Pair each arm with data-parallel training, its run without failures and a lone peer."""
    found: dict[tuple[str, float], dict[int, float]] = {}
    for arm in arms:
        if arm in book:
            found.setdefault((arm.protocol, arm.failure), {})[arm.seed] = book.loss(arm)
    seeds = sorted({arm.seed for arm in arms})
    whole = [seed for seed in seeds if found and all(seed in losses for losses in found.values())]
    heads = "".join(f"  seed {seed:>2}" for seed in seeds)
    done = f"{sum(map(len, found.values()))} of {len(arms)} runs are done; means over {len(whole)} complete seeds"
    print(f"\nheld-out loss, nats per byte; {done}")
    columns = f"{'to data-parallel':>20}{'to no failures':>20}{'to alone':>20}{'of the gain':>16}"
    print(f"{'protocol':<15} {'failure':>7}{heads}     mean{columns}")
    calm = {protocol: found.get((protocol, 0.0), {}) for protocol in ARMS}
    for protocol, failure in sorted(found, key=lambda kind: (ARMS.index(kind[0]), kind[1])):
        losses = found[protocol, failure]
        cells = "".join(f"{losses[seed]:>9.4f}" if seed in losses else f"{'-':>9}" for seed in seeds)
        mean = f"{fmean(losses[seed] for seed in whole):>9.4f}" if whole else f"{'-':>9}"
        beside = [calm["data-parallel"], calm[protocol] if failure else {}, calm["alone"]]
        changes = "".join(f"{spread(paired(losses, other), '+.2%'):>20}" for other in beside)
        kept = spread(shares(losses, calm["alone"], calm["butterfly"]), ".0%")
        print(f"{protocol:<15} {failure:>7g}{cells}{mean}{changes}{kept:>16}")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("python -m benchmarks.protocols", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="where the runs are kept")
    parser.add_argument("--resume", action="store_true", help="continue with the runs in that file")
    parser.add_argument("--seeds", type=at_least_one, default=5, help="default %(default)s")
    parser.add_argument("--preset", default="w64", help="default %(default)s")
    parser.add_argument("--peers", type=partial(at_least, 2), default=8, help="default %(default)s")
    parser.add_argument("--failures", type=float, nargs="+", default=(0.0, 0.1, 0.3), help="default %(default)s")
    parser.add_argument("--rounds", type=at_least_one, help="default: the preset's")
    parser.add_argument("--inner-steps", type=at_least_one, help="default: the preset's")
    parser.add_argument("--rate", type=float, default=1.0, help="inner learning rate, as a multiple of the preset's")
    parser.add_argument("--only", choices=ARMS, nargs="+", help="these alone")
    parser.add_argument("--workers", type=at_least_one, help="runs at a time; default: one per core")
    parser.add_argument("--show", action="store_true", help="print finished runs, run nothing")
    options = parser.parse_args(arguments)
    if not all(0 <= failure < 1 for failure in options.failures):
        parser.error("argument --failures: probabilities from 0 to below 1")
    if not 0 < options.rate <= 1000:
        parser.error("argument --rate: above 0, at most 1000")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        arms, book = list(dict.fromkeys(wanted(options))), Book(options.json, options.resume or options.show)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if not options.show:
        perform_all(arms, book, perform, options.workers)
    print_all(arms, book)
    return 0


if __name__ == "__main__":
    sys.exit(main())
