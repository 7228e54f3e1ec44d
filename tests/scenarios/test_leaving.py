"""Who leaves says so: the round ends for all at once, with its work, and nobody waits for it in the next."""

from __future__ import annotations

import asyncio

import pytest

from node.outer.outer_loop import FIRST_STEP_SECONDS
from protocols.base import PeerId
from protocols.butterfly.round_call import LEAVER_SECONDS
from protocols.consensus.record import Kind
from tests.sim.leaving_scenario import LeavingScenario, LongRounds

STEP_SECONDS = 0.5
MIDDLE_SECONDS = 2.2
"""Into a round that lasts five."""
PROMPT_SECONDS = 1.5
"""The step that everybody is in, the data phase and the vote."""
ROLES = ("coordinator", "successor", "last")


def leaver(stage: LeavingScenario, role: str) -> PeerId:
    """Who plays this part in the round under way."""
    return stage.coordinator(stage.alive()[0], {"coordinator": 0, "successor": 1, "last": -1}[role])


def parted(stage: LeavingScenario, round_number: int, gone: set[PeerId]) -> None:
    """The round in which these left, and those after it, are as if nothing had happened: but without them."""
    stayed = stage.alive()
    for peer in stayed:
        links = stage.since(peer, round_number)
        assert [link.certificate.ballot for link in links] == [0] * len(links), stage.scene()
        assert [link.record.round for link in links] == list(range(round_number, round_number + len(links)))
        assert all(link.record.averaged for link in links)
        assert {member.peer for member in links[0].record.roster} == set(stayed)
        assert gone <= set(links[0].record.peers)
        reports = {each["round"]: each for each in stage.histories[peer] if each["round"] >= round_number}
        assert all(counted == chunks for _, counted, chunks in reports[round_number]["contributions"].values())
        assert {each["outcome"] for each in reports.values()} <= {"committed", "alone"}
        assert stage.seconds(peer, round_number + 1) <= stage.seconds(peer, round_number - 1) + 0.3
    for peer in gone:
        assert stage.histories[peer][-1]["outcome"] == "committed"
        assert stage.histories[peer][-1]["round"] == round_number


@pytest.mark.parametrize("jitter", (False, True))
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("peers", (2, 3, 4, 5))
@simulated(lambda peers, jitter: LeavingScenario(LongRounds(peers, pace_seconds=STEP_SECONDS, jitter=jitter)))
async def test_leaver_ends_the_round_and_is_not_awaited(stage: LeavingScenario, role: str) -> None:
    await stage.rounds(2)
    await asyncio.sleep(MIDDLE_SECONDS)
    number, goes = stage.head("p0").key.round, leaver(stage, role)
    stage.leave(goes)
    seconds = await stage.gone(goes)
    await stage.rounds(3)
    parted(stage, number, {goes})
    assert seconds <= PROMPT_SECONDS, f"{goes} left round {number} after {seconds:.1f} s"


@pytest.mark.parametrize("peers", (2, 3, 4))
@simulated(lambda peers: LeavingScenario(LongRounds(peers, pace_seconds=STEP_SECONDS), {"p1": 4 * STEP_SECONDS}))
async def test_leaver_without_a_step_is_waited_for(stage: LeavingScenario) -> None:
    """It has asked to leave, and has nothing to bring before; where nobody has, the round is skipped."""
    await stage.rounds(2)
    await asyncio.sleep(0.2)
    number = stage.head("p0").key.round
    stage.leave("p1")
    seconds = await stage.gone("p1")
    await stage.rounds(3)
    record = stage.since("p0", number)[0].record
    assert "p1" not in {member.peer for member in record.roster}
    assert record.averaged or record.kind == Kind.SKIP
    assert set(stage.outcomes("p0")) <= {"committed", "alone", "skipped"}
    assert seconds <= 4 * STEP_SECONDS + LEAVER_SECONDS + PROMPT_SECONDS


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("peers", (2, 3, 4))
@simulated(lambda peers: LeavingScenario(LongRounds(peers, pace_seconds=STEP_SECONDS)))
async def test_leaver_in_first_step_hands_that_step_in(stage: LeavingScenario, role: str) -> None:
    await stage.rounds(2)
    await asyncio.sleep(0.2)
    number, goes = stage.head("p0").key.round, leaver(stage, role)
    stage.leave(goes)
    seconds = await stage.gone(goes)
    await stage.rounds(2)
    last = stage.histories[goes][-1]
    assert (last["round"], last["outcome"]) == (number, "committed") and last["weight"] > 0
    _, counted, chunks = last["contributions"][goes]
    assert counted == chunks > 0
    assert seconds <= STEP_SECONDS + PROMPT_SECONDS


