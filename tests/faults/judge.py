"""A verdict on what was played: the invariants, that the swarm came back in time, and that nothing is left behind.

Judged from what was written down alone, so that a play that was kept can be judged again. A violation fails a play; an
aim that was missed is told, and fails nothing.
"""

from __future__ import annotations

import json
import math
import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from tests.checkers import DECIDED, Report, Tree, Violation, check, one_branch
from tests.faults.play import Play

MEANS = ("committed", "alone", "fork")
"""Outcomes that move the parameters; a fork does so only if it took over a mean."""
NO_ROUND = -1
"""The round of a violation that belongs to none."""
LEVEL_REPORTS = 3
QUOTED_CHARACTERS = 160
_ALARMS = re.compile(
    r'Traceback|never retrieved|Task was destroyed|was never awaited|Fatal Python error|"level": "(error|critical)"'
)


@dataclass(frozen=True)
class Verdict:
    """What is to be said of a play.

    Attributes:
        verdict: `pass` or `fail`; it fails with any violation.
        violations: each with `invariant`, `peer` (its name), `round` (-1: of none) and `detail`.
        rounds_committed: lineages, on whatever branch, that somebody first reported as committed, alone or fork after
            the calm began; rounds_skipped: as skipped.
        goodput: tokens that counted after the calm, over those that the peers that were up would have brought at the
            calm's rate: see `goodput`. nan if the calm is too short to know its rate.
        recovery_seconds: from the end of the faults until the last of those who should had reported the first round
            that holds them all; nan if there was none.
        measures: name -> `median`, `worst` (the highest) and `trials`.
        missed: measure -> its worst value and the aim. An aim at what was never measured, or ended nowhere, is missed.
    """

    scenario: str
    seed: int
    verdict: str
    violations: list[dict[str, Any]]
    rounds_committed: int
    rounds_skipped: int
    goodput: float
    recovery_seconds: float
    measures: dict[str, dict[str, float]]
    missed: dict[str, list[float]]

    def as_dict(self) -> dict[str, Any]:
        """For JSON: what is not a finite number is None."""
        found: dict[str, Any] = json.loads(json.dumps(asdict(self)), parse_constant=lambda _: None)
        return found


def judge(play: Play) -> Verdict:
    """The verdict on a play. Raises KeyError for a history that holds something else than round reports."""
    recovery = recovery_seconds(play)
    measures = {name: _summary(values) for name, values in play.measures.items()}
    worst = {"recovery_seconds": recovery} | {name: each["worst"] for name, each in measures.items()}
    ends = {name: worst.get(name, math.nan) for name in play.limits.aims}
    found = [*check(play.histories), *one_branch({name: play.histories.get(name, ()) for name in play.should})]
    found += [Violation("stuck", "", NO_ROUND, _short(step)) for step in play.stuck]  # it tried something else
    found += [*_progress(play, recovery), *_strangers(play), *_endings(play), *_alarms(play), *_levels(play)]
    return Verdict(
        scenario=play.scenario,
        seed=play.seed,
        verdict="fail" if found else "pass",
        violations=[_named(violation, play).as_dict() for violation in found],
        rounds_committed=sum(time >= play.calm[0] for time in _first_told(play, MEANS).values()),
        rounds_skipped=sum(time >= play.calm[0] for time in _first_told(play, ("skipped",)).values()),
        goodput=goodput(play),
        recovery_seconds=recovery,
        measures=measures,
        missed={name: [ends[name], aim] for name, aim in play.limits.aims.items() if not ends[name] <= aim},
    )


def name_of(play: Play, peer: str) -> str:
    """The name of the peer with this id; the id's end if it is nobody's."""
    return next((name for name, each in play.ids.items() if each == peer), f"…{peer[-6:]}")


def recovery_seconds(play: Play) -> float:
    """From the end of the faults until all who should had reported a round that holds them all; nan: they have not."""
    wanted = {play.ids.get(name, "") for name in play.should}
    told = [
        {
            report["lineage"]: report["time"]
            for report in reversed(play.histories.get(name, ()))  # of several, the first
            if report["outcome"] in MEANS and report["time"] > play.healed and wanted <= {*report["peers"]}
        }
        for name in play.should
    ]
    common = set.intersection(*map(set, told)) if told else set()
    ends = [max(each[lineage] for each in told) for lineage in common]
    return float(min(ends, default=math.nan) - play.healed)


