"""The laboratory's experiments with Muon, which the presets take: its rates and outer steps, codecs, peers, trouble."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.journal import FinishedRuns
from benchmarks.laboratory.choices import (
    DECAYS,
    FEW,
    LONG_ROUND,
    MANY,
    Choices,
    OuterStep,
    choose,
    halved,
    outer_step,
    rate_candidates,
)
from benchmarks.laboratory.rows import Row
from benchmarks.laboratory.runs import (
    PEERS,
    STEPS,
    WITHOUT_COMMON_STATE,
    ArmName,
    LabRun,
    Run,
    trial,
)
from node.tasks.base import InnerOptimizerName
from node.tasks.gpt import USUAL_OUTER_STEP

LOST, MISSING = 0.5, 0.3
MUON_ROUNDS = 61
"""Of 80 rounds: more is saved than Muon's longer steps take with the presets, but w256 on CPUs without AVX-512."""
SPEEDS = (1.0, 0.5, 0.25, 0.25)
RATE = 4.0
"""Of Muon, which is best for data parallel and for diloco."""
REACHES = {
    0.0: (1.0,),
    0.5: (1.8,),
    0.7: (2.7, 2.0, 1.5),
    0.8: (3.5, 2.7, 2.0, 4.5, 1.5, 1.0),
    0.9: (2.7, 2.0),
}
"""Momentum -> learning rate over 1 - momentum, of outer steps."""
THREE = range(3)


def _muon(known: Choices, arm: ArmName, seeds: range, **changes: object) -> tuple[LabRun, ...]:
    """The arm with Muon, and the outer step that is best for AdamW."""
    return known.best(arm, seeds, **{"optimizer": "muon", "rate": RATE, **changes})


def rates(known: Choices, runs: FinishedRuns) -> Iterator[Row]:
    """Muon at each rate, then both optimisers at their best, with all seeds."""
    for arm in ("data-parallel", "diloco"):
        given = {"optimizer": "muon", "outer": known.outer, "decay": known.decay}
        candidates = rate_candidates(arm, runs, **given)
        beside = {"AdamW, the same arm": known.best(arm, MANY)}
        best = choose(candidates, runs)
        for rate, trials in candidates.items():
            found = _muon(known, arm, MANY, rate=rate) if rate == best else trials
            yield Row(f"{arm}, {rate:g} x the inner rate", found, beside)


def outer_steps(known: Choices, runs: FinishedRuns) -> Iterator[Row]:
    """Outer steps for Muon, decay in each."""
    beside = {"data parallel with Muon": _muon(known, "data-parallel", FEW)}

    def of(outer: OuterStep, seed: int) -> LabRun:
        return _muon(known, "diloco", range(seed, seed + 1), outer=outer)[0]

    steps = [outer_step(reach, momentum) for momentum, reaches in REACHES.items() for reach in reaches]
    for (rate, momentum), trials in halved(steps, of, runs, kept=4).items():
        yield Row(f"rate {rate:g}, momentum {momentum:g}: {rate / (1 - momentum):.1f}", trials, beside)


def fewer_rounds(known: Choices, runs: FinishedRuns) -> Iterator[Row]:
    """Muon in fewer rounds, because its steps take longer."""
    short = _muon(known, "diloco", FEW, rounds=MUON_ROUNDS)
    yield Row(f"Muon, {MUON_ROUNDS} rounds", short, {"AdamW, 80 rounds": known.best("diloco", FEW)})


def long_rounds(known: Choices, runs: FinishedRuns) -> Iterator[Row]:
    """Rounds of `LONG_ROUND` steps with Muon, and data parallel with Muon; both at the rate that is best at H = 25."""
    beside = {"data parallel with Muon": _muon(known, "data-parallel", MANY)}
    yield Row("H = 25", _muon(known, "diloco", MANY), beside)
    yield Row(f"H = {LONG_ROUND}", _muon(known, "diloco", MANY, inner_steps=LONG_ROUND), beside)


