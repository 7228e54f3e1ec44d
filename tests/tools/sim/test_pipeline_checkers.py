"""The pipeline's checkers: a clean play passes, and each planted bug is found and named."""

from __future__ import annotations

import pytest

from node.tasks.paced_stage import PacedStage
from node.training.trainer import Step
from protocols.base import Member
from protocols.pipeline.admission import Lease, LeaseState, StepAdmission
from protocols.pipeline.settings import PipelineEvent, PipelineSettings
from protocols.pipeline.stages import StageClock
from tests.sim.pipeline_world import PipelineWorld
from tests.sim.scenario import Scenario
from tests.sim.world import Outcome, play
from tests.support.pipeline_checkers import check

SCENARIO = Scenario(peers=4, rounds=2, stages=2, batches=2, inner_steps=2, elements=64, codec="fp32", seed=1)
SETTINGS = PipelineSettings(bytes(32), 2, 2, 256, 32)
DRIVER, REPLICA = Member("p0"), Member("p1")


def violations(outcome: Outcome) -> set[str]:
    return {violation.invariant for violation in outcome.violations}


def test_clean_play_passes_and_is_deterministic() -> None:
    first, second = play(SCENARIO, PipelineWorld), play(SCENARIO, PipelineWorld)
    assert not first.violations and first.rounds_did == 4
    assert list(first.trace.lines) == list(second.trace.lines)


def test_step_of_too_few_microbatches_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepAdmission, "is_full", property(lambda self: len(self.counted) >= self.batches - 1))
    assert "full-steps" in violations(play(SCENARIO, PipelineWorld))


def test_grant_beyond_the_batches_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def may_grant(self: StepAdmission, driver: Member, drivers: int, now: float) -> bool:
        return self.is_open and self.leased < self.batches

    monkeypatch.setattr(StepAdmission, "may_grant", may_grant)
    assert "full-steps" in violations(play(SCENARIO, PipelineWorld))


def test_lease_that_is_never_freed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lease, "end", lambda self: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PipelineWorld, "goes_on", lambda self, peer: len(self.histories[peer]) < 1)
        assert "accounted" in violations(play(SCENARIO, PipelineWorld))


def test_tokens_that_were_not_trained_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    step = PacedStage.step

    def double(self: PacedStage, round_number: int, number: int) -> Step:
        done = step(self, round_number, number)
        return Step(done.loss, 2 * done.tokens)

    monkeypatch.setattr(PacedStage, "step", double)
    assert "tokens" in violations(play(SCENARIO, PipelineWorld))


def test_stage_that_runs_ahead_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StageClock, "rounds", lambda self, drivers, now: 2)
    monkeypatch.setattr(PipelineWorld, "goes_on", lambda self, peer: len(self.histories[peer]) < 3)
    assert "clock" in violations(play(SCENARIO, PipelineWorld))


def test_count_in_other_weights_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def revive(self: Lease) -> bool:
        self.state = LeaseState.COMPUTING
        return True

    def step_early(self: StepAdmission) -> bool:
        return len(self.counted) >= 1  # the other lease is void then

    monkeypatch.setattr(Lease, "begin_backward", revive)
    monkeypatch.setattr(StepAdmission, "is_full", property(step_early))
    with pytest.raises(RuntimeError, match="never gave"):
        play(SCENARIO, PipelineWorld)


def test_backward_at_another_replica_is_found() -> None:
    """At another peer, in another incarnation, and in later weights of the same replica."""
    here = PacedStage(64, 1, 32, Member("a"))
    there, later = PacedStage(64, 1, 32, Member("b")), PacedStage(64, 1, 32, Member("a", 1))
    x = here.forward(b"batch")
    gradient = PacedStage(64, 1, 32, Member("last")).loss(here.forward(x), b"")[1]
    assert here.backward(x, gradient)
    for other in (there, later):
        with pytest.raises(RuntimeError, match="never gave"):
            other.backward(x, gradient)
    here.step(0, 0)
    with pytest.raises(RuntimeError, match="never gave"):
        here.backward(x, gradient)


def event(kind: str, stage: int, number: int = 1, replica: Member | None = None, epoch: int = 0) -> PipelineEvent:
    replica = replica or (REPLICA if stage else DRIVER)
    return PipelineEvent(kind, DRIVER, number, stage, replica, epoch, "why" if kind == "abandoned" else "")


STARTED = (event("granted", 0), event("granted", 1))
DONE = (*STARTED, event("counted", 1), event("counted", 0), event("done", 0))
PLANTED = {
    "counted-once": (*DONE, event("granted", 1, 1, Member("p3")), event("counted", 1, 1, Member("p3"))),
    "counted-below": (*STARTED, event("counted", 0)),
    "same-weights": (*STARTED, event("counted", 1, replica=Member("p3"))),
    "accounted": (*DONE, event("done", 0)),
    "window": (*STARTED, event("granted", 0, 2), event("granted", 0, 3)),
}


@pytest.mark.parametrize("invariant", PLANTED)
def test_planted_events_are_found(invariant: str) -> None:
    events = [(0.0, each) for each in PLANTED[invariant]]
    assert invariant in {violation.invariant for violation in check(events, SETTINGS)}


def test_clean_events_pass() -> None:
    assert not check([(0.0, each) for each in DONE], SETTINGS, [DRIVER])
    (open_,) = check([(0.0, each) for each in STARTED], SETTINGS, [DRIVER])
    assert open_.invariant == "accounted", "a microbatch without an end"
