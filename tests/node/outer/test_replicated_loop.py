"""One outer round, with an averager that follows a script: what moves, what stays, what is reported."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import pytest
import torch

from node.outer.outer_loop import FIRST_ROUND_LIMIT_SECONDS, OuterLoopDeps
from node.outer.replicated_loop import ReplicatedOuterLoop, RoundReport
from node.outer.sgd import OuterSGD
from node.reporting.report import Totals, TrainingDelta
from node.reporting.status import to_json
from node.training.trainer import InlineTrainer
from protocols.base import (
    AveragingResult,
    Contribution,
    Head,
    LocalProgress,
    Member,
    Outcome,
    PeerFault,
    PeerId,
    RoundKey,
    Vector,
)
from protocols.consensus import record as records
from protocols.consensus.record import Kind, Record
from protocols.history.chain import Chain, state_root
from protocols.vectors import root
from protocols.wire import ChunkSpan, Offer, PartDigest, Ready, decode, encode
from tests.sim import loop as simloop
from tests.sim.host import EPOCH, SimClock, SimCompute
from tests.support.fake_rounds import certified
from tests.support.linear_learner import ELEMENTS, STEP, LinearLearner

T = TypeVar("T")

ME, OTHER = Member("anna"), Member("bert", 4)
RUN = b"r" * 32
STEP_SECONDS = 0.5


@dataclass
class Script:
    """What becomes of one round.

    Attributes:
        cut_seconds: when the round is called.
        mean_seconds: what averaging takes.
        average: what the others make of ours, into the mean; the mean of a vote that we are alone in otherwise.
        end: the mean but for its record.
        state_root: of the record, where it is not ours.
    """

    outcome: Outcome = Outcome.COMMITTED
    cut_seconds: float = 2.0
    mean_seconds: float = 1.0
    average: Callable[[Vector, Vector], object] = lambda mine, into: into.copy_(mine)
    end: AveragingResult = field(default_factory=lambda: AveragingResult(Outcome.COMMITTED))
    roster: tuple[Member, ...] = (ME, OTHER)
    kind: Kind = Kind.MEAN
    state_root: bytes | None = None


@dataclass
class Seen:
    """What the averager saw of one round."""

    head: Head
    limit_seconds: float
    offers: list[LocalProgress] = field(default_factory=list)
    mine: Vector = field(default_factory=lambda: torch.empty(0))
    work: LocalProgress | None = None
    closed: bool = False

    @property
    def key(self) -> RoundKey:
        return self.head.key


class Scripted:
    """An `Averager` that does what it is told."""

    me = ME

    def __init__(self, *scripts: Script) -> None:
        self.scripts = list(scripts)
        self.seen: list[Seen] = []

    @asynccontextmanager
    async def enter(self, head: Head, deadline: float) -> AsyncIterator[ScriptedSession]:
        loop = asyncio.get_running_loop()
        seen = Seen(head, deadline - loop.time())
        self.seen.append(seen)
        session = ScriptedSession(self.scripts.pop(0), seen)
        timer = loop.call_later(session.script.cut_seconds, session.cut.set)
        try:
            yield session
        finally:
            timer.cancel()
            seen.closed = True


class ScriptedSession:
    def __init__(self, script: Script, seen: Seen) -> None:
        self.cut = asyncio.Event()
        self.script, self.seen = script, seen

    def waiting_for(self) -> tuple[PeerId, ...]:
        return ()

    def offer(self, work: LocalProgress) -> None:
        self.seen.offers.append(work)

    async def average(self, mine: Sequence[Vector], work: LocalProgress, into: Sequence[Vector]) -> AveragingResult:
        script, seen = self.script, self.seen
        seen.mine, seen.work = mine[0].clone(), work
        await asyncio.sleep(script.mean_seconds)
        into[0].fill_(math.nan)
        if script.outcome not in (Outcome.COMMITTED, Outcome.SKIPPED):
            return replace(script.end, outcome=script.outcome)
        averaged = script.outcome is Outcome.COMMITTED
        if averaged:
            script.average(mine[0], into[0])
        parts = (PartDigest(bytes(32), (ChunkSpan(1, 1),)),) if averaged else ()
        key, root = seen.key, script.state_root or work.state_root
        record = Record(key.lineage, root, key.round, script.kind, bytes(32), parts, script.roster)
        certificate = certified(seen.head, record)
        return replace(script.end, outcome=script.outcome, record=certificate.record, certificate=encode(certificate))


class WatchedTrainer(InlineTrainer):
    """Counts what is written to it."""

    def __init__(self) -> None:
        super().__init__(LinearLearner(), inner_steps=2, step_seconds=STEP_SECONDS)
        self.written: list[Vector] = []

    @property
    def local(self) -> Vector:
        return self.local_training.learner.vectors[0]

    async def write(self, source: Vector, fragment: int = 0, anchor: Vector | None = None, tokens: int = 0) -> None:
        self.written.append(source.clone())
        await super().write(source, fragment, anchor, tokens)


class Peer:
    """A replica over a scripted averager; `rounds` runs all that the script holds."""

    def __init__(
        self, *scripts: Script, roster: tuple[Member, ...] = (ME, OTHER), outer: OuterSGD | None = None
    ) -> None:
        self.averager, self.trainer = Scripted(*scripts), WatchedTrainer()
        self.chain = Chain(RUN, "run", roster, bytes(32))
        self.outer = outer or OuterSGD(0.5, 0.5)
        self.outer_loop = ReplicatedOuterLoop(
            self.chain,
            self.averager,
            self.outer,
            OuterLoopDeps(
                self.trainer, SimCompute(), torch.ones(ELEMENTS), on_progress=lambda *shown: self.on_progress(*shown)
            ),
        )
        self.on_progress: Callable[[str, LocalProgress], None] = lambda phase, work: None

    async def rounds(self) -> list[RoundReport]:
        await self.outer_loop.settle()
        return [await self.outer_loop.run_round(SimClock().wall) for _ in list(self.averager.scripts)]

    @property
    def seen(self) -> list[Seen]:
        return self.averager.seen


def play(main: Coroutine[Any, Any, T]) -> T:
    return simloop.run(main)


def committed(**changes: Any) -> Script:
    return Script(**changes)


def lost(outcome: Outcome = Outcome.UNDECIDED, **changes: Any) -> Script:
    return Script(outcome=outcome, **changes)


def weighed(weight: float, **changes: Any) -> Script:
    """A committed round whose plan gave us this weight."""
    return Script(end=AveragingResult(Outcome.COMMITTED, weights={ME.peer: weight}), **changes)


def skipped(**changes: Any) -> Script:
    return Script(outcome=Outcome.SKIPPED, kind=Kind.SKIP, **changes)


LOST = (Outcome.UNDECIDED, Outcome.SUPERSEDED)


# -- committed --------------------------------------------------------------------------------------------------------


def test_committed_round_applies_the_outer_step() -> None:
    """lr and momentum 1/2: m = Δ, θ -= ½(Δ + ½m); then m = ½m + Δ'."""
    first, second = torch.arange(ELEMENTS) / 4, torch.ones(ELEMENTS)
    peer = Peer(
        committed(average=lambda mine, into: into.copy_(first)),
        committed(average=lambda mine, into: into.copy_(second)),
    )
    play(peer.rounds())
    moment = first / 2 + second
    anchor = 1 - 0.75 * first - 0.5 * (second + moment / 2)
    assert torch.equal(peer.outer_loop.anchor, anchor)
    assert torch.equal(peer.outer_loop.velocity, moment)
    assert torch.equal(peer.trainer.written[0], 1 - 0.75 * first)
    assert torch.equal(peer.trainer.local, anchor), "and the trainer goes on from there"
    assert len(peer.trainer.written) == 2


