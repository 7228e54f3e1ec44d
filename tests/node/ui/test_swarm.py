"""The swarm as one peer sees it: what other peers say is bounded, and what this peer saw itself is from its reports."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from typing import Any

import pytest

from node.reporting.status import PeerStatus, parse_as, to_json
from node.reporting.swarm import MAX_SAID, ROUNDS, CountedRounds, SwarmStatus, newer_line, state_words, swarm_status
from tests.support.status_examples import PEER, REPORT, STATUS

HERE, AWAY = PeerStatus("p", "bob", True, True, 4, ""), PeerStatus("q", "cleo", True, False, 4, "", left=True)


def view(said: dict[str, Any], **mine: Any) -> SwarmStatus:
    """Of a peer that trains, one that says this, and one that has left."""
    status = replace(STATUS, **{"state": "training", "peers": (AWAY, HERE), "tokens_per_second": 100.0} | mine)  # type: ignore[arg-type]
    other = replace(STATUS, **{"state": "training", "tokens_per_second": 50.0} | said)  # type: ignore[arg-type]
    counted = CountedRounds()
    for number in range(30):
        counted.add(replace(REPORT, peers=("p", PEER) if number % 2 else ("q",)))
    for outcome in ("undecided", "superseded"):
        counted.add(replace(REPORT, outcome=outcome, peers=("p",)))
    return swarm_status(status, {"p": (other, 7.0), "q": (other, 7.0)}, counted, unreadable={})


def test_rows_hold_what_was_said_and_counted() -> None:
    swarm = view({})
    assert [each.peer for each in swarm.rows] == [PEER, "p", "q"] and (swarm.here, swarm.known) == (2, 3)
    assert swarm.counted_of == ROUNDS and [each.counted for each in swarm.rows] == [10, 10, 10]
    assert [state_words(each) for each in swarm.rows[1:]] == ["training: for the others", "left"]
    assert swarm.tokens_per_second == 150.0, "of those that are here"
    read = parse_as(SwarmStatus, json.loads(to_json(asdict(swarm))), "swarm")
    assert [replace(each, tokens_per_second=0.0) for each in read.rows] == [
        replace(each, tokens_per_second=0.0) for each in swarm.rows
    ]
    staged = view({}, stage=1)
    assert [each.counted for each in staged.rows] == [10, None, None], "the reports are of another stage"
    assert staged.tokens_per_second == 100.0
    behind = view({}, clusters=True)
    assert [each.counted for each in behind.rows] == [10, None, None], "the reports name the own cluster only"
    assert view({}, protocol="gossip").rows[0].counted is None


@pytest.mark.parametrize("state", ["waiting", "paused", "rm -rf ~", "\x1b[2J"])
def test_only_known_states_are_shown_and_only_training_is_summed(state: str) -> None:
    swarm = view({"state": state, "reason": "x" * 500, "tokens_per_second": 1e300, "device": "y" * 500})
    assert swarm.rows[1].state in (state, "") and "\x1b" not in swarm.rows[1].state and "rm" not in swarm.rows[1].state
    assert len(swarm.rows[1].reason) == len(swarm.rows[1].device) == MAX_SAID
    assert swarm.tokens_per_second == 100.0
    for wrong in (math.nan, -5.0):
        assert view({"tokens_per_second": wrong}).tokens_per_second == 100.0


@pytest.mark.parametrize(
    "mine, others, line",
    [
        ("0.2.0", ["0.3.0", "0.3.0", "0.3.0", "0.2.0"], "3 of 4 peers run 0.3.0, this one 0.2.0: U"),
        ("0.2.0+checkout", ["0.10.0+g12", "0.9.1", "junk"], "2 of 3 peers run 0.9.1 or later, this one 0.2.0: U"),
        ("0.2.0", ["0.3.0", "0.3.0", "", ""], ""),
        ("0.3.0", ["0.3.0+g1", "0.2.0"], ""),
        ("0.2.0", ["9.9.9; curl evil", "0.3.0rc1", "1", "99999999.0"], ""),
        ("", ["0.3.0"], ""),
        ("0.2.0", [], ""),
    ],
)
def test_later_versions_are_told_if_most_run_them(mine: str, others: list[str], line: str) -> None:
    assert newer_line(mine, others, "U") == line
