"""Members that rest or are away: nobody waits for them, no round is called early, and their work so far counts."""

from __future__ import annotations

import asyncio
from statistics import median

import pytest

from node.outer.activity import Activity
from node.outer.catch_up import CatchUp
from protocols.base import PeerId
from protocols.consensus.record import Kind
from tests.sim.scenario_runner import INNER_STEPS, MIDDLE_SECONDS, STEP_SECONDS, ScenarioRunner, leaving_swarm
from tests.support.long import long
from tests.support.simulated import simulated

STEP_TOKENS = 256
SLOWER = 1.02


def round_seconds(swarm: ScenarioRunner, peer: PeerId, since: int) -> float:
    """Median length of a peer's rounds from `since` on."""
    rounds = [each["round"] for each in swarm.histories[peer] if each["round"] >= since]
    return median(swarm.round_seconds(peer, number) for number in rounds)


def worked_through(swarm: ScenarioRunner, workers: list[PeerId], since: int) -> None:
    """All rounds from `since` on are means, and every worker took all inner steps in each of them."""
    for peer in workers:
        reports = [each for each in swarm.histories[peer] if each["round"] >= since]
        assert {each["outcome"] for each in reports} <= {"committed", "alone"}, swarm.outcomes(peer)
        assert all(each["tokens"] >= INNER_STEPS * STEP_TOKENS for each in reports)


def pause(swarm: ScenarioRunner, wanted: Activity, *peers: PeerId) -> None:
    for peer in peers:
        swarm.pause(peer, wanted)


def roster(swarm: ScenarioRunner, peer: PeerId = "p0") -> set[PeerId]:
    return {member.peer for member in swarm.head(peer).roster}


@pytest.mark.parametrize(
    ("wanted", "peers", "pausing"),
    (
        (Activity.REST, 4, 3),
        (Activity.AWAY, 2, 1),
        *long((Activity.AWAY, 4, 3), (Activity.REST, 2, 1)),
        *long(*((wanted, *size) for wanted in (Activity.REST, Activity.AWAY) for size in ((4, 1), (8, 3)))),
    ),
)
@simulated(leaving_swarm)
async def test_pausing_members_cost_the_others_nothing(
    swarm: ScenarioRunner, peers: int, pausing: int, wanted: Activity
) -> None:
    """From the middle of a round on, with the coordinator among those that pause."""
    await swarm.rounds(5)
    usual = round_seconds(swarm, "p0", 1)
    await asyncio.sleep(MIDDLE_SECONDS)
    number, first = swarm.head("p0").key.round, swarm.coordinator("p0")
    goes = [first, *(peer for peer in swarm.peers if peer != first)][:pausing]
    stays = [peer for peer in swarm.peers if peer not in goes]
    pause(swarm, wanted, *goes)
    await swarm.rounds(5, stays)
    worked_through(swarm, stays, number)
    assert round_seconds(swarm, stays[0], number) <= SLOWER * usual
    record = swarm.since(stays[0], number)[0].record
    assert set(goes) <= set(record.peers), "the work before the pause does not count"
    if wanted is Activity.AWAY:
        assert {member.peer for member in record.roster} == set(stays)
        assert all(swarm.activities[peer] is Activity.AWAY for peer in goes)
    else:
        assert roster(swarm, stays[0]) == set(swarm.peers)
        assert swarm.outcomes(goes[0]) == ["committed"] * len(swarm.outcomes(goes[0]))
    back = swarm.head(stays[0]).key.round
    pause(swarm, Activity.WORK, *goes)
    await swarm.rounds(3, stays)
    for peer in goes:
        counted = [each["round"] for each in swarm.histories[peer] if each["round"] >= back and peer in each["peers"]]
        assert counted and counted[0] <= back + 2, f"{peer} counts again in {counted}, back since {back}"


@pytest.mark.parametrize("peers", (2, *long(4)))
@simulated(leaving_swarm)
async def test_resume_in_mid_round_goes_on_where_it_stopped(swarm: ScenarioRunner, peers: int) -> None:
    await swarm.rounds(2)
    number = swarm.head("p0").key.round
    await asyncio.sleep(MIDDLE_SECONDS)
    pause(swarm, Activity.REST, "p1")
    await asyncio.sleep(2 * STEP_SECONDS)
    pause(swarm, Activity.WORK, "p1")
    await swarm.rounds(1)
    report = next(each for each in swarm.histories["p1"] if each["round"] == number)
    assert report["tokens"] >= report["weight"] > (INNER_STEPS - 4) * STEP_TOKENS
    worked_through(swarm, [peer for peer in swarm.peers if peer != "p1"], number)


@simulated(leaving_swarm, 4, founders=3)
async def test_run_waits_while_all_rest_but_admits(swarm: ScenarioRunner) -> None:
    """Nobody works: no round is called. A newcomer is let in at once by a round without a mean, and the work stays."""
    await swarm.rounds(2)
    await asyncio.sleep(MIDDLE_SECONDS)
    pause(swarm, Activity.REST, "p0", "p1", "p2")
    number = swarm.head("p0").key.round
    await asyncio.sleep(30.0)
    assert {swarm.head(peer).key.round for peer in swarm.alive()} == {number}
    await swarm.begun("p3")
    assert await swarm.until(lambda: "p3" in roster(swarm), 5.0, "the newcomer") <= 5.0
    assert swarm.since("p0", number)[0].record.kind == Kind.SKIP
    await swarm.rounds(2)
    record = swarm.since("p0", number)[1].record
    assert record.averaged and set(record.peers) == set(swarm.peers), "the work from before the pause is lost"


