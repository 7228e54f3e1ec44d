"""Experiments on learning: real training on real text, through the real protocol code.

    python -m benchmarks.learning EXPERIMENT --json FILE [--resume] [--seeds 5] [--preset w128]

EXPERIMENT is one of these, or `all` for the first three:

pairs   4 peers against one worker at equal steps. The worker takes plain AdamW steps by the same schedule, and no outer
        step
sweep   rounds of H inner steps, with equal total steps. Expected: nearly flat in H, then worse (Douillard et al. 2023,
        figure 4)
drop    in each round a random half of the contributions is lost. Expected: at most 3 % worse (the same, figure 8). A
        peer drops work that a round did not count, and starts again from the new anchor. In `drop-kept` the peer keeps
        that work and contributes it in the next round
check   a few rounds through the protocol and through a plain mean in memory give the same losses

Peers are simulated: `tests.sim.world` runs their rounds in virtual time. Each has its own stream of data. All losses
are those of the outer parameters over held-out text, in nats per byte. Every seed is printed, unfavourable ones too. A
run's parameters identify it, so experiments share runs. `--resume` continues after an interruption.
"""

from __future__ import annotations

import asyncio
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Literal

import torch

from benchmarks.book import Book, History, perform_all, spread
from node.outer.sgd import OuterSGD
from node.tasks.base import Recipe
from node.tasks.gpt import DEFAULT_PRESET, GptTask, preset
from node.tasks.text import Text, load
from node.training.task_learner import TaskLearner
from node.training.trainer import InlineTrainer, LocalTraining, Step
from protocols.allreduce.clipping import allowances, clip_factors
from protocols.allreduce.plan import part_bounds
from protocols.base import LocalProgress, RoundKey
from protocols.codec import Codec, codec
from protocols.codecs.coding import carry
from protocols.codecs.sparse import sent, settle
from protocols.vectors import norm
from tests.sim.arguments import Parser
from tests.sim.world import Scenario, World, play

PEERS = 4
SWEEP_PRESET = "w64"
SWEEP_STEPS = 600
SWEEP_INNER_STEPS = (10, 25, 50, 100, 200, 300)
DROP_BOUND = 0.03
EXPERIMENTS = ("pairs", "sweep", "drop", "drop-kept")
EVALUATION_STEPS = 50
"""Inner steps between two evaluations, rounded up to the end of a round."""


@dataclass(frozen=True, slots=True)
class Run:
    """One training run, determined by its fields alone.

    Attributes:
        peers: 0 means one worker without an outer step.
        drop: share of the contributions that are lost each round.
        keep: a peer keeps lost work for the next round, instead of dropping it.
        codec: the encoding of vectors on the wire.
        outer: learning rate and momentum of the outer steps; None for the preset's.
        rate: learning rate of the inner steps, as a multiple of the preset's.
        optimizer: of the inner steps; None for AdamW.
        speeds: of each peer, relative to the fastest: its share of the inner steps; empty if all are equal.
    """

    peers: int
    rounds: int
    inner_steps: int
    preset: str
    seed: int
    drop: float = 0.0
    keep: bool = False
    codec: str = "fp32"
    outer: tuple[float, float] | None = None
    rate: float = 1.0
    optimizer: Literal["muon"] | None = None
    speeds: tuple[float, ...] = ()

    def name(self) -> str:
        lost_ = f"{self.drop} kept" if self.keep else f"{self.drop}"
        name = f"{self.preset} peers={self.peers} rounds={self.rounds} H={self.inner_steps} drop={lost_} {self.seed}"
        outer = " outer={:g},{:g}".format(*self.outer) if self.outer else ""
        rate = f" rate={self.rate:g}" if self.rate != 1.0 else ""
        speeds = " speeds=" + ":".join(f"{each:g}" for each in self.speeds) if self.speeds else ""
        optimizer = f" {self.optimizer}" if self.optimizer else ""
        return name + (f" {self.codec}" if self.codec != "fp32" else "") + outer + rate + optimizer + speeds

    @property
    def recipe(self) -> Recipe:
        """The preset's recipe, with this run's changes."""
        recipe = preset(self.preset).recipe
        rate, optimizer = self.rate * recipe.learning_rate, self.optimizer
        sizes = {"inner_steps": self.inner_steps, "rounds": self.rounds}
        return replace(recipe, **sizes, learning_rate=rate, inner_optimizer=optimizer)

    def steps_of(self, peer: int) -> int:
        """Inner steps that a peer takes in a round."""
        return round(self.inner_steps * self.speeds[peer]) if self.speeds else self.inner_steps


@cache
def _text() -> Text:
    return load()


