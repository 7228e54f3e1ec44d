"""From turns to figures: rows, ratios, the table, and the one JSON object."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.peers.rounds import Cell, Turn
from benchmarks.peers.systems import MEGABYTE, System

Row = dict[str, Any]
HEADLINE = Cell(4, 100.0)
RATIOS = {
    "fp32_over_hivemind": ("ours-fp32-direct", "hivemind", "seconds_p50"),
    "int8_over_hivemind": ("ours-int8-direct", "hivemind", "seconds_p50"),
    "fp32_over_torchft": ("ours-fp32-direct", "torchft", "seconds_p50"),
    "fp32_over_encrypted_floor": ("ours-fp32-direct", "encrypted-floor", "seconds_p50"),
    "encrypted_floor_over_tcp_floor": ("encrypted-floor", "tcp-floor", "seconds_p50"),
    "fp32_cpu_over_hivemind": ("ours-fp32-direct", "hivemind", "cpu_seconds_p50"),
}
"""Name -> rows and figure of numerator and denominator. "Ours" is the direct path."""


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that this share of the values does not exceed (nearest rank)."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


def row(system: System, turns: Sequence[Turn]) -> Row:
    """The figures of one system at one size; times in seconds, memory in MB (10^6 bytes) of the peer with most.

    Warm-ups and wrong rounds are in no figure, unless all rounds are wrong.
    """
    rounds, warm_ups = ([turn for turn in turns if turn.is_warm_up == each] for each in (False, True))
    wrong, wrong_warm_ups = (sum(not turn.ok for turn in each) for each in (rounds, warm_ups))
    turns = [turn for turn in rounds if turn.ok] or rounds
    seconds = [turn.seconds for turn in turns]
    forming = [turn.forming_seconds for turn in turns if turn.forming_seconds is not None]
    errors = [turn.relative_error for turn in turns if turn.relative_error is not None]
    return {
        "system": system.name,
        "label": system.label,
        "codec": system.codec,
        "path": system.path or None,
        "rounds": len(turns),
        "seconds": [round(each, 4) for each in seconds],
        "seconds_p50": round(median(seconds), 4),
        "seconds_p95": round(percentile(seconds, 0.95), 4),
        "forming_seconds_p50": round(median(forming), 4) if forming else None,
        "forming_seconds_p95": round(percentile(forming, 0.95), 4) if forming else None,
        "cpu_seconds_p50": round(median(turn.cpu_seconds for turn in turns), 3),
        "peak_megabytes": round(max(turn.held_bytes + turn.added_bytes for turn in turns) / MEGABYTE, 1),
        "added_megabytes": round(max(turn.added_bytes for turn in turns) / MEGABYTE, 1),
        "wire_megabytes_p50": round(median(turn.wire_bytes for turn in turns) / MEGABYTE, 3),
        "p2pd_megabytes_max": round(max(turn.p2pd_bytes for turn in turns) / MEGABYTE, 3),
        "relative_error": max(errors) if errors else None,
        "same_bits": all(turn.same_bits for turn in turns) if errors else None,
        "wrong_rounds": wrong,
        "wrong_warm_ups": wrong_warm_ups,
        "ok": not wrong and (system.is_foreign or not wrong_warm_ups),
    }


def ratios(rows: Sequence[Row]) -> dict[str, float | None]:
    """Each of `RATIOS`; None where one of its rows was not played."""
    figures = {each["system"]: each for each in rows}
    return {
        name: round(figures[above][key] / figures[below][key], 3) if above in figures and below in figures else None
        for name, (above, below, key) in RATIOS.items()
    }


def result(cells: Mapping[Cell, Sequence[Row]]) -> dict[str, Any]:
    """The JSON object. Its short keys are those of 4 x 100 MB, or of the first size if that was not played.

    `<system>_seconds_p50` stands for every row; `ours_<codec>_seconds_p50` is the direct path's, None if not played.
    """
    headline = HEADLINE if HEADLINE in cells else next(iter(cells))
    rows = cells[headline]
    short: dict[str, Any] = {f"{each['system'].replace('-', '_')}_seconds_p50": each["seconds_p50"] for each in rows}
    names = ("ours_fp32", "ours_int8", "hivemind_fp32", "torchft", "encrypted_floor", "tcp_floor")
    aliases = {"ours_fp32": "ours_fp32_direct", "ours_int8": "ours_int8_direct", "hivemind_fp32": "hivemind"}
    required = {f"{name}_seconds_p50": short.get(f"{aliases.get(name, name)}_seconds_p50") for name in names}
    return {
        **short,
        **required,
        "peers": headline.peers,
        "megabytes": headline.megabytes,
        "ratios": ratios(rows),
        "ok": all(each["ok"] for rows in cells.values() for each in rows),
        "cells": [
            {"peers": cell.peers, "megabytes": cell.megabytes, "ratios": ratios(rows), "rows": list(rows)}
            for cell, rows in cells.items()
        ],
    }


COLUMNS = (
    "",
    "s, p50",
    "p95",
    "x hivemind",
    "x encrypted",
    "group s",
    "CPU s",
    "peak MB",
    "added",
    "wire MB",
    "error",
    "",
)


def table(cell: Cell, rows: Sequence[Row]) -> str:
    """The rows as Markdown."""
    figures = {each["system"]: each for each in rows}
    lines = [f"{cell.peers} x {cell.megabytes:g} MB", "", f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    for each in rows:
        compared = [_over(each, figures.get(other)) for other in ("hivemind", "encrypted-floor")]
        fields = (
            each["label"], f"{each['seconds_p50']:.3f}", f"{each['seconds_p95']:.3f}", *compared,
            _or_dash(each["forming_seconds_p50"], ".3f"), f"{each['cpu_seconds_p50']:.2f}",
            f"{each['peak_megabytes']:.0f}", f"{each['added_megabytes']:.0f}", f"{each['wire_megabytes_p50']:.0f}",
            _or_dash(each["relative_error"], ".1e"), _verdict(each),
        )  # fmt: skip
        lines.append(f"| {' | '.join(fields)} |")
    return "\n".join(lines)


def _over(each: Row, other: Row | None) -> str:
    return f"{each['seconds_p50'] / other['seconds_p50']:.2f}" if other else "-"


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def _verdict(each: Row) -> str:
    verdict = {True: "the same bits", False: "within the bound", None: "all arrived"}[each["same_bits"]]
    if wrong := each["wrong_rounds"] + each["wrong_warm_ups"]:
        verdict = f"wrong: {wrong}, of these warm-ups: {each['wrong_warm_ups']}"
    return verdict if each["ok"] else f"NOT OK, {verdict}"
