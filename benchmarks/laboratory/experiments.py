"""The laboratory's experiments, the most important first. Later ones use what earlier ones chose.

A choice is made only when every run that it compares is finished. Until then, experiments that need it have no runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from benchmarks.book import FinishedRuns
from benchmarks.laboratory.trial import ARMS, INNER_STEPS, PEERS, ArmName, LabRun, trial

RATES: dict[ArmName, tuple[float, ...]] = {arm: (1.0, 2.0, 0.5) for arm in ARMS}
RATES["data-parallel"] = (1.0, 2.0, 0.5, 4.0)
"""Inner learning rates, as multiples of the preset's. Data parallel's batch is larger, and may bear more."""
REACHES, MOMENTA = (2.7, 3.5, 2.0, 4.5), (0.7, 0.5, 0.8)
"""Of outer steps: the learning rate over 1 - momentum, which is how far a lasting direction is followed."""
FEW, MANY = range(2), range(5)
LOST = 0.5


def outer_step(reach: float, momentum: float) -> tuple[float, float]:
    """Learning rate and momentum of an outer step."""
    return round(reach * (1 - momentum), 4), momentum


@dataclass(frozen=True, slots=True)
class Row:
    """The same run with several seeds.

    Attributes:
        beside: label -> the runs that these are paired with, seed by seed.
    """

    label: str
    trials: tuple[LabRun, ...]
    beside: Mapping[str, tuple[LabRun, ...]]

    def losses(self, runs: FinishedRuns) -> dict[int, float]:
        return losses(self.trials, runs)


@dataclass(frozen=True, slots=True)
class Experiment:
    """Rows of a table.

    Attributes:
        waits_for: what has to be chosen first; then there are no rows yet.
    """

    name: str
    title: str
    rows: tuple[Row, ...] = ()
    waits_for: str = ""

    @property
    def trials(self) -> list[LabRun]:
        """The runs, each once: seed by seed, and within a seed in the order of the rows."""
        found = (each for row in self.rows for each in (*row.trials, *(t for ts in row.beside.values() for t in ts)))
        return sorted(dict.fromkeys(found), key=lambda each: each.run.seed)


@dataclass(frozen=True, slots=True)
class Choices:
    """What finished runs have settled.

    Attributes:
        rates: arm -> the inner rate with the least mean loss.
        outer: the outer step with the least mean loss; None as long as that is open.
    """

    rates: Mapping[ArmName, float]
    outer: tuple[float, float] | None

    def best(self, arm: ArmName, seeds: Sequence[int], **changes: object) -> tuple[LabRun, ...]:
        """The arm with its best values, for each seed.

        Args:
            changes: of the fields of a `Run`, or `inner_steps` and `peers` as for `trial`.
        """
        sizes = {key: changes.pop(key) for key in ("inner_steps", "peers") if key in changes}
        found = (trial(arm, seed, self.rates[arm], self.outer, **sizes) for seed in seeds)  # type: ignore[arg-type]
        return tuple(replace(each, run=replace(each.run, **changes)) for each in found)  # type: ignore[arg-type]


def losses(trials: Sequence[LabRun], runs: FinishedRuns) -> dict[int, float]:
    """Seed -> final loss of the finished ones."""
    return {each.run.seed: runs.loss(each) for each in trials if each in runs}


def choose(candidates: Mapping[object, tuple[LabRun, ...]], runs: FinishedRuns) -> object | None:
    """The candidate with the least mean loss; None unless all runs of all candidates are finished."""
    if any(each not in runs for trials in candidates.values() for each in trials):
        return None
    return min(candidates, key=lambda key: fmean(losses(candidates[key], runs).values()))


def rate_candidates(arm: ArmName) -> dict[object, tuple[LabRun, ...]]:
    outer = outer_step(REACHES[0], MOMENTA[0])
    return {rate: tuple(trial(arm, seed, rate, outer) for seed in FEW) for rate in RATES[arm]}


def outer_candidates(rate: float) -> dict[object, tuple[LabRun, ...]]:
    steps = (outer_step(reach, momentum) for reach in REACHES for momentum in MOMENTA)
    return {outer: tuple(trial("diloco", seed, rate, outer) for seed in FEW) for outer in steps}


def choices(runs: FinishedRuns) -> Choices:
    """What the finished runs settle."""
    chosen = {arm: choose(rate_candidates(arm), runs) for arm in ARMS}
    rates = {arm: rate for arm, rate in chosen.items() if isinstance(rate, float)}
    outer = choose(outer_candidates(rates["diloco"]), runs) if "diloco" in rates else None
    return Choices(rates, outer if isinstance(outer, tuple) else None)


def experiments(runs: FinishedRuns) -> list[Experiment]:
    """All experiments, most important first."""
    known = choices(runs)
    found = [_baselines(known)]
    for name, title, build, needs_outer in _LATER:
        missing = [arm for arm in ARMS if arm not in known.rates]
        waits = f"the inner rate of {', '.join(missing)}" if missing else ""
        if not waits and needs_outer and known.outer is None:
            waits = "the outer step"
        found.append(Experiment(name, title, () if waits else tuple(build(known)), waits))
    return found


def _baselines(known: Choices) -> Experiment:
    """All arms with all rates. Once the best is known, all are paired with data parallel at its best."""
    rate = known.rates.get("data-parallel", 1.0)
    words = "its best rate" if "data-parallel" in known.rates else "the preset's rate, its best is open"
    beside = {f"data parallel at {words}": rate_candidates("data-parallel")[rate]}
    every = dict.fromkeys(rate for arm in ARMS for rate in RATES[arm])
    rows = [
        Row(f"{arm}, {rate:g} x the inner rate", rate_candidates(arm)[rate], beside)
        for rate in every
        for arm in ARMS
        if rate in RATES[arm]
    ]
    reach = "{:g}, {:g}".format(*outer_step(REACHES[0], MOMENTA[0]))
    return Experiment("baselines", f"Inner learning rates; where there is an outer step, it is ({reach})", tuple(rows))


def _outer(known: Choices) -> Iterator[Row]:
    beside = {"data parallel": known.best("data-parallel", FEW)}
    for outer, trials in outer_candidates(known.rates["diloco"]).items():
        rate, momentum = outer  # type: ignore[misc]
        yield Row(f"rate {rate:g}, momentum {momentum:g}: {rate / (1 - momentum):.1f}", trials, beside)


def _seeds(known: Choices) -> Iterator[Row]:
    best = {arm: known.best(arm, MANY) for arm in ARMS}
    for arm in ARMS:
        others = {"data parallel": best["data-parallel"]} if arm != "data-parallel" else {}
        lone = {"alone": best["alone"], "alone with the outer step": best["alone-outer"]} if arm == "diloco" else {}
        yield Row(arm, best[arm], {**others, **lone})


def _inner_steps(known: Choices) -> Iterator[Row]:
    beside = {"data parallel": known.best("data-parallel", FEW)}
    for steps in (INNER_STEPS, 10, 50, 100):
        yield Row(f"H = {steps}", known.best("diloco", FEW, inner_steps=steps), beside)


def _peers(known: Choices) -> Iterator[Row]:
    for peers in (PEERS, 1, 2, 8):
        arm: ArmName = "diloco" if peers > 1 else "alone-outer"
        beside = known.best("data-parallel" if peers > 1 else "alone", FEW, **({"peers": peers} if peers > 1 else {}))
        yield Row(
            f"{peers} peers" if peers > 1 else "1 peer",
            known.best(arm, FEW, peers=peers),
            {"data parallel of as many peers; of one, without the outer step": beside},
        )


def _trouble(known: Choices) -> Iterator[Row]:
    seeds = range(3)
    calm = known.best("diloco", seeds)
    beside = {"float32, nothing lost": calm}
    yield Row("float32, nothing lost", calm, {})
    yield Row("int8", known.best("diloco", seeds, codec="int8"), beside)
    yield Row("e3m0", known.best("diloco", seeds, codec="e3m0"), beside)
    yield Row("half of the contributions lost", known.best("diloco", seeds, drop=LOST), beside)


_LATER: tuple[tuple[str, str, Callable[[Choices], Iterator[Row]], bool], ...] = (
    ("outer", "Outer steps: learning rate, momentum, and rate / (1 - momentum)", _outer, False),
    ("seeds", "Each arm with its best values", _seeds, True),
    ("inner-steps", "Inner steps of a round, with the outer step that is best at H = 25", _inner_steps, True),
    ("peers", "Number of peers, with the values that are best for 4", _peers, True),
    ("trouble", "Codecs, and lost contributions", _trouble, True),
)
NAMES = ("baselines", *(name for name, *_ in _LATER))
