"""One play with its artifacts: played, judged and printed, in a directory of its own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.judge import judge
from tests.faults.recording import Recording
from tests.faults.runner import Options, play
from tests.faults.scenarios import Scenario, scenario_of
from tests.faults.timeline import timeline

DIRECTORY = Path("build/faults")


def home_of(plays: Path, name: str, seed: int, stage: Options) -> Path:
    return plays / "-".join([stage.protocol] * stage.loose + [name, str(seed)])


def one(name: str, seed: int, stage: Options, home: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Play and judge one scenario in a directory of its own, which is emptied before; `Unplayable` if this machine
    cannot.
    """
    return kept(name, scenario_of(name, stage.protocol), seed, stage, home, say)[1]


def kept(
    name: str, scenario: Scenario, seed: int, stage: Options, home: Path, say: Callable[[str], None]
) -> tuple[Recording, dict[str, Any]]:
    """As `one`, for any scenario; returns the recording, too."""
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    played = play(name, scenario, seed, stage, home.absolute(), say)
    verdict = judge(played)
    lines = timeline(played, verdict)
    result = verdict.as_dict()
    for line in lines:
        say(line)
    (home / "timeline.txt").write_text("\n".join(lines) + "\n")
    (home / "verdict.json").write_text(json.dumps(result, allow_nan=False) + "\n")
    if played.samples:
        (home / "samples.json").write_text(json.dumps(played.samples))
    say(f"kept in {home}: what each peer wrote, timeline.txt, verdict.json")
    return played, result