class LabMember:
    """A simulated learner: exactly H steps a round, or its share, so that no peer trains more than the one worker.

    If its contribution to a round is lost and not kept, it trains but reports no tokens: its weight is 0.
    """

    def __init__(self, run: Run, index: int) -> None:
        task = GptTask(preset(run.preset), _text(), run.seed)
        # The initial weights are the run's; the stream is the peer's.
        self._learner = TaskLearner(task, run.recipe, seed=1000 * run.seed + index)
        self._run, self._index = run, index
        self.layout, self.vectors, self.evaluate = self._learner.layout, self._learner.vectors, self._learner.evaluate

    def step(self, round_number: int, step: int) -> Step:
        if step >= self._run.steps_of(self._index):
            return Step(math.nan, 0)
        done = self._learner.step(round_number, step)
        discarded = not self._run.keep and self._index in lost(self._run, round_number)
        return replace(done, tokens=0) if discarded else done


class _KeepingTrainer(InlineTrainer):
    """Offers nothing in a round in which its contribution is lost, and so keeps its work for the next round."""

    def __init__(self, run: Run, index: int) -> None:
        super().__init__(LabMember(run, index), run.inner_steps, step_seconds=1.0)
        self._run, self._index = run, index

    async def train(
        self, key: RoundKey, cut: asyncio.Event, progress: Callable[[LocalProgress], None], surplus: bool = True
    ) -> LocalProgress:
        def hidden(work: LocalProgress) -> None:
            progress(replace(work, tokens=0, norm=0.0))

        return await super().train(key, cut, hidden if self._index in lost(self._run, key.round) else progress)


def lost(run: Run, round_number: int) -> list[int]:
    """The peers whose contributions are lost in a round."""
    draw = random.Random(f"{run.seed}/drop/{round_number}")
    return draw.sample(range(run.peers), int(run.drop * run.peers))


def _outer(run: Run) -> OuterSGD:
    recipe = preset(run.preset).recipe
    return OuterSGD(*(run.outer or (recipe.outer_learning_rate, recipe.outer_momentum)))


def _evaluated(run: Run, rounds_done: int, evaluation_steps: int | None = None) -> bool:
    every = max(1, (evaluation_steps or EVALUATION_STEPS) // run.inner_steps)
    return rounds_done % every == 0 or rounds_done == run.rounds


def alone(run: Run, evaluation_steps: int | None = None) -> History:
    """Train one worker: inner steps one after the other, and nothing else."""
    learner, history = LabMember(replace(run, peers=1), 0), History()
    for number in range(run.rounds):
        for step in range(run.inner_steps):
            learner.step(number, step)
        if _evaluated(run, number + 1, evaluation_steps):
            history.append(((number + 1) * run.inner_steps, learner.evaluate()))
    return history


def in_memory(
    run: Run, weights: Sequence[Sequence[float]] | None = None, evaluation_steps: int | None = None
) -> History:
    """The reference: a mean with clipped norms and an outer step, without any protocol.

    Contributions and mean are encoded by the run's codec. As in the protocol, each peer reduces one part, and its own
    contribution to that part is not encoded, unless the codec has error feedback.

    Args:
        weights: of every peer in every round. By default they are the peers' tokens.
    """
    shifts = [LocalTraining(LabMember(run, index), run.inner_steps) for index in range(run.peers)]
    outer, history = _outer(run), History()
    anchor = shifts[0].learner.vectors[0].clone()
    velocity = torch.zeros_like(anchor)
    mean_of, carried = _reduction(run, len(anchor)), codec(run.codec)
    residuals = torch.zeros(run.peers if carried.decay else 0, len(anchor))
    for number in range(run.rounds):
        for local_training in shifts:
            local_training.begin(number)
            for _ in range(run.inner_steps):
                local_training.step()
        counted = weights[number] if weights else [float(local_training.work().tokens) for local_training in shifts]
        deltas = torch.stack([anchor - local_training.learner.vectors[0] for local_training in shifts])
        norms = [norm([delta]) if weight else 0.0 for delta, weight in zip(deltas, counted, strict=True)]
        if carried.decay:
            norms = [own + carried.decay * norm([left]) for own, left in zip(norms, residuals, strict=True)]
            deltas = _through_feedback(carried, residuals, deltas)
        factors = torch.tensor(clip_factors(norms, allowances(counted)))
        shares = torch.tensor(counted)
        outer.step(anchor, velocity, mean_of(deltas, shares * factors, float(shares.sum())))
        for local_training in shifts:
            local_training.write(anchor)
        if _evaluated(run, number + 1, evaluation_steps):
            history.append(((number + 1) * run.inner_steps, shifts[0].evaluate()))
    return history


def _through_feedback(carried: Codec, residuals: torch.Tensor, deltas: torch.Tensor) -> torch.Tensor:
    """What each peer sends of its row and its error feedback, which is updated."""
    rows = torch.empty_like(deltas)
    for row, residual, delta in zip(rows, residuals, deltas, strict=True):
        sent(carried, residual, delta, row)
        settle(carried, residual, delta, row)
    return rows


def _reduction(run: Run, elements: int) -> Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]:
    """A function of rows, which it overwrites, their weights and a divisor: their mean, as the peers compute it.

    They do so part by part, through the codec. With error feedback, the rows have been through it.
    """
    carried = codec(run.codec)
    parts = list(pairwise(part_bounds([1 / run.peers] * run.peers, elements, carried.grain)))

    def mean(rows: torch.Tensor, weights: torch.Tensor, divisor: float) -> torch.Tensor:
        for own, (low, high) in enumerate(parts):
            for peer in set() if carried.decay else set(range(run.peers)) - {own}:
                carry(carried, rows[peer, low:high])
        found = weights @ rows / divisor
        for low, high in parts:
            carry(carried.reduced(run.peers), found[low:high])
        return found

    return mean