def goodput(play: Play) -> float:
    """How much of what the living could have brought has counted; 1 is as in the calm. nan if that rate is unknown.

        tokens counted from the last mean of the calm to `ended`
        ─────────────────────────────────────────────────────────────────────────
        the calm's tokens per second of a peer × seconds that peers were up since

    A contribution counts once, when anybody first reports its mean, with its weight as its own peer reports it, by the
    share of its chunks that the mean holds. What is on a branch that was given up does not count; nor does what its
    peer did not report, because it died, or caught up with that round: at most one contribution each time.

    The rate is that between the calm's first mean and its last: from round to round, so that no round is cut in two.
    At the other end one may be: what was under way at `ended` is not in it. A peer is up from its start to its end,
    its imports and its way into the run included: that is part of the price of a restart.
    """
    counted = _counted(play)
    calm = [time for time, _ in counted if play.calm[0] <= time <= play.calm[1]]
    if not calm:
        return math.nan
    first, last = calm[0], calm[-1]
    calm_peer_seconds, peer_seconds = _peer_seconds(play, first, last), _peer_seconds(play, last, play.ended)
    usual = sum(tokens for time, tokens in counted if first < time <= last)
    if not (usual and calm_peer_seconds and peer_seconds):
        return math.nan
    brought = sum(tokens for time, tokens in counted if last < time <= play.ended)
    return brought / (usual / calm_peer_seconds * peer_seconds)


def _counted(play: Play) -> list[tuple[float, float]]:
    """Times and tokens of contributions to the means of the branch on which it ended, oldest first."""
    tree, times = Tree(_reports(play, DECIDED)), _first_told(play, MEANS)
    ends = [history[-1]["lineage"] for name in play.should if (history := play.histories.get(name))]
    end = max(ends, key=lambda lineage: tree.rounds.get(lineage, 0), default="")
    lost = {lineage for lineage in times if tree.apart(lineage, end)}
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for report in _reports(play, MEANS):
        if report["lineage"] not in lost and (tokens := _tokens(report)):
            found.setdefault((report["peer"], report["anchor_lineage"]), (times[report["lineage"]], tokens))
    return sorted(found.values())


def _tokens(report: Report) -> float:
    """Of the reporting peer's own work, as far as the mean holds it; what it trained, if it did not know its weight."""
    _, chunks_counted, chunks = report["contributions"].get(report["peer"], ("", 0, 0))
    weight = report["weight"]
    tokens = weight if weight is not None and math.isfinite(weight) else report["tokens"]
    return float(tokens * chunks_counted / max(1, chunks))


def _peer_seconds(play: Play, since: float, until: float) -> float:
    lives = (life for each in play.lives.values() for life in each)
    return sum(max(0.0, min(life.ended, until) - max(life.began, since)) for life in lives)


def _progress(play: Play, recovery: float) -> Iterator[Violation]:
    """Who should commits a round with all the others who should, in time. That nobody should is a mistake."""
    limit, whom = play.limits.recovery_seconds, ", ".join(play.should) or "nobody"
    if not recovery <= limit:
        what = "no round" if math.isnan(recovery) else f"the first round after {recovery:.1f} s"
        yield Violation("progress", "", NO_ROUND, f"{what} with {whom} in it; due within {limit:g} s")


def _strangers(play: Play) -> Iterator[Violation]:
    """Nobody reports or is counted whom nobody started."""
    known = set(play.ids.values())
    for report in (report for history in play.histories.values() for report in history):
        for peer in sorted({report["peer"], *report["peers"]} - known):
            known.add(peer)  # told once
            yield Violation("stranger", report["peer"], report["round"], f"{peer} is none of the peers")


def _endings(play: Play) -> Iterator[Violation]:
    """Each process ends when and as it should, and takes its children along."""
    for name in play.ids:
        lives, starts = play.lives.get(name, ()), {report["incarnation"] for report in play.histories.get(name, ())}
        if len(lives) < max(1, len(starts)):
            yield Violation("exit-code", name, NO_ROUND, f"ended unseen after {len(lives)} lives")
        for number, life in enumerate(lives, 1):
            if life.code != life.expected:
                what = f"life {number} ended with {in_words(life.code)}, not {in_words(life.expected)}"
                yield Violation("exit-code", name, NO_ROUND, what)
        if name in play.should and lives and (early := play.ended - lives[-1].ended) > 0:
            yield Violation("exit-code", name, NO_ROUND, f"ended {early:.1f} s before it was asked to")
    for name, commands in play.left.items():
        for command in commands:
            yield Violation("orphan", name, NO_ROUND, f"is left of it: {_short(command)}")


