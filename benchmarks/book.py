"""What laboratories keep: runs that are done, in a file; the others are done, some at a time."""

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
    """A run in a book: what it is known by, and what says how long it takes."""

    @property
    def peers(self) -> int: ...

    @property
    def seed(self) -> int: ...

    def name(self) -> str: ...


R = TypeVar("R", bound=Named)


def text_digest() -> str:
    """Of the text that laboratories train on: the standard library's source, which another Python has another of."""
    text = load()
    return hashlib.sha256(text.training.numpy().tobytes() + text.held_out.numpy().tobytes()).hexdigest()[:16]


class Book:
    """The runs that are done, in a JSON file that is written after each: name -> {history, seconds}.

    Attributes:
        text: digest of what they were trained on; empty if there are none.
    """

    def __init__(self, path: Path, resume: bool) -> None:
        """
        Raises:
            ValueError: the file is there, and is not to be resumed, or not a laboratory's.
        """
        self._path = path
        self.runs: dict[str, dict[str, object]] = {}
        self.text = ""
        if not path.parent.is_dir() or path.is_dir():
            raise ValueError(f"{path} cannot be written: name a file in a directory that exists")
        if path.exists():
            if not resume:
                raise ValueError(f"{path} is there already: go on with --resume, or name another file")
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
        """Final loss of a run that is done."""
        history: History = self.runs[run.name()]["history"]  # type: ignore[assignment]
        return float(history[-1][1])


def due(runs: Sequence[R], book: Book) -> list[R]:
    """What is not done yet, seed by seed, so that who is stopped has whole seeds; of a seed the longest first."""
    return sorted(dict.fromkeys(run for run in runs if run not in book), key=lambda run: (run.seed, -run.peers))


def perform_all(
    runs: Sequence[R], book: Book, perform: Callable[[R], tuple[History, float]], workers: int | None = None
) -> None:
    """Do what is due, so many at a time: by default as many as there are cores."""
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
