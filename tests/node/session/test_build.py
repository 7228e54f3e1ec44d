"""When a run in stages has begun for a peer, so that the stages of first members are final, and whom peers watch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from node.session.build import SessionBuilder
from protocols.base import Member
from protocols.consensus.record import genesis

RUN, SCOPE = b"r" * 32, "run/stage/2/1"


def has_begun(past: list[tuple[str, tuple[str, ...]]], anchor: bytes) -> bool:
    chain = SimpleNamespace(head=SimpleNamespace(anchor=anchor))
    key = SimpleNamespace(run=RUN, scope=SCOPE)
    builder: Any = SimpleNamespace(_start=SimpleNamespace(chain=chain), _key=key)
    reports: Any = [SimpleNamespace(outcome=outcome, peers=peers) for outcome, peers in past]
    return SessionBuilder.has_begun(cast(SessionBuilder, builder), reports)()


@pytest.mark.parametrize(
    ("past", "begun"),
    [
        ([("fork", ()), ("skipped", ()), ("undecided", ("a",))], False),
        ([("skipped", ()), ("alone", ("a",))], True),
        ([("fork", ("a", "b"))], True),
    ],
)
def test_run_has_begun_once_a_mean_is_decided(past: list[tuple[str, tuple[str, ...]]], begun: bool) -> None:
    assert has_begun(past, genesis(RUN, SCOPE)) == begun
    assert has_begun(past, b"a lineage with a mean"), "although its reports are lost"


def test_peers_of_the_clusters_are_watched() -> None:
    roster = (Member("a"), Member("b"))
    builder: Any = SimpleNamespace(
        _history=SimpleNamespace(head=SimpleNamespace(roster=roster)),
        _peer=SimpleNamespace(me=Member("me")),
        _ties=lambda: ("lead", "mate"),
    )
    role = SessionBuilder._role(cast(SessionBuilder, builder), None, [])
    assert [group.peers for group in role.groups] == [("lead", "mate"), ("a", "b")]
