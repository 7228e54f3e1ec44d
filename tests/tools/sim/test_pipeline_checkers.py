"""The pipeline's checkers: a clean play passes, and each planted bug is found and named."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from node.tasks.base import Step
from node.tasks.paced_stage import SIZES, PacedStage, WrongWeights
from protocols.aio import raise_when_gone
from protocols.base import Member
from protocols.pipeline import driving
from protocols.pipeline.admission import Lease
from protocols.pipeline.hops import HopReceiver, HopTicket
from protocols.pipeline.job import JobKind, StageJob
from protocols.pipeline.messages import HopInput
from protocols.pipeline.settings import PipelineEvent, PipelineSettings
from protocols.pipeline.stages import StageClock
from tests.sim import world as worlds
from tests.sim.faults import Faults
from tests.sim.pipeline_world import PipelineWorld
from tests.sim.scenario import Scenario
from tests.sim.world import play
from tests.support.pipeline_checkers import check

SCENARIO = Scenario(peers=4, rounds=2, stages=2, batches=2, inner_steps=2, elements=64, codec="fp32", seed=1)
SETTINGS = PipelineSettings(bytes(32), 2, 2, SIZES)
DRIVER, REPLICA, OTHER = Member("p0"), Member("p1"), Member("p3")


def rounds(count: int) -> Callable[[PipelineWorld, str], bool]:
    return lambda self, peer: len(self.histories[peer]) < count


step = PacedStage.step


def double(self: PacedStage, round_number: int, number: int) -> Step:
    done = step(self, round_number, number)
    return Step(done.loss, 2 * done.tokens)


LOOKING_AHEAD = replace(SCENARIO, lookahead=2)


def test_play_with_lookahead_is_clean_and_a_backward_in_later_weights_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """At last as if a replica computed each backward in its present weights."""
    monkeypatch.setattr(PipelineWorld, "goes_on", rounds(2))
    assert not play(LOOKING_AHEAD, PipelineWorld).violations
    monkeypatch.setattr(Lease, "is_stale", property(lambda self: False))
    with pytest.raises(WrongWeights):
        play(LOOKING_AHEAD, PipelineWorld)


valid_ticket = HopReceiver._valid


def latest_ticket(self: HopReceiver, asked: HopInput) -> HopTicket:
    return next(reversed(self._tickets.values()), None) or valid_ticket(self, asked)


@pytest.mark.parametrize("valid, invariants", [(valid_ticket, set()), (latest_ticket, {"hops"})])
def test_play_with_chains_is_clean_and_an_input_of_another_microbatch_is_found(
    valid: Any, invariants: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient goes back where the input came from: no weights are wrong, and only the ids are."""
    monkeypatch.setattr(PipelineWorld, "goes_on", rounds(2))
    monkeypatch.setattr(HopReceiver, "_valid", valid)
    chained = replace(SCENARIO, peers=6, stages=3, batches=4, chains=True)
    found = {violation.invariant for violation in play(chained, PipelineWorld).violations}
    assert found >= invariants and bool(found) == bool(invariants)


@pytest.mark.parametrize(
    "owner, method, wrong, count, invariants",
    [
        (PacedStage, "step", step, 2, set()),
        (PacedStage, "step", double, 1, {"tokens"}),
        (Lease, "end", lambda self: None, 1, {"accounted"}),
        (StageClock, "rounds", lambda self, drivers, now: 2, 3, {"clock"}),
    ],
    ids=["clean", "tokens", "lease-kept", "stage-ahead"],
)
def test_bug_planted_in_a_play_is_found(
    owner: type, method: str, wrong: Any, count: int, invariants: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, method, wrong)
    monkeypatch.setattr(PipelineWorld, "goes_on", rounds(count))
    found = {violation.invariant for violation in play(SCENARIO, PipelineWorld).violations}
    assert found >= invariants and bool(found) == bool(invariants)


