"""Finished runs of an experiment, kept in a file. The missing ones run some at a time."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import as_completed
from pathlib import Path
from typing import Protocol, TypeVar

from node.tasks.text import load
from tests.sim.process import workers as processes

History = list[tuple[int, float]]
"""(inner steps so far, held-out loss)."""


class Named(Protocol):
    """A run in a book: its name, and the sizes that tell how long it takes."""

    @property
    def peers(self) -> int: ...

    @property
    def seed(self) -> int: ...

    def name(self) -> str: ...


R = TypeVar("R", bound=Named)


def text_digest() -> str:
    """Digest of the training text: the standard library's source, which differs between Python versions."""
    text = load()
    return hashlib.sha256(text.training.numpy().tobytes() + text.held_out.numpy().tobytes()).hexdigest()[:16]


class Book:
    """The finished runs, in a JSON file that is written after each: name -> {history, seconds}.

    Attributes:
        text: digest of the training text; empty if there are no runs.
    """

    def __init__(self, path: Path, resume: bool) -> None:
        """
        Raises:
            ValueError: the file exists and is not to be resumed, or it holds no runs of a benchmark.
        """
        self._path = path
        self.runs: dict[str, dict[str, object]] = {}
        self.text = ""
        if not path.parent.is_dir() or path.is_dir():
            raise ValueError(f"{path} cannot be written: name a file in a directory that exists")
        if path.exists():
            if not resume:
                raise ValueError(f"{path} is there already: continue with --resume, or name another file")
            try:
                kept = json.loads(path.read_text())
                self.runs, self.text = dict(kept["runs"]), str(kept["text"])
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path} holds no runs of a benchmark: name another file") from error

    def enter(self, run: Named, history: History, seconds: float) -> None:
        self.runs[run.name()] = {"history": history, "seconds": round(seconds, 1)}
        fresh = self._path.with_suffix(".new")
        fresh.write_text(json.dumps({"text": self.text, "runs": self.runs}, indent=1))
        fresh.replace(self._path)

    def __contains__(self, run: Named) -> bool:
        return run.name() in self.runs

    def loss(self, run: Named) -> float:
        """Final loss of a finished run."""
        history: History = self.runs[run.name()]["history"]  # type: ignore[assignment]
        return float(history[-1][1])


def due(runs: Sequence[R], book: Book) -> list[R]:
    """The missing runs, seed by seed, so that an interruption leaves whole seeds; the longest of a seed come first."""
    return sorted(dict.fromkeys(run for run in runs if run not in book), key=lambda run: (run.seed, -run.peers))


def perform_all(
    runs: Sequence[R], book: Book, perform: Callable[[R], tuple[History, float]], workers: int | None = None
) -> None:
    """Run the missing runs, `workers` at a time: by default one per core."""
    todo, text = due(runs, book), text_digest()
    if todo and text != (book.text or text):
        print("the runs in that file were trained on another Python's text: name another file", file=sys.stderr)
        sys.exit(2)
    book.text = text
    with processes(workers or os.cpu_count() or 1) as pool:
        futures = {pool.submit(perform, run): run for run in todo}
        for number, future in enumerate(as_completed(futures), start=1):
            run, (history, seconds) = futures[future], future.result()
            book.enter(run, history, seconds)
            print(f"[{number}/{len(todo)}] {run.name()}: {history[-1][1]:.4f} in {seconds:.0f} s", flush=True)
