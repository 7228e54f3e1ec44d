"""The checkers themselves: a clean history passes, and every planted violation is found and named."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any

import pytest

from node.round import RoundReport
from tests import checkers
from tests.checkers import Report, Violation
from tests.sim.world import Scenario, play

Histories = dict[str, list[Report]]
PEERS = ("anna", "bert", "cleo")


def report(peer: str, number: int, **changes: Any) -> Report:
    """What `peer` says of committed round `number` on a chain whose lineages are L0, L1, …"""
    parent = changes.get("parent", f"L{number}")
    ordinary: dict[str, Any] = {
        "run": "run",
        "peer": peer,
        "incarnation": 0,
        "round": number,
        "parent": parent,
        "lineage": f"L{number + 1}",
        "anchor_lineage": parent,
        "outcome": "committed",
        "peers": PEERS,
        "contributions": {each: (parent, 4, 4) for each in PEERS},
        "blamed": {},
        "finite": True,
        "weight": 1.0,
        "tokens": 100,
        "loss": 2.0,
        "params_hash": f"params {number + 1}",
        "seconds_train": 1.0,
        "seconds_wait": 0.0,
        "seconds_average": 1.0,
        "bytes_sent": 0,
        "bytes_received": 0,
        "time": 0.0,
    }
    return asdict(RoundReport(**{**ordinary, **changes}))


def undecided(peer: str, number: int, outcome: str = "undecided") -> Report:
    """A round that left this peer where it was."""
    same = {"lineage": f"L{number}", "params_hash": f"params {number}", "peers": (), "contributions": {}}
    return report(peer, number, outcome=outcome, **same)


def clean() -> Histories:
    """Four rounds of three peers; bert misses one and is told of it, cleo's third round needs three attempts."""
    histories = {peer: [report(peer, number) for number in range(4)] for peer in PEERS}
    histories["bert"][1] = undecided("bert", 1, "superseded")
    histories["cleo"][2:2] = [undecided("cleo", 2), undecided("cleo", 2, "skipped")]
    for history in histories.values():
        for each in history:
            if each["round"] == 2 and each["contributions"]:
                each["contributions"]["cleo"] = ("L2", 0, 4)
            if each["round"] == 3:
                each["contributions"]["bert"] = ("L3", 3, 4)
    return histories


def found(histories: Histories) -> list[tuple[str, str, int]]:
    return [(each.invariant, each.peer, each.round) for each in checkers.check(histories)]


def test_a_clean_history_passes() -> None:
    assert checkers.check(clean()) == []
    assert checkers.check({}) == checkers.check({"anna": []}) == []


def test_a_fork_and_what_follows_passes() -> None:
    """Bert and cleo lose anna, fork, and go on; anna goes on alone, and each side counts what it holds."""
    histories: Histories = {"anna": [report("anna", 0)], "bert": [report("bert", 0)], "cleo": [report("cleo", 0)]}
    histories["anna"].append(report("anna", 1, lineage="A2", outcome="fork", contributions={"anna": ("L1", 4, 4)}))
    histories["anna"].append(
        report("anna", 2, parent="A2", lineage="A3", outcome="alone", contributions={"anna": ("A2", 4, 4)})
    )
    for peer in ("bert", "cleo"):
        others = {each: ("L1", 4, 4) for each in ("bert", "cleo")}
        histories[peer].append(report(peer, 1, lineage="B2", outcome="fork", contributions=others, params_hash="other"))
    assert checkers.check(histories) == []


# -- planted ----------------------------------------------------------------------------------------------------------


def two_children(histories: Histories) -> None:
    histories["cleo"][-1].update(lineage="other child", contributions={})


def two_children_one_alone(histories: Histories) -> None:
    histories["cleo"][-1].update(lineage="other child", contributions={}, outcome="alone")


def flipped_hash(histories: Histories) -> None:
    histories["bert"][-1]["params_hash"] = "params 5"


def flipped_hash_early(histories: Histories) -> None:
    histories["bert"][0]["params_hash"] = "params 5"


def differing_count(histories: Histories) -> None:
    histories["cleo"][-1]["contributions"]["anna"] = ("L3", 3, 4)


def differing_members(histories: Histories) -> None:
    del histories["cleo"][-1]["contributions"]["anna"]


def doubled_contribution(histories: Histories) -> None:
    for history in histories.values():
        history[-1]["contributions"]["anna"] = ("L0", 4, 4)


def doubled_in_part(histories: Histories) -> None:
    """One chunk of what was counted before."""
    for history in histories.values():
        history[-1]["contributions"]["bert"] = ("L2", 1, 4)


def not_finite(histories: Histories) -> None:
    histories["cleo"][3]["finite"] = False


def not_finite_undecided(histories: Histories) -> None:
    histories["cleo"][2]["finite"] = False


def gone_back(histories: Histories) -> None:
    """The round goes back, and the chain is made to fit."""
    for history in histories.values():
        history[-1]["round"] = 1


def skipped_ahead(histories: Histories) -> None:
    histories["anna"][-1]["round"] = 9


def stands_still(histories: Histories) -> None:
    """Undecided, and yet the next round has another number."""
    histories["cleo"][3]["round"] = 3
    histories["cleo"][4]["round"] = 3
    histories["cleo"][5]["round"] = 4


def broken_chain(histories: Histories) -> None:
    histories["anna"][-1]["parent"] = "another parent"


