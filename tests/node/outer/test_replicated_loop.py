"""One outer round of replicated state, with an averager that follows a script: what moves, and what stays."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from node.outer.outer_loop import FIRST_ROUND_LIMIT_SECONDS, ROUNDS_LEARNED
from protocols.base import AveragingResult, Contribution, LocalProgress, Member, Outcome, RoundKey
from protocols.consensus import record as records
from protocols.consensus.record import Kind
from protocols.history.chain import state_root
from protocols.vectors.views import root
from protocols.wire import Offer, Ready, decode, encode
from tests.support.inline_trainer import ELEMENTS, STEP
from tests.support.scripted_peers import (
    ME,
    OTHER,
    RUN,
    Peer,
    Script,
    committed,
    lost,
    play,
    play_rounds,
    skipped,
    weighed,
)

UNDECIDED_OUTCOMES = (Outcome.UNDECIDED, Outcome.SUPERSEDED)
DECIDED_OUTCOMES = (Outcome.COMMITTED, Outcome.SKIPPED)
GENESIS = records.genesis(RUN)
FIRST_KEY = RoundKey(RUN, "run", GENESIS, 0)
START = torch.ones(ELEMENTS)
BERT_ONLY = AveragingResult(Outcome.COMMITTED, weights={"bert": 400.0})
ANNA_COUNTED = {"anna": Contribution(4, 4)}
ANNA_IN_PART = {"anna": Contribution(1, 4)}


def start_root(round_number: int) -> bytes:
    """The state root before this round, if no outer step has been taken."""
    return state_root(root([START]), root([torch.zeros(ELEMENTS)]), round_number)


def filled(value: float) -> torch.Tensor:
    return torch.full((ELEMENTS,), value)


# -- committed --------------------------------------------------------------------------------------------------------


def test_committed_round_applies_the_outer_step() -> None:
    """lr and momentum 1/2: m = Δ, θ -= ½(Δ + ½m); then m = ½m + Δ'."""
    first, second = torch.arange(ELEMENTS) / 4, torch.ones(ELEMENTS)
    peer, _ = play_rounds(
        committed(average=lambda mine, into: into.copy_(first)),
        committed(average=lambda mine, into: into.copy_(second)),
    )
    moment = first / 2 + second
    anchor = 1 - 0.75 * first - 0.5 * (second + moment / 2)
    assert torch.equal(peer.outer_loop.anchor, anchor)
    assert torch.equal(peer.outer_loop.state.velocity, moment)
    assert torch.equal(peer.trainer.written[0], 1 - 0.75 * first)
    assert torch.equal(peer.trainer.local, anchor), "the trainer goes on from the anchor"
    assert len(peer.trainer.written) == 2


def test_pseudo_gradient_is_the_change_since_the_anchor() -> None:
    peer, _ = play_rounds(committed(cut_seconds=2.0), committed(cut_seconds=1.4))
    first, second = peer.seen
    assert torch.equal(first.mine, filled(4 * STEP))
    assert torch.equal(second.mine, filled(3 * STEP)), "the step in progress at the cut is finished"
    assert peer.averaged_tokens == [400, 300]
    assert first.work.norm == pytest.approx(4 * STEP * math.sqrt(ELEMENTS))
    offers = [(work.tokens, work.complete) for work in first.offers]
    assert offers == [(0, False), (100, False), (200, True), (300, True), (400, True)]


def test_round_starts_at_head_and_closes_before_next() -> None:
    peer, reports = play_rounds(committed(roster=(ME,)), committed(roster=(ME, OTHER)))
    first, second = peer.seen
    assert (first.key, first.head.roster) == (FIRST_KEY, (ME, OTHER))
    assert (second.key.round, second.key.lineage.hex(), second.head.roster) == (1, reports[0].lineage, (ME,))
    assert first.closed and second.closed
    assert peer.chain.head.key.round == 2 and peer.chain.head.roster == (ME, OTHER)


