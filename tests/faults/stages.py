"""The figures of a play in stages: for each fault, what became of the rate of stage 0 and of its rounds.

The rate comes from the samples of the drivers' status. The same tokens pass all stages, so that stage 0 tells what the
run trains on.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tests.faults.goodput import MEANS
from tests.faults.recording import Event, Recording
from tests.support import stage_checkers
from tests.support.checkers import DECIDED, Report, Violation, began, one_branch
from tests.support.stage_checkers import by_stage

BEFORE_SECONDS, AFTER_SECONDS, WINDOW_SECONDS = 12.0, 10.0, 10.0
STOPPED_SECONDS = 20.0
"""As AFTER_SECONDS, of a peer that was stopped: others notice that later than a death."""
BACK_WINDOW_SECONDS = 5.0
SHARE, WHOLE_SHARE = 0.4, 0.8
"""The rate counts as back at this share of that before: with a peer missing, and with all peers there."""

UNREPORTED = 2
"""A killed peer has not reported what it counted since its last report: at most so many of its largest reports."""

Row = dict[str, Any]


def rows(play: Recording) -> list[Row]:
    return list(_rows(play))


def _rows(play: Recording) -> Iterator[Row]:
    faults = [event for event in play.events if event.kind == "fault"]
    for number, event in enumerate(faults):
        end = faults[number + 1].time if number + 1 < len(faults) else play.ended
        again = next((e for e in play.events if event.time < e.time < end and _mends(e, event)), None)
        yield _row(play, event, again, end)


def _mends(event: Event, fault: Event) -> bool:
    return event.kind in ("start", "heal") and event.peers == fault.peers


def _row(play: Recording, fault: Event, again: Event | None, end: float) -> Row:
    stage, whole = _stage(play, fault), _is_whole(play, fault)
    before = rate(play, fault.time - BEFORE_SECONDS, fault.time)
    after_seconds = STOPPED_SECONDS if fault.what.startswith("SIGSTOP") else AFTER_SECONDS
    after = rate(play, fault.time + after_seconds, fault.time + after_seconds + WINDOW_SECONDS)
    share = WHOLE_SHARE if again is None else SHARE
    since = again.time if again and whole else fault.time
    return {
        "fault": f"{fault.what} of {'all of ' if whole else ''}stage {stage}",
        "peers": list(fault.peers),
        "tokens_per_second": before,
        "after_seconds": after_seconds,
        "rate_after": math.nan if whole else after / before if before else math.nan,
        "share": share,
        "back_seconds": _back(play, since, end, share * before),
        "next_round_seconds": _next_round(play, since, end),
        "rounds_lost": rounds_lost(play, fault.time, end),
        "away_seconds": again.time - fault.time if again else math.nan,
        "loss_before": _loss(play, -math.inf, fault.time, -1),
        "loss_after": _loss(play, since, end, 0),
        "whole": whole,
    }


def measures(play: Recording) -> dict[str, list[float]]:
    found = rows(play)
    parts = [row for row in found if not row["whole"]]
    return {
        "rate_lost": [1 - row["rate_after"] for row in parts],
        "stage_rounds_lost": [row["rounds_lost"] for row in found],
        "back_seconds": [row["back_seconds"] for row in parts],
        "whole_stage_seconds": [row["next_round_seconds"] for row in found if row["whole"]],
    }


def rate(play: Recording, since: float, until: float) -> float:
    if until <= since:
        return math.nan
    trained = sum(_tokens(each, until) - _tokens(each, since) for each in play.samples.values())
    return max(0.0, trained) / (until - since)


def _tokens(samples: Sequence[tuple[float, int]], time: float) -> float:
    """The tokens of a driver at that time, between two looks by interpolation."""
    place = bisect_left(samples, (time, 0))
    if place in (0, len(samples)):
        return float(samples[min(place, len(samples) - 1)][1]) if samples else 0.0
    (earlier, low), (later, high) = samples[place - 1], samples[place]
    return low + (high - low) * (time - earlier) / (later - earlier)


def _back(play: Recording, since: float, end: float, wanted: float) -> float:
    for seconds in range(int(end - since - BACK_WINDOW_SECONDS) + 1):
        if rate(play, since + seconds, since + seconds + BACK_WINDOW_SECONDS) >= wanted > 0:
            return float(seconds)
    return math.nan


def _drivers(play: Recording) -> list[Report]:
    reports = (report for history in by_stage(play.histories).get(0, {}).values() for report in history)
    return sorted(reports, key=lambda report: report["time"])


def _next_round(play: Recording, since: float, end: float) -> float:
    """Seconds until the first mean of stage 0 that began later; nan: there is none."""
    ends = (each["time"] for each in _drivers(play) if each["outcome"] in MEANS and began(each) > since)
    return float(next((time for time in ends if time < end), math.nan) - since)


def rounds_lost(play: Recording, since: float, until: float) -> int:
    """Rounds of stage 0 without a mean: skipped in that time, or missing between those that were decided then."""
    times: dict[int, float] = {}
    means = set()
    for each in _drivers(play):
        if each["outcome"] in DECIDED:
            times.setdefault(each["round"], each["time"])
            means |= {each["round"]} if each["outcome"] in MEANS else set()
    here = [number for number, time in times.items() if since < time <= until]
    return len(set(range(min(here, default=0), max(here, default=-1) + 1)) - means)


def _loss(play: Recording, since: float, until: float, which: int) -> float:
    found = [
        each["held_out_loss"] for each in _drivers(play)
        if since < each["time"] <= until and began(each) > since and each["outcome"] in MEANS
        and each.get("held_out_loss") is not None
    ]  # fmt: skip
    return float(found[which]) if found else math.nan


def _stage(play: Recording, fault: Event) -> int:
    places = [history[0]["stage"] for name in fault.peers if (history := play.histories.get(name))]
    return places[0] if places else 0


def _is_whole(play: Recording, fault: Event) -> bool:
    return set(by_stage(play.histories).get(_stage(play, fault), ())) <= set(fault.peers)


def table(found: Sequence[Row]) -> Iterator[str]:
    head = ("tokens/s", "rate later", "back after", "next round", "lost", "held-out loss")
    yield f"  {'fault':<34}" + "".join(f"{word:>14}" for word in head)
    for row in found:
        loss = f"{_number(row['loss_before'], '.3f')} > {_number(row['loss_after'], '.3f')}"
        cells = [
            _number(row["tokens_per_second"], ",.0f"),
            f"{_number(row['rate_after'], '.0%')} ({row['after_seconds']:.0f} s)",
            _number(row["back_seconds"], ".0f", " s"),
            _number(row["next_round_seconds"], ".1f", " s"),
            str(row["rounds_lost"]),
            loss,
        ]
        yield f"  {row['fault']:<34}" + "".join(f"{cell:>14}" for cell in cells)


def _number(value: float, form: str, unit: str = "") -> str:
    return "-" if math.isnan(value) else f"{value:{form}}{unit}"


# -- each stage as a run of its own, and all of them together ---------------------------------------------------------


def stage_of(play: Recording, stage: int) -> Recording:
    histories = by_stage(play.histories).get(stage, {})
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
