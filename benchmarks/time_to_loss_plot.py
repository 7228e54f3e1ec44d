"""Draws what `benchmarks.time_to_loss` measures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

COLOURS = ("#999999", "#000000", "#d55e00", "#cc79a7", "#0072b2", "#56b4e9", "#00795a", "#e69f00")
"""From Okabe and Ito, "Color Universal Design" (2008), and grey."""
Row = Mapping[str, Any]


def _panels(count: int, height: float) -> tuple[Figure, Any]:
    figure = Figure(figsize=(max(8.0, 4.2 * count), height), dpi=140, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, count, squeeze=False, sharey=True)[0]
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_locator(NullLocator())
    return figure, panels


def _colours(labels: Mapping[str, str]) -> dict[str, str]:
    return {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(labels)}


def draw_curves(rows: Sequence[Row], labels: Mapping[str, str], loss: float, path: Path) -> None:
    """A panel a link: the held-out loss of each arm's first peer by seconds, and the loss that counts."""
    colours, links = _colours(labels), sorted({row["megabits"] for row in rows})
    figure, panels = _panels(len(links), 4.6)
    for axes, link in zip(panels, links, strict=True):
        for row in rows:
            if row["megabits"] == link and row.get("curves"):
                seconds, _, losses = zip(*row["curves"][0], strict=True)
                name = row["arm"]
                axes.plot(seconds, losses, ".-", color=colours[name], linewidth=1.5, label=labels[name])
        axes.axhline(loss, color="#333333", linewidth=0.8, linestyle=(0, (4, 2)))
        axes.set_title(f"{link:g} Mbit/s", loc="left", weight="bold", fontsize=11)
        axes.set_xlabel("seconds of training")
    panels[0].set_ylabel("held-out loss (nats per byte)")
    _save(figure, panels[0], path)


def draw_shares(rows: Sequence[Row], labels: Mapping[str, str], path: Path) -> None:
    """A panel for each H: the share of the time in which the worker takes steps, by the link's rate."""
    colours, rounds = _colours(labels), sorted({row["inner_steps"] for row in rows})
    figure, panels = _panels(len(rounds), 3.6)
    for axes, steps in zip(panels, rounds, strict=True):
        for name in dict.fromkeys(row["arm"] for row in rows):
            found = sorted(
                (r["megabits"], 100 * r["share"]) for r in rows if (r["arm"], r["inner_steps"]) == (name, steps)
            )
            axes.plot(*zip(*found, strict=True), "o-", color=colours[name], label=labels[name])
        axes.set_ylim(0, 102)
        axes.set_title(f"H = {steps}", loc="left", weight="bold", fontsize=11)
        axes.set_xlabel("Mbit/s")
    panels[0].set_ylabel("% of the time in steps\n(paced trainers)")
    _save(figure, panels[0], path)


def _save(figure: Figure, labelled: Any, path: Path) -> None:
    handles, names = labelled.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", pil_kwargs={"optimize": True})
