"""The verdict on a play: invariants, recovery in time, and no leftover processes.

It is made from the recording alone, so that a stored play can be judged again. A violation fails a play; a missed aim
is reported, and does not fail it.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean, median
from typing import Any

from protocols.registry import INDEPENDENT_PROTOCOLS
from tests.faults import independent as loose
from tests.faults import stages
from tests.faults.goodput import MEANS, first_reported, goodput, participation, reports
from tests.faults.recording import Recording
from tests.support.checkers import DECIDED, Violation, began, check, one_branch

NO_ROUND = -1
LEVEL_REPORTS = 3
QUOTED_CHARACTERS = 160
_ALARMS = re.compile(
    r"Traceback|never retrieved|Task was destroyed|was never awaited|Fatal Python error"
    r'|"level": "(error|critical)"|\[(error|critical) *\]'
    r"|(worker|p2pd) \d+ ended \((?!killed by signal 9;)"  # SIGKILL is the harness, or a lack of memory
)


@dataclass(frozen=True)
class Verdict:
    """The verdict on a play, `pass` or `fail`. nan: unknown, or never. A round of -1 in a violation: of none."""

    scenario: str
    seed: int
    verdict: str
    violations: list[dict[str, Any]]
    rounds_committed: int
    rounds_skipped: int
    goodput: float
    participation: float
    recovery_seconds: float
    measures: dict[str, dict[str, float]]
    missed: dict[str, list[float]]
    faults: list[dict[str, Any]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For JSON, with None for numbers that are not finite."""
        found: dict[str, Any] = json.loads(json.dumps(asdict(self)), parse_constant=lambda _: None)
        return found


@dataclass(frozen=True, slots=True)
class Promise:
    """How plays of a kind of protocol are judged; `back` and `together` name its recovery in printed texts."""

    broken: Callable[[Recording], Sequence[Violation]]
    recovery_seconds: Callable[[Recording], float]
    back: str
    together: str
    goodput: Callable[[Recording], float]
    participation: Callable[[Recording], float]
    measures: Callable[[Recording], Mapping[str, Sequence[float]]]


def judge(play: Recording) -> Verdict:
    promise = promise_of(play)
    first = stages.stage_of(play, 0) if play.stages > 1 else play  # stage 0 is the clock of all rounds
    recovery = promise.recovery_seconds(play)
    measures = {name: _summary(values) for name, values in {**play.measures, **promise.measures(play)}.items()}
    worst = (
        {"recovery_seconds": recovery, "standstill_seconds": _standstill(first)}
        | _skipped(first)
        | {name: each["worst"] for name, each in measures.items()}
    )
    ends = {name: worst.get(name, math.nan) for name in play.limits.aims}
    found = [*promise.broken(play)]
    found += [Violation("stuck", "", NO_ROUND, _short(step)) for step in play.stuck]  # not as scheduled
    found += [
        *_progress(play, recovery),
        *_forks(play),
        *_strangers(play),
        *_endings(play),
        *_alarms(play),
        *_levels(play),
    ]
    return Verdict(
        scenario=play.scenario,
        seed=play.seed,
        verdict="fail" if found else "pass",
        violations=[_named(violation, play).as_dict() for violation in found],
        rounds_committed=sum(time >= play.calm[0] for time in first_reported(first, MEANS).values()),
        rounds_skipped=sum(time >= play.calm[0] for time in first_reported(first, ("skipped",)).values()),
        goodput=promise.goodput(play),
        participation=promise.participation(play),
        recovery_seconds=recovery,
        measures=measures,
        missed={name: [ends[name], aim] for name, aim in play.limits.aims.items() if not ends[name] <= aim},
        faults=stages.rows(play) if play.stages > 1 else [],
    )


def name_of(play: Recording, peer: str) -> str:
    return next((name for name, each in play.ids.items() if each == peer), f"…{peer[-6:]}")


def promise_of(play: Recording) -> Promise:
    if play.stages > 1:
        return _STAGED
    return _APART if play.protocol in INDEPENDENT_PROTOCOLS else _ONE


