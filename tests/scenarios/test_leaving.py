"""A leaver announces it: the round ends at once with its contribution, and no peer waits for it in the next."""

from __future__ import annotations

import asyncio

import pytest

from node.outer.outer_loop import FIRST_STEP_SECONDS
from protocols.base import PeerId
from protocols.butterfly.call import LEAVER_SECONDS
from protocols.consensus.record import Kind
from tests.sim.scenario_runner import MIDDLE_SECONDS, STEP_SECONDS, ScenarioRunner, leaving_swarm
from tests.support.long import diagonal, long
from tests.support.simulated import simulated

PROMPT_SECONDS = 1.5
"""The step that everybody is in, the data phase and the vote."""
ROLES = ("coordinator", "successor", "last")


def leaver(swarm: ScenarioRunner, role: str) -> PeerId:
    """Who plays this part in the round under way."""
    return swarm.coordinator(swarm.alive()[0], {"coordinator": 0, "successor": 1, "last": -1}[role])


def parted(swarm: ScenarioRunner, round_number: int, gone: set[PeerId]) -> None:
    """The round in which these left, and those after it, are as if nothing had happened: but without them."""
    stayed = swarm.alive()
    for peer in stayed:
        links = swarm.since(peer, round_number)
        assert [link.certificate.ballot for link in links] == [0] * len(links), swarm.scene()
        assert [link.record.round for link in links] == list(range(round_number, round_number + len(links)))
        assert all(link.record.averaged for link in links)
        assert {member.peer for member in links[0].record.roster} == set(stayed)
        assert gone <= set(links[0].record.peers)
        reports = {each["round"]: each for each in swarm.histories[peer] if each["round"] >= round_number}
        assert all(counted == chunks for _, counted, chunks in reports[round_number]["contributions"].values())
        assert {each["outcome"] for each in reports.values()} <= {"committed", "alone"}
        assert swarm.round_seconds(peer, round_number + 1) <= swarm.round_seconds(peer, round_number - 1) + 0.3
    for peer in gone:
        assert swarm.histories[peer][-1]["outcome"] == "committed"
        assert swarm.histories[peer][-1]["round"] == round_number


@diagonal("peers, role, jitter", (2, 3, 4, 5), ROLES, (False, True))
@simulated(lambda peers, jitter: leaving_swarm(peers, jitter=jitter))
async def test_leaver_ends_the_round_and_is_not_awaited(swarm: ScenarioRunner, role: str) -> None:
    await swarm.rounds(2)
    await asyncio.sleep(MIDDLE_SECONDS)
    number, goes = swarm.head("p0").key.round, leaver(swarm, role)
    swarm.leave(goes)
    seconds = await swarm.gone(goes)
    await swarm.rounds(3)
    parted(swarm, number, {goes})
    assert seconds <= PROMPT_SECONDS, f"{goes} left round {number} after {seconds:.1f} s"


@pytest.mark.parametrize("peers", (2, 3, *long(4)))
@simulated(lambda peers: leaving_swarm(peers, slow={"p1": 4 * STEP_SECONDS}))
async def test_leaver_without_a_step_is_waited_for(swarm: ScenarioRunner) -> None:
    """The leaver has no complete step when it asks to leave. If no peer has a complete step, the round is skipped."""
    await swarm.rounds(2)
    await asyncio.sleep(0.2)
    number = swarm.head("p0").key.round
    swarm.leave("p1")
    seconds = await swarm.gone("p1")
    await swarm.rounds(3)
    record = swarm.since("p0", number)[0].record
    assert "p1" not in {member.peer for member in record.roster}
    assert record.averaged or record.kind == Kind.SKIP
    assert set(swarm.outcomes("p0")) <= {"committed", "alone", "skipped"}
    assert seconds <= 4 * STEP_SECONDS + LEAVER_SECONDS + PROMPT_SECONDS


@diagonal("peers, role", (2, 3, 4), ROLES)
@simulated(leaving_swarm)
async def test_leaver_in_first_step_hands_that_step_in(swarm: ScenarioRunner, role: str) -> None:
    await swarm.rounds(2)
    await asyncio.sleep(0.2)
    number, goes = swarm.head("p0").key.round, leaver(swarm, role)
    swarm.leave(goes)
    seconds = await swarm.gone(goes)
    await swarm.rounds(2)
    last = swarm.histories[goes][-1]
    assert (last["round"], last["outcome"]) == (number, "committed") and last["weight"] > 0
    _, counted, chunks = last["contributions"][goes]
    assert counted == chunks > 0
    assert seconds <= STEP_SECONDS + PROMPT_SECONDS


