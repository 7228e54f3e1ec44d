"""The laboratory's experiments, the most important first. Later ones use what earlier ones chose.

A choice needs all runs that it compares. Until they are finished, experiments that need it have no runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from benchmarks.journal import FinishedRuns
from benchmarks.laboratory.choices import (
    DECAYS,
    FEW,
    LONG_ROUND,
    MANY,
    MOMENTA,
    REACHES,
    Choices,
    choices,
    choose,
    decay_candidates,
    halved,
    long_candidates,
    losses,
    outer_candidates,
    outer_step,
    rate_candidates,
)
from benchmarks.laboratory.runs import (
    ARMS,
    INNER_STEPS,
    PEERS,
    STEPS,
    WITHOUT_COMMON_STATE,
    ArmName,
    LabRun,
    Run,
    trial,
)
from node.tasks.base import InnerOptimizerName
from node.tasks.gpt import PLAIN_OUTER_STEP, USUAL_OUTER_STEP

LOST, MISSING = 0.5, 0.3
MUON_ROUNDS = 61
"""Of 80 rounds: more is saved than Muon's longer steps take with the presets, but w256 on CPUs without AVX-512."""
SPEEDS = (1.0, 0.5, 0.25, 0.25)
SPARSE = PLAIN_OUTER_STEP
"""The outer step of SparseLoCo (Sarfi et al. 2025) for top-k."""


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


def experiments(runs: FinishedRuns) -> list[Experiment]:
    """All experiments, most important first."""
    known = choices(runs)
    found = [_baselines(known, runs)]
    missing = [arm for arm in ARMS if arm not in known.rates]
    for name, title, build, needs in _LATER:
        waits = f"the inner rate of {', '.join(missing)}" if missing and needs else ""
        if not waits and needs != "rates" and needs and known.outer is None:
            waits = "the outer step"
        if not waits and needs == "decay" and known.decay is None:
            waits = "the outer decay"
        found.append(Experiment(name, title, () if waits else tuple(build(known, runs)), waits))
    return found


def _baselines(known: Choices, runs: FinishedRuns) -> Experiment:
    """All arms with all rates. Once the best is known, all are paired with data parallel at its best."""
    rate = known.rates.get("data-parallel", 1.0)
    words = "its best rate" if "data-parallel" in known.rates else "the preset's rate, its best is open"
    candidates = {arm: rate_candidates(arm, runs) for arm in ARMS}
    beside = {f"data parallel at {words}": candidates["data-parallel"][rate]}
    every = dict.fromkeys(rate for rates in candidates.values() for rate in rates)
    rows = [
        Row(f"{arm}, {rate:g} x the inner rate", candidates[arm][rate], beside)
        for rate in every
        for arm in ARMS
        if rate in candidates[arm]
    ]
    reach = "{:g}, {:g}".format(*outer_step(REACHES[0], MOMENTA[0]))
    return Experiment("baselines", f"Inner learning rates; where there is an outer step, it is ({reach})", tuple(rows))


def _outer(known: Choices, runs: FinishedRuns) -> Iterator[Row]:
    beside = {"data parallel": known.best("data-parallel", FEW)}
    for outer, trials in outer_candidates(known.rates["diloco"], runs).items():
        rate, momentum = outer  # type: ignore[misc]
        yield Row(f"rate {rate:g}, momentum {momentum:g}: {rate / (1 - momentum):.1f}", trials, beside)


def _swarm(known: Choices, runs: FinishedRuns) -> Iterator[Row]:
    """Inner rates and outer steps at the size of `make swarm`; the first is that of older presets."""
    usual, longer, longest = USUAL_OUTER_STEP, (0.81, 0.7), (0.7, 0.8)
    keys = [(1.0, usual, 0.0), (2.0, usual, 0.0), (4.0, usual, 0.0), (4.0, longer, 0.0)]
    keys += [(2.0, outer, DECAYS[1]) for outer in (usual, longer, longest)]

    def of(key: object, seed: int) -> LabRun:
        rate, outer, decay = key  # type: ignore[misc]
        return LabRun("diloco", Run(PEERS, 14, 50, "w128", seed, outer=outer, rate=rate, decay=decay))  # type: ignore[has-type]

    beside = {"the first": tuple(of(keys[0], seed) for seed in FEW)}
    for (rate, outer, decay), trials in halved(keys, of, runs).items():  # type: ignore[misc]
        label = "{:g} x the inner rate, outer step ({:g}, {:g})".format(rate, *outer)
        yield Row(label + (", decay" if decay else ""), trials, beside)  # type: ignore[has-type]


