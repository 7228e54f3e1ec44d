"""The invariants, judged on the peers' histories alone: simulated and real runs are judged by the same code.

A history is the list of a peer's round reports, as dictionaries with the fields of `node.round.RoundReport`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

Report = dict[str, Any]

DECIDED = ("committed", "alone", "fork")


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken invariant."""

    invariant: str
    peer: str
    round: int
    detail: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def check(histories: dict[str, Sequence[Report]]) -> list[Violation]:
    """Every violation in these histories: peer -> its reports, oldest first."""
    reports = [report for history in histories.values() for report in history]
    decided = [report for report in reports if report["outcome"] in DECIDED]
    found: list[Violation] = []
    found += one_child(decided)
    found += same_bits(decided)
    found += finite(reports)
    found += counted_once(decided)
    for history in histories.values():
        found += never_back(history)
        found += unmoved(history)
    return found


def _violation(invariant: str, report: Report, detail: str) -> Violation:
    return Violation(invariant, report["peer"], report["round"], detail)


def one_child(decided: Iterable[Report]) -> Iterator[Violation]:
    """Each lineage has at most one decided child, except through a fork."""
    children: dict[str, Report] = {}
    for report in decided:
        if report["outcome"] == "fork":
            continue
        first = children.setdefault(report["parent"], report)
        if first["lineage"] != report["lineage"]:
            yield _violation("one-child", report, f"{report['lineage'][:12]} beside {first['lineage'][:12]}")


def same_bits(decided: Iterable[Report]) -> Iterator[Violation]:
    """All who committed a lineage hold the same parameters, and say that the same contributions are in it."""
    seen: dict[str, Report] = {}
    for report in decided:
        first = seen.setdefault(report["lineage"], report)
        if first["params_hash"] != report["params_hash"]:
            yield _violation("same-bits", report, f"parameters differ from those of {first['peer']}")
        if first["contributions"] != report["contributions"]:
            yield _violation("same-bits", report, f"contributions differ from those of {first['peer']}")


def finite(reports: Iterable[Report]) -> Iterator[Violation]:
    """Parameters are finite, always."""
    for report in reports:
        if not report["finite"]:
            yield _violation("finite", report, "parameters are not finite")


def counted_once(decided: Iterable[Report]) -> Iterator[Violation]:
    """A contribution, named by its peer and its anchor, counts in one decided record at most; in whole chunks."""
    counted: dict[tuple[str, str], str] = {}
    for report in decided:
        for peer, (anchor, chunks_counted, chunks) in report["contributions"].items():
            if not 0 <= chunks_counted <= chunks:
                yield _violation("counted-once", report, f"{chunks_counted} of {chunks} chunks of {peer}")
            if chunks_counted and counted.setdefault((peer, anchor), report["lineage"]) != report["lineage"]:
                yield _violation("counted-once", report, f"the contribution of {peer} is in two records")


def never_back(history: Sequence[Report]) -> Iterator[Violation]:
    """One peer's chain is unbroken and its round never goes back, unless it states a switch of branch."""
    for before, after in itertools.pairwise(history):
        if after["outcome"] == "superseded" or before["outcome"] == "superseded":
            continue
        if after["parent"] != before["lineage"]:
            yield _violation("never-back", after, "its chain is broken")
        expected = before["round"] + (before["outcome"] in DECIDED)
        if after["round"] != expected:
            yield _violation("never-back", after, f"round {after['round']} where {expected} is due")


def unmoved(history: Sequence[Report]) -> Iterator[Violation]:
    """Nothing is applied without a decision: neither lineage nor parameters change in a round that had none."""
    for before, after in itertools.pairwise([None, *history]):
        if after is None or after["outcome"] in (*DECIDED, "superseded"):
            continue
        if after["lineage"] != after["parent"]:
            yield _violation("unmoved", after, "its lineage moved without a decision")
        if before and before["outcome"] != "superseded" and before["params_hash"] != after["params_hash"]:
            yield _violation("unmoved", after, "its parameters changed without a decision")
