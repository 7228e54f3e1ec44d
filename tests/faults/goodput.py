"""Goodput and participation of a play by a protocol that votes on its rounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from tests.faults.recording import Recording
from tests.support.checkers import DECIDED, Report, Tree

MEANS = ("committed", "alone", "fork")
"""Outcomes that move the parameters; a fork does so only if it took over a mean."""


def goodput(play: Recording) -> float:
    """The share of the possible tokens that counted; 1 is the calm's rate. nan if that rate is unknown.

        tokens counted from the last mean of the calm to `ended`
        ─────────────────────────────────────────────────────────────────────────
        the calm's tokens per second of a peer × seconds that peers were up since

    A contribution counts once, when a peer first reports its mean. It counts with the weight that its own peer
    reports, times the share of its chunks that the mean holds. Contributions on abandoned branches do not count.
    Neither do those that their peers did not report, because they died or caught up with that round: at most one each
    time.

    The rate is measured from the calm's first mean to its last, so that no round is cut in two. The round under way at
    `ended` does not count. A peer is up from the start of its process to its end: imports and joining are
    part of the cost of a restart.
    """
    counted, ever = (
        _counted(play),
        _counted(play, given_up=True),
    )  # the rate includes branches that were abandoned later
    calm = [time for time, _ in ever if play.calm[0] <= time <= play.calm[1]]
    if not calm:
        return math.nan
    first, last = calm[0], calm[-1]
    calm_peer_seconds, peer_seconds = _peer_seconds(play, first, last), _peer_seconds(play, last, play.ended)
    usual = sum(tokens for time, tokens in ever if first < time <= last)
    if not (usual and calm_peer_seconds and peer_seconds):
        return math.nan
    brought = sum(tokens for time, tokens in counted if last < time <= play.ended)
    return brought / (usual / calm_peer_seconds * peer_seconds)


def participation(play: Recording) -> float:
    """Contributors of a round over peers that were up at its decision, averaged over the rounds since the calm began.

    A skipped round has none. A member without weight, or without a counted chunk, is not one. nan if there was no
    round.
    """
    decided = [report for report in reports(play, DECIDED) if play.calm[0] <= report["time"] <= play.ended]
    weightless = {(report["peer"], report["lineage"]) for report in decided if report["weight"] == 0}
    first = {report["lineage"]: report for report in reversed(decided)}
    shares = []
    for lineage, report in first.items():
        counted = report["contributions"].items() if report["outcome"] in MEANS else ()
        contributors = sum(chunks > 0 and (peer, lineage) not in weightless for peer, (_, chunks, _) in counted)
        shares.append(min(1.0, contributors / max(1, _up(play, report["time"]))))
    return fmean(shares) if shares else math.nan


def _up(play: Recording, time: float) -> int:
    return sum(process.began <= time <= process.ended for each in play.incarnations.values() for process in each)


def _counted(play: Recording, given_up: bool = False) -> list[tuple[float, float]]:
    """(time, tokens) of contributions to means of the final branch, or with `given_up` of all, oldest first."""
    tree, times = Tree(reports(play, DECIDED)), first_reported(play, MEANS)
    ends = [history[-1]["lineage"] for name in play.should if (history := play.histories.get(name))]
    end = max(ends, key=lambda lineage: tree.rounds.get(lineage, 0), default="")
    lost = {lineage for lineage in times if tree.apart(lineage, end) and not given_up}
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for report in reports(play, MEANS):
        if report["lineage"] not in lost and (tokens := _tokens(report)):
            found.setdefault((report["peer"], report["anchor_lineage"]), (times[report["lineage"]], tokens))
    return sorted(found.values())


def _tokens(report: Report) -> float:
    """The reporter's tokens that the mean holds; its trained tokens stand for an unknown weight."""
    _, chunks_counted, chunks = report["contributions"].get(report["peer"], ("", 0, 0))
    weight = report["weight"]
    tokens = weight if weight is not None and math.isfinite(weight) else report["tokens"]
    return float(tokens * chunks_counted / max(1, chunks))


def _peer_seconds(play: Recording, since: float, until: float) -> float:
    incarnations = (process for each in play.incarnations.values() for process in each)
    return sum(max(0.0, min(process.ended, until) - max(process.began, since)) for process in incarnations)


def reports(play: Recording, outcomes: Sequence[str]) -> list[Report]:
    found = (report for history in play.histories.values() for report in history if report["outcome"] in outcomes)
    return sorted(found, key=lambda report: report["time"])


def first_reported(play: Recording, outcomes: Sequence[str]) -> dict[str, float]:
    """Lineage with one of these outcomes -> when it was first reported."""
    return {report["lineage"]: report["time"] for report in reversed(reports(play, outcomes))}