def test_pseudo_gradient_is_the_change_since_the_anchor() -> None:
    peer = Peer(committed(cut_seconds=2.0), committed(cut_seconds=1.4))
    play(peer.rounds())
    first, second = peer.seen
    assert first.mine.tolist() == [4 * STEP] * ELEMENTS
    assert second.mine.tolist() == [3 * STEP] * ELEMENTS, "the step in progress at the cut is finished"
    assert first.work is not None and second.work is not None
    assert (first.work.tokens, second.work.tokens) == (400, 300)
    assert first.work.norm == pytest.approx(4 * STEP * math.sqrt(ELEMENTS))


def test_round_starts_at_head_and_closes_before_next() -> None:
    peer = Peer(committed(roster=(ME,)), committed(roster=(ME, OTHER)))
    reports = play(peer.rounds())
    first, second = peer.seen
    assert (first.key, first.head.roster) == (RoundKey(RUN, "run", records.genesis(RUN), 0), (ME, OTHER))
    assert (second.key.round, second.key.lineage.hex(), second.head.roster) == (1, reports[0].lineage, (ME,))
    assert first.closed and second.closed
    assert peer.chain.head.key.round == 2 and peer.chain.head.roster == (ME, OTHER)


def test_offers_carry_the_starting_state_root() -> None:
    peer = Peer(committed(), lost(), committed())
    play(peer.rounds())
    first, second, third = ({work.state_root for work in (*seen.offers, seen.work) if work} for seen in peer.seen)
    fresh = state_root(root([torch.ones(ELEMENTS)]), root([torch.zeros(ELEMENTS)]), 0)
    assert first == {fresh} and len(second) == 1 and second == third != first
    held = state_root(root([peer.outer_loop.anchor]), root([peer.outer_loop.velocity]), 2)
    assert peer.chain.head.state_root == held