@simulated(LeavingScenario, LongRounds(3, pace_seconds=STEP_SECONDS), {"p1": 60.0})
async def test_leaver_with_slow_step_leaves_without_work(stage: LeavingScenario) -> None:
    await asyncio.sleep(0.2)
    stage.leave("p1")
    began, number = stage.now, stage.head("p0").key.round
    await stage.until(lambda: stage.head("p0").key.round > number, 60.0, "the round that p1 leaves in")
    assert "p1" not in {member.peer for member in stage.since("p0", number)[0].record.roster}
    assert (stage.now - began) <= FIRST_STEP_SECONDS + PROMPT_SECONDS


@pytest.mark.parametrize(("peers", "leavers"), ((3, 2), (4, 2), (4, 3), (5, 2), (5, 3), (5, 4)))
@simulated(lambda peers: LeavingScenario(LongRounds(peers, pace_seconds=STEP_SECONDS)))
async def test_several_peers_leave_in_one_round(stage: LeavingScenario, peers: int, leavers: int) -> None:
    """At different moments, one among them who coordinates; those who stay go on at once."""
    await stage.rounds(2)
    await asyncio.sleep(MIDDLE_SECONDS)
    number, first = stage.head("p0").key.round, stage.coordinator("p0")
    goes = [first, *(peer for peer in stage.peers if peer != first)][:leavers]
    for peer in goes:
        stage.leave(peer)
        await asyncio.sleep(0.1)
    seconds = await stage.gone(*goes)
    await stage.rounds(3)
    parted(stage, number, set(goes))
    assert seconds <= PROMPT_SECONDS


@pytest.mark.parametrize("peers", (1, 2, 3, 4, 5))
@simulated(lambda peers: LeavingScenario(LongRounds(peers, pace_seconds=STEP_SECONDS)))
async def test_all_peers_leave_together_with_same_state(stage: LeavingScenario, peers: int) -> None:
    await stage.rounds(2)
    await asyncio.sleep(MIDDLE_SECONDS)
    stage.leave(*stage.peers)
    assert (await stage.gone(*stage.peers)) <= PROMPT_SECONDS
    last = [stage.histories[peer][-1] for peer in stage.peers]
    assert {each["outcome"] for each in last} == {"committed" if peers > 1 else "alone"}
    assert len({(each["round"], each["lineage"], each["params_hash"]) for each in last}) == 1


@simulated(LeavingScenario, LongRounds(6, founders=4, pace_seconds=STEP_SECONDS))
async def test_sequential_leavers_are_replaced_by_newcomers(stage: LeavingScenario) -> None:

    async def leave() -> None:
        await asyncio.sleep(MIDDLE_SECONDS)
        goes = leaver(stage, "coordinator")
        number = stage.head(goes).key.round
        stage.leave(goes)
        assert await stage.gone(goes) <= PROMPT_SECONDS
        await stage.rounds(1)
        parted(stage, number, {goes})

    await stage.rounds(2)
    for newcomer in ("p4", "p5", None):
        while len(stage.alive()) > 1:
            await leave()
            if newcomer:
                break
        if newcomer:
            stage.begin(newcomer)
            await asyncio.sleep(0.0)
            await stage.until(stage.whole, 20.0, f"{newcomer} in the roster")
            await stage.rounds(2)
    (last,) = stage.alive() or [next(peer for peer in stage.peers if stage.histories[peer][-1]["outcome"] == "alone")]
    assert stage.histories[last][-1]["outcome"] == "alone"


@pytest.mark.parametrize("peers", (2, 3, 4))
def test_leave_during_data_phase_ends_with_that_round(peers: int) -> None:
    """The next roster is not yet proposed, and is without it."""
    cast = LongRounds(peers, pace_seconds=STEP_SECONDS, elements=200_000, chunk_elements=10_000, uplinks=(2e5,) * peers)
    stage = LeavingScenario(cast)

    async def story() -> None:
        await stage.rounds(2)
        number, goes = stage.head("p0").key.round, leaver(stage, "last")
        session = stage.session(goes)
        assert session
        await stage.until(lambda: session.attempt.exchange is not None, 10.0, "the data phase")
        stage.leave(goes)
        await stage.gone(goes)
        await stage.rounds(2)
        parted(stage, number, {goes})

    stage.play(story)


@pytest.mark.parametrize("peers", (2, 3))
@simulated(lambda peers: LeavingScenario(LongRounds(peers, pace_seconds=STEP_SECONDS, fork_peers=0)))
async def test_returning_leaver_joins_as_newcomer(stage: LeavingScenario, peers: int) -> None:
    await stage.rounds(2)
    await asyncio.sleep(MIDDLE_SECONDS)
    stage.leave("p1")
    await stage.gone("p1")
    stage.revive("p1")
    await asyncio.sleep(0.0)
    await stage.until(stage.whole, 15.0, "admission")
    await stage.rounds(2)
    assert stage.network.nodes["p1"].member.incarnation == 1
    assert "p1" in stage.chain("p0").since(stage.head_of("p0", stage.head("p0").key.round - 1))[0].record.peers
    stage.leave("p1")
    await stage.gone("p1")
    await stage.rounds(2)
    assert set(stage.outcomes("p0")) <= {"committed", "alone", "skipped"}
