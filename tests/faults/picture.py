"""Draws a play: a lane of processes and rounds for each peer over time, with the events above the lanes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from tests.faults.judge import Verdict, in_words, promise_of
from tests.faults.recording import Event, Recording
from tests.faults.timeline import beginning
from tests.support.checkers import Report

WIDTH_INCHES, DOTS_PER_INCH = 14.0, 110
COLOURS = {
    "committed": ("#56b4e9", "#9ad2f3"),
    "alone": ("#0072b2", "#2f92cb"),
    "fork": ("#cc79a7", "#cc79a7"),
    "skipped": ("#f0e442", "#f0e442"),
    "superseded": ("#e69f00", "#e69f00"),
    "undecided": ("#555555", "#777777"),
}
"""Outcome -> colours of even and odd rounds, from Okabe and Ito, "Color Universal Design" (2008)."""
_KINDS = {"fault": "#d55e00", "heal": "#00795a"}
_SHADES = {"calm": "#e8f1f8", "faults": "#fbeee4"}
_BACK: dict[str, Any] = {"color": _KINDS["heal"], "linewidth": 1.6, "linestyle": (0, (2, 1.5))}
_QUIET, _RUNNING = "#8c8c8c", "#dedede"
_LANE = 0.64
_AXES_INCHES, _DIGIT_INCHES, _LETTER_INCHES = WIDTH_INCHES - 1.2, 0.08, 0.07
_TURN = 0.8  # from this share of the picture on, a label stands to the left of its line


def draw(play: Recording, verdict: Verdict, path: Path) -> None:
    """Write the picture as a PNG. Raises OSError if the file cannot be written."""
    start = beginning(play)
    ends = [process.ended for incarnations in play.incarnations.values() for process in incarnations]
    seconds = max([*ends, play.ended, start + 1.0]) - start
    events = sorted(play.events, key=lambda event: event.time)
    rows = _rows(events, start, seconds)
    heights = (0.22 * (1 + max(rows, default=0)) + 0.25, 0.5 * max(1, len(play.ids)) + 0.2)
    layout = ConstrainedLayoutEngine(h_pad=0.06, hspace=0.0)
    figure = Figure(figsize=(WIDTH_INCHES, sum(heights) + 1.5), dpi=DOTS_PER_INCH, layout=layout)
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=heights)
    below.set_xlim(-0.01 * seconds, 1.01 * seconds)
    above.set_ylim(max(rows, default=0) + 0.7, -0.7)
    for event, row in zip(events, rows, strict=True):
        _event(play, event, event.time - start, row, above, below)
    for lane, name in enumerate(play.ids):
        _lane(play, name, lane, start, below, _DIGIT_INCHES / _AXES_INCHES * seconds)
    _phases(play, verdict, start, above, below)
    _dress(play, verdict, above, below)
    figure.savefig(path, format="png")


def _rows(events: Sequence[Event], start: float, seconds: float) -> list[int]:
    """The row of each event's label, below all labels that its vertical line would cross."""
    ends: list[float] = []
    rows = []
    for event in events:
        since = event.time - start
        width = _LETTER_INCHES / _AXES_INCHES * seconds * (len(_label(event)) + 2)
        left = since if since < _TURN * seconds else since - width
        rows.append(max((row + 1 for row, end in enumerate(ends) if end > left), default=0))
        ends[rows[-1] : rows[-1] + 1] = [left + width]
    return rows


def _label(event: Event) -> str:
    return f"{event.what}: {', '.join(event.peers)}" if 0 < len(event.peers) <= 4 else event.what


def _event(play: Recording, event: Event, since: float, row: int, above: Axes, below: Axes) -> None:
    """Draw an event: a vertical line, a label above, and marks in the lanes of its peers."""
    colour, loud = _KINDS.get(event.kind, _QUIET), event.kind in _KINDS
    width, weight = (1.1, "bold") if loud else (0.6, "normal")
    below.axvline(since, color=colour, linewidth=width, zorder=3)
    above.plot([since, since], [row, above.get_ylim()[0]], color=colour, linewidth=width)
    text, side = f" {_label(event)} ", "left" if since < _TURN * below.get_xlim()[1] else "right"
    above.text(since, row, text, color=colour, fontsize=8, weight=weight, va="center", ha=side)
    if loud:
        edges = [lane - _LANE / 2 for lane, name in enumerate(play.ids) if name in event.peers]  # numbers stay readable
        marker = "v" if event.kind == "fault" else "^"
        below.plot([since] * len(edges), edges, marker, color=colour, markeredgecolor="white", markersize=9, zorder=5)