def test_offers_grow_with_the_work() -> None:
    peer = Peer(committed(cut_seconds=2.0))
    play(peer.rounds())
    offers = [(work.tokens, work.complete) for work in peer.seen[0].offers]
    assert offers == [(0, False), (100, False), (200, True), (300, True), (400, True)]


# -- not decided ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", LOST)
def test_nothing_is_applied_without_a_decision(outcome: Outcome) -> None:
    peer = Peer(lost(outcome), lost(outcome))
    reports = play(peer.rounds())
    assert torch.equal(peer.outer_loop.anchor, torch.ones(ELEMENTS))
    assert not peer.outer_loop.velocity.any() and peer.trainer.written == []
    assert peer.chain.head.key == RoundKey(RUN, "run", records.genesis(RUN), 0) and not peer.chain.records
    assert peer.trainer.local.tolist() == [1 - 8 * STEP] * ELEMENTS, "training goes on from where it stood"
    assert {report.params_hash for report in reports} == {root([torch.ones(ELEMENTS)]).hex()}


@pytest.mark.parametrize("outcome", LOST)
def test_undecided_work_accumulates_until_a_decision(outcome: Outcome) -> None:
    peer = Peer(lost(outcome), lost(outcome), committed(), committed())
    reports = play(peer.rounds())
    assert [seen.work.tokens for seen in peer.seen if seen.work] == [400, 800, 1200, 400]
    assert [float(seen.mine[0]) / STEP for seen in peer.seen] == [4, 8, 12, 4]
    assert [report.round for report in reports] == [0, 0, 0, 1]
    assert peer.seen[1].offers[0].tokens == 400, "what is left over is offered at once"


# -- skipped, forked --------------------------------------------------------------------------------------------------


def test_skip_advances_the_chain_only() -> None:
    peer = Peer(skipped(roster=(ME,)), skipped(), committed(), committed())
    reports = play(peer.rounds())
    assert [report.outcome for report in reports[:2]] == ["skipped", "skipped"]
    assert [report.round for report in reports] == [0, 1, 2, 3]
    assert [after.parent == before.lineage for before, after in itertools.pairwise(reports)] == [True] * 3
    genesis = records.genesis(RUN).hex()
    anchors = [report.anchor_lineage for report in reports]
    assert anchors == [genesis, genesis, genesis, reports[2].lineage], "work is measured from where it was before"
    assert [seen.work.tokens for seen in peer.seen if seen.work] == [400, 600, 1000, 400], "alone, no surplus steps"
    assert peer.seen[1].head.roster == (ME,) and peer.seen[1].offers[0].tokens == 400
    assert len(peer.trainer.written) == 2, "the trainer was not disturbed"
    assert reports[0].params_hash == reports[1].params_hash == root([torch.ones(ELEMENTS)]).hex()
    offered = [{work.state_root for work in (*seen.offers, seen.work) if work} for seen in peer.seen[:3]]
    assert offered == [{state_root(root([torch.ones(10)]), root([torch.zeros(10)]), each)} for each in range(3)]


