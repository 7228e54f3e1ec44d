"""Pipelines whose peers die, stall, come and go in the middle of microbatches: training goes on, nothing counts twice.

Each story is judged by the checkers of rounds and of microbatches (`PipelineRunner.play`) beside what it asserts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from node.tasks.paced_stage import SIZES
from node.training.stage_replica import StageSeconds
from protocols.base import BadPayload, Buffer, Vector
from protocols.pipeline.driving import _Lane
from protocols.pipeline.fan_out import FAN_OUT
from protocols.pipeline.job import JobKind, JobResult, Payload, StageJob
from protocols.pipeline.settings import PipelineEvent
from protocols.streams.endpoint import RoundAccounting
from tests.sim.pipeline_runner import PipelineRunner
from tests.sim.scenario_runner import ScenarioSetup
from tests.support.long import long
from tests.support.simulated import simulated

SUSPECTED_SECONDS = 6.0
"""A mute peer is believed dead by then."""


@simulated(PipelineRunner, (0, 0, 1, 1, 2))
async def test_driver_killed_before_its_own_backward_loses_only_its_microbatch(run: PipelineRunner) -> None:
    """The last stage has counted it, the driver has not."""
    await run.rounds(1)

    def strike(event: PipelineEvent) -> None:
        if event.kind == "counted" and event.stage == 2 and event.origin.peer == "p0":
            run.soon(run.kill, "p0")

    run.react(strike)
    await run.until(lambda: "p0" not in run.alive(), 10.0)
    killed_at = run.now
    await run.rounds(2)
    assert run.count("counted", killed_at, 2).total() > 4
    assert all(event.origin.peer != "p0" for time, event in run.events if time > killed_at + 1.0)


def in_forward(event: PipelineEvent, held: int) -> bool:
    return event.kind == "granted" and event.stage == 1


def with_three_leases(event: PipelineEvent, held: int) -> bool:
    return event.kind == "granted" and event.stage == 1 and held == 3


def before_backward(event: PipelineEvent, held: int) -> bool:
    return event.kind == "counted" and event.stage == 2


@pytest.mark.parametrize("moment", (with_three_leases, *long(in_forward, before_backward)))
@simulated(PipelineRunner, (0, 0, 1, 1, 2))
async def test_microbatches_survive_a_killed_replica(
    run: PipelineRunner, moment: Callable[[PipelineEvent, int], bool]
) -> None:
    """Another replica takes over; only microbatches that it held are abandoned."""
    await run.rounds(1)

    def strike(event: PipelineEvent) -> None:
        if moment(event, run.admissions[run.network.nodes["p2"].member].leased) and event.replica.peer in (
            "p2",
            "p4",
        ):
            run.soon(run.kill, "p2")

    run.react(strike)
    await run.until(lambda: "p2" not in run.alive(), 10.0)
    killed_at = run.now
    await run.rounds(2)
    counts = run.count("counted", killed_at, 1)
    assert counts["p3"] > 8 and not counts["p2"]
    assert run.count("abandoned", killed_at).total() <= 8, "those that it held, of two drivers"


@simulated(PipelineRunner, (0, 0, 1, 1))
async def test_stage_without_replicas_stops_the_run_until_they_return(run: PipelineRunner) -> None:
    """The run uses up no rounds, and no peer is asked again and again. Both replicas continue from their disks."""
    await run.rounds(2)
    for peer in ("p2", "p3"):
        run.kill(peer)
    await asyncio.sleep(1.0)
    gone_at, before = run.now, run.trained("p0")
    await asyncio.sleep(60.0)
    assert run.trained("p0") <= before + 1, "the round under way may end, no other begins"
    assert run.count("asked", gone_at).total() <= 600
    for peer in ("p2", "p3"):
        run.revive(peer)
    await asyncio.sleep(0.0)
    goal = run.trained("p0") + 2
    await run.until(lambda: all(run.trained(peer) >= goal for peer in run.peers), 120.0, "two more rounds")


@simulated(PipelineRunner, (0, *(1,) * (FAN_OUT + 1)))
async def test_driver_of_many_replicas_uses_eight(run: PipelineRunner) -> None:
    """Another one takes the place of one that dies."""
    await run.rounds(2)
    used = set(run.count("asked"))
    assert len(used) == FAN_OUT
    run.kill(lost := min(used))
    await asyncio.sleep(SUSPECTED_SECONDS)
    since = run.now
    await run.rounds(2, ("p0",))
    now_used = set(run.count("asked", since))
    assert used - now_used == {lost} and len(now_used) == FAN_OUT


@simulated(PipelineRunner, (0, 0, 1, 1))
async def test_mute_replica_gets_no_requests(run: PipelineRunner) -> None:
    await run.rounds(1)
    run.silence("p2")
    await asyncio.sleep(SUSPECTED_SECONDS)
    since = run.now
    await run.rounds(1, ("p0", "p1", "p3"))
    asked = run.count("asked", since)
    assert asked["p3"] > 4 and not asked["p2"]
    run.heal(["p2"], [peer for peer in run.peers if peer != "p2"])
    await run.until(run.whole, 120.0, "a whole swarm")


@pytest.mark.parametrize("at_cut", (True, *long(False)))
@simulated(PipelineRunner, (0, 0, 1, 1), ScenarioSetup(4, inner_steps=10, pace_seconds=1.0))
async def test_lone_replica_trains_on(run: PipelineRunner, at_cut: bool) -> None:
    """It does not wait for its fork, nor drivers for the other, once this one is believed dead."""
    await run.rounds(1)
    await asyncio.sleep(5.0)
    session = run.session("p3")
    assert session
    if at_cut:
        await run.until(session.cut.is_set, 60.0, "a cut")
    run.silence("p2")
    since = run.now
    await asyncio.sleep(20.0)

    def rate(begin: float, end: float) -> float:
        counted = [time for time, event in run.events if event.kind == "counted" and event.stage == 0]
        return sum(begin <= time < end for time in counted) / (end - begin)

    assert rate(since + SUSPECTED_SECONDS, since + 20.0) >= 0.45 * rate(since - 10.0, since)
    await run.rounds(2, ("p3",))
    assert run.forks("p3")
    run.heal(["p2"], [peer for peer in run.peers if peer != "p2"])
    await run.until(run.whole, 120.0, "a whole swarm")


@simulated(PipelineRunner, (0, 0, 0, 0, 1), ScenarioSetup(5, batches=2))
async def test_lone_replica_has_no_rounds_of_its_own(run: PipelineRunner) -> None:
    """A stage of one peer could decide rounds alone: stage 0 is its clock."""
    for _ in range(4):
        await run.rounds(1)
        assert abs(run.trained("p4") - run.trained("p0")) <= 1
    outcomes = set(run.outcomes("p4"))
    assert outcomes == {"alone"}, outcomes


@simulated(PipelineRunner, (0, 0, 1, 1, 1), ScenarioSetup(5, founders=4))
async def test_peers_join_and_leave_in_mid_round(run: PipelineRunner) -> None:
    await run.rounds(1)
    run.begin("p4")
    await asyncio.sleep(0.0)
    await run.until(lambda: run.whole(), 60.0, "the newcomer in its roster")
    since = run.now
    await run.rounds(1)
    assert run.count("counted", since, 1)["p4"], "it serves"
    run.leave("p2")
    await run.until(lambda: all(m.peer != "p2" for m in run.head("p3").roster), 30.0, "a roster without p2")
    left_at = run.now
    await run.rounds(2, ("p0", "p1", "p3", "p4"))
    assert not run.count("counted", left_at + 1.0, 1)["p2"]


@simulated(
    PipelineRunner,
    (0, 0, 1, 1),
    ScenarioSetup(4, elements=8000, chunk_elements=500, uplinks=(1.25e6, 1.25e6, 2000.0, 2000.0)),
)
async def test_stages_average_side_by_side(run: PipelineRunner) -> None:
    """Stage 1 takes long to average: stage 0 waits for it within its round, and neither runs ahead."""
    await run.rounds(3, seconds=1200.0)
    slow = [report["seconds_average"] for report in run.histories["p2"] if report["outcome"] == "committed"]
    assert max(slow) > 4.0
    assert all(report["outcome"] == "committed" for history in run.histories.values() for report in history)


def test_step_longer_than_the_rounds_limit_completes() -> None:
    """What a replica has counted survives rounds that end undecided, since nothing is written then."""
    run = PipelineRunner((0, 0, 1, 1), ScenarioSetup(4, batches=8))

    async def story() -> None:
        await run.rounds(3)
        for work in run.work.values():
            work.seconds = StageSeconds(4.0, 8.0, 0.0)
        await run.rounds(1, seconds=3600.0)

    run.play(story)
    outcomes = {report["outcome"] for history in run.histories.values() for report in history}
    assert "undecided" in outcomes, "its rounds ran into their limit"


def test_two_plays_of_a_pipeline_are_equal() -> None:
    traces = []
    for _ in range(2):
        run = PipelineRunner((0, 0, 1, 1, 2), ScenarioSetup(5, batches=2, jitter=True))

        async def story(run: PipelineRunner = run) -> None:
            await run.rounds(2)
            run.kill("p2")
            await run.rounds(1)

        run.play(story)
        traces.append((list(run.trace.lines), run.events))
    assert traces[0] == traces[1]


async def _leaves_the_others_their_rate(run: PipelineRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    backward = _Lane._backward
    hoarders: set[str] = set()

    async def hoard(self: _Lane, *arguments: Any) -> Any:
        if self._driver.endpoint.me.peer in hoarders:
            await asyncio.sleep(1e6)
        return await backward(self, *arguments)

    async def counted_in(seconds: float) -> int:
        """Microbatches of p1 and p2."""
        since = run.now
        await asyncio.sleep(seconds)
        counts = run.count("counted", since, 0)
        return counts["p1"] + counts["p2"]

    monkeypatch.setattr(_Lane, "_backward", hoard)
    await asyncio.sleep(10.0)
    honest = await counted_in(30.0)
    hoarders.add("p0")
    await asyncio.sleep(40.0)
    # Leases that are kept run out after 10 to 20 s, in which all may wait: a window holds some of these times.
    assert await counted_in(120.0) >= 0.7 * 4 * honest


@pytest.mark.long
@simulated(PipelineRunner, (0, 0, 0, 1, 1, 2), ScenarioSetup(6, batches=8))
async def test_driver_that_keeps_leases_leaves_the_others_their_rate(
    run: PipelineRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes a place for each of its microbatches and never returns one."""
    await _leaves_the_others_their_rate(run, monkeypatch)