def _alarms(play: Play) -> Iterator[Violation]:
    """No peer says that something went wrong in it which nobody thought of; faults from outside are warnings."""
    for name, log in play.logs.items():
        lines = log.splitlines()
        found = [index for index, line in enumerate(lines) if _ALARMS.search(line)]
        if found:
            yield Violation("log", name, NO_ROUND, f"alarms: {len(found)}, the first: {_quoted(lines[found[0] :])}")


def _levels(play: Play) -> Iterator[Violation]:
    """What a peer that lived through all of it holds at the end is what it held in the calm.

    Medians, because a report may fall into a transfer. Descriptors and tasks may grow with the number of peers, if more
    are up at the end than in the calm, and by a few; memory is mostly torch's, and does not grow with them.
    """
    everybody = [life for lives in play.lives.values() for life in lives]
    up = [sum(life.began <= time <= life.ended for life in everybody) for time in (play.calm[1], play.ended)]
    crowd = max(1.0, up[1] / max(1, up[0]))
    for name, lives in play.lives.items():
        if not (len(lives) == 1 and lives[0].began <= play.calm[0] and lives[0].ended >= play.ended):
            continue
        decided = [report for report in play.histories.get(name, ()) if report["outcome"] in DECIDED]
        before = [report for report in decided if play.calm[0] <= report["time"] <= play.calm[1]]
        after = [report for report in decided if play.healed < report["time"] <= play.ended][-LEVEL_REPORTS:]
        for what, factor, more in (("open_files", 1.25 * crowd, 8), ("tasks", 1.25 * crowd, 8), ("rss_bytes", 1.4, 0)):
            usual, now = (median([each[what] for each in part] or [0]) for part in (before, after))
            if usual and now > factor * usual + more:
                detail = f"{what} {now:,.0f}, {usual:,.0f} in the calm, at most {factor * usual + more:,.0f} allowed"
                yield Violation("level", name, after[-1]["round"], detail)


def in_words(code: int) -> str:
    """An exit code, or the name of the signal that it stands for: SIGKILL."""
    try:
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"
    except ValueError:
        return f"signal {-code}"


def _reports(play: Play, outcomes: Sequence[str]) -> list[Report]:
    """Of all peers, oldest first."""
    reports = (report for history in play.histories.values() for report in history if report["outcome"] in outcomes)
    return sorted(reports, key=lambda report: report["time"])


def _first_told(play: Play, outcomes: Sequence[str]) -> dict[str, float]:
    """When somebody first reported each lineage that was decided so."""
    return {report["lineage"]: report["time"] for report in reversed(_reports(play, outcomes))}


def _summary(values: Sequence[float]) -> dict[str, float]:
    known = bool(values) and not any(math.isnan(value) for value in values)
    middle, worst = (median(values), max(values)) if known else (math.nan, math.nan)
    return {"median": middle, "worst": worst, "trials": len(values)}


def _named(violation: Violation, play: Play) -> Violation:
    """With names for the peers' ids."""
    detail = violation.detail
    for name, peer in play.ids.items():
        detail = detail.replace(peer, name) if peer else detail
    known = violation.peer in play.ids or not violation.peer
    return replace(violation, detail=detail, peer=violation.peer if known else name_of(play, violation.peer))


def _quoted(lines: Sequence[str]) -> str:
    """What the first of these lines says; of a traceback, its end says most."""
    try:
        record = json.loads(lines[0])
        return _short(f"{record['event']} {record.get('exception', '').strip().rpartition(chr(10))[2]}")
    except (ValueError, TypeError, KeyError):
        ends = (line for line in lines[1:] if line and not line.startswith(" "))
        return _short(next(ends, lines[0]) if "Traceback" in lines[0] else lines[0])


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= QUOTED_CHARACTERS else f"{line[: QUOTED_CHARACTERS - 1]}…"