def test_contributions_are_labelled_with_their_anchor() -> None:
    end = AveragingResult(Outcome.COMMITTED, contributions={"anna": Contribution(4, 4)})
    peer = Peer(committed(), skipped(), Script(end=end))
    first, second, third = play(peer.rounds())
    assert third.contributions == {"anna": (first.lineage, 4, 4)} and second.lineage != first.lineage


def test_skip_without_a_vote_changes_nothing() -> None:
    peer = Peer(Script(outcome=Outcome.UNDECIDED, end=AveragingResult(Outcome.SKIPPED)))
    (report,) = play(peer.rounds())
    assert report.lineage == report.parent


@pytest.mark.parametrize("outcome, moved", [(Outcome.COMMITTED, True), (Outcome.SKIPPED, False)])
def test_fork_is_reported_and_may_carry_a_mean(outcome: Outcome, moved: bool) -> None:
    peer = Peer(Script(outcome=outcome, kind=Kind.FORK, roster=(ME,)), committed())
    fork, alone = play(peer.rounds())
    assert (fork.outcome, alone.outcome) == ("fork", "alone") and fork.lineage != fork.parent == fork.anchor_lineage
    assert (alone.anchor_lineage == fork.lineage) is moved
    assert peer.seen[1].work is not None and peer.seen[1].work.tokens == (200 if moved else 400)


@pytest.mark.parametrize("outcome", [Outcome.COMMITTED, Outcome.SKIPPED])
def test_decided_rounds_keep_their_votes(outcome: Outcome) -> None:
    peer = Peer(Script(outcome=outcome), committed())
    play(peer.rounds())
    links = peer.chain.since(records.genesis(RUN))
    assert [tuple(vote.voter for vote in link.certificate.votes) for link in links] == [(ME, OTHER)] * 2


@pytest.mark.parametrize("outcome", [Outcome.COMMITTED, Outcome.SKIPPED])
def test_decision_from_another_state_is_not_applied(outcome: Outcome) -> None:
    end = AveragingResult(
        Outcome.COMMITTED, contributions={"anna": Contribution(4, 4)}, weights={"anna": 1.0}, bytes_sent=7
    )
    peer = Peer(Script(outcome=outcome, end=end, state_root=b"x" * 32), committed())
    report, after = play(peer.rounds())
    assert (report.outcome, report.peers, report.contributions, report.weight) == ("superseded", (), {}, 0.0)
    assert "not the one that the others hold" in report.blamed["anna"] and report.bytes_sent == 7
    assert report.lineage == report.parent == after.parent and peer.chain.head.key.round == 1
    assert peer.seen[1].work is not None and peer.seen[1].work.tokens == 800, "nothing has moved, until it catches up"


# -- not counted ------------------------------------------------------------------------------------------------------


def test_planned_but_uncounted_work_is_dropped() -> None:
    """The others' mean went the same way: kept, the step would be taken twice."""
    end = AveragingResult(Outcome.COMMITTED, weights={ME.peer: 400.0}, contributions={ME.peer: Contribution(1, 4)})
    peer = Peer(Script(end=end), committed())
    play(peer.rounds())
    assert torch.equal(peer.trainer.written[0], torch.ones(ELEMENTS) - 0.75 * 4 * STEP)
    assert [seen.work.tokens for seen in peer.seen if seen.work] == [400, 400]


def test_work_after_the_call_is_kept() -> None:
    """In the middle of its first step when the round was called: a weight of 0, and then a step."""
    peer = Peer(weighed(0.0), weighed(800.0), committed())
    play(peer.rounds())
    assert torch.equal(peer.trainer.written[0], torch.ones(ELEMENTS) - 0.75 * 4 * STEP - 4 * STEP)
    assert peer.seen[1].offers[0].tokens == 400
    assert peer.seen[1].offers[0].norm == pytest.approx(4 * STEP * math.sqrt(ELEMENTS))
    assert torch.equal(peer.seen[1].mine, torch.full((ELEMENTS,), 8 * STEP))
    assert torch.equal(peer.seen[2].mine, torch.full((ELEMENTS,), 4 * STEP))
    assert [seen.work.tokens for seen in peer.seen if seen.work] == [400, 800, 400]


