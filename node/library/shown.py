"""What a script shows of its swarm: messages, figures of the last round, and the postfix of a progress bar."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

_MAX_JOURNAL_BYTES = 1 << 18
_FIGURES = ("round", "held_out_loss", "loss", "tokens", "tokens_per_second", "weight")


class Messages:
    """Lines for the user on stderr, unless they are `quiet`."""

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet
        self._told: set[str] = set()

    def say(self, line: str) -> None:
        if not self.quiet:
            print(f"starling: {line}", file=sys.stderr, flush=True)

    def say_once(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            self.say(line)

    def forget(self) -> None:
        """What was said once may be said again."""
        self._told.clear()


def last_report(state_dir: Path | None, round_number: int | None = None) -> dict[str, Any]:
    """The last whole line of the peer's `rounds.jsonl`, or that of a round; empty if there is none."""
    if state_dir is not None:
        with suppress(OSError, ValueError, IndexError), (state_dir / "rounds.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _MAX_JOURNAL_BYTES))
            for line in reversed(file.read().rpartition(b"\n")[0].splitlines()):
                report: dict[str, Any] = json.loads(line)
                if round_number in (None, report.get("round")):
                    return report
    return {}


def figures(report: Mapping[str, Any], optimizer: Any) -> dict[str, float]:
    """Those of a report, for a logger, and the learning rate; empty before the first round."""
    found = {name: report[name] for name in _FIGURES if isinstance(report.get(name), int | float)}
    if report:
        found["peers"] = len(report.get("peers", ()))
    for group in getattr(optimizer, "param_groups", ())[:1]:
        found["learning_rate"] = float(group["lr"])
    return {f"swarm/{name}": float(value) for name, value in found.items() if math.isfinite(value)}


class BarPostfix:
    """The round on the script's outermost tqdm bar, unless its postfix is the script's own."""

    def __init__(self) -> None:
        self.text = ""  # what is shown now

    def show(self, metrics: Mapping[str, float]) -> None:
        bar = _outermost_bar()
        if bar is None or (bar.postfix or self.text) != self.text:
            return
        shown = [
            f"{name}={metrics[f'swarm/{name}']:.6g}"
            for name in ("round", "peers", "loss")
            if f"swarm/{name}" in metrics
        ]
        bar.set_postfix_str(", ".join(shown))
        self.text = str(bar.postfix)


def _outermost_bar() -> Any:
    tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
    with suppress(RuntimeError):  # another thread makes or ends a bar
        return min(getattr(tqdm, "_instances", ()), key=lambda bar: abs(bar.pos), default=None)
    return None