@pytest.mark.long
@simulated(PipelineRunner, (0, 0, 0, 1, 1, 2), ScenarioSetup(6, batches=8, lookahead=8))
async def test_driver_that_keeps_leases_holds_up_no_lookahead(
    run: PipelineRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each second step waits for the leases that are kept, until they run out."""
    await _leaves_the_others_their_rate(run, monkeypatch)


@pytest.mark.parametrize("kind", (JobKind.FORWARD, JobKind.BACKWARD))
@simulated(PipelineRunner, (0, 0, 1, 1, 2))
async def test_replica_whose_numbers_are_not_finite_is_named_and_costs_no_other_peer(
    run: PipelineRunner, kind: JobKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its drivers go on with the other replica; no driver is blamed for having passed the numbers on."""
    bad = b"\xff" * SIZES.activation_bytes
    named: dict[str, str] = {}
    monkeypatch.setattr(RoundAccounting, "name", lambda accounting, peer, why: named.setdefault(peer, why))

    def check(data: Buffer, payload: Payload) -> None:
        if bytes(data) == bad:
            raise BadPayload("an activation or gradient that is not finite")

    await run.rounds(1)
    for driver in run.drivers.values():
        driver.check = check
    compute = run.work["p2"].compute
    right = compute.run

    def wrong(job: StageJob, outer: Vector | None = None) -> JobResult:
        result = right(job, outer)
        return replace(result, payloads=(bad,)) if job.kind is kind else result

    monkeypatch.setattr(compute, "run", wrong)
    began = run.now
    await run.rounds(2)
    counts = run.count("counted", began, 1)
    assert counts["p3"] > 8 and set(named) == {"p2"} and "not finite" in named["p2"]
    whys = [event.why for time, event in run.events if event.kind == "abandoned" and time >= began]
    lost = [why for why in whys if "weights have changed" not in why]  # those are of the ends of rounds
    assert len(lost) <= (40 if kind is JobKind.BACKWARD else 0) and len(whys) - len(lost) <= 8
