"""The laboratory's experiments with Muon, which the presets take: its rates and outer steps, codecs, peers, trouble."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from benchmarks.journal import FinishedRuns
from benchmarks.laboratory.choices import (
    DECAYS,
    FEW,
    LONG_ROUND,
    MANY,
    Choices,
    choose,
    halved,
    outer_step,
    rate_candidates,
)
from benchmarks.laboratory.rows import Row
from benchmarks.laboratory.runs import (
    INNER_STEPS,
    PEERS,
    ArmName,
    LabRun,
    OuterStep,
    swarm_run,
)
from node.tasks.gpt_presets import MANY_ROUNDS, SHORT_ROUND, USUAL_OUTER_STEP

LOST, LATE_WEIGHTS = 0.5, (0.0, 0.5, 1.0)
MUON_ROUNDS = 61
"""Of 80 rounds: more is saved than Muon's longer steps take, but those of w128 and w256 on CPUs without AVX-512."""
FRAGMENTS = 5
"""So many times the rounds, each a fifth of `INNER_STEPS`."""
WIDER_ROUNDS, WIDER_RATE = 40, 2.0
"""Of runs with w128: rounds of `INNER_STEPS`, and AdamW's best inner rate."""
SPEEDS = (1.0, 0.5, 0.25, 0.25)
RATE, OUTER_STEP, PRESETS_OUTER_STEP = 4.0, (0.4, 0.8), (0.7, 0.8)
"""Of Muon. `OUTER_STEP` is as good as the presets' in rounds of 25 steps, and worse in longer ones."""
REACHES_TRIED = {
    0.0: (1.0,),
    0.5: (1.8,),
    0.7: (2.7, 2.0, 1.5),
    0.8: (3.5, 2.7, 2.0, 4.5, 1.5, 1.0),
    0.9: (2.7, 2.0),
}
"""Momentum -> learning rate over 1 - momentum, of outer steps."""
LONG_OUTER_STEPS = ((0.81, 0.7), (1.05, 0.7), (0.9, 0.8))
"""Tried in long rounds, where larger outer steps do better, beside `PRESETS_OUTER_STEP`."""
THREE = range(3)


def _words(outer: OuterStep) -> str:
    return "({:g}, {:g})".format(*outer)


def _muon(known: Choices, arm: ArmName, seeds: range, **changes: object) -> tuple[LabRun, ...]:
    """The arm with Muon and, where it has an outer step, `OUTER_STEP`."""
    outer = {} if arm in ("data-parallel", "alone") else {"outer": OUTER_STEP}
    return known.best(arm, seeds, **{"optimizer": "muon", "rate": RATE, **outer, **changes})


def rates(known: Choices, runs: FinishedRuns) -> Iterator[Row]:
    """Muon at each rate with the outer step that is best for AdamW, then, at the best, with all seeds."""
    arms: tuple[ArmName, ...] = ("data-parallel", "diloco")
    for arm in arms:
        given = {"optimizer": "muon", "outer": known.outer, "decay": known.decay}
        candidates = rate_candidates(arm, runs, **given)
        best = choose(candidates, runs)
        for rate, trials in candidates.items():
            found = trials[0].with_seeds(MANY) if rate == best else trials
            yield Row(f"{arm}, {rate:g} x the inner rate", found, {"AdamW": known.best(arm, MANY)})


def outer_steps(known: Choices, runs: FinishedRuns) -> Iterator[Row]:
    """Outer steps for Muon, decay in each."""
    beside = {"data parallel with Muon": _muon(known, "data-parallel", FEW)}

    def of(outer: OuterStep, seed: int) -> LabRun:
        return _muon(known, "diloco", range(seed, seed + 1), outer=outer)[0]

    steps = [outer_step(reach, momentum) for momentum, reaches in REACHES_TRIED.items() for reach in reaches]
    for (rate, momentum), trials in halved(steps, of, runs).items():
        yield Row(f"rate {rate:g}, momentum {momentum:g}: {rate / (1 - momentum):.1f}", trials, beside)


def fewer_rounds(known: Choices, runs: FinishedRuns) -> Iterator[Row]:
    """Muon in fewer rounds, because its steps take longer."""
    short = _muon(known, "diloco", FEW, rounds=MUON_ROUNDS, outer=known.outer)
    yield Row(f"Muon, {MUON_ROUNDS} rounds", short, {"AdamW, 80 rounds": known.best("diloco", FEW)})


