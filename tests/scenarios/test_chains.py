"""Chains whose replicas die, lie or cannot reach each other: nothing counts twice, and the driver's upload stays small.

Each story is judged by the checkers of rounds and of microbatches (`PipelineRunner.play`) beside what it asserts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from node.tasks.paced_stage import SIZES
from protocols.base import BadPayload, Buffer, Member, PeerId, Vector
from protocols.pipeline import serving
from protocols.pipeline.job import JobKind, JobResult, Payload, StageJob
from protocols.pipeline.settings import PipelineEvent
from protocols.streams.endpoint import RoundAccounting
from tests.sim.pipeline_runner import PipelineRunner
from tests.sim.scenario_runner import ScenarioSetup
from tests.support.long import long
from tests.support.simulated import simulated

LAYOUT = (0, 0, 1, 1, 2, 2)
CHAINED = ScenarioSetup(6, chains=True)


def lost(run: PipelineRunner, since: float) -> Counter[str]:
    """Why microbatches were abandoned; those at the ends of rounds are left out."""
    whys = Counter(event.why for time, event in run.events if event.kind == "abandoned" and time >= since)
    return Counter({why: count for why, count in whys.items() if "weights have changed" not in why})


def handed(run: PipelineRunner, since: float) -> Counter[tuple[PeerId, PeerId]]:
    return Counter(
        (event.sender.peer, event.replica.peer) for time, event in run.events
        if event.sender and event.kind == "handed" and time >= since
    )  # fmt: skip


@simulated(PipelineRunner, LAYOUT, CHAINED)
async def test_replicas_hand_on_all_inputs(run: PipelineRunner) -> None:
    await run.rounds(2)
    assert set(handed(run, 0.0)) == {(first, second) for first in ("p2", "p3") for second in ("p4", "p5")}
    assert handed(run, 0.0).total() >= run.count("counted", stage=2).total() and not lost(run, 0.0)


@simulated(PipelineRunner, LAYOUT, CHAINED)
async def test_pair_that_cannot_connect_costs_no_microbatch(run: PipelineRunner) -> None:
    """The driver carries what they would pass on to each other; all other pairs hand on."""
    run.network.apart |= {("p2", "p4"), ("p4", "p2")}
    await run.rounds(3)
    pairs = handed(run, 0.0)
    assert ("p2", "p4") not in pairs and pairs["p2", "p5"] and pairs["p3", "p4"]
    assert not lost(run, 0.0) and run.count("counted", stage=2)["p4"] > pairs["p3", "p4"]
    assert all(driver.pairs.has(Member("p2"), Member("p4"), run.now) for driver in run.drivers.values())


def test_replica_without_chains_is_called_in_a_star(monkeypatch: pytest.MonkeyPatch) -> None:
    """An older peer: it serves the method of stars only."""
    monkeypatch.setattr(serving, "ChainServer", lambda *arguments, **options: None)
    run = PipelineRunner(LAYOUT, CHAINED)

    async def story() -> None:
        await run.rounds(2)
        assert run.count("done").total() > 8 and not handed(run, 0.0)
        for driver in run.drivers.values():
            assert driver.way.is_chain and not driver.is_chained

    run.play(story)


def before_its_forward(event: PipelineEvent, peer: PeerId = "p4") -> bool:
    return event.kind == "handed" and event.replica.peer == peer


def after_its_forward(event: PipelineEvent) -> bool:
    return event.kind == "forwarded" and event.replica.peer == "p4"


def after_the_count(event: PipelineEvent) -> bool:
    return event.kind == "counted" and event.stage == 3


@pytest.mark.parametrize("moment", (after_its_forward, *long(before_its_forward, after_the_count)))
@simulated(PipelineRunner, (0, 0, 1, 1, 2, 2, 3), ScenarioSetup(7, chains=True))
async def test_microbatches_of_a_chain_survive_a_killed_replica(
    run: PipelineRunner, moment: Callable[[PipelineEvent], bool]
) -> None:
    """The stage before hands its output to another replica; only what may be counted is abandoned."""
    await run.rounds(1)

    def strike(event: PipelineEvent) -> None:
        if moment(event):
            run.soon(run.kill, "p4")

    run.react(strike)
    await run.until(lambda: "p4" not in run.alive(), 20.0)
    killed_at = run.now
    await run.rounds(2)
    counts = run.count("counted", killed_at + 1.0, 2)
    assert counts["p5"] > 8 and not counts["p4"]
    assert lost(run, killed_at).total() <= 8, "those that it held, of two drivers"


@simulated(PipelineRunner, (0, 1, 2, 2, 3), ScenarioSetup(5, chains=True, batches=1))
async def test_output_is_kept_until_its_gradient_comes(run: PipelineRunner) -> None:
    """A replica that dies with its input, before it has handed anything on, costs time only."""
    await run.rounds(1)
    struck: list[int] = []

    def strike(event: PipelineEvent) -> None:
        if before_its_forward(event, "p2"):
            struck.append(event.number)
            run.soon(run.kill, "p2")

    run.react(strike)
    await run.until(lambda: "p2" not in run.alive(), 60.0)
    killed_at = run.now

    def ended(kind: str) -> bool:
        return any(event.kind == kind and event.number == struck[0] for _, event in run.events)

    await run.until(lambda: ended("done") or ended("abandoned"), 60.0, "its end")
    assert ended("done") and not lost(run, killed_at)


@simulated(PipelineRunner, LAYOUT, CHAINED)
async def test_sender_of_a_bad_hop_is_named_and_no_driver(run: PipelineRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = b"\xff" * SIZES.activation_bytes
    named: dict[str, str] = {}
    monkeypatch.setattr(RoundAccounting, "name", lambda accounting, peer, why: named.setdefault(peer, why))

    def check(data: Buffer, payload: Payload) -> None:
        if bytes(data) == bad:
            raise BadPayload("an activation that is not finite")

    await run.rounds(1)
    monkeypatch.setattr(run, "check_payload", check)
    right = run.work["p2"].compute.run

    def wrong(job: StageJob, outer: Vector | None = None) -> JobResult:
        result = right(job, outer)
        return replace(result, payloads=(bad,)) if job.kind is JobKind.FORWARD else result

    monkeypatch.setattr(run.work["p2"].compute, "run", wrong)
    began = run.now
    await run.rounds(2)
    counts = run.count("counted", began, 1)
    assert counts["p3"] > 8 and set(named) == {"p2"} and "not finite" in named["p2"]
    assert not lost(run, began), "the driver goes on with the other replica"
