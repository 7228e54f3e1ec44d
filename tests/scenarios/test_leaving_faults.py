"""What may go wrong with those who leave: they die on the way or fall silent."""

from __future__ import annotations

import asyncio
from itertools import product

import pytest

from protocols.base import PeerId
from protocols.consensus.record import Kind
from tests.sim.scenario_runner import MIDDLE_SECONDS, ScenarioRunner, leaving_swarm
from tests.support.long import diagonal, long
from tests.support.simulated import simulated

FINISH_SECONDS = 7.0
"""After which a peer gives up leaving in good order (`node.session.peer_session`)."""


def others(swarm: ScenarioRunner, peer: PeerId) -> list[PeerId]:
    return [each for each in swarm.peers if each != peer]


# -- dying on the way -------------------------------------------------------------------------------------------------


def leave_and_die(peers: int, role: int, at: int | None) -> tuple[int, float, list[str]]:
    """A peer leaves, and is killed at its n-th message of that round.

    Returns:
        How many messages it came to, how long the others took for that round and one more, what those came to.
    """
    fork_peers = 1 if peers == 2 else 0
    swarm = leaving_swarm(peers, elements=24 * peers, chunk_elements=12, fork_peers=fork_peers)
    goes, count = "", 0

    def watch(peer: PeerId, number: int, way: str, other: PeerId) -> None:
        nonlocal count
        count += peer == goes and swarm.network.nodes[peer].process.alive
        if peer == goes and count == at:
            swarm.kill(goes)

    async def story() -> tuple[float, list[str]]:
        nonlocal goes
        await swarm.rounds(1)
        goes = swarm.coordinator("p0", role)
        began, rest = swarm.now, others(swarm, goes)
        swarm.network.watch = watch
        await asyncio.sleep(MIDDLE_SECONDS)
        if goes in swarm.alive():
            swarm.leave(goes)
        seconds = await swarm.rounds(2, rest, 60.0) + MIDDLE_SECONDS
        assert goes not in swarm.alive()
        assert all({member.peer for member in swarm.head(peer).roster} == set(rest) for peer in rest)
        return seconds, [outcome for peer in rest for outcome in swarm.outcomes(peer, began)]

    seconds, outcomes = swarm.play(story)
    return count, seconds, outcomes


@pytest.mark.parametrize(("peers", "role", "every"), ((2, 0, 6), (3, 1, 12), *long(*product((2, 3), (0, 1), (3,)))))
def test_leaver_death_at_any_message_spares_the_others(peers: int, role: int, every: int) -> None:
    """With a majority they decide, every time. Of two, the one who is left forks, unless it was let go before."""
    messages, undisturbed, _ = leave_and_die(peers, role, None)
    assert messages > 20
    ways, slowest = set[str](), 0.0
    for at in range(1 + role % every, messages + 1, every):
        _, seconds, outcomes = leave_and_die(peers, role, at)
        ways.update(outcomes)
        slowest = max(slowest, seconds)
    assert ways <= ({"committed", "alone", "fork"} if peers == 2 else {"committed"})
    assert slowest <= undisturbed + 15.0


# -- falling silent ---------------------------------------------------------------------------------------------------


@diagonal("peers, after_seconds, role", (3, 4, 5), (0.0, 0.03, 0.6), (0, 1, -1))
@simulated(leaving_swarm, fork_peers=0)
async def test_silenced_leaver_delays_like_any_other_peer(
    swarm: ScenarioRunner, after_seconds: float, role: int
) -> None:
    await swarm.rounds(2)
    await asyncio.sleep(MIDDLE_SECONDS)
    goes = swarm.coordinator("p0", role)
    rest, began = others(swarm, goes), swarm.now
    swarm.leave(goes)
    await asyncio.sleep(after_seconds)
    swarm.silence(goes)
    seconds = await swarm.rounds(1, rest)
    await asyncio.sleep(max(0.0, FINISH_SECONDS - seconds))
    if goes in swarm.alive():
        swarm.kill(goes)
    await swarm.rounds(2, rest)
    assert all({member.peer for member in swarm.head(peer).roster} == set(rest) for peer in rest)
    assert {outcome for peer in rest for outcome in swarm.outcomes(peer, began)} == {"committed"}
    assert seconds <= 10.0


@pytest.mark.parametrize("fork_peers", (0, 1))
@pytest.mark.parametrize("leaving", (False, True))
@simulated(lambda fork_peers: leaving_swarm(2, fork_peers=fork_peers))
async def test_silent_member_of_two_is_not_evicted(swarm: ScenarioRunner, leaving: bool, fork_peers: int) -> None:
    """Whether the one who is left wants to leave or to stay: no record without the other's vote, only a fork."""
    await swarm.rounds(2)
    parent = swarm.head("p0").key.lineage
    swarm.silence("p1")
    if leaving:
        await asyncio.sleep(MIDDLE_SECONDS)
        swarm.leave("p0")
    await asyncio.sleep(30.0)
    kinds = [link.record.kind for link in swarm.chain("p0").since(parent)[:1]]
    assert kinds == ([Kind.FORK] if fork_peers else [])
