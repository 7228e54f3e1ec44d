"""What averaging does to learning, in runs that are long enough to judge it.

    python -m benchmarks.laboratory [--experiment NAME ...] [--seeds N] [--minutes M] [--workers N] [--pause-while FILE]
    python -m benchmarks.laboratory --show [--plot FILE]
    python -m benchmarks.laboratory --check

The regime: preset w64 on real text, 2,000 inner steps of each peer, 4 peers, rounds of 25 steps unless an experiment
says otherwise. Arms are compared at equal tokens and with equal seeds, which decide the initial weights and each peer's
data. All take the recipe's schedule (warm-up, then cosine) over the whole run.

data-parallel   one AdamW step by the mean gradient over one batch of each peer, from the same streams
diloco          a mean of the pseudo-gradients in each round, norms clipped as in the protocol, and one outer step
alone           one peer: equal steps, its own tokens only, no outer step
alone-outer     the same with the outer step of diloco

baselines       inner learning rates of all arms
swarm           inner rates and outer steps in 14 rounds of 50 steps of w128, as in `make swarm`
outer           learning rate and momentum of the outer step
decay           the last part of the run, in which the outer step goes to a plain mean
seeds           five seeds of each arm with its best values
inner-steps     H
long-rounds     inner rates and outer steps in rounds of 100 steps
variants        momentum restarts, moments averaged, averaged parameters, an inner rate that falls to zero
muon            Muon for hidden matrices, its rates, beside AdamW
muon-time       Muon in fewer rounds, because its steps take longer
muon-long       Muon in rounds of 100 steps
muon-long-outer outer steps in those
muon-swarm      Muon's rates in 14 rounds of w128
muon-outer      outer steps with Muon
muon-codecs     int8 and e3m0 with Muon
codecs          int8, e3m0, top-k with error feedback, with AdamW
sparse          top-k in more rounds
between         the presets' outer steps for few rounds and for many, in 40 rounds of 50 steps, with Muon
peers           their number, with Muon
overlap         averaging that takes half of a round or all of it, while the peers train on; with AdamW and Muon
overlap-w128    the same in 40 rounds of 25 steps of w128
trouble         unequal speeds; contributions lost, or late with a weight; with Muon
family          Moshpit, gossip, NoLoCo and push-sum at 8 peers, in calm and with 30 % missing in each round, with AdamW

Averaging is arithmetic in memory, without votes or a network; `--check` finds the same losses through the real
protocol. In `family` each peer is down with the same probability in each round, the same peers with every protocol:
with the butterfly its work is lost, with the others it goes on from its own state. Losses are held out, in nats per
byte, of the outer parameters after the last round, or the mean over the peers' own models.

Each finished run is one line of the journal, and never runs again. An experiment that needs the choice of an earlier
one begins when that has all of its runs. A run takes four to five minutes of a core, of a lone peer one.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from functools import partial
from pathlib import Path

from benchmarks.journal import RunJournal
from benchmarks.laboratory.experiments import NAMES, experiments
from benchmarks.laboratory.perform import Finished, perform
from benchmarks.laboratory.report import draw, show
from benchmarks.laboratory.rows import Experiment
from benchmarks.laboratory.runs import LabRun
from benchmarks.laboratory.through_protocol import check
from tests.sim.arguments import Parser, at_least_one
from tests.sim.process import workers as processes

JOURNAL = Path("benchmarks/runs/laboratory.jsonl")
LOOK_SECONDS = 5.0


def wanted(names: Sequence[str], journal: RunJournal) -> list[Experiment]:
    """The named experiments in the order of their names, or all."""
    every = {each.name: each for each in experiments(journal)}
    return [every[name] for name in names or every]


def due(names: Sequence[str], journal: RunJournal, seeds: int | None = None) -> list[LabRun]:
    """The missing runs of the experiments that have begun.

    Args:
        seeds: only runs of this number of first seeds; None: of all.
    """
    found = (each for experiment in wanted(names, journal) for each in experiment.trials)
    seen = (each for each in found if seeds is None or each.run.seed < seeds)
    return list(dict.fromkeys(each for each in seen if each not in journal))


class Schedule:
    """Performs missing runs, some at a time, and enters each in the journal when it ends."""

    def __init__(self, missing: Callable[[], list[LabRun]], journal: RunJournal, workers: int) -> None:
        """
        Args:
            missing: the runs that the journal does not have, in their order.
            workers: runs at a time.
        """
        self._missing, self._journal, self._workers = missing, journal, workers
        self._running: dict[Future[Finished], LabRun] = {}

    def follow(self, pool: Executor, may_begin: Callable[[], bool], over: Callable[[], bool]) -> None:
        """Return when nothing is due, or, after `over`, when the runs that have begun have ended.

        Args:
            may_begin: whether a run may begin now.
        """
        while True:
            if not over() and may_begin():
                self._begin(pool)
            if self._running:
                for future in wait(self._running, LOOK_SECONDS, FIRST_COMPLETED).done:
                    self._enter(self._running.pop(future), future.result())
            elif over() or not self._missing():
                return
            else:
                time.sleep(LOOK_SECONDS)

    def _begin(self, pool: Executor) -> None:
        self._journal.read()
        for each in self._missing():
            if len(self._running) < self._workers and each not in self._running.values():
                self._running[pool.submit(perform, each)] = each

    def _enter(self, each: LabRun, found: Finished) -> None:
        processor = round(found.processor_seconds, 1)
        more = {**each.fields(), "processor_seconds": processor, "versions": found.versions}
        self._journal.enter(each, found.history, found.seconds, **more)
        print(
            f"{each.name()}: {found.history[-1][1]:.4f} in {found.seconds:.0f} s, {processor:.0f} of a core", flush=True
        )


def run_missing(options: argparse.Namespace, journal: RunJournal) -> None:
    os.nice(19)
    end = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
    with processes(options.workers) as pool:
        missing = partial(due, options.experiment, journal, options.seeds)
        schedule = Schedule(missing, journal, options.workers)
        pause = options.pause_while
        schedule.follow(pool, lambda: pause is None or not pause.exists(), lambda: time.monotonic() >= end)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("python -m benchmarks.laboratory", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--experiment", choices=NAMES, nargs="+", default=(), help="these alone, in this order; default: all"
    )
    parser.add_argument("--seeds", type=at_least_one, metavar="N", help="runs of the first N seeds alone")
    parser.add_argument("--journal", type=Path, default=JOURNAL, help="where the runs are kept (default %(default)s)")
    parser.add_argument("--workers", type=at_least_one, default=1, help="runs at a time (default %(default)s)")
    parser.add_argument("--minutes", type=at_least_one, help="begin no run after these; default: no limit")
    parser.add_argument("--pause-while", type=Path, metavar="FILE", help="begin no run while this file exists")
    parser.add_argument("--show", action="store_true", help="print the finished runs, run nothing")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the finished runs, run nothing")
    parser.add_argument("--check", action="store_true", help="compare a few rounds with the real protocol, run nothing")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.check:
        return check()
    try:
        journal = RunJournal(options.journal)
        if not options.show and not options.plot:
            journal.check_text()
            run_missing(options, journal)
        if options.plot:
            draw(journal, experiments(journal), options.plot)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    show(wanted(options.experiment, journal), journal)
    return 0


if __name__ == "__main__":
    sys.exit(main())
