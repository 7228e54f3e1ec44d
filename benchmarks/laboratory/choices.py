"""What the laboratory's finished runs settle: inner rates, the outer step and its decay.

A choice is made only when every run that it compares is finished.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TypeVar

from benchmarks.journal import FinishedRuns
from benchmarks.laboratory.runs import ARMS, ArmName, LabRun, OuterStep, trial

LONG_ROUND = 100
"""Inner steps of long rounds."""
RATES, MOST_RATE = (1.0, 2.0), 8.0
"""Inner learning rates, as multiples of `UNIT_RATES`: those that are tried first, and the largest."""
REACHES, MOMENTA, MORE_MOMENTUM = (2.7, 3.5, 2.0, 4.5), (0.7, 0.5, 0.8), 0.9
"""Of outer steps: the learning rate over 1 - momentum, which is how far a lasting direction is followed."""
FEW, MANY = range(2), range(5)
DECAYS = (0.0, 0.0625, 0.125, 0.25, 0.5, 1.0)
"""Shares of a run, its last, in which the outer step decays."""
K = TypeVar("K")


def outer_step(reach: float, momentum: float) -> OuterStep:
    """Learning rate and momentum of an outer step."""
    return round(reach * (1 - momentum), 4), momentum


@dataclass(frozen=True, slots=True)
class Choices:
    """What finished runs have settled.

    Attributes:
        rates: arm -> the inner rate with the least mean loss.
        outer: the outer step with the least mean loss; None as long as that is open.
        decay: the share of the run in which that decays, with the least mean loss; None as long as that is open.
    """

    rates: Mapping[ArmName, float]
    outer: OuterStep | None
    decay: float | None

    def best(self, arm: ArmName, seeds: Sequence[int], **changes: object) -> tuple[LabRun, ...]:
        """The arm with its best values, for each seed.

        Args:
            changes: of the fields of a `Run`, or `inner_steps`, `peers` and `decay` as for `trial`.
        """
        sizes = {"decay": self.decay or 0.0}
        sizes |= {key: changes.pop(key) for key in ("inner_steps", "peers", "decay") if key in changes}  # type: ignore[misc]
        found = (trial(arm, seed, self.rates[arm], self.outer, **sizes) for seed in seeds)  # type: ignore[arg-type]
        return tuple(replace(each, run=replace(each.run, **changes)) for each in found)  # type: ignore[arg-type]


def losses(trials: Sequence[LabRun], runs: FinishedRuns) -> dict[int, float]:
    """Seed -> final loss of the finished ones."""
    return {each.run.seed: runs.loss(each) for each in trials if each in runs}


def choose(candidates: Mapping[K, tuple[LabRun, ...]], runs: FinishedRuns) -> K | None:
    """The candidate with the least mean loss, of those with the most seeds; None unless all runs are finished."""
    if any(each not in runs for trials in candidates.values() for each in trials):
        return None
    most = max(map(len, candidates.values()))
    whole = [key for key, trials in candidates.items() if len(trials) == most]
    return min(whole, key=lambda key: fmean(losses(candidates[key], runs).values()))


def halved(keys: Sequence[K], of: Callable[[K, int], LabRun], runs: FinishedRuns) -> dict[K, tuple[LabRun, ...]]:
    """Each candidate's runs: all with the first seed, then the better half, the middle one included, with all of `FEW`.

    Args:
        of: the run of a candidate with a seed.
    """
    first: dict[K, tuple[LabRun, ...]] = {key: (of(key, FEW[0]),) for key in keys}
    if any(trials[0] not in runs for trials in first.values()):
        return first
    better = sorted(keys, key=lambda key: runs.loss(first[key][0]))[: (len(keys) + 1) // 2]
    return first | {key: tuple(of(key, seed) for seed in FEW) for key in better}


def rate_candidates(arm: ArmName, runs: FinishedRuns, **changes: object) -> dict[float, tuple[LabRun, ...]]:
    """The inner rates of an arm. While the best is the largest or the least of them, one beyond it follows.

    Args:
        changes: arguments of `trial`; without them the outer step has the first of `REACHES` and `MOMENTA`.
    """
    given = {"outer": outer_step(REACHES[0], MOMENTA[0]), **changes}

    def of(rate: float, seed: int) -> LabRun:
        return trial(arm, seed, rate, **given)  # type: ignore[arg-type]

    rates = list(RATES)
    while best := choose({rate: (of(rate, FEW[0]),) for rate in rates}, runs):
        beyond = 2 * best if best == max(rates) else best / 2
        if beyond in rates or not 1 / MOST_RATE <= beyond <= MOST_RATE:
            break
        rates.append(beyond)
    return halved(rates, of, runs)


def outer_candidates(rate: float, runs: FinishedRuns) -> dict[OuterStep, tuple[LabRun, ...]]:
    """The outer steps of diloco. If the best has the largest of `MOMENTA`, one beyond it follows, of the same reach."""

    def of(outer: OuterStep, seed: int) -> LabRun:
        return trial("diloco", seed, rate, outer)

    steps = {outer_step(reach, momentum): (reach, momentum) for reach in REACHES for momentum in MOMENTA}
    best = choose({step: (of(step, FEW[0]),) for step in steps}, runs)
    reach, momentum = steps[best] if best else (0.0, 0.0)
    more = [outer_step(reach, MORE_MOMENTUM)] if momentum == max(MOMENTA) else []
    return halved([*steps, *more], of, runs)


def decay_candidates(rate: float, outer: OuterStep, runs: FinishedRuns) -> dict[float, tuple[LabRun, ...]]:
    """Shares of the run in which the outer step of diloco decays."""
    return halved(DECAYS, lambda decay, seed: trial("diloco", seed, rate, outer, decay=decay), runs)


def choices(runs: FinishedRuns) -> Choices:
    """What the finished runs settle."""
    chosen = {arm: choose(rate_candidates(arm, runs), runs) for arm in ARMS}
    rates = {arm: rate for arm, rate in chosen.items() if rate}
    outer = choose(outer_candidates(rates["diloco"], runs), runs) if "diloco" in rates else None
    decay = choose(decay_candidates(rates["diloco"], outer, runs), runs) if outer else None
    return Choices(rates, outer, decay)


def long_candidates(decay: float, runs: FinishedRuns) -> dict[tuple[float, OuterStep], tuple[LabRun, ...]]:
    """Inner rates and outer steps of rounds of `LONG_ROUND` steps."""
    keys = [(rate, outer) for outer in ((0.9, 0.5), (0.81, 0.7), (0.7, 0.8)) for rate in (2.0, 4.0)]

    def of(key: tuple[float, OuterStep], seed: int) -> LabRun:
        rate, outer = key
        return trial("diloco", seed, rate, outer, inner_steps=LONG_ROUND, decay=decay)

    return halved(keys, of, runs)
