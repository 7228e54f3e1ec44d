"""The laboratory's tables and its plot, of the runs that are finished."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from benchmarks.journal import FinishedRuns, paired, shares, spread
from benchmarks.laboratory.choices import MOST_RATE, Choices, choices, losses
from benchmarks.laboratory.rows import Experiment, Row
from benchmarks.laboratory.runs import ARMS, ArmName, LabRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHOWN_PERCENT = 8.0
COMPARED = ("muon", "muon-codecs", "codecs", "trouble", "family")
"""Experiments of which each row stands in the plot, by its difference from the run beside it."""
GAINS = {
    "seeds": ("diloco", "alone", "data-parallel"),
    "peers": ("4 peers, the presets' outer step", "1 peer at its best", "4 peers of data parallel"),
}
"""Experiment -> its rows of diloco, of one peer, and of data parallel, whose gain over one peer is compared."""
COLOURS = {"data-parallel": "#000000", "diloco": "#0072b2", "alone-outer": "#d55e00", "alone": "#e69f00"}
"""From Okabe and Ito, "Color Universal Design" (2008)."""


def table(experiment: Experiment, runs: FinishedRuns) -> Iterator[str]:
    """Lines of Markdown. A mean needs all of its seeds; a difference says if it has fewer pairs than it should."""
    trials = experiment.trials
    done = sum(each in runs for each in trials)
    if experiment.waits_for:
        yield f"{experiment.title}: not begun. First to be chosen: {experiment.waits_for}."
        return
    yield f"{experiment.title}. {done} of {len(trials)} runs are done."
    yield ""
    seeds = sorted({each.run.seed for row in experiment.rows for each in row.trials})
    columns = list(dict.fromkeys(label for row in experiment.rows for label in row.beside))
    heads = ["", *(f"seed {seed}" for seed in seeds), "mean ± deviation", *(f"to {label}" for label in columns)]
    yield f"| {' | '.join(heads)} |"
    yield "|" + "---|" * len(heads)
    for row in experiment.rows:
        found = row.losses(runs)
        cells = [f"{found[seed]:.4f}" if seed in found else "–" for seed in seeds]
        mean = spread(list(found.values()), ".4f") if len(found) == len(row.trials) else "–"
        yield f"| {' | '.join([row.label, *cells, mean, *(_change(row, label, runs) for label in columns)])} |"


def _change(row: Row, label: str, runs: FinishedRuns) -> str:
    others = row.beside.get(label, ())
    found = paired(row.losses(runs), losses(others, runs)) if others != row.trials else []
    few = f" ({len(found)} of {len(row.trials)} pairs)" if found and len(found) < len(row.trials) else ""
    return spread(found, "+.2%") + few


def conclusions(experiment: Experiment, runs: FinishedRuns) -> Iterator[str]:
    """What the experiment settles, if all of its runs are done."""
    known = choices(runs)
    if experiment.name == "baselines":
        for arm in ARMS:
            yield f"Best inner rate of {arm}: {_best_rate(arm, known)}."
    elif experiment.name == "outer" and known.outer:
        yield "Best outer step: learning rate {:g}, momentum {:g}.".format(*known.outer)
    elif experiment.name in GAINS:
        found = {row.label: row.losses(runs) for row in experiment.rows}
        kept = shares(*(found.get(label, {}) for label in GAINS[experiment.name]))
        if kept:
            yield f"Of data parallel's gain over one peer, diloco keeps {spread(kept, '.0%')} ({len(kept)} seeds)."


def _best_rate(arm: ArmName, known: Choices) -> str:
    if arm not in known.rates:
        return "open, runs are missing"
    rate = known.rates[arm]
    edge = ", at the edge of what is tried" if rate in (1 / MOST_RATE, MOST_RATE) else ""
    return f"{rate:g} x the preset's{edge}"


def show(experiments: Sequence[Experiment], runs: FinishedRuns) -> None:
    """Print all tables."""
    for experiment in experiments:
        print(f"\n### {experiment.name}\n")
        for line in table(experiment, runs):
            print(line)
        settled = list(conclusions(experiment, runs))
        print("\n" + "\n".join(settled) if settled else "", end="\n" if settled else "")


def draw(runs: FinishedRuns, every: Sequence[Experiment], file: Path) -> None:
    """Plot the losses of the finished baselines, outer steps, and what other choices change.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, 10.0), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subfigures(2, 1, height_ratios=(4.6, 5.4))  # type: ignore[misc]
    (left, right), below = upper.subplots(1, 2), lower.subplots()
    known = choices(runs)
    best = next((each for each in every if each.name == "seeds" and each.trials), every[0])
    for arm in ARMS:
        _curves(left, arm, [each for each in best.trials if each.arm == arm and each in runs], runs)
    left.set(title="each arm at its best, seed 0", xlabel="inner steps", ylabel="nats/byte, held out")
    left.set_ylim(top=2.0)
    if left.lines:
        left.legend(frameon=False)
    _outer_steps(right, next(each for each in every if each.name == "outer"), runs)
    right.set(title="outer steps" + ("" if known.outer else " (runs are missing)"), xlabel="rate / (1 - momentum)")
    _differences(below, [each for name in COMPARED for each in every if each.name == name], runs)
    for axes in (left, right, below):
        axes.grid(alpha=0.3)
    figure.savefig(file)


