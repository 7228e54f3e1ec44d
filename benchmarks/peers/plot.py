"""Draws the rounds' times: one panel a size, one bar a system, the whisker ends at p95."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.peers.report import Row
from benchmarks.peers.rounds import Cell

FLOOR, OTHER, DIRECT, LIBP2P = "#b8b8b8", "#d55e00", "#0072b2", "#56b4e9"
"""From Okabe and Ito, "Color Universal Design" (2008); grey for the floors."""


def colour(row: Row) -> str:
    if row["system"].endswith("-floor"):
        return FLOOR
    return {"direct": DIRECT, "libp2p": LIBP2P}.get(row["path"] or "", OTHER)


def draw(cells: Mapping[Cell, Sequence[Row]], path: Path) -> None:
    """Write a PNG: a row of panels for each number of peers, a column for each size of the vectors."""
    peers, sizes = sorted({cell.peers for cell in cells}), sorted({cell.megabytes for cell in cells})
    tallest = max(len(rows) for rows in cells.values())
    width, height = 5.2 + 4.2 * (len(sizes) - 1), (1.0 + 0.27 * tallest) * len(peers)
    figure = Figure(figsize=(max(width, 8.0), height), dpi=140, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(peers), len(sizes), squeeze=False)
    for above, count in enumerate(peers):
        for along, size in enumerate(sizes):
            if rows := cells.get(Cell(count, size)):
                _panel(panels[above][along], rows, f"{count} x {size:g} MB", labelled=along == 0)
            else:
                panels[above][along].set_visible(False)
    figure.savefig(path, format="png", pil_kwargs={"optimize": True})


def _panel(axes: Axes, rows: Sequence[Row], title: str, labelled: bool) -> None:
    middles = [row["seconds_p50"] for row in rows]
    beyond = [row["seconds_p95"] - row["seconds_p50"] for row in rows]
    places = range(len(rows))
    axes.barh(places, middles, color=[colour(row) for row in rows], height=0.72)
    axes.errorbar(middles, places, xerr=([0.0] * len(rows), beyond), fmt="none", ecolor="#333333", capsize=2)
    for place, row in zip(places, rows, strict=True):
        axes.text(row["seconds_p95"], place, f"  {row['seconds_p50']:.2f}", va="center", fontsize=8)
    axes.set_yticks(places, [row["label"] for row in rows] if labelled else [""] * len(rows))
    axes.set_xlim(0, 1.15 * max(row["seconds_p95"] for row in rows))
    axes.set_xlabel("seconds until the last peer holds the mean: median, p95")
    axes.set_title(title, loc="left", weight="bold", fontsize=11)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
