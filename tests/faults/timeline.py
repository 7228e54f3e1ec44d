"""The timeline: a play and its verdict as lines of text, in the order of time.

seconds         what                 in the mean          reported by
   31.2  FAULT  SIGKILL to peer: d
   31.9         round 21 committed   a b c d              a, b +0.1, c +0.1
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator
from itertools import groupby

from tests.faults import stages
from tests.faults.judge import Verdict, in_words, name_of, promise_of
from tests.faults.recording import Recording
from tests.support.checkers import DECIDED, Report, Tree

COLUMNS = 100
_WIDTH = 20
_WORDS = {"start": "start", "fault": "FAULT", "heal": "heal", "end": "end"}

Entry = tuple[float, str, str]


def timeline(play: Recording, verdict: Verdict) -> list[str]:
    """At most 100 columns: a line for each event, each decided lineage, and each other report; then the verdict."""
    start = beginning(play)
    entries = sorted([*_deeds(play, verdict), *_decisions(play), *_others(play)], key=lambda entry: entry[0])
    lines = [f"{play.scenario}, seed {play.seed}: {len(play.ids)} peers, {play.protocol}, {play.task}", ""]
    lines.append(f"seconds         {'what':<{_WIDTH}} {'in the mean':<{_WIDTH}} reported by")
    for time, word, text in entries:
        lines += _wrapped(f"{time - start:7.1f}  {word:<5}  ", text)
    return [*lines, "", *_verdict(play, verdict)]


def beginning(play: Recording) -> float:
    """Wall time from which the seconds count: that of the first event or process."""
    times = [event.time for event in play.events]
    times += [process.began for incarnations in play.incarnations.values() for process in incarnations]
    return min(times, default=play.calm[0])


def _deeds(play: Recording, verdict: Verdict) -> Iterator[Entry]:
    yield play.calm[0], "", "-- the calm begins"
    yield play.calm[1], "", "-- the calm is over"
    if not math.isnan(verdict.recovery_seconds):
        when = play.healed + verdict.recovery_seconds
        yield when, "", f"-- all who should {promise_of(play).back}: {', '.join(play.should)}"
    for event in play.events:
        yield event.time, _WORDS.get(event.kind, event.kind), f"{event.what}: {', '.join(event.peers) or 'everybody'}"
    for name, incarnations in play.incarnations.items():
        for process in incarnations:
            yield process.ended, "exit", f"{name}: {in_words(process.code)}"


def _decisions(play: Recording) -> Iterator[Entry]:
    decided = [
        (name, each) for name, history in play.histories.items() for each in history if each["outcome"] in DECIDED
    ]
    decided.sort(key=lambda each: (each[1]["lineage"], each[1]["time"]))
    for _, group in groupby(decided, key=lambda each: each[1]["lineage"]):
        reports = list(group)
        first = reports[0][1]
        peers = _peers(play, first)
        later = ((name, each["time"] - first["time"]) for name, each in reports)
        who = ", ".join(f"{name} +{seconds:.1f}" if seconds >= 0.05 else name for name, seconds in later)
        yield first["time"], "", f"{_round(first):<{_WIDTH}} {peers:<{_WIDTH}} {who}"


def _peers(play: Recording, report: Report) -> str:
    """The peers in a mean; if they are too many for the column, their number and the running peers that are missing."""
    peers = sorted(name_of(play, peer) for peer in report["peers"])
    if len(text := " ".join(peers)) <= _WIDTH:
        return text or "-"
    up = {
        name
        for name, incarnations in play.incarnations.items()
        if any(each.began <= report["time"] <= each.ended for each in incarnations)
    }
    missing = " ".join(sorted(up - set(peers)))
    return f"{len(peers)} peers{f', without {missing}' if missing else ''}"


def _others(play: Recording) -> Iterator[Entry]:
    rounds = Tree(report for history in play.histories.values() for report in history).rounds
    for name, history in play.histories.items():
        for report in history:
            if report["outcome"] not in DECIDED:
                costs = [("rounds", report.get("lost_rounds", 0)), ("tokens", report.get("lost_tokens", 0))]
                lost = ", ".join(f"{count:,} {what}" for what, count in costs if count)
                to = f"now at round {rounds.get(report['lineage'], '?')}" if report["outcome"] == "superseded" else "-"
                tail = f"; lost {lost}" if lost else ""
                yield report["time"], "", f"{_round(report):<{_WIDTH}} {to:<{_WIDTH}} {name}{tail}"


def _round(report: Report) -> str:
    return f"round {report['round']} {report['outcome']}"


def _verdict(play: Recording, verdict: Verdict) -> Iterator[str]:
    figures = f"{verdict.rounds_committed} rounds committed, {verdict.rounds_skipped} skipped"
    figures += f"; recovery {_number(verdict.recovery_seconds)} s of {play.limits.recovery_seconds:g} s"
    shares = f"goodput {_number(verdict.goodput)}, participation {_number(verdict.participation)}"
    yield from _wrapped(f"{verdict.verdict.upper()}  ", f"{play.scenario}, seed {play.seed}: {figures}; {shares}")
    for each in verdict.violations:
        where = f"{each['peer'] or 'all'}, round {each['round']}" if each["round"] >= 0 else each["peer"] or "all"
        yield from _wrapped(f"  {each['invariant']:<13}  ", f"{where}: {each['detail']}")
    for name, figure in verdict.measures.items():
        middle, worst = _number(figure["median"]), _number(figure["worst"])
        yield f"  {name}: median {middle}, worst {worst}, trials {figure['trials']}"
    if verdict.faults:
        yield from stages.table(verdict.faults)
    for name, (value, aim) in verdict.missed.items():
        yield f"  missed: {name} is {_number(value)}, should be at most {aim:g}"


def _number(value: float) -> str:
    return "unknown" if math.isnan(value) else f"{value:.2f}"


def _wrapped(margin: str, text: str) -> list[str]:
    """Lines of a text; a long text continues under its first line, and columns keep their spaces."""
    if len(margin) + len(text) <= COLUMNS:
        return [f"{margin}{text}".rstrip()]
    return textwrap.wrap(f"{margin}{text}", COLUMNS, subsequent_indent=" " * len(margin), drop_whitespace=True)
