"""The invariants of peers that share no anchor, checked on their histories alone (as in `tests.support.checkers`).

The outcomes of a round:

    committed     averaged with other peers' states: `messages` names each that counted, `group` the last full group
    skipped       averaged with no other peer: only the peer's own step happened
    superseded    this peer has fetched another's state and round

Each incarnation has its own chain: `parent` and `lineage` are the roots of its state before and after.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from tests.support.checkers import Report, Violation, began, finite, incarnations

OUTCOMES = ("committed", "skipped", "superseded")


def check(histories: Mapping[str, Sequence[Report]], protocol: str = "") -> list[Violation]:
    """Every violation in these histories (peer -> its reports, oldest first), also of one protocol's own rules."""
    reports = [report for history in histories.values() for report in history]
    found = [*finite(reports), *one_group(reports), *outcomes(reports)]
    if protocol == "moshpit":
        found += named_groups(reports)
    for history in histories.values():
        found += counted_once(history)
        for incarnation in incarnations(history):
            found += never_back(incarnation)
    return found


def one_group(reports: Iterable[Report]) -> Iterator[Violation]:
    """All peers that completed one group last have the same bits after it."""
    first: dict[str, Report] = {}
    for report in reports:
        if report["group"] and report["outcome"] == "committed":
            held = first.setdefault(report["group"], report)
            same_round = held["round"] == report["round"]  # a root is that of a state before a round
            if held["params_hash"] != report["params_hash"] or (same_round and held["lineage"] != report["lineage"]):
                yield _violation("one-group", report, f"it holds another state than {held['peer']} of the same group")


def named_groups(reports: Iterable[Report]) -> Iterator[Violation]:
    """A peer that committed a round names its last group, so that the states of its members can be compared."""
    for report in reports:
        if report["outcome"] == "committed" and not report["group"]:
            yield _violation("one-group", report, "it committed, and names no group")


def outcomes(reports: Iterable[Report]) -> Iterator[Violation]:
    """Every outcome is known, and a round is committed if and only if messages were counted in it."""
    for report in reports:
        outcome = report["outcome"]
        if outcome not in OUTCOMES:
            yield _violation("outcome", report, f"{outcome} where nothing is voted on")
        elif bool(report["messages"]) != (outcome == "committed"):
            yield _violation("outcome", report, f"{outcome}, and counts {len(report['messages'])} messages")


def counted_once(history: Sequence[Report]) -> Iterator[Violation]:
    """A message counts at most once at its receiver."""
    counted: set[str] = set()
    for report in history:
        for name in report["messages"]:
            if name in counted:
                yield _violation("counted-once", report, f"message {name} is counted twice")
            counted.add(name)


def never_back(incarnation: Sequence[Report]) -> Iterator[Violation]:
    """A peer's chain of states is unbroken, and its round never goes back along it."""
    for report in incarnation:
        if (
            report["lineage"] == report["parent"] and report["outcome"] != "superseded"
        ):  # it may fetch the state that it has
            yield _violation("never-back", report, "a round that does not move its lineage")
    for before, after in itertools.pairwise(incarnation):
        if after["parent"] != before["lineage"]:
            yield _violation("never-back", after, "its chain is broken")
        least = before["round"] + (before["outcome"] != "superseded")
        if after["round"] < least:
            yield _violation("never-back", after, f"round {after['round']} where {least} is due")


def mixed(reports: Iterable[Report], peers: Collection[str], since: float = -math.inf) -> Report | None:
    """The report by which all these peers have mixed, in rounds that began after that wall time; None: not yet.

    Each has committed a round, and counted messages connect them all: two halves that each mix by themselves are not
    mixed, nor is a single peer.
    """
    group = {peer: {peer} for peer in peers}
    alone = set(peers)
    for report in sorted(reports, key=lambda report: float(report["time"])):
        if report["outcome"] != "committed" or began(report) <= since or report["peer"] not in group:
            continue
        alone.discard(report["peer"])
        met = set().union(*(group[peer] for peer in {report["peer"], *report["peers"]} if peer in group))
        group.update(dict.fromkeys(met, met))
        if not alone and len(met) == len(group) > 1:
            return report
    return None


def _violation(invariant: str, report: Report, detail: str) -> Violation:
    return Violation(invariant, report["peer"], report["round"], detail)