def _one_story(play: Recording) -> list[Violation]:
    return [*check(play.histories), *one_branch({name: play.histories.get(name, ()) for name in play.should})]


def _recovery_seconds(play: Recording) -> float:
    """Seconds from the end of the faults until all expected peers have reported one round with all of them; nan: never.

    It must have begun after the faults, and each must have a weight in it: being named in the plan is not enough.
    """
    wanted = {play.ids.get(name, "") for name in play.should}
    decided = [
        {
            report["lineage"]: report["time"]
            for report in reversed(play.histories.get(name, ()))  # the first report of several counts
            if report["outcome"] in MEANS and wanted <= {*report["peers"]}
            if (report["weight"] or 0) > 0 and began(report) > play.healed
        }
        for name in play.should
    ]
    common = set.intersection(*map(set, decided)) if decided else set()
    ends = [max(each[lineage] for each in decided) for lineage in common]
    return float(min(ends, default=math.nan) - play.healed)


def _stages_recovery_seconds(play: Recording) -> float:
    return stages.slowest({stage: _recovery_seconds(stages.stage_of(play, stage)) for stage in range(play.stages)})


def _stages_goodput(play: Recording) -> float:
    return goodput(stages.stage_of(play, 0))


def _stages_participation(play: Recording) -> float:
    return fmean(participation(stages.stage_of(play, stage)) for stage in range(play.stages))


def _skipped(play: Recording) -> dict[str, float]:
    skipped, means = (
        sum(time > play.calm[1] for time in first_reported(play, outcomes).values())
        for outcomes in (("skipped",), MEANS)
    )
    return {"rounds_skipped": skipped, "skipped_share": skipped / max(1, skipped + means)}


def _standstill(play: Recording) -> float:
    """The longest time after the calm in which no peer reported a mean."""
    times = [
        play.calm[1],
        *sorted(time for time in first_reported(play, MEANS).values() if time > play.calm[1]),
        play.ended,
    ]
    return max(later - earlier for earlier, later in itertools.pairwise(times))


def _progress(play: Recording, recovery: float) -> Iterator[Violation]:
    limit, peers = play.limits.recovery_seconds, ", ".join(play.should) or "no peer"
    if not recovery <= limit:
        together = promise_of(play).together
        what = f"no {together}" if math.isnan(recovery) else f"the first {together} after {recovery:.1f} s"
        yield Violation("progress", "", NO_ROUND, f"{what} with {peers} in it; due within {limit:g} s")


def _forks(play: Recording) -> Iterator[Violation]:
    if play.limits.forks:
        return
    seen: set[str] = set()
    for report in reports(play, ("fork",)):
        if report["time"] > play.calm[1] and report["lineage"] not in seen:
            seen.add(report["lineage"])
            yield Violation(
                "fork", report["peer"], report["round"], "it went on without most of its roster, which was there"
            )


def _strangers(play: Recording) -> Iterator[Violation]:
    known = set(play.ids.values())
    for report in (report for history in play.histories.values() for report in history):
        for peer in sorted({report["peer"], *report["peers"]} - known):
            known.add(peer)  # reported once
            yield Violation("stranger", report["peer"], report["round"], f"{peer} is none of the peers")


def _endings(play: Recording) -> Iterator[Violation]:
    for name in play.ids:
        incarnations = play.incarnations.get(name, ())
        starts = {report["incarnation"] for report in play.histories.get(name, ())}
        if len(incarnations) < max(1, len(starts)):
            yield Violation("exit-code", name, NO_ROUND, f"ended unseen after {len(incarnations)} incarnations")
        for number, process in enumerate(incarnations, 1):
            if process.code != process.expected:
                what = f"incarnation {number} ended with {in_words(process.code)}, not {in_words(process.expected)}"
                yield Violation("exit-code", name, NO_ROUND, what)
        if name in play.should and incarnations and (early := play.ended - incarnations[-1].ended) > 0:
            yield Violation("exit-code", name, NO_ROUND, f"ended {early:.1f} s before it was asked to")
    for name, commands in play.left.items():
        for command in commands:
            yield Violation("orphan", name, NO_ROUND, f"is left of it: {_short(command)}")