def missing_round(histories: Histories) -> None:
    del histories["anna"][2]


def undecided_yet_changed(histories: Histories) -> None:
    """A mean was applied that nobody decided."""
    histories["cleo"][2]["params_hash"] = histories["cleo"][3]["params_hash"] = "elsewhere"


def undecided_yet_moved(histories: Histories) -> None:
    """The same, and the rest of the chain is made to fit."""
    histories["cleo"][3]["lineage"] = histories["cleo"][4]["parent"] = "elsewhere"


def too_many_chunks(histories: Histories) -> None:
    for history in histories.values():
        history[-1]["contributions"]["cleo"] = ("L3", 5, 4)


def negative_chunks(histories: Histories) -> None:
    for history in histories.values():
        history[-1]["contributions"]["cleo"] = ("L3", -1, 4)


EACH = [(peer, 3) for peer in PEERS]
PLANTED: list[tuple[Callable[[Histories], None], str, list[tuple[str, int]]]] = [
    (two_children, "one-child", [("cleo", 3)]),
    (two_children_one_alone, "one-child", [("cleo", 3)]),
    (flipped_hash, "same-bits", [("bert", 3)]),
    (flipped_hash_early, "same-bits", [("bert", 0)]),
    (differing_count, "same-bits", [("cleo", 3)]),
    (differing_members, "same-bits", [("cleo", 3)]),
    (doubled_contribution, "counted-once", EACH),
    (doubled_in_part, "counted-once", EACH),
    (not_finite, "finite", [("cleo", 2)]),
    (not_finite_undecided, "finite", [("cleo", 2)]),
    (gone_back, "never-back", [(peer, 1) for peer in PEERS]),
    (skipped_ahead, "never-back", [("anna", 9)]),
    (stands_still, "never-back", [("cleo", 3)]),
    (broken_chain, "never-back", [("anna", 3)]),
    (undecided_yet_changed, "unmoved", [("cleo", 2)]),
    (undecided_yet_moved, "unmoved", [("cleo", 2)]),
    (too_many_chunks, "counted-once", EACH),
    (negative_chunks, "counted-once", EACH),
]


@pytest.mark.parametrize("plant, invariant, places", PLANTED, ids=[plant.__name__ for plant, _, _ in PLANTED])
def test_a_planted_violation_is_found(
    plant: Callable[[Histories], None], invariant: str, places: list[tuple[str, int]]
) -> None:
    histories = clean()
    plant(histories)
    assert found(histories) == [(invariant, *place) for place in places]


def test_a_missing_round_breaks_the_chain_and_the_count() -> None:
    histories = clean()
    missing_round(histories)
    assert found(histories) == [("never-back", "anna", 3)] * 2


def test_an_explicit_switch_of_branch_is_no_violation() -> None:
    histories = clean()
    history = histories["anna"]
    history[2] = {**undecided("anna", 2, "superseded"), "lineage": "wherever it was", "round": 0}
    assert checkers.check(histories) == []


@pytest.mark.parametrize("outcome", ["undecided", "skipped", "superseded"])
def test_what_was_not_decided_is_no_child_and_counts_nothing(outcome: str) -> None:
    histories = clean()
    more = report("anna", 4, outcome=outcome, lineage="L4", contributions={"anna": ("L0", 9, 4)})
    more["params_hash"] = histories["anna"][-1]["params_hash"]
    histories["anna"].append(more)
    assert checkers.check(histories) == []


def test_a_violation_says_what_and_where() -> None:
    histories = clean()
    two_children(histories)
    (violation,) = checkers.check(histories)
    assert violation == Violation("one-child", "cleo", 3, "other child beside L4")
    assert violation.as_dict() == {"invariant": "one-child", "peer": "cleo", "round": 3, "detail": violation.detail}


# -- on what the simulator really writes ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real() -> Histories:
    outcome = play(Scenario(peers=3, rounds=4, seed=1, elements=64))
    assert outcome.violations == []
    return outcome.histories


REAL: dict[str, tuple[str, Callable[[Report], dict[str, Any]]]] = {
    "another child": ("one-child", lambda last: {"lineage": "ab" * 32, "contributions": {}}),
    "another hash": ("same-bits", lambda last: {"params_hash": "00" * 32}),
    "other contributions": ("same-bits", lambda last: {"contributions": {}}),
    "a contribution in two": ("counted-once", lambda last: {"lineage": "ab" * 32, "outcome": "fork"}),
    "not finite": ("finite", lambda last: {"finite": False}),
    "a round back": ("never-back", lambda last: {"round": last["round"] - 1}),
    "another parent": ("never-back", lambda last: {"parent": "cd" * 32}),
}


@pytest.mark.parametrize("invariant, change", REAL.values(), ids=REAL)
def test_a_real_history_passes_and_a_change_to_it_does_not(
    invariant: str, change: Callable[[Report], dict[str, Any]], real: Histories
) -> None:
    assert {len(history) for history in real.values()} == {4}
    assert checkers.check(real) == []
    bent = copy.deepcopy(real)
    last = bent["p2"][-1]
    last.update(change(last))
    assert {each.invariant for each in checkers.check(bent)} == {invariant}


def test_the_checkers_read_the_fields_of_the_report() -> None:
    assert set(report("anna", 0)) == {field.name for field in fields(RoundReport)}
