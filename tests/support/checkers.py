"""The invariants of a run, checked on the peers' histories alone, for simulated and real runs alike.

A history is the list of a peer's round reports, as dictionaries with the fields of `node.reporting.report.RoundReport`.
The outcomes of a round, and what they change:

    committed, alone    a MEAN record extends `parent`: lineage and parameters move
    skipped             a SKIP record extends it: the lineage moves, the parameters do not
    fork                a FORK record extends it: the lineage moves; the parameters, if it took over a mean
    undecided           nothing moves
    superseded          this peer has moved to `lineage`, which others decided: later on its branch, or on another
                        branch, which costs `lost_rounds` rounds and `lost_tokens` tokens of its own
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

Report = dict[str, Any]

DECIDED = ("committed", "alone", "skipped", "fork")


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken invariant."""

    invariant: str
    peer: str
    round: int
    detail: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Tree:
    """The decided lineages: the parent of each, and the round that follows it."""

    def __init__(self, reports: Iterable[Report]) -> None:
        self.parents: dict[str, str] = {}
        self.rounds: dict[str, int] = {}
        for report in reports:
            if report["outcome"] in DECIDED and report["lineage"] != report["parent"]:
                self.parents.setdefault(report["lineage"], report["parent"])
                self.rounds.setdefault(report["lineage"], report["round"] + 1)

    def line(self, lineage: str) -> list[str]:
        """The lineage and its known ancestors."""
        line = {lineage: None}  # a dictionary, because wrong histories may have cycles
        while (lineage := self.parents.get(lineage, "")) and lineage not in line:
            line[lineage] = None
        return list(line)

    def lost(self, old: str, new: str) -> int | None:
        """How many rounds of `old` are not on the branch of `new`; None if their common ancestor is not known."""
        kept = set(self.line(new))
        return next((count for count, each in enumerate(self.line(old)) if each in kept), None)

    def apart(self, one: str, other: str) -> bool:
        """Whether two lineages are known to be on different branches."""
        return bool(self.lost(one, other)) and bool(self.lost(other, one))


def check(histories: Mapping[str, Sequence[Report]]) -> list[Violation]:
    """Every violation in these histories: peer -> its reports, oldest first."""
    reports = [report for history in histories.values() for report in history]
    decided = [report for report in reports if report["outcome"] in DECIDED]
    tree = Tree(reports)
    found: list[Violation] = []
    found += one_child(decided)
    found += same_bits(reports)
    found += finite(reports)
    found += counted_once(decided, tree)
    for history in histories.values():
        for incarnation in incarnations(history):
            found += never_back(incarnation, tree)
            found += unmoved(incarnation)
        found += stated(history, tree)
    return found


def incarnations(history: Sequence[Report]) -> Iterator[list[Report]]:
    """A peer's reports, by incarnation. A new incarnation may begin anywhere on the chain."""
    for _, reports in itertools.groupby(history, key=lambda report: report["incarnation"]):
        yield list(reports)


def began(report: Report) -> float:
    """The wall time at which the reporting peer began the round."""
    return float(report["time"] - report["seconds_train"] - report["seconds_wait"] - report["seconds_average"])


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


def same_bits(reports: Iterable[Report]) -> Iterator[Violation]:
    """All peers at a lineage have the same parameters; those that decided it report the same contributions, of the
    whole round or of the same cluster. Without its plan, a peer knows only how much of each cluster counts.
    """
    arrived: dict[str, Report] = {}
    deciding: dict[tuple[str, frozenset[str]], Report] = {}
    for report in reports:
        first = arrived.setdefault(report["lineage"], report)
        if first["params_hash"] != report["params_hash"]:
            yield _violation("same-bits", report, f"parameters differ from those of {first['peer']}")
        if report["outcome"] == "superseded" and (why := report.get("blamed", {}).get(report["peer"])):
            yield _violation("same-bits", report, why)  # its momentum, where the hash agrees
        knows_plan = report["contributions"] or not report.get("clusters")
        if report["outcome"] in DECIDED and knows_plan:
            near = deciding.setdefault((report["lineage"], frozenset(report.get("clusters", ()))), report)
            mine, theirs = report["contributions"], near["contributions"]
            if mine != theirs:
                differ = sorted(peer for peer in {*mine, *theirs} if mine.get(peer) != theirs.get(peer))
                what = "; ".join(f"{peer}: {mine.get(peer)}, not {theirs.get(peer)}" for peer in differ)
                yield _violation("same-bits", report, f"contributions differ from those of {near['peer']}: {what}")