def test_offers_carry_the_starting_state_root() -> None:
    peer, _ = play_rounds(committed(), lost(), committed())
    first, second, third = map(peer.state_roots, range(3))
    assert first == {start_root(0)} and len(second) == 1 and second == third != first
    held = state_root(root([peer.outer_loop.anchor]), root([peer.outer_loop.state.velocity]), 2)
    assert peer.chain.head.state_root == held


# -- not decided ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", UNDECIDED_OUTCOMES)
def test_nothing_is_applied_without_a_decision(outcome: Outcome) -> None:
    peer, reports = play_rounds(lost(outcome), lost(outcome))
    assert torch.equal(peer.outer_loop.anchor, START)
    assert not peer.outer_loop.state.velocity.any() and peer.trainer.written == []
    assert peer.chain.head.key == FIRST_KEY and not peer.chain.records
    assert torch.equal(peer.trainer.local, filled(1 - 8 * STEP)), "training goes on from where it stood"
    assert {(report.outcome, report.params_hash) for report in reports} == {(outcome.value, root([START]).hex())}


@pytest.mark.parametrize("outcome", UNDECIDED_OUTCOMES)
def test_undecided_work_accumulates_until_a_decision(outcome: Outcome) -> None:
    peer, reports = play_rounds(lost(outcome), lost(outcome), committed(), committed())
    assert peer.averaged_tokens == [400, 800, 1200, 400]
    assert [float(seen.mine[0]) / STEP for seen in peer.seen] == [4, 8, 12, 4]
    assert [report.round for report in reports] == [0, 0, 0, 1]
    assert peer.offered_tokens[1] == 400, "the peer offers its leftover work at once"


@pytest.mark.parametrize(
    ("roster", "me", "root", "expected"),
    [
        ((ME, OTHER), ME, b"s" * 32, True),
        ((ME, OTHER), replace(ME, incarnation=9), b"s" * 32, True),  # its successor may fork
        ((OTHER,), ME, b"s" * 32, False),  # a joiner has no vote
        ((ME, OTHER), ME, start_root(0), False),
        ((ME, OTHER), ME, bytes(32), False),  # no record says which state it is
    ],
)
def test_peer_with_a_vote_may_not_decide_from_another_state_than_the_heads(
    roster: tuple[Member, ...], me: Member, root: bytes, expected: bool
) -> None:
    peer = Peer(roster=roster, root=root)
    peer.outer_loop.me = me
    play(peer.outer_loop.settle())
    assert peer.outer_loop.may_not_decide is expected


# -- skipped, forked --------------------------------------------------------------------------------------------------


def test_skip_advances_the_chain_only() -> None:
    peer, reports = play_rounds(skipped(roster=(ME,)), skipped(), committed(), committed())
    assert [report.outcome for report in reports[:2]] == ["skipped", "skipped"]
    assert [report.round for report in reports] == [0, 1, 2, 3]
    assert all(after.parent == before.lineage for before, after in pairwise(reports))
    genesis = GENESIS.hex()
    anchors = [report.anchor_lineage for report in reports]
    assert anchors == [genesis, genesis, genesis, reports[2].lineage], "work is measured from the unmoved anchor"
    assert peer.averaged_tokens == [400, 600, 1000, 400], "a single member takes no surplus steps"
    assert peer.seen[1].head.roster == (ME,) and peer.offered_tokens[1] == 400
    assert len(peer.trainer.written) == 2, "a skip writes nothing to the trainer"
    assert reports[0].params_hash == reports[1].params_hash == root([START]).hex()
    assert [peer.state_roots(index) for index in range(3)] == [{start_root(index)} for index in range(3)]


def test_skip_without_a_vote_changes_nothing() -> None:
    _, (report,) = play_rounds(Script(outcome=Outcome.UNDECIDED, end=AveragingResult(Outcome.SKIPPED)))
    assert report.lineage == report.parent


