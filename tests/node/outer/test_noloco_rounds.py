"""Rounds by NoLoCo's rule: what a peer brings, what it steps by, and partners that come while it trains."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import pytest

from node.outer.noloco import NoLoCo
from protocols.base import Contribution, PeerId, Vector
from protocols.sync.snapshot import Snapshots
from tests.support.inline_trainer import STEP
from tests.support.scripted_peers import FROM_BERT, STEPS, Exchange, IndependentPeer, half, holds
from tests.support.simulated import on_virtual_time

RATE, MOMENTUM, PULL = 0.5, 0.5, 0.5  # sums of eighths stay exact
DELTA = STEPS * STEP
Meanwhile = Callable[[Sequence[Vector]], Mapping[PeerId, Contribution]]


def puller(*scripts: Exchange, snapshots: Snapshots | None = None) -> IndependentPeer:
    return IndependentPeer(*scripts, snapshots=snapshots, rule=NoLoCo(MOMENTUM, RATE, PULL))


def stepped(phi: float, velocity: float, mean: float) -> tuple[float, float]:
    velocity = MOMENTUM * velocity + PULL * phi + mean
    return phi - velocity, velocity


def own(phi: float) -> float:
    """What a peer with these parameters brings."""
    return RATE * DELTA - PULL * phi


def moved(by: float, lent: list[float] | None = None) -> Meanwhile:
    """A partner that starts an exchange while this peer trains."""

    def meanwhile(vectors: Sequence[Vector]) -> Mapping[PeerId, Contribution]:
        (vector,) = vectors
        if lent is not None:
            lent.append(float(vector[0]))
        vector.add_(by)
        return FROM_BERT

    return meanwhile


def nothing_lent(vectors: Sequence[Vector]) -> Mapping[PeerId, Contribution]:
    assert not vectors
    return {}


def stands(peer: IndependentPeer, state: tuple[float, float]) -> bool:
    outer_loop = peer.outer_loop
    return holds(outer_loop.anchor, state[0]) and holds(outer_loop.state.velocity, state[1])


def test_single_peer_steps_by_its_own_work() -> None:
    peer = puller(Exchange(nothing_lent), Exchange())
    first, second = peer.play(2)
    state = stepped(1.0, 0.0, own(1.0))
    assert stands(peer, stepped(*state, own(state[0])))
    assert holds(peer.learner.vector, float(peer.outer_loop.anchor[0])), "the trainer goes on from the new state"
    assert [first.outcome, second.outcome] == ["skipped", "skipped"]


def test_pull_vector_is_averaged_and_stepped_by() -> None:
    peer = puller(Exchange(average=half))
    (report,) = peer.play()
    (brought,) = peer.seen[0].brought
    assert holds(brought, own(1.0))
    assert stands(peer, stepped(1.0, 0.0, own(1.0) / 2))
    assert (report.outcome, report.peers, report.messages) == ("committed", ("cora",), ("cora/1",))


@pytest.mark.parametrize("before", (None, half))
def test_late_partner_is_compensated(before: Callable[..., object] | None) -> None:
    """The state is as if the partner had taken part in the last step, and the round under way loses no work."""
    lent = list[float]()
    peer = puller(Exchange(average=before), Exchange(moved(0.125, lent)))
    _, second = peer.play(2)
    mean = own(1.0) / 2 if before else own(1.0)
    assert lent == [mean], "what others may still move is the mean that it stepped by"
    phi, velocity = stepped(1.0, 0.0, mean + 0.125)
    assert stands(peer, stepped(phi, velocity, own(phi)))
    assert (second.outcome, second.peers, second.messages) == ("committed", ("bert",), ("bert/7",))


def test_late_exchange_affects_only_the_last_step() -> None:
    """A vector is lent once: each round has its own."""
    lent = list[float]()
    peer = puller(Exchange(), Exchange(moved(0.125)), Exchange(moved(0.0, lent)))
    peer.play(3)
    phi, _ = stepped(1.0, 0.0, own(1.0) + 0.125)
    assert lent == [own(phi)]


@pytest.mark.parametrize("step_size", [math.nan, math.inf, 3e38])
def test_diverged_work_is_left_out(step_size: float) -> None:
    peer = puller(Exchange(average=half))
    peer.learner.step_size = step_size
    (report,) = peer.play()
    (brought,) = peer.seen[0].brought
    assert holds(brought, -PULL * 1.0) and peer.seen[0].work.tokens == 0, "it is pulled, and brings no work"
    assert stands(peer, stepped(1.0, 0.0, -PULL / 2))
    assert report.finite and "not finite" in report.blamed["anna"]


def test_non_finite_exchange_during_training_is_not_applied() -> None:
    peer = puller(Exchange(), Exchange(moved(math.inf)))
    _, report = peer.play(2)
    state = stepped(1.0, 0.0, own(1.0))
    assert stands(peer, stepped(*state, own(state[0])))
    assert (report.outcome, report.half_exchanges) == ("skipped", 2 + 1)


def test_non_finite_step_is_not_taken_or_lent() -> None:
    def far(mine: Sequence[Vector], into: Sequence[Vector]) -> None:
        for each in into:
            each.fill_(3.4e38)  # finite, and so is one step by it

    peer = puller(Exchange(average=far), Exchange(average=far), Exchange(nothing_lent))
    first, second, _ = peer.play(3)
    assert first.outcome == "committed" and first.finite
    assert (second.outcome, second.messages) == ("skipped", ()) and "not finite" in second.blamed["anna"]
    assert second.half_exchanges == 2 + 1
    assert bool(peer.outer_loop.anchor.isfinite().all()) and bool(peer.outer_loop.state.velocity.isfinite().all())


@on_virtual_time
async def test_adopted_state_starts_without_contribution() -> None:
    snapshots = Snapshots(every_rounds=1)
    (report,) = await puller(Exchange(average=half), snapshots=snapshots).rounds()
    peer = puller(Exchange(), Exchange(nothing_lent))
    await peer.rounds()
    await peer.outer_loop.start_from(snapshots.held()[0])
    (again,) = await peer.rounds()
    assert (again.parent, again.round) == (report.lineage, 1)
    state = stepped(1.0, 0.0, own(1.0) / 2)
    assert stands(peer, stepped(*state, own(state[0])))


def test_rounds_without_result_advance_the_round_number() -> None:
    peer = puller(Exchange(average=half, rounds=3), Exchange())
    peer.learner.step_size = math.nan
    first, second = peer.play(2)
    assert (first.round, second.round) == (3, 4)