def finite(reports: Iterable[Report]) -> Iterator[Violation]:
    """Parameters are always finite."""
    for report in reports:
        if not report["finite"]:
            yield _violation("finite", report, "parameters are not finite")


def counted_once(decided: Iterable[Report], tree: Tree) -> Iterator[Violation]:
    """A contribution, identified by peer and anchor, counts at most once on a branch, in whole chunks.

    Two branches of a fork may each count it. Records that are not known to be on different branches are on one.
    """
    counted: dict[tuple[str, str], dict[str, None]] = {}
    through: dict[tuple[str, str], frozenset[str]] = {}  # the other clusters, as those of its own one report them
    for report in sorted(decided, key=lambda report: report["round"]):
        for peer, (anchor, chunks_counted, chunks) in report["contributions"].items():
            if not 0 <= chunks_counted <= chunks:
                yield _violation("counted-once", report, f"{chunks_counted} of {chunks} chunks of {peer}")
            if not chunks_counted:
                continue
            records = counted.setdefault((peer, anchor), {})
            if any(each != report["lineage"] and not tree.apart(each, report["lineage"]) for each in records):
                yield _violation("counted-once", report, f"the contribution of {peer} is in two records")
            records[report["lineage"]] = None
            others = frozenset(report.get("clusters", ()))
            if through.setdefault((peer, report["lineage"]), others) != others:
                yield _violation("counted-once", report, f"the contribution of {peer} is in two clusters")


def never_back(incarnation: Sequence[Report], tree: Tree) -> Iterator[Violation]:
    """A peer's chain is unbroken, and its round never goes back along it."""
    for report in incarnation:
        if report["outcome"] in DECIDED and report["lineage"] == report["parent"]:
            yield _violation("never-back", report, "a decision that does not move its lineage")
    for before, after in itertools.pairwise(incarnation):
        if after["parent"] != before["lineage"]:
            yield _violation("never-back", after, "its chain is broken")
        expected: int | None = before["round"] + (before["outcome"] in DECIDED)
        if before["outcome"] == "superseded":  # another branch may have another round
            expected = tree.rounds.get(before["lineage"])
        if expected is not None and after["round"] != expected:
            yield _violation("never-back", after, f"round {after['round']} where {expected} is due")


def unmoved(incarnation: Sequence[Report]) -> Iterator[Violation]:
    """Nothing is applied without a decision, and a decision to skip changes no parameters."""
    for before, after in itertools.pairwise([None, *incarnation]):
        if after is None or after["outcome"] in ("committed", "alone", "fork"):
            continue
        moves = after["lineage"] != after["parent"]
        if after["outcome"] == "undecided" and moves:
            yield _violation("unmoved", after, "its lineage moved without a decision")
        stays = after["outcome"] == "skipped" or not moves
        if before and stays and before["params_hash"] != after["params_hash"]:
            yield _violation("unmoved", after, "its parameters changed without a decision")


def stated(history: Sequence[Report], tree: Tree) -> Iterator[Violation]:
    """A change of branch is reported as `superseded`, with its costs."""
    for index, report in enumerate(history):
        rounds, tokens = report.get("lost_rounds", 0), report.get("lost_tokens", 0)
        if report["outcome"] != "superseded":
            if rounds or tokens:
                yield _violation("stated", report, f"{report['outcome']}, and yet {rounds} rounds lost")
            continue
        lost = tree.lost(report["parent"], report["lineage"])
        if lost is not None and rounds != lost:
            yield _violation("stated", report, f"lost {lost} rounds and states {rounds}")
        gone = tree.line(report["parent"])[: lost or 0]
        decided = (each for each in history[:index] if each["lineage"] in gone and each["outcome"] in DECIDED)
        if tokens <= 0 and any(each["weight"] != 0 for each in decided):  # an unknown weight is not 0
            yield _violation("stated", report, "does not state the tokens that it lost")


def one_branch(histories: Mapping[str, Sequence[Report]]) -> Iterator[Violation]:
    """After healing, all peers are on the branch of the one that is furthest along."""
    tree = Tree(report for history in histories.values() for report in history)
    ends = [history[-1] for history in histories.values() if history]
    if not ends:
        return
    foremost = max(ends, key=lambda report: tree.rounds.get(report["lineage"], 0))
    branch = tree.line(foremost["lineage"])
    for report in ends:
        if report["lineage"] not in branch:
            yield _violation("one-branch", report, f"not on the branch of {foremost['peer']}")