@pytest.mark.parametrize("outcome, moved", [(Outcome.COMMITTED, True), (Outcome.SKIPPED, False)])
def test_fork_is_reported_and_may_carry_a_mean(outcome: Outcome, moved: bool) -> None:
    peer, (fork, alone) = play_rounds(Script(outcome=outcome, kind=Kind.FORK, roster=(ME,)), committed())
    assert (fork.outcome, alone.outcome) == ("fork", "alone") and fork.lineage != fork.parent == fork.anchor_lineage
    assert (alone.anchor_lineage == fork.lineage) is moved
    assert peer.averaged_tokens[1] == (200 if moved else 400)


@pytest.mark.parametrize("outcome", DECIDED_OUTCOMES)
def test_decided_rounds_keep_their_votes(outcome: Outcome) -> None:
    peer, _ = play_rounds(Script(outcome=outcome), committed())
    links = peer.chain.since(GENESIS)
    assert [tuple(vote.voter for vote in link.certificate.votes) for link in links] == [(ME, OTHER)] * 2


@pytest.mark.parametrize("outcome", DECIDED_OUTCOMES)
def test_decision_from_another_state_is_not_applied(outcome: Outcome) -> None:
    end = AveragingResult(Outcome.COMMITTED, contributions=ANNA_COUNTED, weights={"anna": 1.0}, bytes_sent=7)
    peer, (report, after) = play_rounds(Script(outcome=outcome, end=end, state_root=b"x" * 32), committed())
    assert (report.outcome, report.peers, report.contributions, report.weight) == ("superseded", (), {}, 0.0)
    assert "not the one that the others hold" in report.blamed["anna"] and report.bytes_sent == 7
    assert report.lineage == report.parent == after.parent and peer.chain.head.key.round == 1
    assert peer.averaged_tokens[1] == 800, "nothing has moved, until the peer catches up"


# -- not counted ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scripts, offered",
    [
        pytest.param([Script(end=BERT_ONLY)], [0, 0], id="unplanned and late by several steps"),
        pytest.param([Script(end=BERT_ONLY, cut_seconds=0.7)], [0, 0], id="unplanned and late by two steps"),
        pytest.param(
            [lost(cut_seconds=0.2), Script(end=BERT_ONLY, cut_seconds=0.0)],
            [0, 100, 0],
            id="first step left over from an undecided round",
        ),
        pytest.param(
            [Script(end=AveragingResult(Outcome.COMMITTED, contributions=ANNA_IN_PART), cut_seconds=0.2)],
            [0, 0],
            id="first step counted in part",
        ),
    ],
)  # fmt: skip
def test_uncounted_work_is_dropped(scripts: list[Script], offered: list[int]) -> None:
    """The others' mean has gone the same way: with that work kept, the peer would take the step twice."""
    peer, _ = play_rounds(*map(replace, scripts), committed())
    assert peer.offered_tokens == offered


def test_planned_but_uncounted_work_is_dropped() -> None:
    """The others' mean went the same way: with that work kept, the peer would take the step twice."""
    end = AveragingResult(Outcome.COMMITTED, weights={"anna": 400.0}, contributions=ANNA_IN_PART)
    peer, _ = play_rounds(Script(end=end), committed())
    assert torch.equal(peer.trainer.written[0], filled(1 - 0.75 * 4 * STEP))
    assert peer.averaged_tokens == [400, 400]


def test_work_after_the_call_is_kept() -> None:
    """The round was called during the peer's first step: it has weight 0, and then a step of work."""
    peer, _ = play_rounds(weighed(0.0), weighed(800.0), committed())
    assert torch.equal(peer.trainer.written[0], filled(1 - 0.75 * 4 * STEP - 4 * STEP))
    assert peer.offered_tokens[1] == 400
    assert peer.seen[1].offers[0].norm == pytest.approx(4 * STEP * math.sqrt(ELEMENTS))
    assert torch.equal(peer.seen[1].mine, filled(8 * STEP))
    assert torch.equal(peer.seen[2].mine, filled(4 * STEP))
    assert peer.averaged_tokens == [400, 800, 400]