def test_unplanned_first_step_is_kept() -> None:
    """It had nothing to offer when the round was called, so the plan was made without it."""
    others = {"bert": 400.0}
    peer = Peer(Script(end=AveragingResult(Outcome.COMMITTED, weights=others), cut_seconds=0.2), committed())
    play(peer.rounds())
    assert [work.tokens for work in peer.seen[0].offers] == [0, 100], "the step in progress at the cut is finished"
    assert torch.equal(peer.trainer.written[0], peer.outer_loop.anchor.new_full((ELEMENTS,), 1 - 0.75 * STEP - STEP))
    assert peer.seen[1].offers[0].tokens == 100
    assert peer.seen[1].work is not None and peer.seen[1].work.tokens == 500


@pytest.mark.parametrize("cut_seconds", [0.7, 2.0])
def test_unplanned_work_beyond_one_step_is_dropped(cut_seconds: float) -> None:
    """Cut off, or late by more than a step: the others' mean has gone the same way."""
    peer = Peer(
        Script(end=AveragingResult(Outcome.COMMITTED, weights={"bert": 400.0}), cut_seconds=cut_seconds), committed()
    )
    play(peer.rounds())
    assert peer.seen[1].offers[0].tokens == 0


def test_undecided_leftover_is_not_kept_as_first_step() -> None:
    others = AveragingResult(Outcome.COMMITTED, weights={"bert": 400.0})
    peer = Peer(lost(cut_seconds=0.2), Script(end=others, cut_seconds=0.0), committed())
    play(peer.rounds())
    assert peer.seen[1].offers[0].tokens == 100 and peer.seen[2].offers[0].tokens == 0


def test_partly_counted_first_step_is_dropped() -> None:
    end = AveragingResult(Outcome.COMMITTED, contributions={ME.peer: Contribution(1, 4)})
    peer = Peer(Script(end=end, cut_seconds=0.2), committed())
    play(peer.rounds())
    assert peer.seen[1].offers[0].tokens == 0


def test_kept_work_survives_an_undecided_round() -> None:
    peer = Peer(weighed(0.0), lost(), committed())
    play(peer.rounds())
    assert peer.seen[2].mine.tolist() == [12 * STEP] * ELEMENTS
    assert peer.seen[2].work is not None and peer.seen[2].work.tokens == 1200


def test_peer_without_work_restarts_from_new_anchor() -> None:
    peer = Peer(weighed(0.0, average=lambda mine, into: into.fill_(1.0)))
    peer.trainer.local_training.step = lambda: None  # type: ignore[method-assign]
    play(peer.rounds())
    assert peer.seen[0].work is not None and peer.seen[0].work.tokens == 0
    assert torch.equal(peer.outer_loop.anchor, torch.full((ELEMENTS,), 0.25))
    assert torch.equal(peer.trainer.local, peer.outer_loop.anchor)


# -- diverged ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step_size", [math.nan, math.inf, 1e30, 3e38])
def test_diverged_peer_offers_nothing_and_restarts(step_size: float) -> None:
    """Whatever it offers fits the wire: a coordinator whose own offer does not would spoil everybody's round."""
    peer = Peer(lost(cut_seconds=0.4), committed())
    peer.trainer.local_training.learner.step_size = step_size  # type: ignore[attr-defined]
    asked = peer.trainer.train

    async def recovered(*args: Any) -> LocalProgress:
        if len(peer.seen) == 2:
            peer.trainer.local_training.learner.step_size = STEP  # type: ignore[attr-defined]
        return await asked(*args)

    peer.trainer.train = recovered  # type: ignore[method-assign]
    reports = play(peer.rounds())
    first, second = peer.seen
    for work in (*first.offers, first.work):
        assert work is not None and (work.tokens, work.norm) == (0, 0.0)
        ready = Ready(first.key, Offer(ME, work.tokens, work.norm, 1.0, False, False, 1e6, work.state_root, b""))
        assert decode(encode(ready)) == ready
    assert first.mine.tolist() == [0.0] * ELEMENTS
    assert second.mine.tolist() == [4 * STEP] * ELEMENTS and reports[1].tokens == 400


