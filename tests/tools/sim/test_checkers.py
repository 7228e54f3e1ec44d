"""The checkers themselves: a clean history passes, and every planted violation is found and named."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from node.reporting.report import RoundReport
from tests.sim.world import Scenario, play
from tests.support import checkers
from tests.support.checkers import Report, Violation

Histories = dict[str, list[Report]]
PEERS = ("anna", "bert", "cleo")


def report(peer: str, number: int, **changes: Any) -> Report:
    """What `peer` says of committed round `number` on a chain whose lineages are L0, L1, …"""
    parent = changes.get("parent", f"L{number}")
    ordinary: Report = {
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
        "lost_rounds": 0,
        "lost_tokens": 0,
        "replayed_rounds": 0,
        "bytes_downloaded": 0,
        "seconds_train": 1.0,
        "seconds_wait": 0.0,
        "seconds_average": 1.0,
        "bytes_sent": 0,
        "bytes_received": 0,
        "time": 0.0,
    }
    return {**ordinary, **changes}


NOTHING: dict[str, Any] = {"peers": (), "contributions": {}}


def undecided(peer: str, number: int) -> Report:
    """A round that left this peer where it was."""
    return report(peer, number, outcome="undecided", lineage=f"L{number}", params_hash=f"params {number}", **NOTHING)


def clean() -> Histories:
    """Four rounds of three peers, the third of which they skip: what was trained in it counts in the fourth.

    Bert misses the second and catches up; cleo's third needs two attempts, and a chunk of bert's in the last is lost.
    """
    histories = {peer: [report(peer, number) for number in range(4)] for peer in PEERS}
    for history in histories.values():
        history[2].update(outcome="skipped", params_hash="params 2", **NOTHING)
        history[3].update(anchor_lineage="L2", contributions={each: ("L2", 4, 4) for each in PEERS})
        history[3]["contributions"]["bert"] = ("L2", 3, 4)
    histories["bert"][1].update(outcome="superseded", **NOTHING)
    histories["cleo"].insert(2, undecided("cleo", 2))
    return histories


def forked() -> Histories:
    """After two rounds anna is cut off and forks; bert and cleo go on without her, and in the end she joins them.

    Each side counts her contribution to the third round, which reached bert and cleo.
    """
    histories = {peer: [report(peer, number) for number in range(2)] for peer in PEERS}
    mine = {"anna": ("L2", 4, 4)}
    histories["anna"] += [
        undecided("anna", 2),
        report("anna", 2, lineage="A3", outcome="fork", contributions=mine, params_hash="a3"),
        report("anna", 3, parent="A3", lineage="A4", outcome="alone", contributions={"anna": ("A3", 4, 4)}),
        report("anna", 4, parent="A4", lineage="L4", outcome="superseded", lost_rounds=2, lost_tokens=200, **NOTHING),
        report("anna", 4),
    ]
    histories["anna"][-3]["params_hash"], histories["anna"][-2]["params_hash"] = "a4", "params 4"
    for peer in ("bert", "cleo"):
        histories[peer] += [report(peer, number) for number in (2, 3, 4)]
    for peer in ("bert", "cleo"):
        del histories[peer][3]["contributions"]["anna"]
    return histories


def found(histories: Histories) -> list[tuple[str, str, int]]:
    return [(each.invariant, each.peer, each.round) for each in checkers.check(histories)]


def test_clean_history_passes() -> None:
    assert checkers.check(clean()) == []
    assert checkers.check({}) == checkers.check({"anna": []}) == []
    assert list(checkers.one_branch(clean())) == list(checkers.one_branch({})) == []


def test_forked_history_passes() -> None:
    assert checkers.check(forked()) == []
    assert list(checkers.one_branch(forked())) == []


def test_new_incarnation_may_begin_at_any_round() -> None:
    histories = clean()
    histories["cleo"] = [*histories["cleo"][:2], report("cleo", 3, incarnation=1)]
    histories["cleo"][-1]["contributions"] = histories["anna"][-1]["contributions"]
    assert checkers.check(histories) == []


def test_reports_without_costs_pass() -> None:
    histories = clean()
    for history in histories.values():
        for each in history:
            del each["lost_rounds"], each["lost_tokens"]
    assert checkers.check(histories) == []


# -- planted ----------------------------------------------------------------------------------------------------------


def two_children(histories: Histories) -> None:
    histories["cleo"][-1].update(lineage="other child", contributions={})


def two_children_one_alone(histories: Histories) -> None:
    histories["cleo"][-1].update(lineage="other child", contributions={}, outcome="alone")


def two_children_one_skipped(histories: Histories) -> None:
    """Cleo holds that round 2 was a MEAN."""
    histories["cleo"][3].update(outcome="committed", lineage="other child", params_hash="other")
    histories["cleo"][4].update(parent="other child", contributions=histories["anna"][3]["contributions"])


def flipped_hash(histories: Histories) -> None:
    histories["bert"][-1]["params_hash"] = "params 5"


def flipped_hash_early(histories: Histories) -> None:
    histories["bert"][0]["params_hash"] = "params 5"


def caught_up_with_other_bits(histories: Histories) -> None:
    histories["bert"][1]["params_hash"] = histories["bert"][2]["params_hash"] = "elsewhere"


def differing_count(histories: Histories) -> None:
    histories["cleo"][-1]["contributions"]["anna"] = ("L2", 3, 4)


def differing_members(histories: Histories) -> None:
    del histories["cleo"][-1]["contributions"]["anna"]


def doubled_contribution(histories: Histories) -> None:
    for history in histories.values():
        history[-1]["contributions"]["anna"] = ("L0", 4, 4)


def doubled_in_part(histories: Histories) -> None:
    """One chunk of what was counted before."""
    for history in histories.values():
        history[-1]["contributions"]["cleo"] = ("L1", 1, 4)


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
    """The skipped round is not counted as one."""
    histories["cleo"][4]["round"] = 2


def broken_chain(histories: Histories) -> None:
    histories["anna"][-1]["parent"] = "another parent"


def jumped_when_superseded(histories: Histories) -> None:
    """Bert goes on from elsewhere than where it says that it went."""
    histories["bert"][1].update(lineage="L1", params_hash="params 1")


def decided_and_did_not_move(histories: Histories) -> None:
    histories["cleo"][3]["lineage"] = "L2"
    histories["cleo"][4]["parent"] = "L2"


def undecided_yet_changed(histories: Histories) -> None:
    """A peer applied a mean that was never decided."""
    histories["cleo"][2]["params_hash"] = histories["cleo"][3]["params_hash"] = "elsewhere"


def undecided_yet_moved(histories: Histories) -> None:
    """The same, and the rest of the chain is made to fit."""
    histories["cleo"][2]["lineage"] = histories["cleo"][3]["parent"] = "elsewhere"


def skipped_yet_changed(histories: Histories) -> None:
    """All apply a mean in a round that they decided to skip."""
    for history in histories.values():
        history[-2]["params_hash"] = "elsewhere"


def superseded_in_place_yet_changed(histories: Histories) -> None:
    histories["cleo"][2].update(outcome="superseded", params_hash="elsewhere")
    histories["cleo"][3]["params_hash"] = "elsewhere"


def too_many_chunks(histories: Histories) -> None:
    for history in histories.values():
        history[-1]["contributions"]["cleo"] = ("L2", 5, 4)


def negative_chunks(histories: Histories) -> None:
    for history in histories.values():
        history[-1]["contributions"]["cleo"] = ("L2", -1, 4)


def costs_without_a_switch(histories: Histories) -> None:
    histories["bert"][1]["lost_rounds"] = 1


def costs_of_a_commit(histories: Histories) -> None:
    histories["anna"][3]["lost_tokens"] = 5


EACH = [(peer, 3) for peer in PEERS]
PLANTED: list[tuple[Callable[[Histories], None], list[tuple[str, str, int]]]] = [
    (two_children, [("one-child", "cleo", 3)]),
    (two_children_one_alone, [("one-child", "cleo", 3)]),
    (two_children_one_skipped, [("one-child", "cleo", 2)]),
    (flipped_hash, [("same-bits", "bert", 3)]),
    (flipped_hash_early, [("same-bits", "bert", 0)]),
    (caught_up_with_other_bits, [("same-bits", "bert", 1), ("same-bits", "bert", 2)]),
    (differing_count, [("same-bits", "cleo", 3)]),
    (differing_members, [("same-bits", "cleo", 3)]),
    (doubled_contribution, [("counted-once", *each) for each in EACH]),
    (doubled_in_part, [("counted-once", *each) for each in EACH]),
    (not_finite, [("finite", "cleo", 2)]),
    (not_finite_undecided, [("finite", "cleo", 2)]),
    (gone_back, [("never-back", peer, 1) for peer in PEERS]),
    (skipped_ahead, [("never-back", "anna", 9)]),
    (stands_still, [("never-back", "cleo", 2)]),
    (broken_chain, [("never-back", "anna", 3)]),
    (jumped_when_superseded, [("never-back", "bert", 2), ("never-back", "bert", 2), ("unmoved", "bert", 2)]),
    (
        decided_and_did_not_move,
        [("one-child", "cleo", 2), ("one-child", "cleo", 3), ("same-bits", "cleo", 2), ("never-back", "cleo", 2)],
    ),
    (undecided_yet_changed, [("same-bits", "cleo", 2)] * 2 + [("unmoved", "cleo", 2)]),
    (undecided_yet_moved, [("unmoved", "cleo", 2)]),
    (skipped_yet_changed, [("unmoved", peer, 2) for peer in PEERS]),
    (superseded_in_place_yet_changed, [("same-bits", "cleo", 2)] * 2 + [("unmoved", "cleo", 2)]),
    (too_many_chunks, [("counted-once", *each) for each in EACH]),
    (negative_chunks, [("counted-once", *each) for each in EACH]),
    (costs_without_a_switch, [("stated", "bert", 1)]),
    (costs_of_a_commit, [("stated", "anna", 3)]),
]


@pytest.mark.parametrize("plant, places", PLANTED, ids=[plant.__name__ for plant, _ in PLANTED])
def test_planted_violation_is_found(plant: Callable[[Histories], None], places: list[tuple[str, str, int]]) -> None:
    histories = clean()
    plant(histories)
    assert found(histories) == places


def test_missing_round_breaks_chain_and_count() -> None:
    histories = clean()
    del histories["anna"][2]
    assert [each for each in found(histories) if each[0] == "never-back"] == [("never-back", "anna", 3)] * 2


# -- planted in what follows a fork -----------------------------------------------------------------------------------


def back_without_a_word(histories: Histories) -> None:
    """Anna goes over to the others and calls it nothing."""
    del histories["anna"][-2]


def cost_understated(histories: Histories) -> None:
    histories["anna"][-2]["lost_rounds"] = 1


def tokens_unstated(histories: Histories) -> None:
    histories["anna"][-2]["lost_tokens"] = 0


def tokens_unstated_of_unknown_weight(histories: Histories) -> None:
    histories["anna"][-3]["weight"] = histories["anna"][-4]["weight"] = None
    tokens_unstated(histories)


def counted_on_her_branch_again(histories: Histories) -> None:
    """What the fork counted is counted again by the round after it."""
    histories["anna"][4]["contributions"] = {"anna": ("L2", 4, 4)}


def counted_by_the_others_again(histories: Histories) -> None:
    """Her lost branch gives her no second go at what the others have counted already."""
    for history in histories.values():
        history[-1]["contributions"] = {**history[-1]["contributions"], "anna": ("L2", 4, 4)}


def not_called_a_fork(histories: Histories) -> None:
    histories["anna"][3]["outcome"] = "alone"


def round_back_on_the_new_branch(histories: Histories) -> None:
    histories["anna"][-1]["round"] = 3


FORKED: list[tuple[Callable[[Histories], None], list[tuple[str, str, int]]]] = [
    (back_without_a_word, [("never-back", "anna", 4)]),
    (cost_understated, [("stated", "anna", 4)]),
    (tokens_unstated, [("stated", "anna", 4)]),
    (tokens_unstated_of_unknown_weight, [("stated", "anna", 4)]),
    (counted_on_her_branch_again, [("counted-once", "anna", 3)]),
    (counted_by_the_others_again, [("counted-once", peer, 4) for peer in PEERS]),
    (not_called_a_fork, [("one-child", "bert", 2), ("one-child", "cleo", 2)]),
    (round_back_on_the_new_branch, [("never-back", "anna", 3)]),
]


@pytest.mark.parametrize("plant, places", FORKED, ids=[plant.__name__ for plant, _ in FORKED])
def test_violation_around_a_fork_is_found(
    plant: Callable[[Histories], None], places: list[tuple[str, str, int]]
) -> None:
    histories = forked()
    plant(histories)
    assert found(histories) == places


def test_peer_left_on_other_branch_is_found() -> None:
    histories = forked()
    del histories["anna"][-2:]
    assert checkers.check(histories) == []
    assert [(each.invariant, each.peer) for each in checkers.one_branch(histories)] == [("one-branch", "anna")]


def test_peer_behind_on_same_branch_passes() -> None:
    histories = clean()
    del histories["bert"][-2:]
    assert list(checkers.one_branch(histories)) == []


@pytest.mark.parametrize("outcome", ["undecided", "superseded"])
def test_undecided_round_is_no_child(outcome: str) -> None:
    histories = clean()
    more = report("anna", 4, outcome=outcome, lineage="L4", contributions={"anna": ("L0", 9, 4)})
    more["params_hash"] = histories["anna"][-1]["params_hash"]
    histories["anna"].append(more)
    assert checkers.check(histories) == []


def test_cyclic_histories_terminate() -> None:
    histories = clean()
    histories["anna"].append(report("anna", 4, lineage="L0"))
    checkers.check(histories)
    assert list(checkers.one_branch(histories)) == []


def test_violation_reports_invariant_peer_and_round() -> None:
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


Change = Callable[[Report, Report], dict[str, Any]]
"""(first report, last report) of a peer -> what to say in the last."""

REAL: dict[str, tuple[set[str], Change]] = {
    "another child": ({"one-child"}, lambda first, last: {"lineage": "ab" * 32, "contributions": {}}),
    "another hash": ({"same-bits"}, lambda first, last: {"params_hash": "00" * 32}),
    "other contributions": ({"same-bits"}, lambda first, last: {"contributions": {}}),
    "one counted before": (
        {"same-bits", "counted-once"},
        lambda first, last: {"contributions": {**last["contributions"], **first["contributions"]}},
    ),
    "not finite": ({"finite"}, lambda first, last: {"finite": False}),
    "a round back": ({"never-back"}, lambda first, last: {"round": last["round"] - 1}),
    "another parent": ({"never-back"}, lambda first, last: {"parent": "cd" * 32}),
    "a skip that moves": ({"same-bits", "unmoved"}, lambda first, last: {"outcome": "skipped", "contributions": {}}),
    "no decision": ({"unmoved"}, lambda first, last: {"outcome": "undecided"}),
}


@pytest.mark.parametrize("invariants, change", REAL.values(), ids=REAL)
def test_real_history_passes_and_modified_one_fails(invariants: set[str], change: Change, real: Histories) -> None:
    assert {len(history) for history in real.values()} == {4}
    assert checkers.check(real) == []
    bent = copy.deepcopy(real)
    first, last = bent["p2"][0], bent["p2"][-1]
    last.update(change(first, last))
    assert {each.invariant for each in checkers.check(bent)} == invariants


def test_checkers_use_only_fields_of_the_report() -> None:
    assert set(report("anna", 0)) <= {field.name for field in fields(RoundReport)}