def test_stages_that_do_not_recover_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worlds, "HEALED_SECONDS", 5.0)
    monkeypatch.setattr(PipelineWorld, "whole_rounds", lambda self: 0)
    stalled = replace(SCENARIO, faults=Faults().stall("p0", "p1", at=1, lasts=1), breaking_seconds=3.0)
    assert {violation.invariant for violation in play(stalled, PipelineWorld).violations} == {"progress"}


async def never(members: Any, member: Member, deadline: float) -> None:
    await asyncio.sleep(1e9)


@pytest.mark.parametrize("watch, invariants", [(raise_when_gone, set()), (never, {"calls"})])
def test_call_that_outlives_its_replica_is_found(
    watch: Any, invariants: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driving, "raise_when_gone", watch)
    monkeypatch.setattr(PipelineWorld, "goes_on", rounds(4))
    silent = replace(SCENARIO, faults=Faults().silence(["p1"], ["p0", "p2", "p3"], at=1, heal=14), breaking_seconds=15)
    assert {violation.invariant for violation in play(silent, PipelineWorld).violations} == invariants


def test_backward_at_another_replica_is_found() -> None:
    """At another peer, in another incarnation, and in later weights of the same replica. Those before the last step
    are kept, until they are replaced.
    """
    here = PacedStage(64, 1, 32, "a/0")
    there, later = PacedStage(64, 1, 32, "b/0"), PacedStage(64, 1, 32, "a/1")
    (x,) = here.run(StageJob(JobKind.FORWARD, (b"batch",))).payloads
    (y,) = here.run(StageJob(JobKind.FORWARD, (x,))).payloads
    (gradient,) = PacedStage(64, 1, 32, "last/0").run(StageJob(JobKind.LOSS, (y, b""))).payloads
    backward = StageJob(JobKind.BACKWARD, (x, gradient))
    assert here.run(backward).payloads
    for other in (there, later):
        with pytest.raises(RuntimeError, match="never gave"):
            other.run(backward)
    stale = replace(backward, stale=True)
    with pytest.raises(RuntimeError, match="never gave"):
        here.run(stale)
    here.step(0, 0)
    with pytest.raises(RuntimeError, match="never gave"):
        here.run(backward)
    assert here.run(stale).payloads
    here.discard()
    with pytest.raises(RuntimeError, match="never gave"):
        here.run(stale)


def event(
    kind: str, stage: int, number: int = 1, replica: Member | None = None, epoch: int = 0, why: str = ""
) -> PipelineEvent:
    return PipelineEvent(kind, DRIVER, number, stage, replica or (REPLICA if stage else DRIVER), epoch, why)


STARTED = (event("granted", 0), event("forwarded", 0), event("granted", 1))
DONE = (*STARTED, event("counted", 1), event("counted", 0), event("done", 0))
PLANTED: dict[str, tuple[str, tuple[PipelineEvent, ...]]] = {
    "counted at two replicas": ("counted-once", (*DONE, event("granted", 1, 1, OTHER), event("counted", 1, 1, OTHER))),
    "counted first in the first stage": ("counted-below", (*STARTED, event("counted", 0))),
    "counted by another replica": ("same-weights", (*STARTED, event("counted", 1, replica=OTHER))),
    "granted in weights that are over": ("same-weights", (event("voided", 1), event("granted", 1))),
    "one microbatch too many": ("full-steps", tuple(event("granted", 1, number) for number in (1, 2, 3))),
    "step that is not full": ("full-steps", (*DONE, event("stepped", 1))),
    "two in a window of one": ("window", (*STARTED, event("granted", 0, 2), event("granted", 0, 3))),
    "done twice": ("accounted", (*DONE, event("done", 0))),
    "done and never started": ("accounted", (event("done", 0),)),
    "abandoned without a reason": ("accounted", (*STARTED, event("abandoned", 0))),
    "without an end": ("accounted", STARTED),
    "call to a lost replica": ("calls", (*STARTED, event("waiting", 1), event("lost", 1), event("answered", 1))),
}