def _lane(play: Recording, name: str, lane: int, start: float, below: Axes, digit_seconds: float) -> None:
    """Draw the processes and rounds of a peer, with round numbers where there is room."""
    for process in play.incarnations.get(name, ()):
        below.barh(
            lane, process.ended - process.began, left=process.began - start, height=0.3, color=_RUNNING, zorder=1
        )
        text = f"  {in_words(process.code)}" if process.code else ""
        below.text(process.ended - start, lane, text, fontsize=7, va="center", color=_KINDS["fault"], zorder=6)
    for began, report in _segments(play, name):
        seconds, number = report["time"] - began, str(report["round"])
        colour = COLOURS[report["outcome"]][report["round"] % 2]
        below.barh(lane, seconds, _LANE, began - start, color=colour, edgecolor="white", linewidth=0.6, zorder=2)
        if digit_seconds * (len(number) + 0.5) < seconds:
            ink = "white" if report["outcome"] in ("alone", "undecided") else "black"
            below.text(
                began - start + seconds / 2, lane, number, fontsize=7, ha="center", va="center", color=ink, zorder=4
            )


def _segments(play: Recording, name: str) -> Iterator[tuple[float, Report]]:
    """(beginning, report) of each round of a peer, as far as its reports show."""
    before = -math.inf
    for report in play.histories.get(name, ()):
        began = [process.began for process in play.incarnations.get(name, ()) if process.began <= report["time"]]
        took = sum(report[each] for each in ("seconds_train", "seconds_wait", "seconds_average"))
        yield max([before, report["time"] - took, *began]), report
        before = report["time"]


def _phases(play: Recording, verdict: Verdict, start: float, above: Axes, below: Axes) -> None:
    """Shade the calm and the time of the faults, and mark the end of the recovery."""
    faults = [event.time for event in play.events if event.kind == "fault"]
    for since, until, what in [(*play.calm, "calm"), *[(min(faults), play.healed, "faults") for _ in faults[:1]]]:
        for axes in (above, below):
            axes.axvspan(since - start, until - start, color=_SHADES[what], linewidth=0, zorder=0)
    if not math.isnan(verdict.recovery_seconds):
        below.axvline(play.healed + verdict.recovery_seconds - start, zorder=3, **_BACK)


def _dress(play: Recording, verdict: Verdict, above: Axes, below: Axes) -> None:
    """Add the title, peer names, time axis and legend."""
    known = not math.isnan(verdict.recovery_seconds)
    recovery = f"recovered in {verdict.recovery_seconds:.1f} s" if known else "not recovered"
    broken = f" ({', '.join(dict.fromkeys(each['invariant'] for each in verdict.violations))})"
    title = f"{play.scenario}, seed {play.seed}: {verdict.verdict}{broken if verdict.violations else ''}, {recovery}"
    above.set_title(title, fontsize=12, weight="bold", loc="left")
    above.axis("off")
    below.set_yticks(range(len(play.ids)), list(play.ids))
    below.set_ylim(len(play.ids) - 0.5, -0.5)
    below.set_xlabel("seconds since the first process was started")
    below.spines[["top", "right", "left"]].set_visible(False)
    below.tick_params(axis="y", length=0)
    there = {report["outcome"] for history in play.histories.values() for report in history}
    keys: list[Artist] = [
        Patch(color=colours[0], label=outcome) for outcome, colours in COLOURS.items() if outcome in there
    ]
    keys += [Patch(color=_RUNNING, label="alive, no round reported")]
    keys += [Patch(facecolor=colour, edgecolor=_RUNNING, label=what) for what, colour in _SHADES.items()]
    keys += [Line2D([], [], label=f"all who should {promise_of(play).back}", **_BACK)]
    below.figure.legend(handles=keys, loc="outside lower left", ncols=len(keys), fontsize=8, frameon=False)