def _seeds(known: Choices, runs: FinishedRuns) -> Iterator[Row]:
    best = {arm: known.best(arm, MANY) for arm in ARMS}
    yield Row("diloco, no decay", known.best("diloco", MANY, decay=0.0), {"data parallel": best["data-parallel"]})
    for arm in ARMS:
        others = {"data parallel": best["data-parallel"]} if arm != "data-parallel" else {}
        lone = {"alone": best["alone"], "alone with the outer step": best["alone-outer"]} if arm == "diloco" else {}
        yield Row(arm, best[arm], {**others, **lone})


def _inner_steps(known: Choices, runs: FinishedRuns) -> Iterator[Row]:
    beside = {"data parallel": known.best("data-parallel", FEW)}
    for steps in (INNER_STEPS, 10, 50, 100):
        yield Row(f"H = {steps}", known.best("diloco", FEW, inner_steps=steps, decay=0.0), beside)


def _long_rounds(known: Choices, runs: FinishedRuns) -> Iterator[Row]:
    """The best of them has all seeds."""
    candidates = long_candidates(known.decay or 0.0, runs)
    best = choose(candidates, runs)
    for (rate, outer), trials in candidates.items():  # type: ignore[misc]
        seeds = MANY if (rate, outer) == best else range(len(trials))
        yield Row(
            "{:g} x the inner rate, outer step ({:g}, {:g})".format(rate, *outer),
            tuple(replace(trials[0], run=replace(trials[0].run, seed=seed)) for seed in seeds),
            {"data parallel": known.best("data-parallel", seeds)},
        )


VARIANTS: Mapping[str, Mapping[str, object]] = {
    "mean of the last 4 outer parameters evaluated": {"averaged": 4},
    "of the last 8": {"averaged": 8},
    "of the last 4, and a decay in the last quarter": {"decay": 0.25, "averaged": 4},
    "of the last 8, and a decay in the last eighth": {"decay": 0.125, "averaged": 8},
    "the inner rate falls to zero": {"variant": "zero"},
    "outer momentum at zero again after each quarter": {"variant": "restarts"},
    "AdamW's moments averaged after each round": {"variant": "moments"},
}


def _variants(known: Choices, runs: FinishedRuns) -> Iterator[Row]:
    """What a run may do differently, without outer decay unless it is named."""
    first = FEW[:1]
    calm = {"diloco": known.best("diloco", first, decay=0.0)}
    other = {"data parallel": known.best("data-parallel", first)}
    for words, changes in VARIANTS.items():
        yield Row(words, known.best("diloco", first, **{"decay": 0.0, **changes}), calm)
    yield Row("data parallel, the rate falls to zero", known.best("data-parallel", first, variant="zero"), other)
    yield Row(
        "data parallel, mean of its last 8 states, 25 steps apart",
        known.best("data-parallel", first, averaged=8),
        other,
    )


def _decay(known: Choices, runs: FinishedRuns) -> Iterator[Row]:
    assert known.outer
    beside = {"data parallel": known.best("data-parallel", FEW)}
    for decay, trials in decay_candidates(known.rates["diloco"], known.outer, runs).items():
        yield Row(f"in the last {decay:.2%}" if decay else "never", trials, beside)


def _peers(known: Choices, runs: FinishedRuns) -> Iterator[Row]:
    for peers in (PEERS, 1, 2, 8):
        arm: ArmName = "diloco" if peers > 1 else "alone-outer"
        beside = known.best("data-parallel" if peers > 1 else "alone", FEW, **({"peers": peers} if peers > 1 else {}))
        yield Row(
            f"{peers} peers" if peers > 1 else "1 peer",
            known.best(arm, FEW, peers=peers),
            {"data parallel of as many peers; of one, without the outer step": beside},
        )