# -- limits -----------------------------------------------------------------------------------------------------------


def test_time_limit_follows_committed_rounds_only() -> None:
    peer = Peer(
        committed(cut_seconds=10.0, mean_seconds=2.0),
        lost(cut_seconds=100.0, mean_seconds=20.0),
        skipped(cut_seconds=100.0),
        lost(Outcome.SUPERSEDED, cut_seconds=100.0),
        committed(cut_seconds=2.0, mean_seconds=1.0),
        committed(cut_seconds=20.0, mean_seconds=1.0),
        committed(),
    )
    play(peer.rounds())
    limits = [seen.limit_seconds for seen in peer.seen]
    assert limits == pytest.approx([FIRST_ROUND_LIMIT_SECONDS, 120, 120, 120, 120, 60, 210], rel=1e-3)


# -- reports ----------------------------------------------------------------------------------------------------------


def test_committed_round_is_reported_in_full() -> None:
    end = AveragingResult(
        Outcome.COMMITTED,
        contributions={"anna": Contribution(3, 4), "bert": Contribution(4, 4), "cleo": Contribution(0, 4)},
        weights={"anna": 350.0, "bert": 100.0},
        blamed=(PeerFault("cleo", "late"),),
        bytes_sent=11,
        bytes_received=22,
    )
    peer = Peer(Script(end=end, cut_seconds=2.2, mean_seconds=3.0))

    async def main() -> RoundReport:
        await asyncio.sleep(100)
        (report,) = await peer.rounds()
        return report

    report = play(main())
    genesis = records.genesis(RUN).hex()
    assert replace(report, seconds_average=0.0, time=0.0) == RoundReport(
        run=RUN.hex(),
        peer="anna",
        incarnation=0,
        round=0,
        parent=genesis,
        lineage=records.lineage(peer.chain.records[-1]).hex(),
        anchor_lineage=genesis,
        outcome="committed",
        peers=("anna", "bert"),
        contributions={"anna": (genesis, 3, 4), "bert": (genesis, 4, 4), "cleo": (genesis, 0, 4)},
        blamed={"cleo": "late"},
        finite=True,
        weight=350.0,
        tokens=500,
        loss=2.5,
        params_hash=root([peer.outer_loop.anchor]).hex(),
        seconds_train=2.5,
        seconds_wait=0.0,
        seconds_average=0.0,
        bytes_sent=11,
        bytes_received=22,
        time=0.0,
    )
    assert report.seconds_average == pytest.approx(3.0, rel=1e-6)
    assert report.time == pytest.approx(EPOCH + 105.5, abs=1e-3)


def test_unknown_weight_is_reported_as_null() -> None:
    """What was decided was another plan than the one that reached us: it says who is in the mean, not with how much."""
    means = [AveragingResult(Outcome.COMMITTED, contributions={name: Contribution(1, 4)}) for name in ("anna", "bert")]
    counted, not_counted = play(Peer(*(Script(end=mean) for mean in means)).rounds())
    assert math.isnan(counted.weight) and '"weight":null' in to_json(counted)
    assert counted.peers == ("anna",) and not_counted.weight == 0.0


def test_undecided_round_is_reported_in_full() -> None:
    peer = Peer(
        committed(), lost(end=AveragingResult(Outcome.UNDECIDED, blamed=(PeerFault("bert", "lost"),), bytes_sent=5))
    )
    before, report = play(peer.rounds())
    assert (report.outcome, report.round, report.weight, report.peers) == ("undecided", 1, 0.0, ())
    assert report.parent == report.lineage == report.anchor_lineage == before.lineage
    assert report.params_hash == before.params_hash
    assert (report.blamed, report.bytes_sent, report.finite) == ({"bert": "lost"}, 5, True)


