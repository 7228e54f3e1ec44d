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
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

import torch

from benchmarks.book import Book, History, perform_all, spread
from benchmarks.laboratory.reference import LabMember, Run, alone, in_memory, is_evaluated, lost, outer_of
from node.outer.sgd import OuterSGD
from node.tasks.gpt import DEFAULT_PRESET, preset
from node.training.trainer import InlineTrainer
from protocols.base import LocalProgress, RoundKey
from tests.sim.arguments import Parser
from tests.sim.world import Scenario, World, play

PEERS = 4
SWEEP_PRESET = "w64"
SWEEP_STEPS = 600
SWEEP_INNER_STEPS = (10, 25, 50, 100, 200, 300)
DROP_BOUND = 0.03
EXPERIMENTS = ("pairs", "sweep", "drop", "drop-kept")


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
        return outer_of(self._run)

    async def after_round(self, index: int, trainer: InlineTrainer) -> None:
        if index == 0:
            self._rounds_done += 1
            if is_evaluated(self._run, self._rounds_done):
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
