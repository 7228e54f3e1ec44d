"""Finished runs of an experiment, in a file, and what pairs of them show. The missing ones run some at a time."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import as_completed
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Protocol, TypeVar

from node.tasks.text import load
from tests.sim.process import workers as processes

History = list[tuple[int, float]]
"""(inner steps so far, held-out loss)."""


class Named(Protocol):
    """A run in a journal."""

    def name(self) -> str: ...


class Sized(Named, Protocol):
    """A run whose sizes tell how long it takes."""

    @property
    def peers(self) -> int: ...

    @property
    def seed(self) -> int: ...


R = TypeVar("R", bound=Sized)


@cache
def text_digest() -> str:
    """Digest of the training text: the standard library's source, which differs between Python versions."""
    text = load()
    return hashlib.sha256(text.training.numpy().tobytes() + text.held_out.numpy().tobytes()).hexdigest()[:16]


class FinishedRuns:
    """The finished runs of a file, by name.

    Attributes:
        runs: name -> what the file says of the run, at least {history, seconds}.
        text: digest of the training text; empty if there are no runs.
    """

    def __init__(self) -> None:
        self.runs: dict[str, dict[str, object]] = {}
        self.text = ""

    def __contains__(self, run: Named) -> bool:
        return run.name() in self.runs

    def history(self, run: Named) -> History:
        """Losses of a finished run."""
        found: History = self.runs[run.name()]["history"]  # type: ignore[assignment]
        return found

    def loss(self, run: Named) -> float:
        """Final loss of a finished run."""
        return float(self.history(run)[-1][1])


class RunJournal(FinishedRuns):
    """The finished runs, in a file to which several processes may append: one line of JSON each."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            ValueError: the file cannot be read, or holds other things, or runs on several texts.
        """
        super().__init__()
        self._path = path
        if not path.parent.is_dir() or path.is_dir():
            raise ValueError(f"{path} cannot be written: name a file in a directory that exists")
        self.read()

    def read(self) -> None:
        """Read the file again, which other processes may have appended to. A torn line is no run: it runs again.

        Raises:
            ValueError: as for the constructor.
        """
        lines = [line for line in self._path.read_text().splitlines() if line] if self._path.exists() else []
        entries = [entry for entry in map(_entry, lines) if entry]
        if len(lines) > 1 and not entries:
            raise ValueError(f"{self._path} holds no runs of a benchmark: name another file")
        texts = {str(entry["text"]) for entry in entries}
        if len(texts) > 1:
            raise ValueError(f"{self._path} has runs on the texts of two Pythons, which do not compare")
        self.text = next(iter(texts), "")
        self.runs = {str(entry["name"]): entry for entry in reversed(entries)}  # of two equal runs, the first counts

    def check_text(self) -> None:
        """
        Raises:
            ValueError: this Python's text is not that of the finished runs.
        """
        if self.text not in ("", text_digest()):
            raise ValueError(f"{self._path} has runs on another Python's text: name another file with --journal")

    def enter(self, run: Named, history: History, seconds: float, **more: object) -> None:
        """Append a run on this Python's text."""
        entry = {"name": run.name(), "history": history, "seconds": round(seconds, 1), "text": text_digest(), **more}
        line = json.dumps(entry) + "\n"
        with open(self._path, "a+b", buffering=0) as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                line = line if file.read(1) == b"\n" else "\n" + line  # what a writer that was killed has left
            file.write(line.encode())  # in one write, so that lines of two processes do not mix
        self.read()


def _entry(line: str) -> dict[str, object] | None:
    """A run in a journal; None if the line is torn or is something else."""
    try:
        entry: dict[str, object] = json.loads(line)
        float(entry["history"][-1][1])  # type: ignore[index]
        return entry if {"name", "text"} <= entry.keys() else None
    except (ValueError, LookupError, TypeError):
        return None


def paired(losses: Mapping[int, float], others: Mapping[int, float]) -> list[float]:
    """Relative differences of the losses, seed -> loss, from others, for the seeds that both have."""
    return [losses[seed] / others[seed] - 1 for seed in sorted(losses.keys() & others.keys())]


def shares(losses: Mapping[int, float], alone: Mapping[int, float], best: Mapping[int, float]) -> list[float]:
    """The gain over a lone peer, as a share of the gain that the best has, for the seeds that all have."""
    whole = sorted(losses.keys() & alone.keys() & best.keys())
    return [(alone[seed] - losses[seed]) / (alone[seed] - best[seed]) for seed in whole]


def spread(found: Sequence[float], form: str) -> str:
    """Mean and deviation, such as `+1.20% ± .30%`; empty if there is nothing.

    Args:
        form: of the mean; the deviation takes it without a sign.
    """
    deviation = f" ± {stdev(found):{form.lstrip('+')}}" if len(found) > 1 else ""
    return f"{fmean(found):{form}}{deviation}" if found else ""


def due(runs: Sequence[R], journal: FinishedRuns) -> list[R]:
    """The missing runs, seed by seed, so that an interruption leaves whole seeds; the longest of a seed come first."""
    return sorted(dict.fromkeys(run for run in runs if run not in journal), key=lambda run: (run.seed, -run.peers))


def perform_all(
    runs: Sequence[R], journal: RunJournal, perform: Callable[[R], tuple[History, float]], workers: int | None = None
) -> None:
    """Run the missing runs, `workers` at a time: by default one per core.

    Raises:
        ValueError: as for `RunJournal.check_text`.
    """
    todo = due(runs, journal)
    if todo:
        journal.check_text()
    with processes(workers or os.cpu_count() or 1) as pool:
        futures = {pool.submit(perform, run): run for run in todo}
        for number, future in enumerate(as_completed(futures), start=1):
            run, (history, seconds) = futures[future], future.result()
            journal.enter(run, history, seconds)
            print(f"[{number}/{len(todo)}] {run.name()}: {history[-1][1]:.4f} in {seconds:.0f} s", flush=True)