def _curves(axes: Axes, arm: str, trials: Sequence[LabRun], runs: FinishedRuns) -> None:
    firsts = [each for each in trials if each.run.seed == 0]
    if firsts:
        best = min(firsts, key=runs.loss)
        steps, found = zip(*runs.history(best), strict=True)
        axes.plot(steps, found, color=COLOURS[arm], label=f"{arm}: {found[-1]:.3f}")


def _differences(axes: Axes, experiments: Sequence[Experiment], runs: FinishedRuns) -> None:
    """A line for each finished row: the mean of its differences and their deviation, if it has several."""
    labels = list[str]()
    for name, row in ((experiment.name, row) for experiment in experiments for row in experiment.rows):
        for trials in row.beside.values():
            changes = [100 * each for each in paired(row.losses(runs), losses(trials, runs))]
            if trials == row.trials or not changes:
                continue
            error = stdev(changes) if len(changes) > 1 else None
            axes.errorbar(fmean(changes), len(labels), xerr=error, fmt="o", capsize=3, color=COLOURS["diloco"])
            labels.append(f"{name}: {row.label} ({len(changes)})")
    axes.set(yticks=range(len(labels)), xlabel="% above what the tables compare it with; below 0 is better")
    axes.set_yticklabels(labels, fontsize="small")
    axes.set_title("other choices: mean difference, deviation and number of seeds", loc="left")
    axes.invert_yaxis()
    axes.axvline(0.0, color="black", linewidth=0.8)


def _outer_steps(axes: Axes, experiment: Experiment, runs: FinishedRuns) -> None:
    """The change from data parallel, a line for each momentum."""
    points: dict[float, list[tuple[float, float]]] = {}
    for row in experiment.rows:
        (others,) = row.beside.values()
        changes = paired(row.losses(runs), losses(others, runs))
        if len(changes) == len(row.trials):
            rate, momentum = row.trials[0].run.outer or (0.0, 0.0)
            points.setdefault(momentum, []).append((rate / (1 - momentum), 100 * sum(changes) / len(changes)))
    for momentum, found in sorted(points.items()):
        axes.plot(*zip(*sorted(found), strict=True), marker="o", label=f"momentum {momentum:g}")
    axes.set_ylabel(f"% above data parallel, up to {SHOWN_PERCENT:g}")
    axes.set_ylim(0.0, SHOWN_PERCENT)
    if points:
        axes.legend(frameon=False)