def test_unplanned_first_step_is_kept() -> None:
    """The peer had nothing to offer when the round was called, so the plan was made without it."""
    peer, _ = play_rounds(Script(end=BERT_ONLY, cut_seconds=0.2), committed())
    assert [work.tokens for work in peer.seen[0].offers] == [0, 100], "the step in progress at the cut is finished"
    assert torch.equal(peer.trainer.written[0], filled(1 - 0.75 * STEP - STEP))
    assert peer.offered_tokens[1] == 100 and peer.averaged_tokens[1] == 500


def test_kept_work_survives_an_undecided_round() -> None:
    peer, _ = play_rounds(weighed(0.0), lost(), committed())
    assert torch.equal(peer.seen[2].mine, filled(12 * STEP)) and peer.averaged_tokens[2] == 1200


def test_peer_without_work_restarts_from_new_anchor() -> None:
    peer = Peer(weighed(0.0, average=lambda mine, into: into.fill_(1.0)))
    peer.trainer.local_training.step = lambda: None  # type: ignore[method-assign]
    play(peer.rounds())
    assert peer.averaged_tokens == [0]
    assert torch.equal(peer.outer_loop.anchor, filled(0.25))
    assert torch.equal(peer.trainer.local, peer.outer_loop.anchor)


# -- diverged ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step_size", [math.nan, math.inf, 1e30, 3e38])
def test_diverged_peer_offers_nothing_and_restarts(step_size: float) -> None:
    """All that it offers fits the wire: a coordinator whose own offer did not would spoil the round for all members."""
    peer = Peer(lost(cut_seconds=0.4), committed())
    peer.trainer.local_training.learner.step_size = step_size  # type: ignore[attr-defined]
    train = peer.trainer.train

    async def recovered(*args: Any, **options: Any) -> LocalProgress:
        if len(peer.seen) == 2:
            peer.trainer.local_training.learner.step_size = STEP  # type: ignore[attr-defined]
        return await train(*args, **options)

    peer.trainer.train = recovered  # type: ignore[method-assign]
    reports = play(peer.rounds())
    first, second = peer.seen
    for work in (*first.offers, first.work):
        assert (work.tokens, work.norm) == (0, 0.0)
        ready = Ready(first.key, Offer(ME, work.tokens, work.norm, 1.0, False, False, 1e6, work.state_root, b""))
        assert decode(encode(ready)) == ready
    assert torch.equal(first.mine, filled(0.0))
    assert torch.equal(second.mine, filled(4 * STEP)) and reports[1].tokens == 400


# -- limits, failures -------------------------------------------------------------------------------------------------


def test_time_limit_follows_the_longest_of_the_last_committed_rounds() -> None:
    """A short one among them may have ended early for a peer that left."""
    peer, _ = play_rounds(
        committed(cut_seconds=10.0, mean_seconds=2.0),
        lost(cut_seconds=100.0, mean_seconds=20.0),
        skipped(cut_seconds=100.0),
        lost(Outcome.SUPERSEDED, cut_seconds=100.0),
        committed(cut_seconds=2.0, mean_seconds=1.0),
        committed(cut_seconds=20.0, mean_seconds=1.0),
        *(committed(cut_seconds=4.0, mean_seconds=1.0) for _ in range(ROUNDS_LEARNED)),
        committed(),
    )
    limits = [seen.limit_seconds for seen in peer.seen]
    assert limits == pytest.approx([FIRST_ROUND_LIMIT_SECONDS, *(5 * [120]), *(ROUNDS_LEARNED * [210]), 60], rel=1e-3)


def test_trainer_failure_propagates_and_closes_the_round() -> None:
    peer = Peer(committed())

    async def failing(*_: Any, **__: Any) -> LocalProgress:
        raise LookupError("the trainer's own")

    peer.trainer.train = failing  # type: ignore[method-assign]
    with pytest.raises(LookupError, match="the trainer's own"):
        play(peer.rounds())
    assert peer.seen[0].closed and peer.chain.head.key.round == 0