def timed(events: tuple[PipelineEvent, ...]) -> list[tuple[float, PipelineEvent]]:
    return [(2.0 * index, each) for index, each in enumerate(events)]


def begun(number: int, epoch: int) -> tuple[PipelineEvent, ...]:
    return event("granted", 0, number, epoch=epoch), event("forwarded", 0, number, epoch=epoch)


def counted(number: int, at: int, forwarded_at: int) -> tuple[PipelineEvent, ...]:
    """A microbatch whose count in stage 0 is in weights of an epoch; in stage 1 of another."""
    last = event("granted", 1, number, epoch=at), event("counted", 1, number, epoch=at)
    return *last, event("counted", 0, number, epoch=forwarded_at), event("done", 0, number)


def stepped(epoch: int) -> tuple[PipelineEvent, ...]:
    return event("stepped", 0, epoch=epoch), event("stepped", 1, epoch=epoch)


AHEAD = PipelineSettings(bytes(32), 2, 2, SIZES, lookahead=1)
LATE = (
    *(*begun(1, 0), *begun(2, 0), *begun(3, 0), *counted(1, 0, 0), *counted(2, 0, 0), *stepped(0)),
    *(*begun(4, 1), *begun(5, 1), *counted(4, 1, 1)),
)
"""Microbatch 3 was begun in the first step's weights, and is not counted in it."""
PLANTED_AHEAD: dict[str, tuple[str, tuple[PipelineEvent, ...]]] = {
    "counted in weights that are over": (
        "same-weights",
        (*LATE, *counted(5, 1, 1), *stepped(1), *counted(3, 2, 0)),
    ),
    "step before its last stale lease": ("full-steps", (*LATE, *counted(5, 1, 1), *stepped(1))),
    "counted in other weights than forwarded": ("same-weights", (*LATE, *counted(3, 1, 1))),
    "forwarded before the weights were replaced": (
        "same-weights",
        (*begun(1, 0), event("voided", 0), event("counted", 0)),
    ),
    "one microbatch beyond the lookahead": ("full-steps", (*LATE, *begun(6, 1))),
}


def handed(number: int = 1, sender: Member = REPLICA) -> PipelineEvent:
    return replace(event("handed", 2, number, OTHER), sender=sender)


CHAINED = PipelineSettings(bytes(32), 3, 2, SIZES)
HANDED = (*STARTED, event("forwarded", 1), event("granted", 2, 1, OTHER), handed())
PLANTED_CHAINS: dict[str, tuple[str, tuple[PipelineEvent, ...]]] = {
    "handed on before its forward": ("hops", (*STARTED, event("granted", 2, 1, OTHER), handed())),
    "handed on by another replica": ("hops", (*HANDED[:-1], handed(sender=DRIVER))),
    "handed on without a lease": ("hops", (*STARTED, event("forwarded", 1), handed())),
    "handed on twice": ("hops", (*HANDED, handed())),
}


@pytest.mark.parametrize(
    "settings, invariant, events",
    [
        *((SETTINGS, *each) for each in PLANTED.values()),
        *((AHEAD, *each) for each in PLANTED_AHEAD.values()),
        *((CHAINED, *each) for each in PLANTED_CHAINS.values()),
    ],
    ids=(*PLANTED, *PLANTED_AHEAD, *PLANTED_CHAINS),
)
def test_planted_events_are_found(
    settings: PipelineSettings, invariant: str, events: tuple[PipelineEvent, ...]
) -> None:
    found = check(timed(events), settings, [DRIVER])
    assert invariant in {violation.invariant for violation in found}


def test_clean_events_pass() -> None:
    assert not check(timed(DONE), SETTINGS, [DRIVER])
    late = (*LATE, *counted(3, 1, 0), *stepped(1), *counted(5, 2, 1))
    assert not check(timed(late), AHEAD, [DRIVER])
    whole = *HANDED, event("counted", 2, 1, OTHER), event("counted", 1), event("counted", 0), event("done", 0)
    assert not check(timed(whole), CHAINED, [DRIVER])