def swarm(known: Choices, runs: FinishedRuns) -> Iterator[Row]:
    """Muon at the size of `make swarm`, beside AdamW at its best there."""

    def of(key: tuple[float, OuterStep, float], seed: int, optimizer: InnerOptimizerName = "muon") -> LabRun:
        rate, outer, decay = key
        given = Run(PEERS, 14, 50, "w128", seed, outer=outer, rate=rate, optimizer=optimizer, decay=decay)
        return LabRun("diloco", given)

    beside = {"AdamW, 2 x": tuple(of((2.0, USUAL_OUTER_STEP, 0.0), seed, None) for seed in FEW)}
    keys = [(rate, USUAL_OUTER_STEP, 0.0) for rate in (1.0, 2.0, 4.0, 8.0)]
    for (rate, _, _), trials in halved(keys, of, runs).items():
        yield Row(f"{rate:g} x the inner rate", trials, beside)
    more = tuple(of((RATE, (0.7, 0.8), DECAYS[1]), seed) for seed in FEW)
    yield Row(f"{RATE:g} x the inner rate, outer step (.7, .8) with decay", more, beside)


def between(known: Choices, runs: FinishedRuns) -> Iterator[Row]:
    """The presets' outer steps of few rounds and of many, where they change, and below."""
    for rounds in (40, 20):
        given = {"inner_steps": STEPS // rounds}
        few = _muon(known, "diloco", FEW, outer=USUAL_OUTER_STEP, decay=0.0, **given)
        yield Row(f"{rounds} rounds, (.9, .5)", few, {})
        yield Row(f"{rounds} rounds, (.7, .8) and decay", _muon(known, "diloco", FEW, **given), {"(.9, .5)": few})


def codecs(known: Choices, runs: FinishedRuns) -> Iterator[Row]:
    beside = {"float32": _muon(known, "diloco", THREE)}
    yield Row("float32", beside["float32"], {})
    for used in ("int8", "e3m0"):
        yield Row(used, _muon(known, "diloco", THREE, codec=used), beside)


def peers(known: Choices, runs: FinishedRuns) -> Iterator[Row]:
    """One peer at two rates, as less than `RATE` is best for one peer with AdamW."""

    def lone(rate: float, seed: int) -> LabRun:
        return _muon(known, "alone", range(seed, seed + 1), rate=rate)[0]

    alone = halved((RATE / 2, RATE), lone, runs)
    best = choose(alone, runs)
    for rate, trials in alone.items():
        found = _muon(known, "alone", THREE, rate=rate) if rate == best else trials
        yield Row(f"1 peer, {rate:g} x the inner rate", found, {})
    if best is not None:
        beside = {"1 peer": _muon(known, "alone", THREE, rate=best)}
        yield Row("1 peer with the outer step", _muon(known, "alone-outer", THREE, rate=best), beside)
        yield Row("4 peers", _muon(known, "diloco", THREE), beside)
    for count in (2, PEERS, 8, 16):
        beside = {"data parallel of as many peers": _muon(known, "data-parallel", FEW, peers=count)}
        yield Row(f"{count} peers", _muon(known, "diloco", FEW, peers=count), beside)


def trouble(known: Choices, runs: FinishedRuns) -> Iterator[Row]:
    calm = _muon(known, "diloco", THREE)
    beside = {"4 equal peers, nothing lost": calm}
    yield Row("4 equal peers, nothing lost", calm, {})
    yield Row("speeds 4:2:1:1, half of the tokens", _muon(known, "diloco", THREE, speeds=SPEEDS), beside)
    yield Row("2 equal peers, half of the tokens", _muon(known, "diloco", THREE, peers=2), beside)
    yield Row("half of the contributions lost", _muon(known, "diloco", THREE, drop=LOST), beside)


def family(known: Choices, runs: FinishedRuns) -> Iterator[Row]:
    """With 8 peers, in calm and with peers missing; the butterfly under failures is diloco."""
    yield from _family(known, "muon")


def adamw_family(known: Choices, runs: FinishedRuns) -> Iterator[Row]:
    """The same with AdamW."""
    yield from _family(known, None)


def _family(known: Choices, optimizer: InnerOptimizerName) -> Iterator[Row]:
    rate = RATE if optimizer else known.rates["diloco"]

    def of(arm: ArmName, seed: int, failure: float) -> LabRun:
        decay = (known.decay or 0.0) if arm != "noloco" else 0.0  # its rule has none
        given = trial(arm, seed, rate, known.outer, peers=8, decay=decay, optimizer=optimizer)
        return replace(given, failure=failure)

    for failure in (0.0, MISSING):
        missing = f", {failure:.0%} missing in each round" if failure else ""
        beside = {"butterfly, as many missing": tuple(of("butterfly", seed, failure) for seed in FEW)}
        for arm in ("butterfly", *WITHOUT_COMMON_STATE):
            yield Row(f"{arm}{missing}", tuple(of(arm, seed, failure) for seed in FEW), beside)