def _alarms(play: Recording) -> Iterator[Violation]:
    """Injected faults cause only warnings."""
    for name, log in play.logs.items():
        lines = log.splitlines()
        found = [index for index, line in enumerate(lines) if _ALARMS.search(line)]
        if found:
            yield Violation("log", name, NO_ROUND, f"alarms: {len(found)}, the first: {_quoted(lines[found[0] :])}")


def _levels(play: Recording) -> Iterator[Violation]:
    """A violation if a peer that ran all the time holds more resources at the end than in the calm.

    Medians are compared, because a report may fall into a transfer. Descriptors and tasks may grow with the number of
    peers and by a few more; memory is mostly PyTorch's, and does not.
    """
    processes = [process for incarnations in play.incarnations.values() for process in incarnations]
    up = [sum(process.began <= time <= process.ended for process in processes) for time in (play.calm[1], play.ended)]
    crowd = max(1.0, up[1] / max(1, up[0]))
    for name, incarnations in play.incarnations.items():
        if not (
            len(incarnations) == 1 and incarnations[0].began <= play.calm[0] and incarnations[0].ended >= play.ended
        ):
            continue
        decided = [report for report in play.histories.get(name, ()) if report["outcome"] in DECIDED]
        before = [report for report in decided if play.calm[0] <= report["time"] <= play.calm[1]]
        after = [report for report in decided if play.healed < report["time"] <= play.ended][-LEVEL_REPORTS:]
        for what, factor, more in (("open_files", 1.25 * crowd, 8), ("tasks", 1.25 * crowd, 8), ("rss_bytes", 1.4, 0)):
            usual, now = (median([each[what] for each in part] or [0]) for part in (before, after))
            if usual and now > factor * usual + more:
                detail = f"{what} {now:,.0f}, {usual:,.0f} in the calm, at most {factor * usual + more:,.0f} allowed"
                yield Violation("level", name, after[-1]["round"], detail)


_ONE = Promise(
    _one_story, _recovery_seconds, "have reported a round that holds them all", "round",
    goodput, participation, lambda play: {},
)  # fmt: skip
_STAGED = Promise(
    stages.broken, _stages_recovery_seconds, "have reported a round of their stage that holds all of it", "round",
    _stages_goodput, _stages_participation, stages.measures,
)  # fmt: skip
_APART = Promise(
    loose.broken, loose.recovery_seconds, "have mixed, each with any other or through others", "mixing",
    loose.goodput, loose.participation, loose.measures,
)  # fmt: skip


def in_words(code: int) -> str:
    try:
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"
    except ValueError:
        return f"signal {-code}"


def _summary(values: Sequence[float]) -> dict[str, float]:
    known = bool(values) and not any(math.isnan(value) for value in values)
    middle, worst = (median(values), max(values)) if known else (math.nan, math.nan)
    return {"median": middle, "worst": worst, "trials": len(values)}


def _named(violation: Violation, play: Recording) -> Violation:
    detail = violation.detail
    for name, peer in play.ids.items():
        detail = detail.replace(peer, name) if peer else detail
    known = violation.peer in play.ids or not violation.peer
    return replace(violation, detail=detail, peer=violation.peer if known else name_of(play, violation.peer))


def _quoted(lines: Sequence[str]) -> str:
    """The message of the first of these lines; for a traceback, its last line."""
    try:
        record = json.loads(lines[0])
        return _short(f"{record['event']} {record.get('exception', '').strip().rpartition(chr(10))[2]}")
    except (ValueError, TypeError, KeyError):
        ends = (line for line in lines[1:] if line and not line.startswith(" "))
        return _short(next(ends, lines[0]) if "Traceback" in lines[0] else lines[0])


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= QUOTED_CHARACTERS else f"{line[: QUOTED_CHARACTERS - 1]}…"
