"""Rows of the laboratory's tables, and the experiments that they form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.journal import FinishedRuns
from benchmarks.laboratory.choices import losses
from benchmarks.laboratory.runs import LabRun


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