def long_rounds(known: Choices, runs: FinishedRuns) -> Iterator[Row]:
    """Rounds of `LONG_ROUND` steps with Muon, and data parallel with Muon; both at the rate that is best at H = 25."""
    beside = {"data parallel with Muon": _muon(known, "data-parallel", MANY)}
    for steps, outer in product((INNER_STEPS, LONG_ROUND), (PRESETS_OUTER_STEP, OUTER_STEP)):
        found = _muon(known, "diloco", MANY, inner_steps=steps, outer=outer)
        yield Row(f"H = {steps}, outer step {_words(outer)}", found, beside)


def long_outer_steps(known: Choices, runs: FinishedRuns) -> Iterator[Row]:
    """Outer steps in rounds of `LONG_ROUND` steps, decay in each but the presets' of few rounds."""

    def of(outer: OuterStep, seed: int) -> LabRun:
        return _muon(known, "diloco", range(seed, seed + 1), outer=outer, inner_steps=LONG_ROUND)[0]

    data_parallel = {"data parallel with Muon": _muon(known, "data-parallel", MANY)}
    adamw = {"data parallel with AdamW": known.best("data-parallel", MANY)}
    usual = _muon(known, "diloco", MANY, outer=USUAL_OUTER_STEP, decay=0.0, inner_steps=LONG_ROUND)
    candidates = halved([PRESETS_OUTER_STEP, *LONG_OUTER_STEPS], of, runs)
    best = choose(candidates, runs)
    for outer, trials in candidates.items():
        found = trials[0].with_seeds(MANY) if outer in (best, PRESETS_OUTER_STEP) else trials
        yield Row(f"{_words(outer)} and decay", found, data_parallel | {_words(USUAL_OUTER_STEP): usual})
    yield Row(f"{_words(USUAL_OUTER_STEP)}, no decay", usual, data_parallel | adamw)


def swarm(known: Choices, runs: FinishedRuns) -> Iterator[Row]:
    """Muon at the size of `make swarm`, beside AdamW at its best there."""

    def of(key: tuple[float, OuterStep, float], seed: int) -> LabRun:
        return swarm_run(seed, *key, "muon")

    beside = {"AdamW, 2 x": tuple(swarm_run(seed, 2.0, USUAL_OUTER_STEP) for seed in FEW)}
    keys = [(rate, USUAL_OUTER_STEP, 0.0) for rate in (1.0, 2.0, 4.0, 8.0)]
    for (rate, _, _), trials in halved(keys, of, runs).items():
        yield Row(f"{rate:g} x the inner rate", trials, beside)
    others = [(RATE, PRESETS_OUTER_STEP, DECAYS[1]), (RATE, OUTER_STEP, DECAYS[1]), (RATE, (0.6, 0.7), DECAYS[1])]
    for key, trials in halved(others, of, runs).items():
        yield Row(f"{RATE:g} x the inner rate, outer step {_words(key[1])}, decay", trials, beside)


def between(known: Choices, runs: FinishedRuns) -> Iterator[Row]:
    """The presets' outer steps of few rounds and of many, in the fewest and longest rounds that count as many."""
    given = {"rounds": MANY_ROUNDS, "inner_steps": SHORT_ROUND}
    data_parallel = {"data parallel with Muon": _muon(known, "data-parallel", MANY)}
    few = _muon(known, "diloco", MANY, outer=USUAL_OUTER_STEP, decay=0.0, **given)
    for outer, seeds in ((PRESETS_OUTER_STEP, MANY), (OUTER_STEP, FEW[:1])):
        found = _muon(known, "diloco", seeds, outer=outer, **given)
        yield Row(f"{_words(outer)} and decay", found, data_parallel | {_words(USUAL_OUTER_STEP): few})
    yield Row(f"{_words(USUAL_OUTER_STEP)}, no decay", few, data_parallel)


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
        yield Row(f"1 peer, {rate:g} x the inner rate", trials, {})
    if best is not None:
        beside = {"1 peer": _muon(known, "alone", THREE, rate=best)}
        yield Row("1 peer at its best", beside["1 peer"], {})
        yield Row("1 peer with the outer step", _muon(known, "alone-outer", THREE, rate=best), beside)
        yield Row("4 peers of data parallel", _muon(known, "data-parallel", THREE), beside)
        presets = _muon(known, "diloco", THREE, outer=PRESETS_OUTER_STEP)
        yield Row("4 peers, the presets' outer step", presets, beside)
    for count in (2, PEERS, 8, 16):
        seeds = FEW if count <= PEERS else FEW[:1]
        beside = {"data parallel of as many peers": _muon(known, "data-parallel", seeds, peers=count)}
        yield Row(f"{count} peers", _muon(known, "diloco", seeds, peers=count), beside)


