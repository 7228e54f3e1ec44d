"""The checkers of replicated runs: clean histories pass, and one planted violation of each rule is found and named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support import checkers
from tests.support.checkers import Report
from tests.support.recordings import IDS, NO_CONTRIBUTIONS, PEERS, voted_report

Histories = dict[str, list[Report]]
Edit = tuple[tuple[str, ...], int, dict[str, Any]]
"""Of which peers, which of their reports, and what it says instead."""


def counted(anchor: str, **others: tuple[str, int, int]) -> dict[str, tuple[str, int, int]]:
    """All four chunks of all peers, but for `others`."""
    return {IDS[each]: others.get(each, (anchor, 4, 4)) for each in PEERS}


def undecided(peer: str, number: int) -> Report:
    """A round that left this peer where it was."""
    return voted_report(
        peer, number, outcome="undecided", lineage=f"L{number}", params_hash=f"params {number}", **NO_CONTRIBUTIONS
    )


def clean() -> Histories:
    """Four rounds of three peers, the third of which they skip: what was trained in it counts in the fourth.

    Bert misses the second and catches up; cleo's third needs two attempts, and a chunk of bert's in the last is lost.
    """
    histories = {peer: [voted_report(peer, number) for number in range(4)] for peer in PEERS}
    for history in histories.values():
        history[2].update(outcome="skipped", params_hash="params 2", **NO_CONTRIBUTIONS)
        history[3].update(contributions=counted("L2", bert=("L2", 3, 4)))
    histories["bert"][1].update(outcome="superseded", **NO_CONTRIBUTIONS)
    histories["cleo"].insert(2, undecided("cleo", 2))
    return histories


def forked() -> Histories:
    """After two rounds anna is cut off and forks; bert and cleo go on without her, and in the end she joins them.

    Each side counts her contribution to the third round, which reached bert and cleo.
    """
    histories = {peer: [voted_report(peer, number) for number in range(2)] for peer in PEERS}
    mine = {IDS["anna"]: ("L2", 4, 4)}
    back = {"outcome": "superseded", "lost_rounds": 2, "lost_tokens": 200, **NO_CONTRIBUTIONS}
    histories["anna"] += [
        undecided("anna", 2),
        voted_report("anna", 2, lineage="A3", outcome="fork", contributions=mine, params_hash="a3"),
        voted_report("anna", 3, parent="A3", lineage="A4", outcome="alone", contributions={IDS["anna"]: ("A3", 4, 4)}),
        voted_report("anna", 4, parent="A4", lineage="L4", **back),
        voted_report("anna", 4),
    ]
    histories["anna"][-3]["params_hash"], histories["anna"][-2]["params_hash"] = "a4", "params 4"
    for peer in ("bert", "cleo"):
        histories[peer] += [voted_report(peer, number) for number in (2, 3, 4)]
        del histories[peer][3]["contributions"][IDS["anna"]]
    return histories


def moved() -> Histories:
    """A round of two clusters, in both of which cleo is: it has moved to its own one, and counts there."""
    histories = {peer: [voted_report(peer, 0)] for peer in PEERS}
    for peer in ("anna", "bert"):
        histories[peer][0].update(contributions=counted("L0", cleo=("L0", 0, 4)), clusters={IDS["cleo"]: (4, 4)})
    histories["cleo"][0].update(contributions={IDS["cleo"]: ("L0", 4, 4)}, clusters={IDS["anna"]: (8, 12)})
    return histories


@pytest.mark.parametrize("histories", [clean, forked, moved, dict])
def test_clean_history_passes(histories: Callable[[], Histories]) -> None:
    assert checkers.check(histories()) == list(checkers.one_branch(histories())) == []


def of(peer: str, index: int, **changes: Any) -> Edit:
    return (peer,), index, changes


def of_all(index: int, **changes: Any) -> Edit:
    return PEERS, index, changes


def each(invariant: str, number: int, *peers: str) -> list[tuple[str, str, int]]:
    return [(invariant, IDS[peer], number) for peer in peers or PEERS]


PLANTED: dict[str, tuple[Callable[[], Histories], list[Edit], list[tuple[str, str, int]]]] = {
    "two children": (clean, [of("cleo", -1, lineage="other child", **NO_CONTRIBUTIONS)], each("one-child", 3, "cleo")),
    "other parameters": (clean, [of("bert", -1, params_hash="params 5")], each("same-bits", 3, "bert")),
    "other momentum": (clean, [of("bert", 1, blamed={IDS["bert"]: "another state"})], each("same-bits", 1, "bert")),
    "other counts": (clean, [of("cleo", -1, contributions=counted("L2"))], each("same-bits", 3, "cleo")),
    "not finite": (clean, [of("cleo", 3, finite=False)], each("finite", 2, "cleo")),
    "one chunk of what counted before": (
        clean, [of_all(-1, contributions=counted("L2", cleo=("L1", 1, 4)))], each("counted-once", 3),
    ),
    "more chunks than there are": (
        clean, [of_all(-1, contributions=counted("L2", cleo=("L2", 5, 4)))], each("counted-once", 3),
    ),
    "broken chain": (clean, [of("anna", -1, parent="another parent")], each("never-back", 3, "anna")),
    "skip that does not count": (clean, [of("cleo", 4, round=2)], each("never-back", 2, "cleo")),
    "decision that does not move": (
        clean, [of("cleo", 3, lineage="L2"), of("cleo", 4, parent="L2")],
        [*each("one-child", 2, "cleo"), *each("one-child", 3, "cleo"), *each("same-bits", 2, "cleo"),
         *each("never-back", 2, "cleo")],
    ),
    "move without a decision": (
        clean, [of("cleo", 2, lineage="elsewhere"), of("cleo", 3, parent="elsewhere")], each("unmoved", 2, "cleo"),
    ),
    "mean without a decision": (
        clean, [of("cleo", 2, params_hash="elsewhere"), of("cleo", 3, params_hash="elsewhere")],
        [*each("same-bits", 2, "cleo", "cleo"), *each("unmoved", 2, "cleo")],
    ),
    "mean in a skipped round": (clean, [of_all(-2, params_hash="elsewhere")], each("unmoved", 2)),
    "costs of a commit": (clean, [of("anna", 3, lost_tokens=5)], each("stated", 3, "anna")),
    "fork called alone": (forked, [of("anna", 3, outcome="alone")], each("one-child", 2, "bert", "cleo")),
    "counted twice on a branch": (
        forked, [of("anna", 4, contributions={IDS["anna"]: ("L2", 4, 4)})], each("counted-once", 3, "anna"),
    ),
    "counted again after the fork": (
        forked, [of_all(-1, contributions=counted("L4", anna=("L2", 4, 4)))], each("counted-once", 4),
    ),
    "counted in two clusters": (
        moved,
        [of(peer, 0, contributions=counted("L0", cleo=("L0", 1, 4))) for peer in ("anna", "bert")],
        each("counted-once", 0, "cleo"),
    ),
    "other counts in a cluster": (
        moved, [of("bert", 0, contributions=counted("L0", bert=("L0", 3, 4), cleo=("L0", 0, 4)))],
        each("same-bits", 0, "bert"),
    ),
    "round back on the new branch": (forked, [of("anna", -1, round=3)], each("never-back", 3, "anna")),
    "rounds lost unstated": (forked, [of("anna", -2, lost_rounds=1)], each("stated", 4, "anna")),
    "tokens of unknown weight unstated": (
        forked, [of("anna", -4, weight=None), of("anna", -3, weight=None), of("anna", -2, lost_tokens=0)],
        each("stated", 4, "anna"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("healthy, edits, found", PLANTED.values(), ids=PLANTED)
def test_planted_violation_is_found(
    healthy: Callable[[], Histories], edits: list[Edit], found: list[tuple[str, str, int]]
) -> None:
    histories = healthy()
    for peers, index, changes in edits:
        for peer in peers:
            histories[peer][index].update(changes)
    assert [(each.invariant, each.peer, each.round) for each in checkers.check(histories)] == found


def test_peer_left_on_other_branch_is_found() -> None:
    histories = forked()
    del histories["anna"][-2:]
    assert checkers.check(histories) == []
    assert [(each.invariant, each.peer) for each in checkers.one_branch(histories)] == [("one-branch", IDS["anna"])]
