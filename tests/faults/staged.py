"""Judges a play of a run in stages: each stage as a run of its own, and all of them together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from tests.faults.recording import Recording
from tests.support import stage_checkers
from tests.support.checkers import Violation, one_branch

UNREPORTED = 2
"""A killed peer has not reported what it counted since its last report: at most so many of its largest reports."""


def stage_of(play: Recording, stage: int) -> Recording:
    histories = stage_checkers.by_stage(play.histories).get(stage, {})
    return replace(
        play,
        histories=histories,
        should=tuple(name for name in play.should if name in histories),
        incarnations={name: each for name, each in play.incarnations.items() if name in histories},
    )


def broken(play: Recording) -> list[Violation]:
    found = stage_checkers.check(play.histories)
    for stage in range(play.stages):
        part = stage_of(play, stage)
        found += one_branch({name: part.histories[name] for name in part.should})
        if not part.should:
            found.append(Violation("one-stage", "", -1, f"stage {stage} has nobody at the end"))
    found += stage_checkers.counted_below(play.histories, unreported(play))
    found += stage_checkers.one_pace(play.histories, play.stages, play.ended)
    return found


def unreported(play: Recording) -> Mapping[int, int]:
    """Stage -> microbatches that it may have counted without a report, because its peers were killed."""
    found: dict[int, int] = {}
    for name, history in play.histories.items():
        killed = sum(process.code < 0 for process in play.incarnations.get(name, ()))
        if history and killed:
            most = max(each["microbatches"] for each in history)
            found[history[0]["stage"]] = found.get(history[0]["stage"], 0) + UNREPORTED * killed * most
    return found


def slowest(seconds: Mapping[int, float]) -> float:
    return math.nan if any(map(math.isnan, seconds.values())) else max(seconds.values(), default=math.nan)
