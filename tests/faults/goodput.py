"""How much of what a swarm could have brought has counted, in spite of what was done to it, and how many took part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from tests.faults.recording import Recording
from tests.support.checkers import DECIDED, Report, Tree

MEANS = ("committed", "alone", "fork")
"""Outcomes that move the parameters; a fork does so only if it took over a mean."""


def goodput(play: Recording) -> float:
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
    counted, ever = _counted(play), _counted(play, given_up=True)  # the rate is what it was, whatever became of it
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
    """Contributors of a round over peers that were up when it was decided; the mean of all rounds since the calm began.

    A round that was skipped has none. One that was decided on two branches counts on both. Who is in a mean with no
    weight, or of whom no chunk was counted, is no contributor. nan if there was no round.
    """
    told = [report for report in reports(play, DECIDED) if play.calm[0] <= report["time"] <= play.ended]
    weightless = {(report["peer"], report["lineage"]) for report in told if report["weight"] == 0}
    first = {report["lineage"]: report for report in reversed(told)}
    shares = []
    for lineage, report in first.items():
        counted = report["contributions"].items() if report["outcome"] in MEANS else ()
        contributors = sum(chunks > 0 and (peer, lineage) not in weightless for peer, (_, chunks, _) in counted)
        shares.append(min(1.0, contributors / max(1, _up(play, report["time"]))))
    return fmean(shares) if shares else math.nan


def _up(play: Recording, time: float) -> int:
    return sum(life.began <= time <= life.ended for each in play.lives.values() for life in each)


def _counted(play: Recording, given_up: bool = False) -> list[tuple[float, float]]:
    """Times and tokens of contributions to the means of the branch on which it ended, oldest first; with those of
    others, if what was given up is asked for, too."""
    tree, times = Tree(reports(play, DECIDED)), first_told(play, MEANS)
    ends = [history[-1]["lineage"] for name in play.should if (history := play.histories.get(name))]
    end = max(ends, key=lambda lineage: tree.rounds.get(lineage, 0), default="")
    lost = {lineage for lineage in times if tree.apart(lineage, end) and not given_up}
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for report in reports(play, MEANS):
        if report["lineage"] not in lost and (tokens := _tokens(report)):
            found.setdefault((report["peer"], report["anchor_lineage"]), (times[report["lineage"]], tokens))
    return sorted(found.values())


def _tokens(report: Report) -> float:
    """Of the reporting peer's own work, as far as the mean holds it; what it trained, if it did not know its weight."""
    _, chunks_counted, chunks = report["contributions"].get(report["peer"], ("", 0, 0))
    weight = report["weight"]
    tokens = weight if weight is not None and math.isfinite(weight) else report["tokens"]
    return float(tokens * chunks_counted / max(1, chunks))


def _peer_seconds(play: Recording, since: float, until: float) -> float:
    lives = (life for each in play.lives.values() for life in each)
    return sum(max(0.0, min(life.ended, until) - max(life.began, since)) for life in lives)


def reports(play: Recording, outcomes: Sequence[str]) -> list[Report]:
    """Of all peers, oldest first."""
    found = (report for history in play.histories.values() for report in history if report["outcome"] in outcomes)
    return sorted(found, key=lambda report: report["time"])


def first_told(play: Recording, outcomes: Sequence[str]) -> dict[str, float]:
    """When somebody first reported each lineage that was decided so."""
    return {report["lineage"]: report["time"] for report in reversed(reports(play, outcomes))}
