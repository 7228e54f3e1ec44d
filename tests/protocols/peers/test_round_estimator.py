"""The estimate of the others' round: a slow peer keeps up with most of them, and one liar moves no peer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from protocols.peers.estimates import WITNESSES, ClaimedRounds
from tests.support.pairwise import PairwiseSwarm


def estimator_of(**claims: int) -> ClaimedRounds:
    estimator = ClaimedRounds()
    for peer, number in claims.items():
        estimator.hear(peer, number)
    return estimator


@pytest.mark.parametrize(
    "claims, others, expected",
    [
        ({}, "", 3),
        ({}, "abc", 3),
        ({"a": 7}, "a", 7),  # the only other peer
        ({"a": 7}, "ab", 3),  # one of them may lie
        ({"a": 10**6, "b": 7}, "ab", 7),
        ({"a": 10**6, "b": 7, "c": 6}, "abc", 7),
        ({"a": 10**6, "b": 10**6, "c": 6, "d": 5}, "abcd", 6),
        ({"a": 9, "b": 2, "c": 2}, "abc", 3),  # the round never goes back
        ({"a": 9, "b": 8}, "", 8),  # they have ended their runs, and left
        ({"a": 9, "b": 1, "c": 1}, "a", 9),  # the others were behind, and died
        ({"a": 9}, "abcdefghijkl", 3),
    ],
)
def test_round_is_the_one_most_heard_peers_report(claims: dict[str, int], others: str, expected: int) -> None:
    assert estimator_of(**claims).round(3, tuple(others)) == expected


def test_latest_report_counts_and_memory_is_bounded() -> None:
    estimator = estimator_of(a=9, b=9)
    estimator.hear("a", 2)
    assert estimator.round(0, ("a", "b")) == 2
    for index in range(WITNESSES):
        estimator.hear(f"p{index}", 4)
    assert estimator.round(0, ()) == 4


def test_slow_peer_joins_the_others_round() -> None:
    """Three peers do six rounds while the fourth does one, which ends in the last of theirs."""
    swarm, sessions = PairwiseSwarm(4), list[Any]()
    swarm.gossips[3].estimator.hear("p0", 10**6)  # a claim that p0 takes back
    opened = swarm.gossips[3].open_round

    def open_round(session: Any) -> None:
        sessions.append(session)
        opened(session)

    swarm.gossips[3].open_round = open_round

    async def play() -> None:
        slow = swarm.start(3, swarm.round(3, 0, train_seconds=12.0))
        await asyncio.wait([*(swarm.start(index, swarm.play_rounds(index, 6)) for index in range(3)), slow])

    swarm.run(play)
    (session,) = sessions
    assert session.round == session.key.round == 5