def overlaps(known: Choices, runs: FinishedRuns) -> Iterator[Row]:
    """Rounds that take a part of their time to average while the peers train on, whole and in five fragments."""
    plain = {
        "Muon": _muon(known, "diloco", MANY, outer=PRESETS_OUTER_STEP),
        "AdamW": known.best("diloco", MANY),
    }
    short = INNER_STEPS // FRAGMENTS
    kinds: tuple[tuple[str, int, int, dict[str, Any], range], ...] = (
        ("five fragments, keep", FRAGMENTS, short // 2, {}, MANY),
        ("keep", 1, INNER_STEPS // 4, {}, MANY),
        ("keep", 1, INNER_STEPS // 2, {}, MANY),
        ("three quarters kept", 1, INNER_STEPS // 2, {"kept": 0.75}, FEW),
        (f"keep, outer step {_words(USUAL_OUTER_STEP)}", 1, INNER_STEPS // 2, {"outer": USUAL_OUTER_STEP}, FEW[:1]),
        ("five fragments, strided, keep", FRAGMENTS, short // 2, {"variant": "strided"}, FEW),
        ("five fragments, keep", FRAGMENTS, 0, {}, FEW),
        ("five fragments, keep", FRAGMENTS, short - 1, {}, FEW),
        ("keep", 1, INNER_STEPS - 1, {}, FEW),
        ("naive", 1, INNER_STEPS // 2, {"variant": "naive"}, FEW[:1]),
    )
    for kind, fragments, delay, changes, seeds in kinds:
        steps = INNER_STEPS // fragments
        for name, trials in plain.items():
            sizes = {"inner_steps": steps, "fragments": fragments, "delay": delay, **changes}
            late = [replace(each.run, rounds=fragments * each.run.rounds, **sizes) for each in trials]
            found = tuple(LabRun("diloco", run) for run in late if run.seed in seeds)
            yield Row(f"{name}, {kind}, {delay} of {steps} steps late", found, {f"{name}, nothing late": trials})


def wider_overlaps(known: Choices, runs: FinishedRuns) -> Iterator[Row]:
    """The same with w128, in half as many rounds, and at its best inner rates."""
    sizes: dict[str, Any] = {"preset": "w128", "rounds": WIDER_ROUNDS}
    plain = {
        "Muon": _muon(known, "diloco", MANY, outer=PRESETS_OUTER_STEP, **sizes),
        "AdamW": known.best("diloco", MANY, rate=WIDER_RATE, **sizes),
    }
    for fragments, delay in ((FRAGMENTS, 2), (1, INNER_STEPS // 4)):
        steps = INNER_STEPS // fragments
        late_by: dict[str, Any] = {"inner_steps": steps, "fragments": fragments, "delay": delay}
        for name, trials in plain.items():
            runs_late = [replace(each.run, rounds=fragments * WIDER_ROUNDS, **late_by) for each in trials]
            late = tuple(LabRun("diloco", run) for run in runs_late)
            kind = f"{fragments} fragments" if fragments > 1 else "keep"
            words = f"{name}, {kind}, {delay} of {steps} steps late"
            yield Row(words, late, {f"{name}, nothing late": trials})


def trouble(known: Choices, runs: FinishedRuns) -> Iterator[Row]:
    calm = _muon(known, "diloco", THREE)
    beside = {"4 equal peers, nothing lost": calm}
    yield Row("4 equal peers, nothing lost", calm, {})
    yield Row("speeds 4:2:1:1, half of the tokens", _muon(known, "diloco", THREE, speeds=SPEEDS), beside)
    yield Row("2 equal peers, half of the tokens", _muon(known, "diloco", THREE, peers=2), beside)
    yield Row("half of the contributions lost", _muon(known, "diloco", FEW[:1], drop=LOST), beside)
    for late in LATE_WEIGHTS:
        words = f"one of 4 contributions lost, which counts with {late:g} in the next round"
        yield Row(words, _muon(known, "diloco", FEW, drop=0.25, late=late), beside)
        adamw = known.best("diloco", FEW, drop=0.25, late=late)
        yield Row(f"AdamW, {words}", adamw, {"AdamW, nothing lost": known.best("diloco", FEW)})