@simulated(leaving_swarm, 4)
async def test_only_worker_that_died_works_again(swarm: ScenarioRunner) -> None:
    """The others rest, so no member completes its work. The next incarnation is admitted and counted nevertheless."""
    await swarm.rounds(2)
    await asyncio.sleep(MIDDLE_SECONDS)
    *others, last = swarm.peers
    pause(swarm, Activity.REST, *others)
    await asyncio.sleep(2 * STEP_SECONDS)
    await swarm.restarted(last)
    history = swarm.histories[last]
    await swarm.until(lambda: history[-1]["incarnation"] == 1 and history[-1]["weight"] > 0, 20.0, "its work")
    assert history[-1]["outcome"] == "committed" and set(history[-1]["peers"]) == set(swarm.peers)


@pytest.mark.parametrize("first", ("last", "away"))
@simulated(leaving_swarm, 3)
async def test_last_of_a_roster_rests_instead_of_leaving(swarm: ScenarioRunner, first: str) -> None:
    await swarm.rounds(2)
    await asyncio.sleep(MIDDLE_SECONDS)
    pause(swarm, Activity.AWAY, *swarm.peers)
    await asyncio.sleep(20.0)
    gone = [peer for peer in swarm.peers if swarm.activities[peer] is Activity.AWAY]
    (last,) = set(swarm.peers) - set(gone)
    assert roster(swarm, last) == {last} and swarm.activities[last] is Activity.REST
    number = swarm.head(last).key.round
    await asyncio.sleep(30.0)
    assert swarm.head(last).key.round == number, "rounds of nobody"
    back = last if first == "last" else gone[0]
    pause(swarm, Activity.WORK, back)
    await swarm.until(lambda: swarm.head(back).key.round > number + 3, 30.0, "rounds of the first that is back")
    pause(swarm, Activity.WORK, *swarm.peers)
    await swarm.until(swarm.whole, 60.0, "all back")
    await swarm.rounds(2)


@pytest.mark.parametrize("peers", (1, 4))
@simulated(leaving_swarm)
async def test_only_worker_back_before_it_left_trains(swarm: ScenarioRunner, peers: int) -> None:
    """It was told to be away and then to work, in one round that nobody else works in."""
    await swarm.rounds(2)
    await asyncio.sleep(MIDDLE_SECONDS)
    *others, last = swarm.peers
    pause(swarm, Activity.REST, *others)
    pause(swarm, Activity.AWAY, last)
    await asyncio.sleep(5.0)
    number = swarm.head(last).key.round
    pause(swarm, Activity.WORK, last)
    await swarm.until(lambda: swarm.head(last).key.round >= number + 3, 25.0, "three rounds")
    assert swarm.outcomes(last)[-1] in ("alone", "committed")


@simulated(leaving_swarm, 3, founders=2)
async def test_joiner_told_to_be_away_ends_its_catch_up(swarm: ScenarioRunner) -> None:
    await swarm.rounds(2)
    begun, ended = asyncio.Event(), asyncio.Event()
    run = CatchUp.run

    async def endless(*_: object) -> None:
        begun.set()
        try:
            await asyncio.sleep(1000.0)
        finally:
            ended.set()

    CatchUp.run = endless  # type: ignore[assignment, method-assign]
    try:
        await swarm.begun("p2")
        await asyncio.wait_for(begun.wait(), 30.0)
        pause(swarm, Activity.AWAY, "p2")
        await asyncio.wait_for(ended.wait(), 1.0)
        await swarm.until(lambda: swarm.activities["p2"] is Activity.AWAY, 5.0, "the absence")
    finally:
        CatchUp.run = run  # type: ignore[method-assign]
    pause(swarm, Activity.WORK, "p2")
    await swarm.until(swarm.whole, 60.0, "the return")


@pytest.mark.parametrize("wanted", (Activity.AWAY, *long(Activity.REST)))
@simulated(leaving_swarm, 3)
async def test_restarted_peer_pauses_still(swarm: ScenarioRunner, wanted: Activity) -> None:
    await swarm.rounds(2)
    await asyncio.sleep(MIDDLE_SECONDS)
    pause(swarm, wanted, "p1")
    await swarm.rounds(2, ["p0"])
    await swarm.restarted("p1")
    number = swarm.head("p0").key.round
    await swarm.rounds(4, ["p0", "p2"])
    worked_through(swarm, ["p0", "p2"], number + 1)
    since = swarm.now
    assert not any(each["tokens"] for each in swarm.histories["p1"] if each["incarnation"] == 1)
    pause(swarm, Activity.WORK, "p1")
    await swarm.until(swarm.whole, 30.0, "the return")
    await swarm.rounds(1)
    assert any("p1" in each["peers"] for each in swarm.reports("p0", since))
