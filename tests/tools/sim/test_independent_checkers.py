"""The checkers of peers that share no anchor: a clean history passes, and each planted violation is found."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.independent_checkers import check


def report(peer: str, number: int, parent: str, lineage: str, **more: Any) -> dict[str, Any]:
    plain = {"outcome": "skipped", "messages": (), "group": "", "finite": True, "incarnation": 0}
    names = {"peer": peer, "round": number, "parent": parent, "lineage": lineage, "params_hash": f"of {lineage}"}
    return {**names, **plain, **more}


def histories() -> dict[str, list[dict[str, Any]]]:
    """Two peers meet in a pair, then in a group of round 4, to which one of them jumps; the other restarts."""
    pair, group = {"outcome": "committed"}, {"outcome": "committed", "group": "4/x"}
    a = [
        report("a", 0, "a0", "a1"),
        report("a", 1, "a1", "a2", messages=("b 1",), **pair),
        report("a", 2, "a2", "b5", outcome="superseded"),
        report("a", 4, "b5", "x", messages=("b 2", "c 1"), **group),
    ]
    b = [
        report("b", 0, "b0", "b1", messages=("a 1",), **pair),
        report("b", 4, "b1", "x", messages=("a 2", "c 1"), **group),
        report("b", 5, "x", "b2"),
        report("b", 1, "b7", "b8", incarnation=1),
    ]
    return {"a": a, "b": b}


def test_clean_histories_pass() -> None:
    assert check(histories()) == check(histories(), "gossip") == []
    assert {violation.peer for violation in check(histories(), "moshpit")} == {"a", "b"}, "their pair names no group"


@pytest.mark.parametrize(
    "peer, index, change, invariant",
    [
        ("a", 0, {"finite": False}, "finite"),
        ("a", 3, {"params_hash": "of y"}, "one-group"),
        ("a", 3, {"lineage": "y"}, "one-group"),
        ("b", 3, {"outcome": "committed", "messages": ("a 1",)}, "counted-once"),
        ("a", 1, {"messages": ()}, "outcome"),
        ("a", 2, {"outcome": "undecided"}, "outcome"),
        ("a", 3, {"round": 1}, "never-back"),
        ("a", 1, {"parent": "a9"}, "never-back"),
        ("b", 2, {"lineage": "x"}, "never-back"),
    ],
)
def test_planted_violation_is_found(peer: str, index: int, change: dict[str, Any], invariant: str) -> None:
    planted = histories()
    planted[peer][index].update(change)
    assert {violation.invariant for violation in check(planted)} == {invariant}