class LearningWorld(World):
    """The simulated swarm with real learners."""

    def __init__(self, run: Run, history: History, scenario: Scenario) -> None:
        super().__init__(scenario)
        self._run, self._history = run, history
        self._rounds_done = 0

    def trainer(self, index: int) -> InlineTrainer:
        if self._run.keep:
            return _KeepingTrainer(self._run, index)
        return InlineTrainer(LabMember(self._run, index), self._run.inner_steps, step_seconds=1.0)

    def outer(self) -> OuterSGD:
        return _outer(self._run)

    async def after_round(self, index: int, trainer: InlineTrainer) -> None:
        if index == 0:
            self._rounds_done += 1
            if _evaluated(self._run, self._rounds_done):
                self._history.append((self._rounds_done * self._run.inner_steps, await trainer.evaluate()))


def through_the_protocol(
    run: Run, world: Callable[[Run, History, Scenario], World] | None = None
) -> tuple[History, list[list[float]]]:
    """Run peers of equal speed through averager, round and outer step. Returns history and weights of each round.

    Args:
        world: the simulated world; `LearningWorld` by default.

    Raises:
        RuntimeError: an invariant of the rounds was broken, so the losses would mean nothing.
    """
    scenario = Scenario(
        peers=run.peers,
        rounds=run.rounds,
        seed=run.seed,
        codec=run.codec,
        inner_steps=run.inner_steps,
        chunk_elements=1 << 18,
        uplinks=(12.5e6,) * run.peers,
        step_seconds=(1.0,) * run.peers,
    )
    history = History()
    outcome = play(scenario, partial(world or LearningWorld, run, history))  # type: ignore[arg-type]
    if outcome.violations:
        raise RuntimeError(f"{run.name()}: {outcome.violations[0]}")
    rounds = zip(*outcome.histories.values(), strict=True)
    return history, [[report["weight"] for report in reports] for reports in rounds]


