"""The laboratory's experiments, the most important first. Later ones use what earlier ones chose.

A choice needs all runs that it compares. Until they are finished, experiments that need it have no runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Literal

from benchmarks.journal import FinishedRuns
from benchmarks.laboratory import muon_experiments as muon
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
    outer_candidates,
    outer_step,
    rate_candidates,
)
from benchmarks.laboratory.rows import Experiment, Row
from benchmarks.laboratory.runs import (
    ARMS,
    INNER_STEPS,
    WITHOUT_COMMON_STATE,
    ArmName,
    LabRun,
    OuterStep,
    swarm_run,
    trial,
)
from node.tasks.gpt_presets import PLAIN_OUTER_STEP, USUAL_OUTER_STEP

MISSING = 0.3
SPARSE = PLAIN_OUTER_STEP
"""The outer step of SparseLoCo (Sarfi et al. 2025) for top-k."""


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
        rate, momentum = outer
        yield Row(f"rate {rate:g}, momentum {momentum:g}: {rate / (1 - momentum):.1f}", trials, beside)


def _swarm(known: Choices, runs: FinishedRuns) -> Iterator[Row]:
    """Inner rates and outer steps at the size of `make swarm`; the first is that of older presets."""
    usual, longer, longest = USUAL_OUTER_STEP, (0.81, 0.7), (0.7, 0.8)
    keys = [(1.0, usual, 0.0), (2.0, usual, 0.0), (4.0, usual, 0.0), (4.0, longer, 0.0)]
    keys += [(2.0, outer, DECAYS[1]) for outer in (usual, longer, longest)]

    def of(key: tuple[float, OuterStep, float], seed: int) -> LabRun:
        return swarm_run(seed, *key)

    beside = {"the first": tuple(of(keys[0], seed) for seed in FEW)}
    for (rate, outer, decay), trials in halved(keys, of, runs).items():
        label = "{:g} x the inner rate, outer step ({:g}, {:g})".format(rate, *outer)
        yield Row(label + (", decay" if decay else ""), trials, beside)


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
    for (rate, outer), trials in candidates.items():
        seeds = MANY if (rate, outer) == best else range(len(trials))
        yield Row(
            "{:g} x the inner rate, outer step ({:g}, {:g})".format(rate, *outer),
            trials[0].with_seeds(seeds),
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
    ("muon", "Muon for hidden matrices, with the outer step that is best for AdamW", muon.rates, "decay"),
    ("muon-time", "Muon in fewer rounds than AdamW", muon.fewer_rounds, "decay"),
    ("muon-long", "Muon in rounds of 25 and of 100 steps, decay in each", muon.long_rounds, "decay"),
    ("muon-long-outer", "Outer steps with Muon in rounds of 100 steps", muon.long_outer_steps, "decay"),
    ("muon-swarm", "Muon in 14 rounds of 50 steps of w128, as in `make swarm`", muon.swarm, ""),
    ("muon-outer", "Outer steps with Muon, decay in each", muon.outer_steps, "decay"),
    ("muon-codecs", "Codecs with Muon", muon.codecs, "decay"),
    ("codecs", "Codecs with AdamW", _codecs, "decay"),
    ("sparse", "topk with the outer step (1, 0): inner steps of a round, and inner rates", _sparse, "decay"),
    ("between", "The presets' outer steps, in 40 rounds of 50 steps with Muon", muon.between, "decay"),
    ("peers", "Number of peers, with Muon and the values that are best for 4", muon.peers, "decay"),
    ("overlap", "Rounds that average while the peers train on, with AdamW and Muon", muon.overlaps, "decay"),
    ("overlap-w128", "The same in 40 rounds of w128", muon.wider_overlaps, "decay"),
    ("trouble", "Unequal speeds, and lost contributions, with Muon", muon.trouble, "decay"),
    ("family", "Eight peers without a common state, beside the butterfly, with AdamW", _family, "decay"),
)
NAMES = ("baselines", *(name for name, *_ in _LATER))