@pytest.mark.parametrize("outcome", LOST)
def test_report_names_the_outcome(outcome: Outcome) -> None:
    (report,) = play(Peer(lost(outcome)).rounds())
    assert report.outcome == outcome.value


@pytest.mark.parametrize(
    "roster, outcome, expected",
    [
        ((ME,), Outcome.COMMITTED, "alone"),
        ((ME, OTHER), Outcome.COMMITTED, "committed"),
        ((Member("anna", 1),), Outcome.COMMITTED, "committed"),
        ((ME,), Outcome.UNDECIDED, "undecided"),
    ],
)
def test_single_member_commit_is_reported_as_alone(roster: tuple[Member, ...], outcome: Outcome, expected: str) -> None:
    (report,) = play(Peer(Script(outcome=outcome), roster=roster).rounds())
    assert report.outcome == expected


@pytest.mark.parametrize("bad", [math.nan, math.inf, 3e38])
def test_non_finite_parameters_are_reported(bad: float) -> None:
    def spoil(mine: Vector, into: Vector) -> None:
        into.copy_(mine)[7] = bad

    reports = play(Peer(committed(), committed(average=spoil), outer=OuterSGD(1.5, 0.9)).rounds())
    assert [report.finite for report in reports] == [True, False]


def test_wait_time_excludes_training_time() -> None:
    peer = Peer(committed(cut_seconds=2.0))
    train = peer.trainer.train

    async def slow_to_start(*args: Any) -> LocalProgress:
        await asyncio.sleep(1.25)
        return await train(*args)

    peer.trainer.train = slow_to_start  # type: ignore[method-assign]
    (report,) = play(peer.rounds())
    assert (report.seconds_train, report.seconds_wait) == (pytest.approx(1.0), pytest.approx(1.25))


ONE_BY_ONE = [
    pytest.param([committed(), committed()], id="committed"),
    pytest.param([lost(), lost(Outcome.SUPERSEDED), skipped(), committed(), committed()], id="told again"),
    pytest.param([weighed(0.0), lost(), weighed(800.0), committed()], id="late"),
    pytest.param([lost(), weighed(0.0), weighed(0.0), skipped(), committed()], id="late again and again"),
]


@pytest.mark.parametrize("scripts", ONE_BY_ONE)
def test_reports_sum_to_the_work_trained(scripts: list[Script]) -> None:
    """Whatever became of the rounds: four steps of 100 tokens and half a second in each, told once."""
    peer, totals = Peer(*(replace(script) for script in scripts)), Totals()
    shown: list[tuple[int, float]] = []
    peer.on_progress = lambda phase, work: shown.append((work.tokens, work.seconds))
    reports = play(peer.rounds())
    for report in reports:
        totals.add(report)
        assert (report.tokens, report.seconds_train) == (400, pytest.approx(2.0))
    assert (totals.tokens, totals.seconds_train) == (400 * len(reports), pytest.approx(2.0 * len(reports)))
    assert max(shown) == (400, pytest.approx(2.0)), "nor is more shown while a round goes on"


def test_work_of_dead_worker_is_counted_once() -> None:
    """The next has nothing, or what was carried over; neither is less than nothing, nor told twice."""
    trained = TrainingDelta()
    for tokens, seconds, carried in ((0, 0.0, 0), (300, 3.0, 0), (0, 0.0, 0), (40, 1.0, 0)):
        trained.hear(LocalProgress(tokens, 1.0, seconds, 1.0, carried=carried))
    assert trained.take() == (340, 4.0)
    for tokens, seconds, carried in ((40, 1.0, 0), (0, 0.0, 0), (40, 0.0, 40), (90, 1.5, 40)):
        trained.hear(LocalProgress(tokens, 1.0, seconds, 1.0, carried=carried))
    assert trained.take() == (50, 1.5)


def test_trainer_failure_propagates_and_closes_the_round() -> None:
    peer = Peer(committed())

    async def failing(*_: Any) -> LocalProgress:
        raise LookupError("the trainer's own")

    peer.trainer.train = failing  # type: ignore[method-assign]
    with pytest.raises(LookupError, match="the trainer's own"):
        play(peer.rounds())
    assert peer.seen[0].closed and peer.chain.head.key.round == 0