@simulated(leaving_swarm, 3, slow={"p1": 60.0})
async def test_leaver_with_slow_step_leaves_without_work(swarm: ScenarioRunner) -> None:
    await asyncio.sleep(0.2)
    swarm.leave("p1")
    began, number = swarm.now, swarm.head("p0").key.round
    await swarm.until(lambda: swarm.head("p0").key.round > number, 60.0, "the round that p1 leaves in")
    assert "p1" not in {member.peer for member in swarm.since("p0", number)[0].record.roster}
    assert swarm.now - began <= FIRST_STEP_SECONDS + PROMPT_SECONDS


@pytest.mark.parametrize(("peers", "leavers"), ((3, 2), (5, 3), *long((4, 2), (4, 3), (5, 2), (5, 4))))
@simulated(leaving_swarm)
async def test_several_peers_leave_in_one_round(swarm: ScenarioRunner, peers: int, leavers: int) -> None:
    """At different moments, one among them who coordinates; those who stay go on at once."""
    await swarm.rounds(2)
    await asyncio.sleep(MIDDLE_SECONDS)
    number, first = swarm.head("p0").key.round, swarm.coordinator("p0")
    goes = [first, *(peer for peer in swarm.peers if peer != first)][:leavers]
    for peer in goes:
        swarm.leave(peer)
        await asyncio.sleep(0.1)
    seconds = await swarm.gone(*goes)
    await swarm.rounds(3)
    parted(swarm, number, set(goes))
    assert seconds <= PROMPT_SECONDS


@pytest.mark.parametrize("peers", (1, 3, *long(2, 4, 5)))
@simulated(leaving_swarm)
async def test_all_peers_leave_together_with_same_state(swarm: ScenarioRunner, peers: int) -> None:
    await swarm.rounds(2)
    await asyncio.sleep(MIDDLE_SECONDS)
    swarm.leave(*swarm.peers)
    assert await swarm.gone(*swarm.peers) <= PROMPT_SECONDS
    last = [swarm.histories[peer][-1] for peer in swarm.peers]
    assert {each["outcome"] for each in last} == {"committed" if peers > 1 else "alone"}
    assert len({(each["round"], each["lineage"], each["params_hash"]) for each in last}) == 1


@pytest.mark.parametrize("peers", (2, 3, *long(4)))
@simulated(lambda peers: leaving_swarm(peers, elements=200_000, chunk_elements=10_000, uplinks=(2e5,) * peers))
async def test_leave_during_data_phase_ends_with_that_round(swarm: ScenarioRunner) -> None:
    """The next roster is not yet proposed, and does not name the leaver."""
    await swarm.rounds(2)
    number, goes = swarm.head("p0").key.round, leaver(swarm, "last")
    session = swarm.session(goes)
    assert session
    await swarm.until(lambda: session.exchange is not None, 10.0, "the data phase")
    swarm.leave(goes)
    await swarm.gone(goes)
    await swarm.rounds(2)
    parted(swarm, number, {goes})


@pytest.mark.parametrize("peers", (2, 3))
@simulated(leaving_swarm, fork_peers=0)
async def test_returning_leaver_joins_as_newcomer(swarm: ScenarioRunner) -> None:
    await swarm.rounds(2)
    await asyncio.sleep(MIDDLE_SECONDS)
    swarm.leave("p1")
    await swarm.gone("p1")
    await swarm.revived("p1")
    await swarm.until(swarm.whole, 15.0, "admission")
    await swarm.rounds(2)
    assert swarm.network.nodes["p1"].member.incarnation == 1
    assert "p1" in swarm.chain("p0").since(swarm.head_of("p0", swarm.head("p0").key.round - 1))[0].record.peers
    swarm.leave("p1")
    await swarm.gone("p1")
    await swarm.rounds(2)
    assert set(swarm.outcomes("p0")) <= {"committed", "alone", "skipped"}