def _codecs(known: Choices, runs: FinishedRuns) -> Iterator[Row]:
    """Those that lose little have all seeds."""
    beside = {"float32": known.best("diloco", MANY)}
    yield Row("float32", beside["float32"], {})
    for used in ("int8", "e3m0"):
        yield Row(used, known.best("diloco", MANY, codec=used), beside)
    yield Row("top-k, error feedback", known.best("diloco", range(3), codec="topk"), beside)
    sparse = known.best("diloco", range(3), codec="topk", outer=SPARSE)
    yield Row("top-k, error feedback, outer (1, 0)", sparse, beside)


def _sparse(known: Choices, runs: FinishedRuns) -> Iterator[Row]:
    """More rounds, or a lower inner rate, for topk."""
    beside = {"float32, rounds of 25 steps": known.best("diloco", FEW)}
    for steps, rate in ((5, 4.0), (10, 4.0), (INNER_STEPS, 4.0), (INNER_STEPS, 2.0)):
        trials = known.best("diloco", FEW[:1], codec="topk", outer=SPARSE, inner_steps=steps, rate=rate)
        yield Row(f"H = {steps}, {rate:g} x the inner rate", trials, beside)


def _between(known: Choices, runs: FinishedRuns) -> Iterator[Row]:
    """The presets' outer steps of few rounds and of many, where they change, and on either side."""
    for rounds in (40, 20, 80):
        given = {"optimizer": "muon", "rate": 4.0, "inner_steps": STEPS // rounds}
        few = known.best("diloco", FEW, outer=USUAL_OUTER_STEP, decay=0.0, **given)
        yield Row(f"{rounds} rounds, (.9, .5)", few, {})
        yield Row(f"{rounds} rounds, (.7, .8) and decay", known.best("diloco", FEW, **given), {"(.9, .5)": few})


def _trouble(known: Choices, runs: FinishedRuns) -> Iterator[Row]:
    seeds = range(3)
    calm = known.best("diloco", seeds)
    beside = {"4 equal peers, nothing lost": calm}
    yield Row("4 equal peers, nothing lost", calm, {})
    yield Row("half of the contributions lost", known.best("diloco", seeds, drop=LOST), beside)
    yield Row("speeds 4:2:1:1, half of the tokens", known.best("diloco", seeds, speeds=SPEEDS), beside)
    yield Row("2 equal peers, half of the tokens", known.best("diloco", seeds, peers=2), beside)


def _muon(known: Choices, runs: FinishedRuns) -> Iterator[Row]:
    """Muon at each rate, then both optimisers at their best, three seeds each."""
    for arm in ("data-parallel", "diloco"):
        given = {"optimizer": "muon", "outer": known.outer, "decay": known.decay}
        candidates = rate_candidates(arm, runs, **given)  # type: ignore[arg-type]
        beside = {"AdamW, the same arm": known.best(arm, range(3))}  # type: ignore[arg-type]
        best = choose(candidates, runs)  # type: ignore[arg-type]
        for rate, trials in candidates.items():
            third = (trial(arm, 2, rate, **given),) if rate == best else ()  # type: ignore[arg-type]
            yield Row(f"{arm}, {rate:g} x the inner rate", (*trials, *third), beside)


def _muon_time(known: Choices, runs: FinishedRuns) -> Iterator[Row]:
    """Muon in fewer rounds, because its steps take longer."""
    given = {"optimizer": "muon", "outer": known.outer, "decay": known.decay}
    best = choose(rate_candidates("diloco", runs, **given), runs)  # type: ignore[arg-type]
    if isinstance(best, float):
        whole = [trial("diloco", seed, best, **given) for seed in range(3)]  # type: ignore[arg-type]
        short = tuple(replace(each, run=replace(each.run, rounds=MUON_ROUNDS)) for each in whole)
        beside = {f"AdamW, {whole[0].run.rounds} rounds": known.best("diloco", range(3))}
        yield Row(f"Muon, {MUON_ROUNDS} rounds", short, beside)


def _muon_long(known: Choices, runs: FinishedRuns) -> Iterator[Row]:
    """Rounds of `LONG_ROUND` steps with Muon, and data parallel with Muon; both at the rate that is best at H = 25."""
    given = {"optimizer": "muon", "rate": 4.0}
    beside = {"data parallel with Muon": known.best("data-parallel", range(3), **given)}
    yield Row("H = 25", known.best("diloco", range(3), **given), beside)
    yield Row(f"H = {LONG_ROUND}", known.best("diloco", range(3), inner_steps=LONG_ROUND, **given), beside)


def _muon_swarm(known: Choices, runs: FinishedRuns) -> Iterator[Row]:
    """Muon at the size of `make swarm`, beside AdamW at its best there."""

    def of(rate: float, seed: int, optimizer: InnerOptimizerName = "muon") -> LabRun:
        return LabRun(
            "diloco", Run(PEERS, 14, 50, "w128", seed, outer=USUAL_OUTER_STEP, rate=rate, optimizer=optimizer)
        )

    beside = {"AdamW, 2 x": tuple(of(2.0, seed, None) for seed in FEW)}
    for rate, trials in halved((1.0, 2.0, 4.0, 8.0), of, runs).items():  # type: ignore[arg-type]
        yield Row(f"{rate:g} x the inner rate", trials, beside)


def _family(known: Choices, runs: FinishedRuns) -> Iterator[Row]:
    """With 8 peers, in calm and with peers missing; the butterfly under failures is diloco."""

    def of(arm: ArmName, seed: int, failure: float) -> LabRun:
        decay = (known.decay or 0.0) if arm != "noloco" else 0.0  # its rule has none
        given = trial(arm, seed, known.rates["diloco"], known.outer, peers=8, decay=decay)
        return replace(given, failure=failure)

    for failure in (0.0, MISSING):
        missing = f", {failure:.0%} missing in each round" if failure else ""
        beside = {"butterfly, as many missing": tuple(of("butterfly", seed, failure) for seed in FEW)}
        for arm in ("butterfly", *WITHOUT_COMMON_STATE):
            yield Row(f"{arm}{missing}", tuple(of(arm, seed, failure) for seed in FEW), beside)


Needs = Literal["", "rates", "outer", "decay"]
"""What has to be chosen before an experiment begins."""
_LATER: tuple[tuple[str, str, Callable[[Choices, FinishedRuns], Iterator[Row]], Needs], ...] = (
    ("swarm", "14 rounds of 50 steps of w128, as in `make swarm`", _swarm, ""),
    ("outer", "Outer steps: learning rate, momentum, and rate / (1 - momentum)", _outer, "rates"),
    ("decay", "Outer decay: when the best outer step goes to a plain mean", _decay, "outer"),
    ("seeds", "Each arm with its best values", _seeds, "decay"),
    (
        "inner-steps",
        "Inner steps of a round, with the outer step that is best at H = 25, no decay",
        _inner_steps,
        "outer",
    ),
    ("long-rounds", f"Rounds of {LONG_ROUND} steps, with rates and outer steps of their own", _long_rounds, "decay"),
    ("variants", "What may be done differently, without outer decay", _variants, "outer"),
    ("muon", "Muon for hidden matrices, with the outer step that is best for AdamW", _muon, "decay"),
    ("muon-time", "Muon in fewer rounds than AdamW", _muon_time, "decay"),
    ("muon-long", "Muon in rounds of 25 and of 100 steps, outer step (.7, .8) with decay", _muon_long, "decay"),
    ("muon-swarm", "Muon in 14 rounds of 50 steps of w128, as in `make swarm`", _muon_swarm, ""),
    ("codecs", "Codecs", _codecs, "decay"),
    ("sparse", "topk with the outer step (1, 0): inner steps of a round, and inner rates", _sparse, "decay"),
    ("between", "Muon with the outer steps of the presets, for few rounds and for many", _between, "decay"),
    ("peers", "Number of peers, with the values that are best for 4", _peers, "decay"),
    ("trouble", "Lost contributions, and unequal speeds", _trouble, "decay"),
    ("family", "Eight peers without a common state, beside the butterfly", _family, "decay"),
)
NAMES = ("baselines", *(name for name, *_ in _LATER))