def perform(run: Run) -> tuple[History, float]:
    """Train a run; returns its history and the seconds that it took."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    history = through_the_protocol(run)[0] if run.peers else alone(run)
    return history, time.perf_counter() - began


# -- experiments ------------------------------------------------------------------------------------------------------

Losses = Callable[[Run], float]


def _own(name: str, seed: int, peers: int, drop: float = 0.0, keep: bool = False) -> Run:
    recipe = preset(name).recipe
    return Run(peers, recipe.rounds, recipe.inner_steps, name, seed, drop, keep)


def _pair(name: str, seed: int) -> tuple[Run, Run]:
    return _own(name, seed, 0), _own(name, seed, PEERS)


def _dropped(name: str, seed: int, keep: bool) -> tuple[Run, Run]:
    return _own(name, seed, PEERS), _own(name, seed, PEERS, drop=0.5, keep=keep)


def _swept(seed: int) -> list[Run]:
    return [Run(PEERS, SWEEP_STEPS // steps, steps, SWEEP_PRESET, seed) for steps in SWEEP_INNER_STEPS]


def _print_paired(title: str, names: tuple[str, str], pairs: Sequence[tuple[Run, Run]], loss: Losses) -> list[float]:
    """Print a line per seed. Returns the relative differences of the second from the first."""
    print(f"\n{title}\n{'seed':>4} {names[0]:>12} {names[1]:>12} {'difference':>11}")
    found = []
    for first, second in pairs:
        a, b = loss(first), loss(second)
        found.append((b - a) / a)
        print(f"{first.seed:>4} {a:>12.4f} {b:>12.4f} {b - a:>+11.4f} {found[-1]:>+8.2%}")
    print(f"mean {spread(found, '+.2%')}; lower in {sum(d < 0 for d in found)} of {len(found)}")
    return found


def print_pairs(name: str, seeds: range, loss: Losses) -> bool:
    """Whether the peers beat the one worker with every seed."""
    title = f"pairs: {name}, {PEERS} peers against one worker at equal steps, nats per byte"
    found = _print_paired(title, ("one worker", f"{PEERS} peers"), [_pair(name, seed) for seed in seeds], loss)
    return max(found) < 0


def print_drop(name: str, seeds: range, keep: bool, loss: Losses) -> bool:
    """Whether the bound holds for the mean over the seeds."""
    title = f"drop: {name}, {PEERS} peers, half of the contributions lost and {'kept' if keep else 'dropped'}"
    found = _print_paired(title, ("all", "half lost"), [_dropped(name, seed, keep) for seed in seeds], loss)
    held = fmean(found) <= DROP_BOUND
    print(f"bound {DROP_BOUND:+.0%}: {'held' if held else 'BROKEN'}")
    return held


def print_sweep(seeds: range, loss: Losses) -> None:
    print(f"\nsweep: {SWEEP_PRESET}, {PEERS} peers, {SWEEP_STEPS} steps each, nats per byte")
    print(f"{'H':>4} {'rounds':>6} " + " ".join(f"seed {seed:>3}" for seed in seeds) + "     mean  to H=50")
    losses = {run: loss(run) for seed in seeds for run in _swept(seed)}
    table = {steps: [x for run, x in losses.items() if run.inner_steps == steps] for steps in SWEEP_INNER_STEPS}
    for steps, row in table.items():
        change = fmean((x - y) / y for x, y in zip(row, table[50], strict=True))
        values = " ".join(f"{x:>8.4f}" for x in row)
        print(f"{steps:>4} {SWEEP_STEPS // steps:>6} {values} {fmean(row):>8.4f} {change:>+8.2%}")


def check() -> int:
    """Compare the protocol with the reference at equal weights: all contributions, half of them, and other codecs."""
    worst = 0.0
    for drop, encoding in ((0.0, "fp32"), (0.5, "fp32"), (0.0, "int8"), (0.0, "e3m0"), (0.0, "topk")):
        run = Run(PEERS, rounds=3, inner_steps=4, preset=SWEEP_PRESET, seed=0, drop=drop, codec=encoding)
        history, weights = through_the_protocol(run)
        off = abs(history[-1][1] - in_memory(run, weights)[-1][1])
        worst = max(worst, off)
        print(f"drop {drop}, {encoding}: {history[-1][1]:.6f} nats per byte, off by {off:.1e}; weights {weights}")
    print(f"largest difference in loss between the protocol and a plain mean: {worst:.1e}")
    return 0 if worst < 1e-4 else 1


# -- command line -----------------------------------------------------------------------------------------------------


def _wanted(experiments: Sequence[str], name: str, seeds: range, few: range) -> Iterator[Run]:
    for experiment in experiments:
        if experiment == "pairs":
            yield from (run for seed in seeds for run in _pair(name, seed))
        elif experiment in ("drop", "drop-kept"):
            yield from (run for seed in seeds for run in _dropped(name, seed, experiment == "drop-kept"))
        else:
            yield from (run for seed in few for run in _swept(seed))


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m benchmarks.learning", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("experiment", choices=(*EXPERIMENTS, "all", "check"))
    parser.add_argument(
        "--seeds", type=int, default=5, help="seeds of pairs and drop; the sweep uses at most 3 of them"
    )
    parser.add_argument("--preset", default=DEFAULT_PRESET, help=f"of pairs and drop; the sweep's is {SWEEP_PRESET}")
    parser.add_argument("--json", type=Path, help="where the runs are kept")
    parser.add_argument("--resume", action="store_true", help="continue with the runs in that file")
    options = parser.parse_args(arguments)
    if options.experiment == "check":
        torch.set_num_threads(1)
        return check()
    if options.json is None or options.seeds < 1:
        parser.error("--json FILE is needed, and at least one seed")
    seeds, few = range(options.seeds), range(min(3, options.seeds))
    experiments = EXPERIMENTS[:3] if options.experiment == "all" else (options.experiment,)
    try:
        runs = list(_wanted(experiments, options.preset, seeds, few))
        book = Book(options.json, options.resume)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    perform_all(runs, book, perform)
    failed = False
    if "pairs" in experiments:
        failed = not print_pairs(options.preset, seeds, book.loss)
    if "sweep" in experiments:
        print_sweep(few, book.loss)
    for experiment in ("drop", "drop-kept"):
        if experiment in experiments:
            held = print_drop(options.preset, seeds, experiment == "drop-kept", book.loss)
            failed = failed or (experiment == "drop" and not held)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
